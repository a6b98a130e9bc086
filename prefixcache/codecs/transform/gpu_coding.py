"""Rows of groups of layers, joined and transformed, on MLX's GPUs: the products are MLX's, what stands around them and the
entropy coder are kernels.

The same format as `coding`, whose values these are but for the rounding of products: factors and what comes of them are half
precision, as rows are. Many blocks and several groups are coded at once: a row takes as long as it has components, however
many rows there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from prefixcache.codecs.interchange import Array, bring_in, copy_out, element
from prefixcache.codecs.transform import gpu_entropy
from prefixcache.codecs.transform.basis import MARGIN
from prefixcache.codecs.transform.coding import CLAIMED, Codes, GroupCoder, quantised_offsets
from prefixcache.codecs.transform.entropy import AS_IT_IS, MOST_WORDS, Damaged, gain_of
from prefixcache.codecs.transform.gpu_entropy import Classes, padded
from prefixcache.codecs.transform.rotation import NO_ROTATION, Rotation
from prefixcache.kernels import transform_rows as kernels  # type: ignore[import-not-found]
from prefixcache.memory import machine_memory

_WITHIN = 256  # tokens over which the phases of a rotation are kept
_SHARE, _ROOM = 1 / 16, 2 << 30  # groups that are coded at once take that much of the memory, and bytes, at most


class Rows(NamedTuple):
    """Rows of one block that are to be coded: those of tokens `first` to `last` (not included). The first `skip` have no
    codes.
    """

    first: int
    last: int
    skip: int = 0


class Rowed(NamedTuple):
    """A group's rows (heads, tokens, width) by stream, those of blocks one after the other; and of each block codes of other
    rows of the same, whose offsets stand, or None.
    """

    coder: GroupCoder
    streams: Sequence[mx.array]
    settled: Sequence[Codes | None]


class Coded(NamedTuple):
    """A group's codes, block by block."""

    coder: GroupCoder
    blocks: Sequence[Codes]


class Batch(NamedTuple):
    """Codes of several groups, of the tokens of `runs`, in the GPU's memory: heads uint16 (groups, rows), the first word of
    each row uint32 (groups, rows), words uint16, and of each group and block `Codes.offsets` and `offset_steps`. Of rows that
    are kept as they are, by group, the numbers and bits are here.
    """

    coders: tuple[GroupCoder, ...]
    runs: tuple[tuple[int, int], ...]
    heads: mx.array
    first: mx.array
    words: mx.array
    offsets: Sequence[mx.array]
    offset_steps: Sequence[mx.array]
    kept: Sequence[tuple[Array, Array]]


class Restored(NamedTuple):
    """Rows (heads, tokens, width) of each stream of a group, and what is wrong with each token's, for `reason_of`. Lazy."""

    streams: list[mx.array]
    wrong: mx.array


def available() -> bool:
    """Whether rows are coded on a GPU here."""
    return gpu_entropy.available()


def at_once(coders: Sequence[GroupCoder], tokens: int) -> int:
    """How many of these groups, from the first on, are best coded together, for so many tokens."""
    room, count = min(_ROOM, machine_memory() * _SHARE), 0
    for coder in coders:
        room -= tokens * (8 * coder.group.channels + 8 * padded(len(coder.classes)))
        if room < 0 or coder.tables is not coders[0].tables:
            break
        count += 1
    return max(1, count)


# -- to codes -------------------------------------------------------------------------------------------------------------


def encode(groups: Sequence[Rowed], blocks: Sequence[Rows]) -> list[list[Codes]]:
    """The codes of groups, all of which have rows of these blocks: of each group and block."""
    coders = [group.coder for group in groups]
    runs = tuple((block.first, block.last) for block in blocks)
    skipped = np.concatenate([np.arange(block.last - block.first) < block.skip for block in blocks])
    measured = [_measured(coder, group.streams, runs) for coder, group in zip(coders, groups, strict=True)]
    classes = Classes.of([coder.classes for coder in coders])
    values = [
        coder.group.on_gpu.vectors[: len(coder.classes)] @ of_group
        for coder, of_group in zip(coders, measured, strict=True)
    ]
    packed = gpu_entropy.pack(
        mx.concatenate([classes.padded(of_group[None]) for of_group in values]),
        mx.stack([mx.square(of_group.astype(mx.float32)).sum(axis=0) for of_group in measured]),
        mx.array(skipped.astype(np.uint32)),
        mx.array(np.array([coder.most_left_out(0) for coder in coders], np.float32)),
        classes,
        coders[0].tables,
    )
    lacking, seen = [], None
    if any(settled is None for group in groups for settled in group.settled):
        means = _Means(packed.fine, runs)
        seen = means.seen
        lacking = [
            _lacking(coder, means, g, measured[g], packed.decoded[g, : len(coder.classes)])
            for g, coder in enumerate(coders)
        ]
    mx.eval(packed.heads, packed.scratch, lacking, [] if seen is None else seen)
    heads = copy_out(packed.heads)
    words = copy_out(gpu_entropy.gathered(heads.ravel(), packed.scratch))
    counts = np.where(gain_of(heads) == AS_IT_IS, 0, heads & MOST_WORDS).astype(np.int64)
    row_ends = np.cumsum(counts).reshape(counts.shape)
    ends = np.cumsum([last - first for first, last in runs])
    made = []
    for g, group in enumerate(groups):
        offsets, steps = None, None
        if seen is not None:
            offsets, steps = quantised_offsets(np.array(lacking[g]).T, np.array(seen[g]), group.coder.streams)
        kept = np.flatnonzero(heads[g] == 0xFFFF)
        as_they_are = _bits(group.streams, kept)
        last_word = row_ends[g, 0] - counts[g, 0]
        of_group = []
        for number, (end, settled) in enumerate(zip(ends, group.settled, strict=True)):
            own = slice(0 if not number else int(ends[number - 1]), int(end))
            own_words = words[last_word : row_ends[g, own.stop - 1]]
            last_word = row_ends[g, own.stop - 1]
            whole_rows = as_they_are[np.searchsorted(kept, own.start) : np.searchsorted(kept, own.stop)]
            if len(whole_rows):
                own_words = _with_rows(heads[g, own], own_words, whole_rows)
            if settled is None:
                assert offsets is not None
                assert steps is not None
                of_group.append(Codes(heads[g, own], own_words, offsets[number], steps[number]))
            else:
                of_group.append(Codes(heads[g, own], own_words, settled.offsets, settled.offset_steps))
        made.append(of_group)
    return made


def _measured(coder: GroupCoder, streams: Sequence[mx.array], runs: tuple[tuple[int, int], ...]) -> mx.array:
    """Rows in the metric, in steps, float16 (channels, tokens): not finite where they are too far off."""
    on_gpu = coder.group.on_gpu
    scale = float(coder.finer) / on_gpu.scale
    centred, at = [], 0
    for i, (stream, (heads, width)) in enumerate(zip(streams, coder.streams, strict=True)):
        own = slice(at, at + heads * width)
        at = own.stop
        form, phases = _form(coder, i, runs, forth=False)
        bits = stream.view(mx.uint32 if coder.dtype == "float32" else mx.uint16)
        of_stream = kernels.centre(gpu_entropy.dialect_here(), form, [bits, on_gpu.mean[own], scale[own], *phases])
        centred.append(of_stream.view(mx.float16))
    return _by_head(coder, centred, [mx.swapaxes(factor, 1, 2) for factor in on_gpu.factors])


def _by_head(coder: GroupCoder, rows: Sequence[mx.array], factors: Sequence[mx.array]) -> mx.array:
    """Rows (heads, tokens, width) of each stream times each head's factor, turned: (channels, tokens)."""
    made, at = [], 0
    for factor in factors:
        run = []
        while sum(len(part) for part in run) < len(factor):
            run.append(rows[at])
            at += 1
        joined = run[0] if len(run) == 1 else mx.concatenate(run)
        made.append((factor @ mx.swapaxes(joined, 1, 2)).reshape(-1, joined.shape[1]))
    assert at == len(coder.streams)
    return made[0] if len(made) == 1 else mx.concatenate(made)


class _Means:
    """Means over the fine rows of each block: of which a group's are (groups, rows), float16, 1 or 0."""

    def __init__(self, fine: mx.array, runs: Sequence[tuple[int, int]]):
        here = mx.arange(len(runs))[:, None] == _block_of_each(tuple(runs))
        shares = here[None] * fine[:, None].astype(mx.float32)
        self.fine = fine
        self.seen = shares.sum(axis=2)
        self.shares = mx.swapaxes(shares / mx.maximum(self.seen, 1)[:, :, None], 1, 2).astype(mx.float16)

    def of(self, group: int, values: mx.array) -> mx.array:
        """Values float16 (n, rows) -> (n, blocks)."""
        return mx.where(self.fine[group] > 0, values, 0).astype(mx.float16) @ self.shares[group]


def _lacking(coder: GroupCoder, means: _Means, group: int, measured: mx.array, decoded: mx.array) -> mx.array:
    """What decoded values of each block's fine rows lack on average, float32 (channels, blocks)."""
    on_gpu = coder.group.on_gpu
    missing = means.of(group, measured)
    if len(coder.classes):
        missing = missing - on_gpu.vectors[: len(coder.classes)].T @ means.of(group, decoded)
    back, at = [], 0
    for inverse in on_gpu.inverses:
        heads, width, _ = inverse.shape
        of_heads = missing[at : at + heads * width].reshape(heads, width, -1)
        back.append((mx.swapaxes(inverse, 1, 2) @ of_heads).reshape(heads * width, -1))
        at += heads * width
    return mx.concatenate(back).astype(mx.float32) * _unscaled(coder)[:, None]


def _unscaled(coder: GroupCoder) -> mx.array:
    """What a product with the inverses is to be multiplied by, float32 (channels,)."""
    return coder.group.on_gpu.scale * (MARGIN / float(coder.finer))


def _bits(streams: Sequence[mx.array], rows: Array) -> Array:
    """Uint16 (rows, halves of a row): the bits of these rows, stream after stream."""
    if not len(rows):
        return np.empty((0, 0), np.uint16)
    at = mx.array(rows.astype(np.int32))
    parts = [copy_out(mx.swapaxes(mx.take(stream, at, axis=1), 0, 1)) for stream in streams]
    return np.concatenate([part.reshape(len(rows), -1).view(np.uint16) for part in parts], axis=1)


def _with_rows(heads: Array, words: Array, whole_rows: Array) -> Array:
    """The words of rows with these heads, and whole rows where the heads say so."""
    parts, at, whole = [], 0, iter(whole_rows)
    for head in heads.tolist():
        if head == 0xFFFF:
            parts.append(next(whole))
        else:
            parts.append(words[at : at + (head & MOST_WORDS)])
            at += head & MOST_WORDS
    return np.concatenate(parts)


# -- and back -------------------------------------------------------------------------------------------------------------


def decode(groups: Sequence[Coded], firsts: Sequence[int]) -> list[Restored]:
    """Codes of groups, each of the same blocks, which begin at these tokens -> their rows, the blocks' one after the other.
    Damaged where more than words is.
    """
    return decode_batch(brought_in(groups, firsts))


def brought_in(groups: Sequence[Coded], firsts: Sequence[int]) -> Batch:
    """What `decode` takes, in the GPU's memory."""
    counts = [len(codes.heads) for codes in groups[0].blocks]
    heads = np.stack([np.concatenate([codes.heads for codes in group.blocks]) for group in groups])
    row_words = np.stack([group.coder.row_words(own) for group, own in zip(groups, heads, strict=True)])
    ends = np.cumsum(row_words).reshape(row_words.shape)
    edges = np.cumsum([0, *counts])
    words, kept = [], []
    for group, own, of_rows in zip(groups, heads, row_words, strict=True):
        for number, codes in enumerate(group.blocks):
            try:
                group.coder.check(codes)
            except Damaged as damage:
                raise Damaged(str(damage), number) from None
            length = int(of_rows[edges[number] : edges[number + 1]].sum())
            if length > len(codes.words):
                raise Damaged(CLAIMED, number)
            words.append(codes.words[:length])
        kept.append(np.flatnonzero(gain_of(own) == AS_IT_IS))
    joined = np.concatenate(words)
    bits = []
    for g, (group, rows) in enumerate(zip(groups, kept, strict=True)):
        parts = [joined[ends[g, row] - group.coder.raw_words : ends[g, row]] for row in rows]
        bits.append(np.stack(parts).view(element(group.coder.dtype).numpy) if parts else np.empty(0))
    return Batch(
        tuple(group.coder for group in groups),
        tuple((first, first + count) for first, count in zip(firsts, counts, strict=True)),
        mx.array(heads),
        mx.array((ends - row_words).astype(np.uint32)),
        mx.array(joined if len(joined) else np.zeros(1, np.uint16)),
        _parts([np.stack([codes.offsets for codes in group.blocks]) for group in groups]),
        _parts([np.stack([codes.offset_steps for codes in group.blocks]) for group in groups]),
        list(zip(kept, bits, strict=True)),
    )


def _parts(arrays: Sequence[Array]) -> list[mx.array]:
    """Arrays in the GPU's memory, brought there together."""
    whole = mx.array(np.concatenate([array.ravel() for array in arrays]))
    ends = np.cumsum([array.size for array in arrays]).tolist()
    return [whole[end - array.size : end].reshape(array.shape) for array, end in zip(arrays, ends, strict=True)]


def decode_batch(batch: Batch) -> list[Restored]:
    """`decode` of what is there already."""
    coders = batch.coders
    classes = Classes.of([coder.classes for coder in coders])
    values, wrong = gpu_entropy.unpack(batch.heads, batch.words, batch.first, classes, coders[0].tables)
    made = []
    for g, coder in enumerate(coders):
        count = min(padded(len(coder.classes)), len(coder.group.on_gpu.vectors))
        products = mx.swapaxes(values[g, :count], 0, 1) @ _decoding(coder, count)
        made.append(Restored(_restored(coder, products, batch, g), wrong[g]))
    return made


def _decoding(coder: GroupCoder, count: int) -> mx.array:
    """From components to channels, float16 (count, channels): the first vectors times the inverses."""
    vectors, made, at = coder.group.on_gpu.vectors[:count], [], 0
    for inverse in coder.group.on_gpu.inverses:
        heads, width, _ = inverse.shape
        of_heads = mx.swapaxes(vectors[:, at : at + heads * width].reshape(count, heads, width), 0, 1)
        made.append(mx.swapaxes(of_heads @ inverse, 0, 1).reshape(count, heads * width))
        at += heads * width
    return made[0] if len(made) == 1 else mx.concatenate(made, axis=1)


def _restored(coder: GroupCoder, products: mx.array, batch: Batch, group: int) -> list[mx.array]:
    """Rows of each stream: products with what was scaled, centred and turned back as it was."""
    scale, mean, blocks = _unscaled(coder), coder.group.on_gpu.mean, _block_of_each(batch.runs)
    offsets, steps, (kept, bits) = batch.offsets[group], batch.offset_steps[group], batch.kept[group]
    streams, at, head = [], 0, 0
    for i, (heads, width) in enumerate(coder.streams):
        own = slice(at, at + heads * width)
        form, phases = _form(coder, i, batch.runs, forth=True, odd=at % 2 == 1)
        restored = kernels.restore(
            gpu_entropy.dialect_here(), form,
            [
                products.view(mx.uint16)[:, own], mean[own], scale[own], blocks, offsets[:, at // 2 :],
                steps[:, head : head + heads], *phases,
            ],
        )  # fmt: skip
        stream = restored.view(element(coder.dtype).mlx)
        if len(kept):
            whole = bits[:, own].reshape(len(kept), heads, width).swapaxes(0, 1)
            stream[:, mx.array(kept)] = bring_in(np.ascontiguousarray(whole), coder.dtype)
        streams.append(stream)
        at, head = own.stop, head + heads
    return streams


def reason_of(wrong: Array) -> str | None:
    """What is wrong with a block, of whose rows `Restored` says this; None: nothing."""
    return gpu_entropy.reason_of(int(wrong.max(initial=0)))


# -- where rows are -------------------------------------------------------------------------------------------------------


def _form(
    coder: GroupCoder, stream: int, runs: tuple[tuple[int, int], ...], *, forth: bool, odd: bool = False
) -> tuple[kernels.Form, tuple[mx.array, mx.array]]:
    """What a kernel is made for, and the cosines and sines of the rows' phases."""
    rotation = NO_ROTATION if stream % 2 else coder.group.layers[stream // 2].rotation
    pairs, (heads, width) = len(rotation.frequencies), coder.streams[stream]
    length = rotation.scale if forth else 1 / rotation.scale
    form = kernels.Form(heads, width, coder.dtype, pairs, rotation.interleaved, length, odd)
    return form, _phases(rotation, runs)


@lru_cache(maxsize=8)
def _block_of_each(runs: tuple[tuple[int, int], ...]) -> mx.array:
    """The number of each token's block: uint32 (tokens,)."""
    counts = [last - first for first, last in runs]
    return mx.array(np.repeat(np.arange(len(counts), dtype=np.uint32), counts))


@lru_cache(maxsize=8)  # the layers of a model share a rotation as a rule
def _phases(rotation: Rotation, runs: tuple[tuple[int, int], ...]) -> tuple[mx.array, mx.array]:
    """Cosines and sines, float32 (tokens, pairs). Phases are float64's: of each 256th token, and between them added."""
    radians = np.asarray(rotation.frequencies, np.float64)
    if not len(radians):
        return mx.zeros((1, 1)), mx.zeros((1, 1))
    within = np.arange(_WITHIN)[:, None] * radians
    starts = np.array([start for first, last in runs for start in range(first, last, _WITHIN)])
    firsts = starts[:, None] * radians
    c, s, cos, sin = (mx.array(f(x).astype(np.float32)) for x in (within, firsts) for f in (np.cos, np.sin))
    cos, sin = cos[:, None], sin[:, None]
    both = [(cos * c - sin * s).reshape(-1, len(radians)), (sin * c + cos * s).reshape(-1, len(radians))]
    places, at = [], 0
    for first, last in runs:
        places.append(np.arange(at, at + last - first))
        at += -(-(last - first) // _WITHIN) * _WITHIN
    whole = np.concatenate(places)
    if len(whole) != at:
        both = [mx.take(part, mx.array(whole.astype(np.int32)), axis=0) for part in both]
    mx.eval(both)
    return both[0], both[1]
