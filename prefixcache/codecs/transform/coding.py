"""Rows of a group of layers, joined and transformed: to codes and back, in NumPy and BLAS.

A token's channels are centred, brought into the metric and along the basis's vectors, and rounded to whole steps, which
`backends` packs. What a block's rows lose on average is kept beside them, 4 bits a channel: an error that all of a
block's tokens share would add up in attention. Every product is of 256 rows, filled up with zeros, so that a row's values
don't depend on which others are decoded with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from prefixcache.codecs.interchange import Array, as_float32, element
from prefixcache.codecs.transform import backends
from prefixcache.codecs.transform.basis import LEAST_SPREAD, LEFT_OUT_SHARE, LayerGroup, finer
from prefixcache.codecs.transform.entropy import AS_IT_IS, DamagedCodes, gain_of, words_of
from prefixcache.codecs.transform.tables import MOST, Tables

ROWS = 256  # of a product: a block
MOST_OFFSET = 7  # in steps of a head's own
CLAIMED = "the rows' heads claim more words than there are"
OFFSET_ROWS = 64  # from fewer rows an offset is taken for smaller than it looks


class Codes(NamedTuple):
    """Coded rows of one block. `heads` uint16 (tokens,) and `words` uint16 as in `entropy`; a row that is kept as it is has
    its bits there. `offsets` uint8 ((channels + 1) // 2,), two to a byte, in steps of `offset_steps`, bf16 as uint16 (heads
    of all streams,): what the decoded rows of the block lack on average.
    """

    heads: Array
    words: Array
    offsets: Array
    offset_steps: Array


class GroupCoder:
    """Codes rows of `dtype` of one group of layers, at one quality. Immutable."""

    def __init__(self, group: LayerGroup, tables: Tables, quality: float, dtype: str):
        self.group, self.tables, self.quality, self.dtype = group, tables, quality, dtype
        self.classes = group.classes(quality)
        self.finer = np.float32(finer(quality))
        # The streams of a row, in the order of their channels: heads and width.
        self.streams = [
            (layer.heads, width) for layer in group.layers for width in (layer.key_width, layer.value_width)
        ]
        self._ends = np.cumsum([heads * width for heads, width in self.streams])

    @property
    def vectors(self) -> Array:
        """Return the vectors that are coded along: float16 (channels, components)."""
        return self.group.vectors[:, : len(self.classes)]

    @property
    def heads(self) -> int:
        """Count the heads of all streams together: each has an offset's step of its own."""
        return sum(heads for heads, _ in self.streams)

    @property
    def widths(self) -> Array:
        """Return how many channels each head has: int64 (heads,)."""
        return np.concatenate([np.full(heads, width) for heads, width in self.streams])

    @property
    def raw_words(self) -> int:
        """Count the 16-bit words of a row that is kept as it is."""
        return self.group.channels * element(self.dtype).numpy.itemsize // 2

    def row_words(self, heads: Array) -> Array:
        """Return how many words each row has, by its head: int64."""
        return np.where(gain_of(heads) == AS_IT_IS, self.raw_words, words_of(heads))

    def words_of(self, heads: Array) -> int:
        """Return how many words rows with these heads have together."""
        return int(self.row_words(heads).sum())

    def encode(self, streams: Sequence[Array], first: int, skip: int = 0, settled: Codes | None = None) -> Codes:
        """Encode rows (tokens, heads, width) of each stream, bf16 as uint16, of tokens `first` and on -> codes.

        The first `skip` rows, which are kept elsewhere, have none, and come back as the mean. `settled`: codes of rows of
        the same block, whose offsets stand.
        """
        tokens = len(streams[0])
        rows = self._joined(streams, first)
        coded = np.logical_and.reduce(np.isfinite(rows), axis=1)
        coded[:skip] = False
        coded_rows = rows[coded]
        with np.errstate(over="ignore", invalid="ignore"):  # of rows that are far off
            values, left_out = (of_rows[coded] for of_rows in self._forward(rows, first))
            reached = np.einsum("ij,ij->i", values, values)
        # Too long for codes, or not along the vectors: a row unlike all that the calibration saw.
        far = ~(np.logical_and.reduce(np.abs(values) <= MOST, axis=1) & (left_out <= self.most_left_out(reached)))
        values[far] = 0
        heads = np.zeros(tokens, np.uint16)
        heads[coded], words, decoded = backends.encode(values, self.classes, self.tables)
        lost = np.zeros(tokens, bool)
        lost[skip:] = ~coded[skip:]
        lost[np.flatnonzero(coded)[far]] = True
        lost |= gain_of(heads) == AS_IT_IS
        if lost.any():
            heads, words = self._with_rows_as_they_are(heads, words, streams, lost)
        if settled is not None:
            return Codes(heads, words, settled.offsets, settled.offset_steps)
        fine = ~lost[coded] & (left_out <= self.most_left_out(0))
        return Codes(heads, words, *self._offsets(coded_rows[fine], decoded[fine]))

    def decode(self, codes: Codes, first: int) -> list[Array]:
        """Decode codes of tokens `first` and on -> rows (tokens, heads, width) of each stream, bf16 as uint16.

        DamagedCodes for codes that no encoder wrote.
        """
        tokens = len(codes.heads)
        counts = self.row_words(codes.heads)
        ends = np.cumsum(counts)
        if len(counts) and ends[-1] > len(codes.words):
            raise DamagedCodes(CLAIMED)
        values = backends.decode(codes.heads, codes.words, ends - counts, self.classes, self.tables)
        with np.errstate(over="ignore", invalid="ignore"):  # of what no encoder wrote
            rows = self._backward(values, first)
            rows += self._read_offsets(codes)
            streams = self._apart(rows, first)
        for row, whole in self.rows_as_they_are(codes):
            for stream, bits in zip(streams, np.split(whole, self._ends[:-1]), strict=True):
                stream[row] = bits.reshape(stream.shape[1:])
        assert all(len(stream) == tokens for stream in streams)
        return streams

    def rows_as_they_are(self, codes: Codes) -> Iterator[tuple[int, Array]]:
        """Yield the numbers of rows that aren't coded, and their values (channels,), bf16 as uint16."""
        rows = np.flatnonzero(gain_of(codes.heads) == AS_IT_IS).tolist()
        ends = np.cumsum(self.row_words(codes.heads)) if rows else ()
        for row in rows:
            yield row, codes.words[ends[row] - self.raw_words : ends[row]].view(element(self.dtype).numpy)

    # -- the way there and back -----------------------------------------------------------------------------------------

    def _joined(self, streams: Sequence[Array], first: int) -> Array:
        """Return streams as channels float32 (tokens, channels), keys without RoPE."""
        rows = np.empty((len(streams[0]), self.group.channels), np.float32)
        for i, (there, stream) in enumerate(zip(self._by_stream(rows), streams, strict=True)):
            there[...] = as_float32(stream, self.dtype)
            if i % 2 == 0:
                with np.errstate(invalid="ignore", over="ignore"):
                    self.group.layers[i // 2].rotation.undo(there, first, out=there)
        return rows

    def _apart(self, rows: Array, first: int) -> list[Array]:
        """Return channels as streams of the layers' dtype, keys with RoPE."""
        streams = []
        for i, there in enumerate(self._by_stream(rows)):
            if i % 2 == 0:
                self.group.layers[i // 2].rotation.redo(there, first, out=there)
            streams.append(_cast(there, self.dtype))
        return streams

    def _by_stream(self, rows: Array) -> Iterator[Array]:
        """Return views (tokens, heads, width) of channels."""
        for (heads, width), end in zip(self.streams, self._ends, strict=True):
            yield rows[:, end - heads * width : end].reshape(len(rows), heads, width)

    def most_left_out(self, reached: Any) -> Any:
        """Return the square of the length, in steps, that a row may have along the vectors that are left out: 64 times the
        largest variance that these can have together, and a share of `reached`, the square along the others, since vectors
        are rounded to float16.
        """
        return 64 * LEAST_SPREAD**2 * self.group.channels + LEFT_OUT_SHARE * reached

    def _forward(self, rows: Array, first: int) -> tuple[Array, Array]:
        """Turn channels into values along the vectors, in steps, and by row the square of what is not along them."""
        vectors = _widened(self)
        values, left_out = np.empty((len(rows), len(self.classes)), np.float32), np.empty(len(rows), np.float32)
        for part, place, padded in _padded(rows - self.group.mean, first):
            measured = np.empty_like(padded)
            for there, block, factor in zip(
                self._by_stream(measured), self._by_stream(padded), self._factors(inverse=False), strict=True
            ):
                there[...] = np.matmul(block.swapaxes(0, 1), factor).swapaxes(0, 1)
            measured *= self.finer
            values[part] = (measured @ vectors)[place]
            whole = np.einsum("ij,ij->i", measured, measured)[place]
            left_out[part] = whole - np.einsum("ij,ij->i", values[part], values[part])
        return values, left_out

    def _backward(self, values: Array, first: int) -> Array:
        """Turn values in steps into channels, the mean added."""
        rows = np.empty((len(values), self.group.channels), np.float32)
        for part, place, padded in _padded(values, first):
            rows[part] = self._product_back(padded)[place]
        return rows

    def _product_back(self, values: Array) -> Array:
        measured = (values / self.finer) @ _widened(self).T
        rows = np.empty_like(measured)
        for there, source, inverse in zip(
            self._by_stream(rows), self._by_stream(measured), self._factors(inverse=True), strict=True
        ):
            there[...] = np.matmul(source.swapaxes(0, 1), inverse).swapaxes(0, 1)
        rows += self.group.mean
        return rows

    def _factors(self, inverse: bool) -> Iterator[Array]:
        for pair in self.group.inverses if inverse else self.group.factors:
            yield from pair

    # -- offsets ----------------------------------------------------------------------------------------------------------

    def _offsets(self, rows: Array, decoded: Array) -> tuple[Array, Array]:
        """Return what decoded values of these rows lack on average, by channel."""
        lacking = np.zeros(self.group.channels, np.float32)
        if len(rows):
            mean = decoded.mean(axis=0, dtype=np.float64)[None].astype(np.float32)
            lacking = rows.mean(axis=0, dtype=np.float64).astype(np.float32) - self._product_back(mean)[0]
        return _quantised(lacking * np.float32(min(1, len(rows) / OFFSET_ROWS)), self.streams)

    def check(self, codes: Codes) -> None:
        """Raise DamagedCodes where offsets are not as an encoder writes them."""
        if (len(codes.offsets), len(codes.offset_steps)) != ((self.group.channels + 1) // 2, self.heads):
            raise DamagedCodes(
                f"a block has {len(codes.offsets)} bytes of offsets and {len(codes.offset_steps)} steps of them"
            )
        if (codes.offset_steps & 0x7F80 == 0x7F80).any():
            raise DamagedCodes("a block's offsets are not finite")

    def _read_offsets(self, codes: Codes) -> Array:
        """Return float32 (channels,)."""
        self.check(codes)
        nibbles = np.stack([codes.offsets & 15, codes.offsets >> 4], axis=1).ravel()[: self.group.channels]
        return (nibbles.astype(np.float32) - 8) * np.repeat(as_float32(codes.offset_steps, "bfloat16"), self.widths)

    def _with_rows_as_they_are(
        self, heads: Array, words: Array, streams: Sequence[Array], lost: Array
    ) -> tuple[Array, Array]:
        """Return the codes, but of `lost` rows their own bits."""
        counts = words_of(heads) * (gain_of(heads) != AS_IT_IS)
        ends = np.cumsum(counts)
        parts = []
        for row, (count, end) in enumerate(zip(counts, ends, strict=True)):
            if lost[row]:
                bits = [np.ascontiguousarray(stream[row]).ravel().view(np.uint16) for stream in streams]
                parts.append(np.concatenate(bits))
            else:
                parts.append(words[end - count : end])
        return np.where(lost, np.uint16(0xFFFF), heads), np.concatenate(parts)


def _quantised(lacking: Array, streams: Sequence[tuple[int, int]]) -> tuple[Array, Array]:
    """Return `Codes.offsets` and `offset_steps` of rows that lack this on average, float32 (channels,)."""
    steps, numbers, at = [], [], 0
    for heads, width in streams:
        of_stream = lacking[at : at + heads * width].reshape(heads, width)
        at += heads * width
        largest = np.abs(of_stream).max(axis=1)
        bits = ((largest / MOST_OFFSET).view(np.uint32) + 0xFFFF) >> 16  # bf16, rounded up
        step = as_float32(bits.astype(np.uint16), "bfloat16")
        steps.append(bits.astype(np.uint16))
        whole = np.rint(of_stream / np.where(step > 0, step, 1)[:, None])
        numbers.append(np.clip(whole, -MOST_OFFSET, MOST_OFFSET).astype(np.int8).ravel())
    nibbles = (np.concatenate(numbers) + 8).astype(np.uint8)
    if len(nibbles) % 2:
        nibbles = np.append(nibbles, np.uint8(8))
    return nibbles[::2] | nibbles[1::2] << 4, np.concatenate(steps)


_wide: WeakKeyDictionary[GroupCoder, Array] = WeakKeyDictionary()


def _widened(coder: GroupCoder) -> Array:
    """Return the vectors in float32: kept of one group while it is used, since its blocks come one after the other."""
    vectors = _wide.get(coder)
    if vectors is None:
        vectors = coder.vectors.astype(np.float32)
        _wide.clear()
        _wide[coder] = vectors
    return vectors


def _padded(rows: Array, first: int) -> Iterator[tuple[slice, slice, Array]]:
    """Yield the rows of tokens `first` and on by blocks: which rows, their places in the block, and the whole block,
    with zeros for the others.

    BLAS may round a row otherwise in another place of a product (OpenBLAS on AVX2 does), so each is multiplied in its own.
    """
    start, at = 0, first % ROWS
    while start < len(rows):
        part = slice(start, min(start + ROWS - at, len(rows)))
        place = slice(at, at + part.stop - start)
        if place == slice(0, ROWS):
            block = rows[part]
        else:
            block = np.zeros((ROWS, rows.shape[1]), np.float32)
            block[place] = rows[part]
        yield part, place, block
        start, at = part.stop, 0


def _cast(values: Array, dtype: str) -> Array:
    """Return float32 as bits of `dtype`, cut to its finite range, rounded to even."""
    if dtype != "bfloat16":
        most = np.finfo(dtype).max
        return np.clip(values, -most, most).astype(dtype, copy=False)
    bits = values.view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    largest = (bits & 0x80000000) >> 16 | 0x7F7F  # of its sign
    return np.where((rounded & 0x7F80) == 0x7F80, largest, rounded).astype(np.uint16)
