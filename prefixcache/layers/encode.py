"""From live layers to bytes: rows of attention state into an image's tensors. Runs on the caller's thread and stream."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from prefixcache.codecs import RawRows
from prefixcache.codecs.base import Encoding
from prefixcache.codecs.interchange import borrow, element, name_of, on_cpu
from prefixcache.image import Spec
from prefixcache.layers.adapters import CacheError, Leaf, LiveCodes
from prefixcache.layers.levels import LevelSet
from prefixcache.layers.live_codes import levels_of, same
from prefixcache.layers.plan import Group, Member, Plan, Section


class Target(NamedTuple):
    """Tokens `first` to `last` (not included) of the sequence go to rows `at` and on of `tensors`, coded with `levels`."""

    first: int
    last: int
    tensors: dict[str, np.ndarray]
    at: int
    levels: LevelSet | None = None


def evaluate(leaves: Iterable[Leaf]) -> None:
    """Evaluate every array of live leaves, here and now: a lazy one can't be read on this side."""
    leaves = list(leaves)
    mx.eval([leaf.arrays for leaf in leaves], [_arrays_in(leaf.state) for leaf in leaves])
    mx.eval([(leaf.codes.codes, leaf.codes.scales) for leaf in leaves if leaf.codes is not None])


def encode(section: Section, leaves: list[Leaf], targets: list[Target]) -> None:
    """Encode the targets' tokens of every stream in the section.

    On a GPU: one launch for each group of equal streams, and of targets with equal levels. On the CPU there is no launch
    to save, and every stretch of rows goes from the live cache to its place by itself. What a live cache has coded already
    is copied.
    """
    here = on_cpu()
    for group in section.groups if targets else ():
        members = group.members
        if not isinstance(group.codec, RawRows):
            for member in members:
                if (codes := leaves[member.leaf].codes) is not None:
                    _copy(group, member, codes, targets)
            members = tuple(member for member in members if leaves[member.leaf].codes is None)
        if here or isinstance(group.codec, RawRows):
            _encode_here(group, members, leaves, targets)
            continue
        # All members stand next to each other in the tensor, some need not.
        for some in [members] if members == group.members else [(member,) for member in members]:
            for level_set in {id(target.levels): target.levels for target in targets}.values():
                own = [target for target in targets if target.levels is level_set]
                _launch(group, some, leaves, own, level_set)


def _copy(group: Group, member: Member, codes: LiveCodes, targets: list[Target]) -> None:
    """One live cache's codes, as they are: but those made with other levels than their target's are made anew."""
    planes, heads = codes.planes(member.stream), slice(member.head, member.head + member.heads)
    for target in targets:
        wanted = levels_of(target.levels, group, member)
        for first, last, pair in codes.stretches(target.first, target.last):
            own = [plane[first:last] for plane in planes]
            levels = getattr(pair, member.stream)
            if not same(levels, wanted):
                rows = group.codec.decode([np.ascontiguousarray(plane) for plane in own], last - first, levels)
                own = group.codec.encode(mx.swapaxes(rows, 0, 1), wanted)
            at = target.at + first - target.first
            for name, plane in zip(group.names, own, strict=True):
                target.tensors[name][at : at + last - first, heads] = plane


def _encode_here(group: Group, members: Iterable[Member], leaves: list[Leaf], targets: list[Target]) -> None:
    batch = []
    for member in members:
        (rows,) = borrow(leaves[member.leaf].arrays[member.stream])
        own = slice(member.head, member.head + member.heads)
        for target in targets:
            where = leaves[member.leaf].where(target.first, target.last)
            into = slice(target.at, target.at + target.last - target.first)
            planes = tuple(target.tensors[name][into, own] for name in group.names)
            levels = levels_of(target.levels, group, member)
            batch.append(Encoding(rows[:, where].swapaxes(0, 1), planes, levels))
    group.codec.encode_all(batch)


def _launch(
    group: Group, members: tuple[Member, ...], leaves: list[Leaf], targets: list[Target], level_set: LevelSet | None
) -> None:
    """Encode these members, whose heads are next to each other: all of the group, or one."""
    rows = mx.concatenate([_rows(leaves[m.leaf], m.stream, targets) for m in members], axis=1)
    whole = level_set.of(group) if level_set is not None else None
    levels = whole if members == group.members else levels_of(level_set, group, members[0])
    heads = slice(members[0].head, members[-1].head + members[-1].heads)
    at, planes = 0, group.codec.encode(rows, levels)
    for target in targets:
        count = target.last - target.first
        for name, plane in zip(group.names, planes, strict=True):
            target.tensors[name][target.at : target.at + count, heads] = plane[at : at + count]
        at += count


def _rows(leaf: Leaf, stream: str, targets: list[Target]) -> mx.array:
    """(tokens of all targets, heads, width)."""
    array = leaf.arrays[stream][0]
    pieces = []
    for target in targets:
        where = leaf.where(target.first, target.last)
        pieces.append(array[:, where] if isinstance(where, slice) else mx.take(array, mx.array(where), axis=1))
    rows = pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=1)
    return mx.swapaxes(rows, 0, 1)


class State(NamedTuple):
    """Snapshot layers, described: JSON with the arrays taken out, and the arrays in order."""

    described: list[Any]
    arrays: list[mx.array]

    def specs(self) -> list[Spec]:
        return [Spec(f"s{i}", element(name_of(a.dtype)).safetensors, tuple(a.shape)) for i, a in enumerate(self.arrays)]


def describe_state(plan: Plan, leaves: list[Leaf]) -> State:
    """What a snapshot keeps: each attribute of each such leaf. CacheError for what can't be kept."""
    arrays: list[mx.array] = []
    described = []
    for i in plan.snapshots:
        at = f"layer {plan.layer_of[i]} ({plan.leaves[i]['class'].rsplit('.', 1)[-1]})"
        described.append({name: _describe(value, arrays, f"{at}.{name}") for name, value in leaves[i].state.items()})
    return State(described, arrays)


def _describe(value: Any, arrays: list[mx.array], at: str) -> Any:
    """Plain values as [kind, ...]; an array as its number."""
    if isinstance(value, mx.array):
        arrays.append(value)
        return ["array", len(arrays) - 1]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else ["float", repr(value)]
    if type(value) in (list, tuple):
        return [type(value).__name__, [_describe(v, arrays, f"{at}[{i}]") for i, v in enumerate(value)]]
    if type(value) is dict:
        if not all(isinstance(k, str) for k in value):
            raise CacheError(f"{at}: a dict with keys that are not str can't be kept")
        return ["dict", {k: _describe(v, arrays, f"{at}[{k!r}]") for k, v in value.items()}]
    raise CacheError(
        f"{at} is a {type(value).__name__}: a snapshot keeps None, bool, int, float, str, mx.array "
        "and lists, tuples and dicts of them"
    )


def _arrays_in(value: Any) -> list[mx.array]:
    if isinstance(value, mx.array):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [a for v in value for a in _arrays_in(v)] if isinstance(value, (list, tuple)) else []


def write_state(state: State, tensors: dict[str, np.ndarray]) -> None:
    for i, array in enumerate(state.arrays):
        tensors[f"s{i}"][...] = borrow(array)
