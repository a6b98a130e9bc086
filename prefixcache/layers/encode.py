"""From live layers to bytes: rows of attention state into an image's tensors. Runs on the caller's thread and stream."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from prefixcache.codecs import RawRows
from prefixcache.codecs.interchange import borrow, bring_in, element, name_of
from prefixcache.image import Spec
from prefixcache.layers.adapters import CacheError, Leaf
from prefixcache.layers.plan import Group, Plan, Section


class Target(NamedTuple):
    """Tokens `first` to `last` (not included) of the sequence go to rows `at` and on of `tensors`."""

    first: int
    last: int
    tensors: dict[str, np.ndarray]
    at: int


def evaluate(leaves: Iterable[Leaf]) -> None:
    """Evaluate every array of live leaves, here and now: a lazy one can't be read on this side."""
    mx.eval([leaf.arrays for leaf in leaves], [_arrays_in(leaf.state) for leaf in leaves])


def encode(section: Section, leaves: list[Leaf], targets: list[Target]) -> None:
    """Encode the targets' tokens of every stream in the section, one launch for each group of equal streams."""
    for group in section.groups if targets else ():
        if isinstance(group.codec, RawRows):
            (name,) = group.names
            _gather(group, leaves, targets, (target.tensors[name][target.at :] for target in targets))
        elif mx.default_device() == mx.cpu:
            _encode_here(group, leaves, targets)
        else:
            rows = mx.concatenate([_rows(leaves[m.leaf], m.stream, targets) for m in group.members], axis=1)
            at, planes = 0, group.codec.encode(rows)
            for target in targets:
                count = target.last - target.first
                _put(group, target, [plane[at : at + count] for plane in planes])
                at += count


def _encode_here(group: Group, leaves: list[Leaf], targets: list[Target]) -> None:
    """On the CPU there is no launch to save, and joining in NumPy is quicker than in MLX: target by target."""
    dtype = group.codec.dtype
    longest = max(target.last - target.first for target in targets)
    buffer = np.empty((longest, group.heads, group.codec.width), element(dtype).numpy)
    for target in targets:
        _gather(group, leaves, [target], [buffer])
        _put(group, target, group.codec.encode(bring_in(buffer[: target.last - target.first], dtype)))


def _put(group: Group, target: Target, planes: list[np.ndarray]) -> None:
    for name, plane in zip(group.names, planes, strict=True):
        target.tensors[name][target.at : target.at + len(plane)] = plane


def _gather(group: Group, leaves: list[Leaf], targets: list[Target], into: Iterable[np.ndarray]) -> None:
    """Each target's rows as they are, (tokens, heads of all members, width), to the beginning of its array in `into`."""
    rows = [borrow(leaves[member.leaf].arrays[member.stream])[0] for member in group.members]
    for target, array in zip(targets, into, strict=True):
        count = target.last - target.first
        for member, own in zip(group.members, rows, strict=True):
            where = leaves[member.leaf].where(target.first, target.last)
            array[:count, member.head : member.head + member.heads] = own[:, where].swapaxes(0, 1)


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
