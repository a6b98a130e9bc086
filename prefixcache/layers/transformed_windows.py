"""Rows of windowed layers that are transformed together: from live leaves and other images to a window image's tensors, and
back. A window image has any of its block's tokens: a mask says which. Decision 0054 says what is joined with what.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from prefixcache.blocks.window_masks import mask_of, row_pairs, runs_of
from prefixcache.codecs.transform.coding import Codes
from prefixcache.layers.adapters import Leaf
from prefixcache.layers.image_layout import Joined, Plan, Section, Tensors
from prefixcache.layers.transformed import (
    CodedBlocks,
    RowsToCode,
    TailRows,
    codes_of,
    encode_parts,
    one_after_another,
)


class WindowRows(NamedTuple):
    """Rows of a window that are to be codes, as masks of the tokens of the block at token `start`: those in `mask`, of
    which the live cache has those in `live`. An image has the others: its `tensors` hold the tokens in `stored`.
    """

    start: int
    mask: int
    live: int
    tensors: Tensors
    stored: int


def encode_window(
    plan: Plan, window: int, leaves: Sequence[Leaf], blocks: Sequence[WindowRows]
) -> list[list[Codes | None]]:
    """Encode all blocks of each group of a window's layers; None for a block without rows. Stored codes are taken over."""
    section = plan.windowed[window]
    runs = [_Runs(plan, window, block) for block in blocks]
    codes: list[list[dict[int, Codes]]] = [[of_block.taken(joined) for of_block in runs] for joined in section.joined]
    for number in range(max((len(of_block.uncoded) for of_block in runs), default=0)):
        pending = [b for b, of_block in enumerate(runs) if number < len(of_block.uncoded)]
        parts = [
            [runs[b].uncoded[number]._replace(taken=next(iter(of_group[b].values()), None)) for b in pending]
            for of_group in codes
        ]  # rows of one block have the offsets of the first of them that were coded
        for of_group, encoded in zip(codes, encode_parts(plan, section.joined, leaves, parts), strict=True):
            for b, new in zip(pending, encoded, strict=True):
                of_group[b][runs[b].uncoded[number].first] = new
    return [[_in_order(of_block) for of_block in of_group] for of_group in codes]


class _Runs:
    """What a block's rows in a window are made of: codes that are taken over, and runs that are still to be coded, live ones
    first: so what they decode to does not depend on a tail that somebody stored.
    """

    def __init__(self, plan: Plan, window: int, block: WindowRows):
        section, tails = plan.windowed[window], plan.window_tails[window]
        self._block, old = block, block.mask & ~block.live
        is_coded = all(name in block.tensors for name in section.names)
        self._coded = old if is_coded else 0
        self.uncoded = [self._run(plan, first, last) for first, last in runs_of(block.live)]
        exact = old & ~self._coded
        for (first, last), (_, rows) in zip(runs_of(exact), row_pairs(exact, exact, block.stored), strict=True):
            self.uncoded.append(self._run(plan, first, last)._replace(tail=TailRows(tails, block.tensors, rows)))

    def _run(self, plan: Plan, first: int, last: int) -> RowsToCode:
        start = self._block.start
        skip = (mask_of(first, last) & plan.sunk(start)).bit_count()
        return RowsToCode(start + first, start + last, skip, None)

    def taken(self, joined: Joined) -> dict[int, Codes]:
        """Return codes that are taken over, by their first token."""
        block = self._block
        return dict(coded_runs(joined, CodedWindow(block.start, block.tensors, self._coded, block.stored)))


def _in_order(codes: dict[int, Codes]) -> Codes | None:
    return one_after_another([of for _, of in sorted(codes.items())]) if codes else None


class CodedWindow(NamedTuple):
    """The `wanted` rows of a window in a window image's `tensors`, which have those in `stored`: masks of the tokens of the
    block at token `start`.
    """

    start: int
    tensors: Tensors
    wanted: int
    stored: int


def coded_window(section: Section, blocks: Sequence[CodedWindow]) -> list[CodedBlocks]:
    """Return the codes of blocks' rows of one window, whose section this is, by group."""
    return [
        CodedBlocks(joined, [run for block in blocks for run in coded_runs(joined, block)]) for joined in section.joined
    ]


def coded_runs(joined: Joined, block: CodedWindow) -> list[tuple[int, Codes]]:
    """Return of each run of a block's rows its first token, and its codes."""
    pairs = zip(runs_of(block.wanted), row_pairs(block.wanted, block.wanted, block.stored), strict=True)
    return [(block.start + first, codes_of(joined, block.tensors, rows)) for (first, _), (_, rows) in pairs]
