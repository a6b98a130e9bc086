"""From live layers to bytes: rows of attention state into an image's tensors. Runs on the caller's thread and stream.

Where MLX computes on the CPU, rows are read where they lie and encoded stretch by stretch; on a GPU, as many as possible go
in one launch. `Host` and `Gpu` are these two ways, of one interface; `encode` takes one of them.
Decision 0003 says why only whole blocks are coded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from prefixcache.codecs import RawRows
from prefixcache.codecs.base import Encoding, side_by_side
from prefixcache.codecs.gather import gather
from prefixcache.codecs.interchange import CopyOut, borrow, on_cpu
from prefixcache.codecs.levels import Levels, neutral, same_levels
from prefixcache.codecs.turboquant.coding import run_at, spans_of
from prefixcache.codecs.turboquant.measure_levels import measure_levels
from prefixcache.layers.adapters import Leaf, LiveCodes, arrays_in, taken
from prefixcache.layers.image_layout import Group, Member, Section, Tensors
from prefixcache.layers.transformed import merged
from prefixcache.layers.write_back import WriteBack


class RowTarget(NamedTuple):
    """Tokens `first` to `last` (not included) of the sequence go to rows `at` and on of `tensors`.

    `settled`: the levels in `tensors` are those of rows that are there already; else they are measured here, from token
    `sinks` on. `whole`: rows of a whole block, which a fetch gives as they are decoded, but for the tokens before `exact`.
    """

    first: int
    last: int
    tensors: Tensors
    at: int
    settled: bool = False
    sinks: int = 0
    exact: int = 0
    whole: bool = False

    @property
    def tokens(self) -> int:
        return self.last - self.first

    @property
    def rows(self) -> slice:
        return slice(self.at, self.at + self.tokens)

    @property
    def first_measured(self) -> int:
        """The first token whose row levels are measured from."""
        return min(max(self.first, self.sinks), self.last)


def evaluate(leaves: Iterable[Leaf]) -> None:
    """Evaluate every array of live leaves, here and now: a lazy one can't be read on this side."""
    leaves = list(leaves)
    mx.eval([leaf.arrays for leaf in leaves], [arrays_in(leaf.state) for leaf in leaves])
    mx.eval([(leaf.codes.codes, leaf.codes.scales) for leaf in leaves if leaf.codes is not None])


def encode(
    section: Section, leaves: list[Leaf], targets: list[RowTarget], back: WriteBack | None = None
) -> list[CopyOut]:
    """Encode the targets' tokens of every stream in the section; `back` gets what a fetch would give of them. Return the
    copies that are left to be made: on a GPU all.

    What a live cache has coded already is copied.
    """
    way = Host(leaves, back) if on_cpu() else Gpu(leaves, back)
    for group in section.groups if targets else ():
        if isinstance(group.codec, RawRows):
            way.copy(group, targets)
        elif any(leaves[member.leaf].codes is not None for member in group.members):
            way.encode_beside_codes(group, targets)
        else:
            way.encode(group, targets)
    return way.copies


class Way(ABC):
    """How rows of live leaves come into tensors. `back` gets what a fetch would give of them."""

    def __init__(self, leaves: Sequence[Leaf], back: WriteBack | None):
        self._leaves, self._back = leaves, back
        self.copies: list[CopyOut] = []

    @abstractmethod
    def copy(self, group: Group, targets: Sequence[RowTarget]) -> None:
        """Copy a group's rows as they are."""

    @abstractmethod
    def encode(self, group: Group, targets: Sequence[RowTarget]) -> None:
        """Encode all of a group's rows, with levels that are measured where they aren't settled."""

    @abstractmethod
    def encode_with(
        self, wanted: Sequence[Levels | None], group: Group, members: Sequence[Member], targets: Sequence[RowTarget]
    ) -> None:
        """Encode these members' rows, with the levels, of all of the group's heads, that are wanted for each target."""

    @abstractmethod
    def measure(self, group: Group, members: Sequence[Member], targets: Sequence[RowTarget]) -> list[Levels]:
        """Measure the levels of each target's rows, of these members' heads side by side."""

    def encode_beside_codes(self, group: Group, targets: Sequence[RowTarget]) -> None:
        """Encode all of a group's rows, of which live caches have coded some members already."""
        wanted, plain = self._settle_levels(group, targets), []
        for member in group.members:
            codes = self._leaves[member.leaf].codes
            if codes is None:
                plain.append(member)
            else:
                _copy_codes(group, member, codes, targets, wanted)
        self.encode_with(wanted, group, plain, targets)

    def _settle_levels(self, group: Group, targets: Sequence[RowTarget]) -> list[Levels | None]:
        """Settle the levels of each target's rows, all heads of the group, which are in its tensors from here on."""
        if not group.steps:
            return [None] * len(targets)
        fresh = [target for target in targets if not target.settled]
        for target, measured in zip(fresh, self._fresh_levels(group, fresh), strict=True):
            group.write_levels(target.tensors, measured.packed())
        return [group.levels(target.tensors) for target in targets]

    def _fresh_levels(self, group: Group, targets: Sequence[RowTarget]) -> list[Levels]:
        """Return the levels that live codes have, and measure those of all other rows."""
        plain = [member for member in group.members if self._leaves[member.leaf].codes is None]
        measured = self.measure(group, plain, targets) if plain and targets else []
        of_targets = []
        for i, target in enumerate(targets):
            at, parts = 0, []
            for member in group.members:
                codes = self._leaves[member.leaf].codes
                if codes is not None:
                    coded_with: Levels | None = getattr(run_at(codes.runs, target.first).levels, member.stream)
                    parts.append(coded_with or neutral(member.heads, group.codec.width))
                else:
                    parts.append(measured[i].of(at, member.heads))
                    at += member.heads
            of_targets.append(Levels.joined(parts))
        return of_targets


def _copy_codes(
    group: Group, member: Member, codes: LiveCodes, targets: Sequence[RowTarget], wanted: Sequence[Levels | None]
) -> None:
    """Copy one live cache's codes; rows whose levels are not their target's are decoded and encoded again."""
    planes = codes.planes(member.stream)
    for target, of_group in zip(targets, wanted, strict=True):
        of_target = member.levels_of(of_group)
        for first, last, of_layer in spans_of(codes.runs, 0, target.first, target.last):
            stretch = [plane[first:last] for plane in planes]
            of_codes = getattr(of_layer, member.stream)
            if not same_levels(of_codes, of_target):
                rows = group.codec.decode([np.ascontiguousarray(plane) for plane in stretch], of_codes)
                stretch = group.codec.encode(mx.swapaxes(rows, 0, 1), of_target)
            at = target.at + first - target.first
            for name, plane in zip(group.names, stretch, strict=True):
                target.tensors[name][at : at + last - first, member.in_group] = plane


class Host(Way):
    """Where MLX's arrays are in the host's memory: each stretch of rows goes from where it lies to its place."""

    def copy(self, group: Group, targets: Sequence[RowTarget]) -> None:
        self.encode_with([None] * len(targets), group, group.members, targets)

    def encode(self, group: Group, targets: Sequence[RowTarget]) -> None:
        self.encode_with(self._settle_levels(group, targets), group, group.members, targets)

    def encode_with(
        self, wanted: Sequence[Levels | None], group: Group, members: Sequence[Member], targets: Sequence[RowTarget]
    ) -> None:
        batch = []
        names, places = group.names, [target.rows for target in targets]
        for member in members:
            rows, where, heads = self._rows_of(member), self._leaves[member.leaf].where, member.in_group
            for target, into, of_group in zip(targets, places, wanted, strict=True):
                planes = tuple(target.tensors[name][into, heads] for name in names)
                lying = rows[:, where(target.first, target.last)].swapaxes(0, 1)
                batch.append(Encoding(lying, planes, member.levels_of(of_group)))
        group.codec.encode_all(batch)
        if self._back is None or isinstance(group.codec, RawRows):
            return
        for member in members:
            for target in targets:
                if target.whole:
                    self._back.decode_rows(group, member, target.first, target.rows, target.tensors, target.exact)

    def measure(self, group: Group, members: Sequence[Member], targets: Sequence[RowTarget]) -> list[Levels]:
        lying = [(self._rows_of(member), self._leaves[member.leaf].where) for member in members]
        measured = []
        for target in targets:
            parts = [rows[:, where(target.first_measured, target.last)].swapaxes(0, 1) for rows, where in lying]
            measured.append(measure_levels(parts, group.codec.centred))
        return measured

    def _rows_of(self, member: Member) -> np.ndarray:
        """Return rows (heads, buffer, width), where the live cache has them."""
        (rows,) = borrow(self._leaves[member.leaf].arrays[member.stream])
        return rows


class Gpu(Way):
    """Where MLX's arrays are on a GPU: one launch encodes a group's rows of all targets of one length."""

    def copy(self, group: Group, targets: Sequence[RowTarget]) -> None:
        rows = mx.contiguous(mx.swapaxes(self._gathered(group.members, targets), 0, 1))
        mx.async_eval(rows)
        self.copies += [CopyOut(rows, [t.tensors[name][t.rows] for t in targets]) for name in group.names]

    def encode(self, group: Group, targets: Sequence[RowTarget]) -> None:
        for settled in (False, True):  # some have levels only once the others are done
            some = [target for target in targets if target.settled is settled]
            for numbers in _alike(some):
                alike = [some[i] for i in numbers]
                if settled:
                    self._copy_now()
                known = [group.levels(target.tensors) for target in alike] if settled else None
                self._launch(known, group, group.members, alike)

    def _copy_now(self) -> None:
        for copy in self.copies:
            copy.run()
        self.copies.clear()

    def encode_with(
        self, wanted: Sequence[Levels | None], group: Group, members: Sequence[Member], targets: Sequence[RowTarget]
    ) -> None:
        for member in members:  # one by one: not all of them need stand next to each other in the tensor
            for numbers in _alike(targets):
                self._launch([wanted[i] for i in numbers], group, (member,), [targets[i] for i in numbers])

    def measure(self, group: Group, members: Sequence[Member], targets: Sequence[RowTarget]) -> list[Levels]:
        measured: dict[int, Levels] = {}
        ranges = [target._replace(first=target.first_measured) for target in targets]
        for numbers in _alike(ranges):
            rows = self._gathered(members, [ranges[i] for i in numbers])
            whole = measure_levels(side_by_side(rows, len(numbers)).astype(mx.float32), group.codec.centred)
            for at, i in enumerate(numbers):
                measured[i] = Levels(whole.mean[at :: len(numbers)], whole.divisor[at :: len(numbers)])
        return [measured[i] for i in range(len(targets))]

    def _launch(
        self,
        wanted: Sequence[Levels | None] | None,
        group: Group,
        members: Sequence[Member],
        targets: Sequence[RowTarget],
    ) -> None:
        """Encode targets that are alike, of members whose heads are next to each other: all of the group, or one.

        Where no levels are `wanted`, they are measured, of all of the group's heads.
        """
        rows = self._gathered(members, targets)
        first, heads = members[0].head, slice(members[0].head, members[0].head + len(rows))
        firsts = [t.first_measured - t.first for t in targets] if wanted is None and group.steps else []
        known = [whole.of(first, len(rows)) for whole in wanted or () if whole is not None]
        decoding = self._back is not None and targets[0].whole
        encoded = group.codec.encode_blocks(rows, len(targets), known, firsts, decoding)

        for name, plane in zip(group.names, encoded.planes, strict=True):
            self.copies.append(CopyOut(plane, [t.tensors[name][t.rows, heads] for t in targets]))
        if encoded.levels is not None:
            mx.async_eval(encoded.levels)
            for name, part in zip((group.mean, group.steps), encoded.levels, strict=True):
                if name:
                    self.copies.append(CopyOut(part, [t.tensors[name][heads] for t in targets]))
        if self._back is not None and encoded.decoded is not None:
            at = 0
            for start, last in merged([(target.first, target.last) for target in targets]):
                for member in members:
                    of_member = slice(member.head - first, member.head - first + member.heads)
                    decoded = encoded.decoded[of_member, at : at + last - start]
                    self._back.add(member, start, decoded, targets[0].exact)
                at += last - start

    def _gathered(self, members: Sequence[Member], targets: Sequence[RowTarget]) -> mx.array:
        """Return rows (all heads of these members, tokens of all targets, width)."""
        runs = merged([(target.first, target.last) for target in targets])
        if len(runs) == 1 and all(self._leaves[member.leaf].where is slice for member in members):
            return gather([self._leaves[member.leaf].arrays[member.stream] for member in members], *runs[0])
        of_members = []
        for member in members:
            leaf = self._leaves[member.leaf]
            array = leaf.arrays[member.stream]
            pieces = [taken(array, leaf.where(first, last)) for first, last in runs]
            of_members.append(pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=2))
        return mx.concatenate(of_members, axis=1)[0]


def _alike(targets: Sequence[RowTarget]) -> list[list[int]]:
    """Group the targets' numbers by how many tokens they have and whether those are whole blocks'."""
    by_kind: dict[tuple[int, bool], list[int]] = {}
    for i, target in enumerate(targets):
        by_kind.setdefault((target.tokens, target.whole), []).append(i)
    return list(by_kind.values())
