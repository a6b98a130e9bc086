"""Which codes of a stored block are a live cache's own: those that decode, bit for bit, to the rows that it holds.

A hit that ends inside a block gives decoded rows. When these are stored again their codes are taken over, since to encode
them would be to code them twice. Rows that were computed are encoded by themselves, so a block's decoded rows depend on its
own rows alone, never on a neighbour that begins with the same tokens. Decision 0004 says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from prefixcache.blocks.window_masks import mask_of, runs_of
from prefixcache.codecs.levels import same_levels
from prefixcache.codecs.turboquant.coding import spans_of
from prefixcache.layers.adapters import Leaf, LiveCodes
from prefixcache.layers.image_layout import Group, Joined, Member, Plan, Tensors
from prefixcache.layers.transformed import CodedBlocks, DamagedBlock, codes_of, decode_joined
from prefixcache.layers.write_back import decoded_rows


class Compared(NamedTuple):
    """For each token of a block from `first` on, whether a stream's live row equals the stored row, decoded."""

    first: int
    alike: mx.array


class TokenRun(NamedTuple):
    """Tokens `first` to `last` (not included) of a block, and the first of their rows in a section's tensors."""

    first: int
    last: int
    at: int


def leading_rows(plan: Plan, leaves: Sequence[Leaf], start: int, tensors: Tensors, count: int) -> int:
    """Count the leading tokens, of the first `count` of the block at token `start`, whose live rows are what a rows image's
    tensors decode to. Tokens that the codec keeps as they are count where one behind them does.
    """
    first = min(max(plan.sink_tokens - start, 0), count)
    return _leading(_compared_rows(plan, leaves, start, tensors, TokenRun(first, count, first)), count)


def leading_window(
    plan: Plan, leaves: Sequence[Leaf], start: int, tensors: Tensors, stored: Sequence[int], shared: Sequence[int]
) -> int:
    """Do as `leading_rows` with a window image, which has the tokens in the masks `stored`, one for each window. Only the
    tokens in `shared` are compared.
    """
    compared = _compared_windows(plan, leaves, start, tensors, stored, shared)
    return _leading(compared, max(mask.bit_length() for mask in shared))


def _leading(compared: Iterator[Compared], count: int) -> int:
    """Count the tokens before the first row that differs; 0 where no row is alike. Most live rows were computed: then
    the first stream says so, and no other is decoded.
    """
    leading, lowest = count, count
    for stream in compared:
        alike = np.array(stream.alike)
        lowest = min(lowest, stream.first)
        if not alike.all():
            leading = min(leading, stream.first + int(alike.argmin()))
        if leading <= lowest:
            return 0
    return leading if lowest < leading else 0


def _compared_rows(
    plan: Plan, leaves: Sequence[Leaf], start: int, tensors: Tensors, run: TokenRun
) -> Iterator[Compared]:
    if run.first < run.last:
        for group in plan.rows.groups:
            for member in group.members:
                yield _compared(group, member, leaves[member.leaf], start, tensors, run)
        yield from _compared_joined(plan.rows.joined, leaves, start, tensors, run)


def _compared_joined(
    joined_streams: Sequence[Joined], leaves: Sequence[Leaf], start: int, tensors: Tensors, run: TokenRun
) -> Iterator[Compared]:
    before = run.at if run.at == run.first else 0  # rows of a block's first tokens: decoded, too, as in a fetch
    for joined in joined_streams:
        codes = codes_of(joined, tensors, slice(run.at - before, run.at + run.last - run.first))
        try:
            (decoded,) = decode_joined([CodedBlocks(joined, [(start + run.first - before, codes)])])
            decoded.check()
        except DamagedBlock:  # a fetch deletes the image
            yield Compared(run.first, mx.array([False]))
            return
        (rows,) = decoded.stretches
        for number, (leaf, stream) in enumerate(joined.streams):
            stored = rows.rows(number, joined.coder.dtype)[:, before:]
            live = leaves[leaf].rows(stream, start + run.first, start + run.last)
            yield Compared(run.first, _alike(live, stored))


def _compared_windows(
    plan: Plan, leaves: Sequence[Leaf], start: int, tensors: Tensors, stored: Sequence[int], shared: Sequence[int]
) -> Iterator[Compared]:
    for section, mask, wanted in zip(plan.windowed, stored, shared, strict=True):
        for first, last in runs_of(wanted & ~plan.sunk(start)):
            run = TokenRun(first, last, (mask & mask_of(0, first)).bit_count())
            for group in section.groups:
                for member in group.members:
                    yield _compared(group, member, leaves[member.leaf], start, tensors, run)
            yield from _compared_joined(section.joined, leaves, start, tensors, run)


def _compared(group: Group, member: Member, leaf: Leaf, start: int, tensors: Tensors, run: TokenRun) -> Compared:
    rows = slice(run.at, run.at + run.last - run.first)
    if leaf.codes is not None:
        return Compared(run.first, _same_codes(group, member, leaf.codes, start, tensors, run))
    stored = decoded_rows(group, member, rows, tensors)
    live = leaf.rows(member.stream, start + run.first, start + run.last)
    return Compared(run.first, _alike(live, stored))


def _alike(live: mx.array, stored: mx.array) -> mx.array:
    return mx.all(live == stored, axis=(0, 2))


def _same_codes(
    group: Group, member: Member, codes: LiveCodes, start: int, tensors: Tensors, run: TokenRun
) -> mx.array:
    """Tell for each token whether live cache and image have the same codes, with the same levels."""
    first, last, of_image = start + run.first, start + run.last, group.levels(tensors, member)
    alike = np.ones(last - first, bool)
    for name, plane in zip(group.names, codes.planes(member.stream), strict=True):
        stored = tensors[name][run.at : run.at + last - first, member.in_group]
        alike &= (stored == plane[first:last]).reshape(last - first, -1).all(1)
    for low, high, of_layer in spans_of(codes.runs, 0, first, last):
        alike[low - first : high - first] &= same_levels(getattr(of_layer, member.stream), of_image)
    return mx.array(alike)
