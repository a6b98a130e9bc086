"""From live layers to bytes: rows of attention state into an image's tensors. Runs on the caller's thread and stream."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from prefixcache.codecs import RawRows
from prefixcache.codecs.base import Decoding, Encoding, side_by_side
from prefixcache.codecs.interchange import borrow, copy_out, element, name_of, on_cpu
from prefixcache.codecs.threads import WORTH_A_THREAD, share_out
from prefixcache.codecs.turboquant.levelling import Levels, measure, neutral
from prefixcache.image import Spec
from prefixcache.layers import levels
from prefixcache.layers.adapters import CacheError, Leaf, LiveCodes
from prefixcache.layers.decoded import Decoded
from prefixcache.layers.live_codes import same
from prefixcache.layers.plan import Group, Member, Plan, Section


class Target(NamedTuple):
    """Tokens `first` to `last` (not included) of the sequence go to rows `at` and on of `tensors`.

    `settled`: the levels in `tensors` are those of rows that are there already; else they are measured here, from token
    `sinks` on. `whole`: rows of a whole block, which a fetch gives as they are decoded, but for the tokens before `raw`.
    """

    first: int
    last: int
    tensors: dict[str, np.ndarray]
    at: int
    settled: bool = False
    sinks: int = 0
    raw: int = 0
    whole: bool = False


def evaluate(leaves: Iterable[Leaf]) -> None:
    """Evaluate every array of live leaves, here and now: a lazy one can't be read on this side."""
    leaves = list(leaves)
    mx.eval([leaf.arrays for leaf in leaves], [_arrays_in(leaf.state) for leaf in leaves])
    mx.eval([(leaf.codes.codes, leaf.codes.scales) for leaf in leaves if leaf.codes is not None])


def encode(section: Section, leaves: list[Leaf], targets: list[Target], back: Decoded | None = None) -> None:
    """Encode the targets' tokens of every stream in the section; `back` gets what a fetch would give of them.

    On a GPU: one launch for each group of equal streams, and of targets that are alike. On the CPU there is no
    launch to save, and every stretch of rows goes from the live cache to its place by itself. What a live cache has coded
    already is copied.
    """
    here = on_cpu()
    for group in section.groups if targets else ():
        raw = isinstance(group.codec, RawRows)
        coded = [] if raw else [member for member in group.members if leaves[member.leaf].codes is not None]
        if not (here or raw or coded):
            for settled in (False, True):  # some have levels only once the others are done
                some = [target for target in targets if target.settled is settled]
                for numbers in _alike(some):
                    own = [some[i] for i in numbers]
                    known = [levels.read(group, target.tensors) for target in own] if settled else None
                    _launch(group, group.members, leaves, own, known, back)
            continue
        wanted = _levels_of(group, leaves, targets, here)
        for member in coded:
            codes = leaves[member.leaf].codes
            assert codes is not None
            _copy(group, member, codes, targets, wanted)
        members = tuple(member for member in group.members if member not in coded)
        if here or raw:
            _encode_here(group, members, leaves, targets, wanted, back)
            continue
        for member in members:  # all stand next to each other in the tensor, some need not
            for numbers in _alike(targets):
                own = [targets[i] for i in numbers]
                _launch(group, (member,), leaves, own, [wanted[i] for i in numbers], back)


def _alike(targets: list[Target]) -> list[list[int]]:
    """The targets' numbers, by how many tokens they have and whether those are whole blocks'."""
    by_kind: dict[tuple[int, bool], list[int]] = {}
    for i, target in enumerate(targets):
        by_kind.setdefault((target.last - target.first, target.whole), []).append(i)
    return list(by_kind.values())


def encode_stored(
    section: Section, tails: Section, rows: dict[str, np.ndarray], tensors: dict[str, np.ndarray], sinks: int
) -> None:
    """All `rows` that tensors of `tails` have as they are -> `tensors` of a section of the same streams.

    Levels are measured here, without the first `sinks` rows.
    """
    places = _places(tails)
    for group in section.groups:
        parts = []
        for member in group.members:
            own, heads = places[member.leaf, member.stream]
            parts.append(rows[own.names[0]][:, heads])
        of_group = np.concatenate(parts, axis=1)
        of_all = None
        if group.root:
            of_all = measure(of_group[sinks:], group.codec.centred)
            levels.write(group, tensors, of_all)
        group.codec.encode_all([Encoding(of_group, tuple(tensors[name] for name in group.names), of_all)])


def decode_stored(
    section: Section,
    tails: Section,
    source: dict[str, np.ndarray],
    tensors: dict[str, np.ndarray],
    pairs: list[tuple[slice, slice]],
) -> None:
    """The inverse: codes that an image of `section` has -> `tensors` of `tails`, into and out of these rows."""
    places = _places(tails)
    for group in section.groups:
        for member in group.members:
            own, heads = places[member.leaf, member.stream]
            coded, of_member = slice(member.head, member.head + member.heads), levels.read(group, source, member)
            batch = []
            for into, out in pairs:
                planes = tuple(source[name][out, coded] for name in group.names)
                batch.append(Decoding(planes, tensors[own.names[0]][into, heads].swapaxes(0, 1), of_member))
            group.codec.decode_all(batch)


def copy_stored(
    section: Section,
    tensors: dict[str, np.ndarray],
    other: Section,
    source: dict[str, np.ndarray],
    pairs: list[tuple[slice, slice]],
) -> None:
    """Rows that an image has as they are in `other` -> `tensors` of `section`: of the streams of both."""
    into, out = _places(section), _places(other)
    for where in into.keys() & out.keys():
        (group, heads), (other_group, other_heads) = into[where], out[where]
        for a, b in pairs:
            tensors[group.names[0]][a, heads] = source[other_group.names[0]][b, other_heads]


def _places(tails: Section) -> dict[tuple[int, str], tuple[Group, slice]]:
    """Of a section that has rows as they are, where each stream's stand."""
    return {
        (member.leaf, member.stream): (group, slice(member.head, member.head + member.heads))
        for group in tails.groups
        for member in group.members
    }


def _levels_of(group: Group, leaves: list[Leaf], targets: list[Target], here: bool) -> list[Levels | None]:
    """The levels of each target's rows, all heads of the group, which are in its tensors from here on."""
    if not group.root:
        return [None] * len(targets)
    fresh = [target for target in targets if not target.settled]
    if fresh:
        for target, own in zip(fresh, _fresh_levels(group, leaves, fresh, here), strict=True):
            levels.write(group, target.tensors, own)
    return [levels.read(group, target.tensors) for target in targets]


def _fresh_levels(group: Group, leaves: list[Leaf], targets: list[Target], here: bool) -> list[Levels]:
    """Of live codes those that they have, of all other rows by measuring them."""
    plain = [member for member in group.members if leaves[member.leaf].codes is None]
    measured: dict[int, Levels] = {}
    ranges = [target._replace(first=_measured_from(target)) for target in targets]
    for own in _alike(ranges) if plain else ():
        measured |= zip(own, _measure(group, plain, leaves, [ranges[i] for i in own], here), strict=True)
    found = []
    for i, target in enumerate(targets):
        at, parts = 0, []
        for member in group.members:
            codes = leaves[member.leaf].codes
            if codes is not None:
                known = getattr(codes.pair_at(target.first), member.stream)
                parts.append(known if known is not None else neutral(member.heads, group.codec.width))
            else:
                parts.append(measured[i].of(at, member.heads))
                at += member.heads
        found.append(Levels.joined(parts))
    return found


def _measured_from(target: Target) -> int:
    return min(max(target.first, target.sinks), target.last)


def _measure(
    group: Group, members: list[Member], leaves: list[Leaf], targets: list[Target], here: bool
) -> list[Levels]:
    """Of targets of equally many tokens, by the rows of these members."""
    if not here:
        rows = mx.concatenate([_rows(leaves[m.leaf], m.stream, targets) for m in members])
        whole = measure(side_by_side(rows, len(targets)).astype(mx.float32), group.codec.centred)
        return [Levels(whole.mean[i :: len(targets)], whole.root[i :: len(targets)]) for i in range(len(targets))]
    made = []
    for target in targets:
        parts = []
        for member in members:
            (rows,) = borrow(leaves[member.leaf].arrays[member.stream])
            parts.append(rows[:, leaves[member.leaf].where(target.first, target.last)].swapaxes(0, 1))
        made.append(measure(parts, group.codec.centred))
    return made


def _copy(group: Group, member: Member, codes: LiveCodes, targets: list[Target], wanted: list[Levels | None]) -> None:
    """One live cache's codes, as they are: but those made with other levels than their target's are made anew."""
    planes, heads = codes.planes(member.stream), slice(member.head, member.head + member.heads)
    for target, whole in zip(targets, wanted, strict=True):
        of_target = levels.of_member(whole, member)
        for first, last, pair in codes.stretches(target.first, target.last):
            own = [plane[first:last] for plane in planes]
            of_codes = getattr(pair, member.stream)
            if not same(of_codes, of_target):
                rows = group.codec.decode([np.ascontiguousarray(plane) for plane in own], last - first, of_codes)
                own = group.codec.encode(mx.swapaxes(rows, 0, 1), of_target)
            at = target.at + first - target.first
            for name, plane in zip(group.names, own, strict=True):
                target.tensors[name][at : at + last - first, heads] = plane


def _encode_here(
    group: Group,
    members: Iterable[Member],
    leaves: list[Leaf],
    targets: list[Target],
    wanted: list[Levels | None],
    back: Decoded | None,
) -> None:
    batch = []
    if not on_cpu():  # of what is kept as it is, a few rows: not the whole buffers come to the host
        for member in members:
            own, at = slice(member.head, member.head + member.heads), 0
            rows = copy_out(_rows(leaves[member.leaf], member.stream, targets)).swapaxes(0, 1)
            for target in targets:
                count = target.last - target.first
                into = slice(target.at, target.at + count)
                batch.append(Encoding(rows[at : at + count], tuple(target.tensors[n][into, own] for n in group.names)))
                at += count
        group.codec.encode_all(batch)
        return
    for member in members:
        (rows,) = borrow(leaves[member.leaf].arrays[member.stream])
        own = slice(member.head, member.head + member.heads)
        for target, whole in zip(targets, wanted, strict=True):
            where = leaves[member.leaf].where(target.first, target.last)
            into = slice(target.at, target.at + target.last - target.first)
            planes = tuple(target.tensors[name][into, own] for name in group.names)
            batch.append(Encoding(rows[:, where].swapaxes(0, 1), planes, levels.of_member(whole, member)))
    group.codec.encode_all(batch)
    if back is not None and not isinstance(group.codec, RawRows):
        for member in members:
            for target in targets:
                rows_of = slice(target.at, target.at + target.last - target.first)
                if target.whole:
                    back.decode_rows(group, member, target.first, rows_of, target.tensors, target.raw)


def _launch(
    group: Group,
    members: tuple[Member, ...],
    leaves: list[Leaf],
    targets: list[Target],
    wanted: list[Levels | None] | None,
    back: Decoded | None,
) -> None:
    """Encode targets that are alike, of members whose heads are next to each other: all of the group, or one.

    Where no levels are `wanted`, they are measured, of all of the group's heads.
    """
    rows = mx.concatenate([_rows(leaves[m.leaf], m.stream, targets) for m in members])
    first, count, heads = members[0].head, targets[0].last - targets[0].first, len(rows)
    firsts = [_measured_from(target) - target.first for target in targets] if wanted is None and group.root else []
    known = [whole.of(first, heads) for whole in wanted or () if whole is not None]
    decoding = back is not None and targets[0].whole
    made = group.codec.encode_blocks(rows, len(targets), known, firsts, decoding)

    def copy(start: int, end: int) -> None:
        for i in range(start, end):
            target = targets[i]
            for name, plane in zip(group.names, made.planes, strict=True):
                target.tensors[name][target.at : target.at + count, first : first + heads] = plane[i]
            if made.kept is not None:
                mean, root = made.kept
                levels.put(group, target.tensors, mean[i] if mean is not None else None, root[i])

    share_out(len(targets), 1, sum(plane.nbytes for plane in made.planes) // WORTH_A_THREAD, copy)
    if back is not None and made.decoded is not None:
        at = 0
        for start, last in _joined(targets):
            for member in members:
                own = made.decoded[member.head - first :][: member.heads, at : at + last - start]
                back.add(member, start, own, targets[0].raw)
            at += last - start


def _rows(leaf: Leaf, stream: str, targets: list[Target]) -> mx.array:
    """(heads, tokens of all targets, width)."""
    array = leaf.arrays[stream][0]
    pieces = []
    for target in _joined(targets):
        where = leaf.where(*target)
        pieces.append(array[:, where] if isinstance(where, slice) else mx.take(array, mx.array(where), axis=1))
    return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=1)


def _joined(targets: list[Target]) -> list[tuple[int, int]]:
    """The stretches of tokens of targets that follow each other."""
    stretches: list[tuple[int, int]] = []
    for target in targets:
        if stretches and stretches[-1][1] == target.first:
            stretches[-1] = stretches[-1][0], target.last
        else:
            stretches.append((target.first, target.last))
    return stretches


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
