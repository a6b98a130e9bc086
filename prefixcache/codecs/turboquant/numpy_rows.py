"""TurboQuant in NumPy, for machines where MLX itself runs on the CPU. The format is `format`'s.

Rows are worked on in chunks that stay in a core's cache, laid out with a row in each *column*, so that every step of
the rotation is a long contiguous operation.
"""

from __future__ import annotations

import numpy as np

from prefixcache.codecs.interchange import Array, element
from prefixcache.codecs.levels import Levels, bf16_bits
from prefixcache.codecs.packing import pack_columns, unpack_centroids
from prefixcache.codecs.turboquant.format import LARGEST, LARGEST_SCALE, NAN_SCALE, Form

CHUNK_VALUES = 1 << 16
_INT16_MAX = 32767


def encode(rows: Array, dtype: str, form: Form, levels: Levels | None, codes: Array, scales: Array) -> None:
    """Encode (tokens, heads, width), bf16 as uint16 -> into codes uint32 (tokens, heads, words), scales uint16 (tokens,
    heads).

    All three may be strided.
    """
    tokens, heads, width = rows.shape
    step = max(1, CHUNK_VALUES // max(1, width * heads))
    with np.errstate(all="ignore"):
        for start in range(0, tokens if heads else 0, step):
            part = slice(start, start + step)
            x = _columns(rows[part].reshape(-1, width), dtype)
            if levels is not None:
                by_head = x.reshape(width, -1, heads)
                by_head -= levels.mean.T[:, None]
                by_head *= levels.weight.T[:, None]
            packed, scales_of_part = _encode_columns(x, form)
            codes[part] = np.ascontiguousarray(packed.T).view(np.uint32).reshape(-1, heads, codes.shape[2])
            scales[part] = scales_of_part.reshape(-1, heads)


def _columns(rows: Array, dtype: str) -> Array:
    """Return (n, width) of `dtype` -> float32 (width, n), contiguous, owned."""
    if dtype != "bfloat16":
        return np.array(rows.T, np.float32, order="C")
    bits = np.array(rows.T, np.uint32, order="C")
    bits <<= np.uint32(16)
    return bits.view(np.float32)


def _encode_columns(x: Array, form: Form) -> tuple[Array, Array]:
    """Encode float32 (width, n), used up -> packed codes uint8 (bytes, n), scales uint16 (n,)."""
    codebook = form.codebook
    magnitude = x.view(np.uint32) & np.uint32(0x7FFFFFFF)
    top = (magnitude.max(axis=0) >> np.uint32(23)).astype(np.int32)
    alive = (top > 0) & (top < 255)
    least = (np.maximum(top, 101) - 100).astype(np.uint32) << np.uint32(23)
    np.copyto(x, 0.0, where=(magnitude < least) | ~alive)
    x *= ((255 - np.where(alive, top, 128)).astype(np.uint32) << np.uint32(23)).view(np.float32)

    spare = magnitude.view(np.float32)
    np.multiply(x, x, out=spare)
    ss = np.where(alive, _folded(spare), np.float32(1))
    u, spare = form.rotation.forward(x, spare)
    negative = u < 0
    a = np.abs(u, out=u)
    factor = form.per_length / np.sqrt(ss)
    if form.per_peak:
        factor += form.per_peak / np.where(alive, a.max(axis=0), np.float32(1))
    a *= factor
    if codebook.bits == 8:
        a += a
        np.floor(a, out=a)
        index = np.minimum((a.astype(np.int32) + 1) >> 1, 127).astype(np.uint8)
        codes = np.where(negative, np.uint8(128) - index, np.uint8(128) + index)
    else:
        index = np.zeros(a.shape, np.uint8)
        beyond = np.empty(a.shape, np.bool_)
        for border in codebook.borders:
            np.greater_equal(a, np.float32(border), out=beyond)
            index += beyond.view(np.uint8)
        codes = (index + np.uint8(codebook.half)) ^ (negative.view(np.uint8) * np.uint8(codebook.mask))
    squares = np.array([c * c for c in codebook.magnitudes], np.uint16)
    cc = np.take(squares, index).sum(axis=0, dtype=np.int64).astype(np.float32)

    scales = _scales(np.sqrt(ss / np.where(alive, cc, np.float32(1))), top - 128 + codebook.shift)
    scales[top == 0] = 0
    scales[top == 255] = NAN_SCALE
    void = ~alive | (scales == 0)
    if void.any():
        codes[:, void] = 0
    return pack_columns(codes, codebook.bits), scales


def _folded(squares: Array) -> Array:
    """Return the sums of the columns of (width, n), in the format's order; uses up its argument."""
    count = len(squares)
    while count > 1:
        half = count // 2
        squares[:half] += squares[half : 2 * half]
        if count % 2:
            squares[half] = squares[count - 1]
        count = half + count % 2
    total: Array = squares[0]
    return total


def _scales(values: Array, exponents: Array) -> Array:
    """Return positive float32 times 2**exponents -> bf16 bits, uint16: 0 below the normal numbers, at most the largest."""
    bits = bf16_bits(values).astype(np.int32) + (exponents << 7)
    return np.where(bits < 0x80, 0, np.minimum(bits, LARGEST_SCALE)).astype(np.uint16)


def decode(codes: Array, scales: Array, dtype: str, form: Form, levels: Levels | None, rows: Array) -> None:
    """Decode codes (tokens, heads, words), scales (tokens, heads), as `encode` gives -> into rows (heads, tokens, width).

    All may be strided; bf16 rows are uint16.
    """
    tokens, heads = scales.shape
    width = form.width
    spread = form.spread(levels)
    at_once = max(1, CHUNK_VALUES // width)
    head_step = max(1, at_once // max(1, tokens))
    token_step = max(1, min(tokens, at_once))
    with np.errstate(all="ignore"):
        for first in range(0, heads, head_step):
            some = slice(first, first + head_step)
            factor = spread[some if levels is not None else slice(None)].T[:, :, None]
            mean = levels.mean[some].T[:, :, None] if levels is not None else np.float32(0)
            for start in range(0, tokens, token_step):
                part = slice(start, start + token_step)
                scale = scales[part, some].T
                y = _unmixed(codes[part, some].swapaxes(0, 1).reshape(scale.size, -1), form).reshape(
                    width, *scale.shape
                )
                values = np.multiply(y, factor, dtype=np.float32)
                values *= (scale.astype(np.uint32) << np.uint32(16)).view(np.float32)
                values += mean
                rows[some, part] = _cast(values, dtype).transpose(1, 2, 0)


def _unmixed(words: Array, form: Form) -> Array:
    """Return words uint32 (n, words) -> y, float32 or int16 (width, n)."""
    rotation = form.rotation
    y = unpack_centroids(words, form.width, form.codebook.bits, form.centroids).T
    bound = form.longest
    for turn in reversed(range(rotation.rounds)):
        # Integers are exact in either type, and int16 moves half the bytes.
        bound *= rotation.gain
        narrow = rotation.integral and bound <= _INT16_MAX
        y = np.array(y, np.int16 if narrow else np.float32, order="C")
        y, _ = rotation.mix(y, np.empty_like(y))
        if turn:
            y = y * rotation.signs[turn].astype(y.dtype)[:, None]
    return y


def _cast(values: Array, dtype: str) -> Array:
    """Return float32, used up -> `dtype`, bf16 as uint16, cut to its finite range."""
    largest = LARGEST[dtype]
    np.clip(values, -largest, largest, out=values)
    if dtype == "bfloat16":
        return bf16_bits(values)
    cast: Array = values.astype(element(dtype).numpy, copy=False)
    return cast
