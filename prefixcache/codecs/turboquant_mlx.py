"""TurboQuant in composed MLX operations, for any device of MLX's. The format is `turboquant_format`'s.

It gives the codes of the NumPy back end bit for bit, and is what a fused kernel is compared with. Not fast: every step
reads and writes the whole array in float32.
"""

from __future__ import annotations

import mlx.core as mx

from .interchange import Array, bring_in, copy_out, element
from .packing import pack_mlx, unpack_mlx
from .turboquant_format import LARGEST, LARGEST_SCALE, NAN_SCALE, Form


def encode(rows: mx.array, form: Form) -> tuple[Array, Array]:
    """(tokens, heads, width) of a float dtype -> codes uint32 (tokens, heads, words), scales uint16 (tokens, heads)."""
    tokens, heads, width = rows.shape
    codebook = form.codebook
    x = rows.reshape(-1, width).astype(mx.float32)
    magnitude = x.view(mx.uint32) & 0x7FFFFFFF
    top = (mx.max(magnitude, axis=1, keepdims=True) >> 23).astype(mx.int32)
    alive = (top > 0) & (top < 255)
    least = (mx.maximum(top, 101) - 100).astype(mx.uint32) << 23
    x = mx.where((magnitude >= least) & alive, x, 0.0)
    x = x * ((255 - mx.where(alive, top, 128)).astype(mx.uint32) << 23).view(mx.float32)

    ss = mx.where(alive, _folded(x * x), 1.0)
    y = form.rotation.forward_mlx(x)
    a = mx.abs(y)
    length = mx.sqrt(ss) if codebook.grid is not None else mx.where(alive, mx.max(a, axis=1, keepdims=True), 1.0)
    a = a * (float(form.encode_gain) / length)
    if codebook.grid is None:
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
    kept = scales.astype(mx.uint16).reshape(tokens, heads)
    mx.eval(words, kept)
    return copy_out(words), copy_out(kept)


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
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def decode(codes: Array, scales: Array, capacity: int, dtype: str, form: Form) -> mx.array:
    """Codes (heads, tokens, words), scales (heads, tokens), as `encode` gives -> (heads, capacity, width), lazy."""
    heads, tokens, words = codes.shape
    rotation = form.rotation
    unpacked = unpack_mlx(bring_in(codes, "uint32").reshape(-1, words), form.width, form.codebook.bits)
    y = mx.take(mx.array(form.levels).astype(mx.float32), unpacked)
    for turn in reversed(range(rotation.rounds)):
        y = rotation.mix_mlx(y) * mx.array(rotation.signs[turn])
    scale = bring_in(scales, "bfloat16").reshape(-1, 1).view(mx.uint16)
    factor = (scale.astype(mx.uint32) << 16).view(mx.float32)
    values = mx.where(factor == 0, 0.0, (y * float(form.decode_gain)) * factor)
    values = mx.clip(values, -LARGEST[dtype], LARGEST[dtype])
    kind = element(dtype).mlx
    rows = _bf16(values).astype(mx.uint16).view(kind) if dtype == "bfloat16" else values.astype(kind)
    rows = rows.reshape(heads, tokens, form.width)
    if capacity == tokens:
        return rows
    return mx.concatenate([rows, mx.zeros((heads, capacity - tokens, form.width), kind)], axis=1)
