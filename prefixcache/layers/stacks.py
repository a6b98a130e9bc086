"""Rows of blocks on their way to a GPU: of many blocks and several streams at once, in one copy and few launches.

An image has the heads of all layers side by side. So the bytes of a stack of blocks go to the GPU for as many neighbouring
heads as `AT_ONCE` allows, and stay there until these streams have been decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx

from prefixcache.codecs.interchange import bring_in_stacked
from prefixcache.codecs.levels import LazyLevels
from prefixcache.codecs.pieces import Piece
from prefixcache.layers import levels
from prefixcache.layers.image_layout import Group, Member, Place, Section, Tensors

AT_ONCE = 128 << 20  # bytes on the GPU beside the rows that they become


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


class Stack:
    """Runs of equally many rows that follow each other, of one group of streams."""

    def __init__(self, group: Group, runs: Sequence[RowRun]):
        self._group, self._runs = group, runs
        self._brought: HeadsOnGpu | None = None

    def piece(self, member: Member, last_head: int) -> Piece:
        """Decode one stream's rows. Heads up to `last_head` may be asked for next."""
        there = self._brought
        if there is None or not there.first <= member.head < member.in_group.stop <= there.last:
            self._brought = None
            there = self._brought = self._bring(member, last_head)
        heads = slice(member.head - there.first, member.in_group.stop - there.first)
        of_stream = LazyLevels(*(part[:, heads] for part in there.levels)) if there.levels is not None else None
        rows = self._group.codec.decode_blocks([plane[:, :, heads] for plane in there.planes], of_stream)
        return Piece(self._group.codec, (), self._runs[0].at, rows=rows)

    def _bring(self, member: Member, last_head: int) -> HeadsOnGpu:
        group, runs = self._group, self._runs
        of_head = len(runs) * sum(runs[0].tensors[name][: runs[0].rows, 0].nbytes for name in group.names)
        last = max(member.in_group.stop, min(last_head, member.head + AT_ONCE // max(of_head, 1)))
        heads = slice(member.head, last)
        planes = [
            bring_in_stacked([run.tensors[name][run.first : run.first + run.rows, heads] for run in runs])
            for name in group.names
        ]
        return HeadsOnGpu(member.head, last, planes, self._levels(heads))

    def _levels(self, heads: slice) -> LazyLevels | None:
        group = self._group
        of_runs = [levels.packed(group, run.tensors, heads) for run in self._runs]
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
        """Return one stream's rows of these runs, decoded lazily. For the same runs pass the same list."""
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
