"""The levels of a namespace: measured once, from the first prompt that is long enough, and kept as one small file.

A `LevelSet` is immutable and named by its content. Images name the one that they were encoded with, so a namespace may
have had several; it is not part of any key. Who holds it in RAM and writes it is `prefixcache.tiers`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import mlx.core as mx
import numpy as np
from safetensors import SafetensorError
from safetensors import numpy as safetensors

from prefixcache.codecs.interchange import Array, copy_out
from prefixcache.codecs.levelling import LEAST_ROWS, MOST_ROWS, Levels, measure
from prefixcache.image import statistics_name
from prefixcache.layers.adapters import Leaf
from prefixcache.layers.plan import Group, Member, Plan

LEAST_DISTINCT = 32  # tokens: a prompt that repeats a few, as warm-ups do, says nothing of how text spreads


def distinct(raw: bytes) -> int:
    """How many different tokens there are (raw int64 bytes)."""
    return len(np.unique(np.frombuffer(raw, np.int64)))


class LevelSet:
    """For each group of streams, by name, the levels of its heads. `data` is the file, `name` its digest, `root` the key of
    the namespace that it is of, and of no other.
    """

    def __init__(self, root: bytes, data: bytes, groups: dict[str, Levels]):
        self.root = root
        self.data = data
        self.name = statistics_name(data)
        self._groups = groups
        self._slices: dict[tuple[str, int], Levels] = {}
        # A back end may keep the factors of its decoder beside mean, root and weight.
        self.nbytes = len(data) + sum(4 * own.mean.nbytes for own in groups.values())

    def of(self, group: Group) -> Levels | None:
        """The levels of a group's heads; None where there were too few rows to measure."""
        return self._groups.get(group.levels)

    def of_member(self, group: Group, member: Member) -> Levels | None:
        """Those of one stream's heads: the same object each time."""
        whole = self._groups.get(group.levels)
        if whole is None:
            return None
        return self._slices.setdefault((group.levels, member.head), whole.of(member.head, member.heads))


def most_bytes(plan: Plan) -> int:
    """What a set of this plan takes at most, so that the room can be reserved before it is measured or read."""
    return sum(6 * 4 * group.heads * group.codec.width + 512 for group in _levelled(plan)) + 512


def _metadata(root: bytes) -> dict[str, str]:
    return {"levels": f"1 {root.hex()}"}  # one field: several would stand in any order, and the name is of all bytes


def pack(root: bytes, groups: dict[str, Levels]) -> LevelSet:
    """Levels by group -> the set, with its file: safetensors F32 `<group>.mean` and `<group>.root`, (heads, width)."""
    tensors = {}
    for name, own in groups.items():
        tensors[f"{name}.mean"], tensors[f"{name}.root"] = own.mean, own.root
    return LevelSet(root, safetensors.save(tensors, _metadata(root)), groups)


def unpack(name: str, data: bytes, root: bytes, plan: Plan) -> LevelSet | None:
    """The set in a file's bytes; None when they are not those that the name stands for, of another namespace, or not
    levels of this plan.
    """
    if statistics_name(data) != name:
        return None
    try:
        tensors = safetensors.load(data)
        said = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__")
    except (SafetensorError, ValueError, TypeError, KeyError, RecursionError):
        return None
    if said != _metadata(root):
        return None
    shapes = {group.levels: (group.heads, group.codec.width) for group in _levelled(plan)}
    groups = {}
    for own in {tensor.rpartition(".")[0] for tensor in tensors}:
        mean, factor = tensors.get(f"{own}.mean"), tensors.get(f"{own}.root")
        if mean is None or factor is None or not valid(Levels(mean, factor), shapes.get(own)):
            return None
        groups[own] = Levels(mean, factor)
    return LevelSet(root, data, groups)


def valid(levels: Levels, shape: tuple[int, int] | None) -> bool:
    """Whether these can be levels of (heads, width)."""
    both = (levels.mean, levels.root)
    return all(a.dtype == np.float32 and a.shape == shape and np.isfinite(a).all() for a in both) and bool(
        (levels.root >= 1).all()
    )


def joined(several: Sequence[Levels]) -> Levels:
    """One after the other, by heads."""
    return Levels(np.concatenate([one.mean for one in several]), np.concatenate([one.root for one in several]))


def _levelled(plan: Plan) -> Iterable[Group]:
    return (group for section in (plan.rows, *plan.windowed) for group in section.groups if group.codec.levelled)


def measure_all(root: bytes, plan: Plan, leaves: list[Leaf], limit: int) -> LevelSet | None:
    """Levels from the first `limit` tokens of evaluated leaves; None where no group has 256 rows of them.

    Rows that a live cache has coded are not measured: they have levels.
    """
    groups = {}
    for group in _levelled(plan):
        own = [_levels(leaves[member.leaf], member.stream, limit) for member in group.members]
        if all(levels is not None for levels in own):
            groups[group.levels] = joined([levels for levels in own if levels is not None])
    return pack(root, groups) if groups else None


def _levels(leaf: Leaf, stream: str, limit: int) -> Levels | None:
    if leaf.codes is not None:
        own: Levels | None = getattr(leaf.codes.pair_at(limit - 1), stream)
        return own
    rows = _sample(leaf, stream, limit)
    return measure(rows) if rows is not None else None


def _sample(leaf: Leaf, stream: str, limit: int) -> Array | None:
    """Float32 rows (tokens, heads, width), at most `MOST_ROWS` of them, evenly drawn; None when there are too few."""
    stretches = [(first, min(last, limit)) for first, last in leaf.held if first < limit]
    rows = np.concatenate([np.arange(0), *(_physical(leaf.where(*stretch)) for stretch in stretches)])
    if len(rows) < LEAST_ROWS:
        return None
    rows = rows[np.linspace(0, len(rows) - 1, min(len(rows), MOST_ROWS)).astype(np.int64)]
    drawn = mx.take(leaf.arrays[stream][0], mx.array(rows), axis=1)
    return copy_out(mx.swapaxes(drawn, 0, 1).astype(mx.float32))


def _physical(where: slice | Array) -> Array:
    return np.arange(where.start, where.stop) if isinstance(where, slice) else where
