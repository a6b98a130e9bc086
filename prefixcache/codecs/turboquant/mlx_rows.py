"""TurboQuant in composed MLX operations, for any device of MLX's. The format is `format`'s.

It gives the codes of the NumPy back end bit for bit, and is what a fused kernel is compared with. Not fast: every step
reads and writes the whole array in float32.
"""

from __future__ import annotations

import mlx.core as mx

from prefixcache.codecs.interchange import Array, bring_in, copy_out, element
from prefixcache.codecs.packing import pack_mlx, unpack_mlx
from prefixcache.codecs.turboquant.format import LARGEST, LARGEST_SCALE, NAN_SCALE, Form
from prefixcache.codecs.turboquant.levelling import Levels


def encode(rows: mx.array, form: Form, levels: Levels | None) -> tuple[Array, Array]:
    """(tokens, heads, width) of a float dtype -> codes uint32 (tokens, heads, words), scales uint16 (tokens, heads)."""
    tokens, heads, width = rows.shape
    codebook = form.codebook
    x = rows.astype(mx.float32)
    if levels is not None:
        x = (x - mx.array(levels.mean)) * mx.array(levels.weight)
    x = x.reshape(-1, width)
    magnitude = x.view(mx.uint32) & 0x7FFFFFFF
    top = (mx.max(magnitude, axis=1, keepdims=True) >> 23).astype(mx.int32)
    alive = (top > 0) & (top < 255)
    least = (mx.maximum(top, 101) - 100).astype(mx.uint32) << 23
    x = mx.where((magnitude >= least) & alive, x, 0.0)
    x = x * ((255 - mx.where(alive, top, 128)).astype(mx.uint32) << 23).view(mx.float32)

    ss = mx.where(alive, _folded(x * x), 1.0)
    y = form.rotation.forward_mlx(x)
    a = mx.abs(y)
    factor = float(form.per_length) / mx.sqrt(ss)
    if form.per_peak:
        factor = factor + float(form.per_peak) / mx.where(alive, mx.max(a, axis=1, keepdims=True), 1.0)
    a = a * factor
    if codebook.bits == 8:
        index = mx.minimum((mx.floor(a + a).astype(mx.int32) + 1) >> 1, 127)
        codes = mx.where(y < 0, 128 - index, 128 + index)
    else:
        index = mx.zeros(a.shape, mx.int32)
        for border in codebook.borders:
            index = index + (a >= border).astype(mx.int32)
        codes = (index + codebook.half) ^ mx.where(y < 0, codebook.mask, 0)
    squares = mx.array([c * c for c in codebook.magnitudes], dtype=mx.int32)
    cc = mx.sum(mx.take(squares, index), axis=1, keepdims=True).astype(mx.float32)

    scales = _scales(mx.sqrt(ss / mx.where(alive, cc, 1.0)), top - 128 + codebook.shift)
    scales = mx.where(top == 0, 0, mx.where(top == 255, NAN_SCALE, scales))
    codes = mx.where(alive & (scales != 0), codes, 0).astype(mx.uint32)
    words = pack_mlx(codes, codebook.bits).reshape(tokens, heads, -1)
    scales = scales.astype(mx.uint16).reshape(tokens, heads)
    mx.eval(words, scales)
    return copy_out(words), copy_out(scales)


def _folded(squares: mx.array) -> mx.array:
    """The sums of the rows of (n, width), in the format's order: (n, 1)."""
    while (count := squares.shape[1]) > 1:
        half = count // 2
        low = squares[:, :half] + squares[:, half : 2 * half]
        squares = mx.concatenate([low, squares[:, 2 * half :]], axis=1) if count % 2 else low
    return squares


def _scales(values: mx.array, exponents: mx.array) -> mx.array:
    """Positive float32 times 2**exponents -> bf16 bits, int32: 0 below the normal numbers, at most the largest one."""
    bits = _bf16(values).astype(mx.int32) + (exponents << 7)
    return mx.where(bits < 0x80, 0, mx.minimum(bits, LARGEST_SCALE))


def _bf16(values: mx.array) -> mx.array:
    """float32 -> the bits of the nearest bf16, ties to even: uint32. NaN stays NaN."""
    bits = values.view(mx.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return mx.where(mx.isnan(values), mx.array(NAN_SCALE, mx.uint32), rounded)  # CUDA's NaN would overflow to -0


def decode(codes: Array, scales: Array, capacity: int, dtype: str, form: Form, levels: Levels | None) -> mx.array:
    """Codes (tokens, heads, words), scales (tokens, heads), as `encode` gives -> (heads, capacity, width), lazy."""
    tokens, heads, words = codes.shape
    rotation = form.rotation
    unpacked = unpack_mlx(bring_in(codes, "uint32").reshape(-1, words), form.width, form.codebook.bits)
    y = mx.take(mx.array(form.centroids).astype(mx.float32), unpacked)
    for turn in reversed(range(rotation.rounds)):
        y = rotation.mix_mlx(y)
        if turn:
            y = y * mx.array(rotation.signs[turn])
    factor = (bring_in(scales, "uint16").astype(mx.uint32) << 16).view(mx.float32)[..., None]
    values = (y.reshape(tokens, heads, form.width) * mx.array(form.spread(levels))) * factor
    values = values + (mx.array(levels.mean) if levels is not None else 0.0)
    values = mx.clip(values, -LARGEST[dtype], LARGEST[dtype])
    kind = element(dtype).mlx
    rows = _bf16(values).astype(mx.uint16).view(kind) if dtype == "bfloat16" else values.astype(kind)
    rows = mx.swapaxes(rows, 0, 1)
    if capacity == tokens:
        return rows
    return mx.concatenate([rows, mx.zeros((heads, capacity - tokens, form.width), kind)], axis=1)
