"""The levels of an image: tensors beside the codes that they belong to, one of each for a group of streams."""

from __future__ import annotations

from prefixcache.codecs.levels import Levels, PackedLevels
from prefixcache.layers.image_layout import Group, Member, Tensors


def read(group: Group, tensors: Tensors, member: Member | None = None) -> Levels | None:
    """Return the levels of a group's heads, or of one member's, as an image has them; None where its codec levels no rows."""
    stored = packed(group, tensors, member.in_group if member is not None else slice(None))
    return Levels.unpacked(stored) if stored is not None else None


def packed(group: Group, tensors: Tensors, heads: slice) -> PackedLevels | None:
    """Return those of some heads in the image's own numbers."""
    if not group.steps:
        return None
    return PackedLevels(tensors[group.mean][heads] if group.mean else None, tensors[group.steps][heads])


def write(group: Group, tensors: Tensors, packed: PackedLevels) -> None:
    if group.mean:
        tensors[group.mean][...] = packed.mean
    tensors[group.steps][...] = packed.steps


def of_member(levels: Levels | None, member: Member) -> Levels | None:
    return levels.of(member.head, member.heads) if levels is not None else None
