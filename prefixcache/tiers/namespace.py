"""A namespace at work: what the index says of it, where its streams stand in images, and its blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from prefixcache.blocks.node import Tree
from prefixcache.ssd.entries import NamespaceRow

if TYPE_CHECKING:
    from prefixcache.layers.image_layout import Plan


class Namespace(NamedTuple):
    """The tiers ask `plan` which windows a boundary needs, and whether an image fits; what it is needs MLX."""

    row: NamespaceRow
    plan: Plan
    tree: Tree
