"""Rows of a group of layers, joined and transformed, on MLX's GPUs: the products are MLX's, the entropy coder a kernel.

The same format as `coding`, whose values these are but for the rounding of products: 10 bits of each factor where the GPU
multiplies float32 so. Many blocks are coded at once: a row takes as long as it has components, however many there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from prefixcache.codecs.interchange import Array, bring_in, copy_out, element
from prefixcache.codecs.transform import gpu_entropy
from prefixcache.codecs.transform.coding import CLAIMED, Codes, GroupCoder, quantised_offsets
from prefixcache.codecs.transform.entropy import AS_IT_IS, Damaged, gain_of
from prefixcache.codecs.transform.rotation import Rotation
from prefixcache.codecs.transform.tables import MOST

_WITHIN = 256  # tokens over which the phases of a rotation are kept


class Rows(NamedTuple):
    """Rows of one block that are to be coded: those of tokens `first` to `last` (not included). The first `skip` have no
    codes; `settled`: codes of rows of the same block, whose offsets stand.
    """

    first: int
    last: int
    skip: int = 0
    settled: Codes | None = None


class Batch(NamedTuple):
    """Codes of several blocks, of the tokens of `runs`, in the GPU's memory: heads uint16 (rows,), the first word of each row
    uint32 (rows,), words uint16, and of each block `Codes.offsets` and `offset_steps`. Rows `kept` as they are have their
    `bits` here.
    """

    runs: tuple[tuple[int, int], ...]
    heads: mx.array
    first: mx.array
    words: mx.array
    offsets: mx.array
    offset_steps: mx.array
    kept: Array
    bits: Array


class GpuCoder:
    """Does what a `GroupCoder` does, for many blocks at once. Immutable, and light: what is large is the group's."""

    def __init__(self, coder: GroupCoder):
        self._coder = coder
        ends = np.cumsum([heads * width for heads, width in coder.streams])
        self._channels = [slice(end - h * w, end) for end, (h, w) in zip(ends.tolist(), coder.streams, strict=True)]

    @property
    def _vectors(self) -> mx.array:
        """Float32 (channels, components): each call makes them anew, since all groups' are four times as large as a basis."""
        return self._coder.group.on_gpu.vectors[:, : len(self._coder.classes)].astype(mx.float32)

    # -- to codes

    def encode(self, streams: Sequence[mx.array], blocks: Sequence[Rows]) -> list[Codes]:
        """Rows (heads, tokens, width) of each stream, those of the blocks one after the other -> the blocks' codes."""
        coder, on_gpu = self._coder, self._coder.group.on_gpu
        finer = float(coder.finer)
        counts = [block.last - block.first for block in blocks]
        runs = [(block.first, block.last) for block in blocks]
        centred = [self._centred(i, stream, runs) for i, stream in enumerate(streams)]
        measured = mx.concatenate(
            [_as_channels(x @ (factor * finer)) for x, factor in zip(centred, on_gpu.factors, strict=True)], axis=1
        )
        values = self._vectors.T @ measured.T
        whole, reached = mx.square(measured).sum(axis=1), mx.square(values).sum(axis=0)
        within = (mx.abs(values) <= MOST).all(axis=0)
        left_out = whole - reached
        # A row that isn't finite, or too long for codes, or not along the vectors: the comparisons are false of NaN.
        good = within & (left_out <= coder.most_left_out(reached))
        skipped = np.concatenate([np.arange(n) < block.skip for n, block in zip(counts, blocks, strict=True)])
        wanted = mx.where(good, gpu_entropy.CODED, gpu_entropy.AS_IT_IS)
        wanted = mx.where(mx.array(skipped), gpu_entropy.SKIPPED, wanted).astype(mx.uint32)
        heads, decoded, scratch = gpu_entropy.pack(values, wanted, coder.classes, coder.tables)
        fine = (wanted == gpu_entropy.CODED) & (left_out <= coder.most_left_out(0)) & (heads != 0xFFFF)
        lacking, seen = self._lacking(centred, decoded, fine, counts)
        mx.eval(heads, lacking, seen, scratch)
        all_heads, all_lacking, all_seen = copy_out(heads), np.array(lacking), np.array(seen)
        words = copy_out(gpu_entropy.gathered(all_heads, scratch))
        kept = np.flatnonzero(all_heads == 0xFFFF)
        as_they_are = self._bits(streams, kept)
        made, at, word = [], 0, 0
        for number, (block, count) in enumerate(zip(blocks, counts, strict=True)):
            own = all_heads[at : at + count]
            length = int(np.where(own == 0xFFFF, 0, own & 0xFFF).sum())
            own_words = words[word : word + length]
            whole_rows = as_they_are[np.searchsorted(kept, at) : np.searchsorted(kept, at + count)]
            if len(whole_rows):
                own_words = _with_rows(own, own_words, whole_rows)
            if block.settled is not None:
                offsets, steps = block.settled.offsets, block.settled.offset_steps
            else:
                offsets, steps = quantised_offsets(all_lacking[number], int(all_seen[number]), coder.streams)
            made.append(Codes(own, own_words, offsets, steps))
            at, word = at + count, word + length
        return made

    def _centred(self, i: int, stream: mx.array, runs: Sequence[tuple[int, int]]) -> mx.array:
        """Rows of stream i without RoPE and mean: float32 (heads, tokens, width)."""
        heads, width = self._coder.streams[i]
        rows = stream.astype(mx.float32)
        if i % 2 == 0:
            rows = _turned(rows, self._coder.group.layers[i // 2].rotation, runs, forth=False)
        return rows - self._coder.group.on_gpu.mean[self._channels[i]].reshape(heads, 1, width)

    def _lacking(
        self, centred: Sequence[mx.array], decoded: mx.array, fine: mx.array, counts: Sequence[int]
    ) -> tuple[mx.array, mx.array]:
        """What decoded values of each block's fine rows lack on average, float32 (blocks, channels), and how many rows are
        fine.
        """
        shares = (mx.arange(len(counts))[:, None] == _block_of_each(counts)) * fine.astype(mx.float32)
        seen = shares.sum(axis=1)
        shares = shares / mx.maximum(seen, 1)[:, None]
        means = [_as_channels(shares @ mx.where(fine[:, None], x, 0)) for x in centred]
        back = self._back((shares @ decoded.T) @ self._vectors.T)
        return mx.concatenate(means, axis=1) - mx.concatenate([_as_channels(x) for x in back], axis=1), seen

    def _bits(self, streams: Sequence[mx.array], rows: Array) -> Array:
        """Uint16 (rows, halves of a row): the bits of these rows, stream after stream."""
        if not len(rows):
            return np.empty((0, 0), np.uint16)
        at = mx.array(rows.astype(np.int32))
        parts = [copy_out(mx.swapaxes(mx.take(stream, at, axis=1), 0, 1)) for stream in streams]
        return np.concatenate([part.reshape(len(rows), -1).view(np.uint16) for part in parts], axis=1)

    # -- and back

    def decode(self, blocks: Sequence[tuple[int, Codes]]) -> tuple[list[mx.array], mx.array]:
        """Codes of blocks, each from a token on -> rows (heads, tokens, width) of each stream, the blocks' one after the
        other, and what is wrong with each row, for `reason_of`. Lazy. Damaged where more than words is.
        """
        return self.decode_batch(self.brought_in(blocks))

    def brought_in(self, blocks: Sequence[tuple[int, Codes]]) -> Batch:
        """What `decode` takes, in the GPU's memory."""
        coder = self._coder
        heads = np.concatenate([codes.heads for _, codes in blocks])
        row_words = coder.row_words(heads)
        ends = np.cumsum(row_words)
        counts = [len(codes.heads) for _, codes in blocks]
        lengths = np.diff(np.append(0, ends)[np.cumsum([0, *counts])])
        for number, ((_, codes), length) in enumerate(zip(blocks, lengths, strict=True)):
            try:
                coder.check(codes)
            except Damaged as damage:
                raise Damaged(str(damage), number) from None
            if length > len(codes.words):
                raise Damaged(CLAIMED, number)
        words = np.concatenate([codes.words[:length] for (_, codes), length in zip(blocks, lengths, strict=True)])
        kept = np.flatnonzero(gain_of(heads) == AS_IT_IS)
        bits = [words[ends[row] - coder.raw_words : ends[row]] for row in kept]
        return Batch(
            tuple((first, first + count) for (first, _), count in zip(blocks, counts, strict=True)),
            mx.array(heads),
            mx.array((ends - row_words).astype(np.uint32)),
            mx.array(words if len(words) else np.zeros(1, np.uint16)),
            mx.array(np.stack([codes.offsets for _, codes in blocks])),
            mx.array(np.stack([codes.offset_steps for _, codes in blocks])),
            kept,
            np.stack(bits).view(element(coder.dtype).numpy) if bits else np.empty(0),
        )

    def decode_batch(self, batch: Batch) -> tuple[list[mx.array], mx.array]:
        """`decode` of what is there already."""
        coder = self._coder
        values, wrong = gpu_entropy.unpack(batch.heads, batch.words, batch.first, coder.classes, coder.tables)
        rows = self._back(values.T @ self._vectors.T)
        block = _block_of_each([last - first for first, last in batch.runs])
        beside = self._beside(batch)
        streams = []
        for i, of_stream in enumerate(rows):
            heads, width = coder.streams[i]
            added = mx.swapaxes(beside[:, self._channels[i]].reshape(-1, heads, width), 0, 1)
            of_stream = of_stream + mx.take(added, block, axis=1)
            if i % 2 == 0:
                of_stream = _turned(of_stream, coder.group.layers[i // 2].rotation, batch.runs, forth=True)
            of_stream = _cast(of_stream, coder.dtype)
            if len(batch.kept):  # rows that are kept as they are
                whole = batch.bits[:, self._channels[i]].reshape(len(batch.kept), heads, width).swapaxes(0, 1)
                of_stream[:, mx.array(batch.kept)] = bring_in(np.ascontiguousarray(whole), coder.dtype)
            streams.append(of_stream)
        return streams, wrong

    def _beside(self, batch: Batch) -> mx.array:
        """What is added to the rows of each block, mean and offsets: float32 (blocks, channels)."""
        group = self._coder.group
        nibbles = mx.stack([batch.offsets & 15, batch.offsets >> 4], axis=2)
        numbers = nibbles.reshape(len(batch.offsets), -1)[:, : group.channels].astype(mx.float32) - 8
        steps = batch.offset_steps.view(mx.bfloat16).astype(mx.float32)
        head = _block_of_each(self._coder.widths.tolist())
        return numbers * mx.take(steps, head, axis=1) + group.on_gpu.mean

    def _back(self, measured: mx.array) -> list[mx.array]:
        """Channels in the metric, in steps, float32 (rows, channels) -> each stream's (heads, rows, width), without mean."""
        streams, finer = [], float(self._coder.finer)
        for i, (heads, width) in enumerate(self._coder.streams):
            of_stream = measured[:, self._channels[i]].reshape(-1, heads, width)
            streams.append(mx.swapaxes(of_stream, 0, 1) @ (self._coder.group.on_gpu.inverses[i] / finer))
        return streams


def available() -> bool:
    """Whether rows are coded on a GPU here."""
    return gpu_entropy.available()


def reason_of(wrong: Array) -> str | None:
    """What is wrong with a block, of whose rows `GpuCoder.decode` says this; None: nothing."""
    return gpu_entropy.reason_of(int(wrong.max(initial=0)))


def _with_rows(heads: Array, words: Array, whole_rows: Array) -> Array:
    """The words of rows with these heads, and whole rows where the heads say so."""
    parts, at, whole = [], 0, iter(whole_rows)
    for head in heads.tolist():
        if head == 0xFFFF:
            parts.append(next(whole))
        else:
            parts.append(words[at : at + (head & 0xFFF)])
            at += head & 0xFFF
    return np.concatenate(parts)


def _as_channels(rows: mx.array) -> mx.array:
    """(heads, rows, width) -> (rows, heads * width)."""
    heads, count, width = rows.shape
    return mx.swapaxes(rows, 0, 1).reshape(count, heads * width)


def _block_of_each(counts: Sequence[int]) -> mx.array:
    """The number of each token's block, of blocks of so many; or of each channel's head."""
    return mx.array(np.repeat(np.arange(len(counts), dtype=np.int32), counts))


def _cast(rows: mx.array, dtype: str) -> mx.array:
    """Float32 as `dtype`, cut to its finite range."""
    if dtype == "float32":
        return rows
    most = 65504.0 if dtype == "float16" else float.fromhex("0x1.fep127")
    return mx.clip(rows, -most, most).astype(element(dtype).mlx)


# -- RoPE ---------------------------------------------------------------------------------------------------------------


def _turned(rows: mx.array, rotation: Rotation, runs: Sequence[tuple[int, int]], forth: bool) -> mx.array:
    """Float32 (heads, tokens, width), of the tokens of these runs, as RoPE turns them, or back."""
    pairs = len(rotation.frequencies)
    if not pairs:
        return rows
    cos, sin = _phases(np.asarray(rotation.frequencies, np.float64).tobytes(), tuple(runs))
    length = rotation.scale if forth else 1 / rotation.scale
    c, s = cos * length, sin * (length if forth else -length)
    if rotation.interleaved:
        heads, tokens, _ = rows.shape
        turning = rows[..., : 2 * pairs].reshape(heads, tokens, pairs, 2)
        a, b = turning[..., 0], turning[..., 1]
        turned = mx.stack([a * c - b * s, a * s + b * c], axis=-1).reshape(heads, tokens, 2 * pairs)
        return mx.concatenate([turned, rows[..., 2 * pairs :]], axis=2)
    a, b = rows[..., :pairs], rows[..., pairs : 2 * pairs]
    return mx.concatenate([a * c - b * s, a * s + b * c, rows[..., 2 * pairs :]], axis=2)


@lru_cache(maxsize=4)  # the layers of a model share a rotation as a rule
def _phases(frequencies: bytes, runs: tuple[tuple[int, int], ...]) -> tuple[mx.array, mx.array]:
    """Cosines and sines, float32 (tokens, pairs). Phases are float64's: of each 256th token, and between them added."""
    radians = np.frombuffer(frequencies, np.float64)
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
