"""Rows of blocks on their way to a GPU: of many blocks and several streams at once, in one copy and few launches.

An image has the heads of all layers side by side. So the bytes of a stack of blocks go to the GPU for as many neighbouring
heads as `AT_ONCE` allows. There one launch decodes as many heads as `DECODED_AT_ONCE` allows: for a short prompt those of
all layers, since a launch for each layer would take longer than all the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from prefixcache.codecs.interchange import bring_in_stacked, element
from prefixcache.codecs.levels import LazyLevels
from prefixcache.codecs.pieces import Piece
from prefixcache.layers.image_layout import Group, Member, Place, Section, Tensors

AT_ONCE = 128 << 20  # coded bytes on the GPU
DECODED_AT_ONCE = 128 << 20  # bytes of rows there, beside the buffers that they go to


class RowRun(NamedTuple):
    """Rows `first` to `first + rows` of an image's tensors go to physical rows `at` and on of a buffer.

    `sunk`: the first of the rows where they also stand as they are beside their codes, None where they don't. `coded`: they
    are coded as a whole block's rows are.
    """

    tensors: Tensors
    first: int
    rows: int
    at: int
    sunk: int | None = None
    coded: bool = False


class HeadsOnGpu(NamedTuple):
    """What a group's heads `first` to `last` (not included) have in a stack: planes (runs, rows, heads, ...) and levels
    (runs, heads, width).
    """

    first: int
    last: int
    planes: list[mx.array]
    levels: LazyLevels | None

    def of(self, first: int, last: int) -> HeadsOnGpu:
        """Return the same of fewer heads."""
        heads = slice(first - self.first, last - self.first)
        levels = LazyLevels(*(part[:, heads] for part in self.levels)) if self.levels is not None else None
        return HeadsOnGpu(first, last, [plane[:, :, heads] for plane in self.planes], levels)


class DecodedHeads(NamedTuple):
    """Rows (heads, tokens, width) of a stack, of a group's heads `first` to `last` (not included)."""

    first: int
    last: int
    rows: mx.array


def _has(heads: HeadsOnGpu | DecodedHeads, member: Member) -> bool:
    return heads.first <= member.head and member.in_group.stop <= heads.last


class Stack:
    """Runs of equally many rows that follow each other, of one group of streams."""

    def __init__(self, group: Group, runs: Sequence[RowRun]):
        self._group, self._runs = group, runs
        self._brought: HeadsOnGpu | None = None
        self._decoded: DecodedHeads | None = None

    def piece(self, member: Member, last_head: int) -> Piece:
        """Return one stream's rows, decoded lazily. Heads up to `last_head` may be asked for next."""
        if self._decoded is None or not _has(self._decoded, member):
            if self._brought is None or not _has(self._brought, member):
                self._brought = None
                self._brought = self._bring(member, last_head)
            self._decoded = None
            self._decoded = self._decode(member, self._brought)
        heads = slice(member.head - self._decoded.first, member.in_group.stop - self._decoded.first)
        return Piece(self._group.codec, (), self._runs[0].at, rows=self._decoded.rows[heads])

    def _bring(self, member: Member, last_head: int) -> HeadsOnGpu:
        runs, names = self._runs, self._group.names
        last = self._last_head(member, last_head, AT_ONCE, sum(runs[0].tensors[name][0, 0].nbytes for name in names))
        heads = slice(member.head, last)
        planes = [
            bring_in_stacked([run.tensors[name][run.first : run.first + run.rows, heads] for run in runs])
            for name in names
        ]
        return HeadsOnGpu(member.head, last, planes, self._levels(heads))

    def _decode(self, member: Member, brought: HeadsOnGpu) -> DecodedHeads:
        codec = self._group.codec
        row_bytes = codec.width * element(codec.dtype).numpy.itemsize
        last = self._last_head(member, brought.last, DECODED_AT_ONCE, row_bytes)
        some = brought.of(member.head, last)
        return DecodedHeads(member.head, last, codec.decode_blocks(some.planes, some.levels))

    def _last_head(self, member: Member, limit: int, nbytes: int, row_bytes: int) -> int:
        """Return the head up to which `nbytes` have the rows: at least a member's last, at most `limit`."""
        heads = nbytes // max(len(self._runs) * self._runs[0].rows * row_bytes, 1)
        return max(member.in_group.stop, min(limit, member.head + heads))

    def _levels(self, heads: slice) -> LazyLevels | None:
        group = self._group
        of_runs = [group.packed_levels(run.tensors, heads) for run in self._runs]
        return LazyLevels.brought_in([of_run for of_run in of_runs if of_run is not None]) if group.steps else None


class Stacks:
    """The stacks of one call, which asks for one stream after the other, in the order of a group's members.

    With `one_by_one` it asks for few of them, and no bytes of others go to the GPU.
    """

    def __init__(self, *, one_by_one: bool = False):
        self._one_by_one = one_by_one
        self._stacks: dict[tuple[int, int, int], list[Stack]] = {}
        self._known: list[Sequence[RowRun]] = []  # kept alive: they are known by their ids

    def pieces(self, section: Section, place: Place, runs: Sequence[RowRun]) -> list[Piece]:
        """Return one stream's rows in these runs, decoded lazily. Pass all streams the same list: it is known by its id."""
        g, member = place
        key = (id(section), g, id(runs))
        if key not in self._stacks:
            self._known.append(runs)
            self._stacks[key] = [Stack(section.groups[g], alike) for alike in _alike(runs)]
        last_head = member.in_group.stop if self._one_by_one else section.groups[g].heads
        return [stack.piece(member, last_head) for stack in self._stacks[key]]


def _alike(runs: Sequence[RowRun]) -> list[list[RowRun]]:
    """Return runs of equally many rows that follow each other, together."""
    stacks: list[list[RowRun]] = []
    for run in runs:
        before = stacks[-1][-1] if stacks else None
        if before is not None and (before.rows, before.at + before.rows) == (run.rows, run.at):
            stacks[-1].append(run)
        else:
            stacks.append([run])
    return stacks
