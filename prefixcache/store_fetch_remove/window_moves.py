"""How the rows of one window come into a window image: from an older image of the block, and from the live cache."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from prefixcache.blocks.node import BLOCK_BYTES
from prefixcache.blocks.window_masks import mask_from, mask_of, row_pairs, runs_of
from prefixcache.image_format import DTYPES
from prefixcache.layers.encode import RowTarget
from prefixcache.layers.image_layout import Plan, Section, Tensors
from prefixcache.layers.recode import CopyRows, DecodeRows, EncodeRows, TakeCodes
from prefixcache.store_fetch_remove.jobs import ImageJob


class WindowMoves(NamedTuple):
    """Moves to run in this order: `stored` rows, the `live` rows of each section, and the `last` one, which codes both.

    Only a tail that has become a whole block has a last move: its rows are coded together with the live ones, by levels
    that are measured from both.
    """

    stored: list[TakeCodes | CopyRows | DecodeRows]
    live: list[tuple[Section, list[RowTarget]]]
    last: EncodeRows | None = None


def plan_window(plan: Plan, job: ImageJob, tensors: Tensors, window: int) -> WindowMoves:
    """Plan the moves into the `tensors` of a window image's draft, for one window of the namespace."""
    coded, tails, sinks = plan.windowed[window], plan.window_tails[window], plan.window_sinks[window]
    section, mask = coded if job.coded else tails, job.mask[window]
    old = mask & ~job.encoded[window]
    if not old:
        return WindowMoves([], _live(plan, job, window, section, tensors, tensors))
    assert job.source.window is not None
    source, stored = job.source.window.tensors(), mask_from(job.source.window.header()[0].extra)[window]
    sunk = plan.sunk(job.start) if sinks.groups else 0
    pairs = row_pairs(old, mask, stored)
    was_coded = all(name in source for name in coded.names)
    moves: list[TakeCodes | CopyRows | DecodeRows]
    if plan.lossless or job.coded is was_coded:
        moves = [TakeCodes(section, tensors, source, pairs)]
        if job.coded:
            moves.append(TakeCodes(sinks, tensors, source, row_pairs(old & sunk, mask & sunk, stored & sunk)))
        return WindowMoves(moves, _live(plan, job, window, section, tensors, tensors))
    if not job.coded:
        exact = row_pairs(old & sunk, mask, stored & sunk)
        moves = [DecodeRows(coded, source, tails, tensors, pairs, [job.start + first for first, _ in runs_of(old)])]
        moves.append(CopyRows(tails, tensors, sinks, source, exact))
        return WindowMoves(moves, _live(plan, job, window, tails, tensors, tensors))
    rows = {spec.name: np.empty(spec.shape, DTYPES[spec.dtype]) for spec in tails.specs(mask.bit_count())}
    exact = row_pairs(old & sunk, mask & sunk, stored)
    moves = [TakeCodes(tails, rows, source, pairs), CopyRows(sinks, tensors, tails, source, exact)]
    levelled = (job.encoded[window] & ~sunk) or (mask & ~sunk) or mask
    measured = [into for into, _ in row_pairs(levelled, mask, mask)]
    last = EncodeRows(coded, tensors, tails, rows, measured)
    return WindowMoves(moves, _live(plan, job, window, tails, rows, tensors), last)


def _live(
    plan: Plan, job: ImageJob, window: int, section: Section, rows: Tensors, tensors: Tensors
) -> list[tuple[Section, list[RowTarget]]]:
    """Tell where the live rows go: to `rows`, tensors of a section, and those of sinks as they are to `tensors`, too."""
    mask, new, start = job.mask[window], job.encoded[window], job.start
    sunk = plan.sunk(start) if plan.window_sinks[window].groups else 0
    targets, settled = [], bool(mask & ~new)
    whole = job.coded and len(job.tokens) == BLOCK_BYTES and job.source.window is None
    for first, last in runs_of(new):
        at, exact = (mask & mask_of(0, first)).bit_count(), plan.sink_tokens
        targets.append(RowTarget(start + first, start + last, rows, at, settled, exact, exact, whole))
        settled = True
    exact_targets = []
    for first, last in runs_of(new & sunk) if job.coded else ():
        at = (mask & sunk & mask_of(0, first)).bit_count()
        exact_targets.append(RowTarget(start + first, start + last, tensors, at))
    return [(section, targets), (plan.window_sinks[window], exact_targets)]
