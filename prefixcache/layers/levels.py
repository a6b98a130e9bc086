"""The levels of an image: tensors beside the codes that they belong to, one of each for a group of streams."""

from __future__ import annotations

import numpy as np

from prefixcache.codecs.turboquant.levelling import Levels
from prefixcache.layers.plan import Group, Member


def read(group: Group, tensors: dict[str, np.ndarray], member: Member | None = None) -> Levels | None:
    """The levels of a group's heads, or of one member's, as an image has them; None where its codec levels no rows."""
    if not group.root:
        return None
    heads = slice(None) if member is None else slice(member.head, member.head + member.heads)
    return Levels.from_kept(tensors[group.mean][heads] if group.mean else None, tensors[group.root][heads])


def write(group: Group, tensors: dict[str, np.ndarray], levels: Levels) -> None:
    put(group, tensors, *levels.kept)


def put(group: Group, tensors: dict[str, np.ndarray], mean: np.ndarray | None, root: np.ndarray) -> None:
    """Levels as they are kept."""
    if group.mean:
        tensors[group.mean][...] = mean
    tensors[group.root][...] = root


def of_member(levels: Levels | None, member: Member) -> Levels | None:
    return levels.of(member.head, member.heads) if levels is not None else None
