"""TurboQuant in kernels of its own, for MLX's GPUs: Metal's and CUDA's. The format is `format`'s.

The same codes, scales and rows as the NumPy back end, bit for bit, in one pass over memory. `kernels` has their text.
Decision 0024 says what a store and a hit wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from prefixcache.codecs.interchange import Array, borrow, element, name_of
from prefixcache.codecs.levels import DIVISORS, MOST_STEPS, STEPS, LazyLevels, Levels
from prefixcache.codecs.packing import words_of
from prefixcache.codecs.turboquant.format import Form
from prefixcache.codecs.turboquant.measure_levels import FAR, FLOOR, LEAST_ROWS, POWER, measure_levels_lazily
from prefixcache.kernels import (
    turboquant_decode,
    turboquant_encode,
    turboquant_measure,
    turboquant_rows,
)
from prefixcache.kernels.dialects import Dialect, dialect_here
from prefixcache.kernels.turboquant_rows import RowKind


def available() -> bool:
    """Tell whether MLX's default device is a GPU that kernels can be built for."""
    return dialect_here() is not None


def describe() -> str:
    """Return "Metal kernel", "CUDA kernel", or why there is none."""
    here = dialect_here()
    if here is not None:
        return f"{here.name.title() if here.name == 'metal' else here.name.upper()} kernel"
    if mx.default_device().type != mx.DeviceType.gpu:
        return "no GPU kernel: MLX's default device is the CPU"
    return "no GPU kernel: this MLX has neither Metal nor CUDA"


def takes(form: Form) -> bool:
    """Tell whether rows of this form have a kernel: widths of 32 to 512 whose odd part is 1, 3, 5 or 7, such as 64, 80, 96,
    112, 128, 192, 256 and 512, but not 384."""
    return turboquant_rows.takes(form.width, form.codebook.bits)


def encode(rows: mx.array, form: Form, levels: Levels | None) -> tuple[Array, Array]:
    """Encode (tokens, heads, width) of a float dtype -> codes uint32 (tokens, heads, words), scales uint16 (tokens, heads).

    Read-only views of MLX's memory: nobody else has these arrays, and the caller copies them to their place at once.
    """
    codes, scales = encode_arrays(rows, form, levels)
    mx.eval(codes, scales)
    return borrow(codes), borrow(scales)


def encode_arrays(rows: mx.array, form: Form, levels: Levels | mx.array | None) -> tuple[mx.array, mx.array]:
    """Do what `encode` does, lazily, with MLX arrays.

    Rows may be a transposed or sliced view. One that begins inside a row is slow, and on Metal must be copied first
    (`mx.contiguous`): loads there need their 16 bytes aligned.

    Levels may be given as `for_encoding` makes them, where the same ones serve many calls.
    """
    tokens, heads, width = rows.shape
    if tokens * heads == 0:
        words = words_of(width, form.codebook.bits)
        return mx.zeros((tokens, heads, words), mx.uint32), mx.zeros((tokens, heads), mx.uint16)
    kind = _kind(form, name_of(rows.dtype), levels is not None)
    if isinstance(levels, Levels):
        levels = for_encoding(levels)
    return turboquant_encode.encode(dialect(), kind, rows, levels)


def decode(codes: Array, scales: Array, dtype: str, form: Form, levels: Levels | None) -> mx.array:
    """Decode codes (tokens, heads, words), scales (tokens, heads), as `encode` gives -> (heads, tokens, width), lazy."""
    return decode_arrays(_as_mlx(codes), _as_mlx(scales), dtype, form, levels)


def decode_arrays(
    codes: mx.array, scales: mx.array, dtype: str, form: Form, levels: Levels | mx.array | None
) -> mx.array:
    """Do what `decode` does with MLX arrays, which may be transposed or sliced views.

    Levels may be given as `for_decoding` makes them, where the same ones serve many calls.
    """
    tokens, heads, _ = codes.shape
    if tokens * heads == 0:
        return mx.zeros((heads, tokens, form.width), element(dtype).mlx)
    kind = _kind(form, dtype, levels is not None)
    if isinstance(levels, Levels):
        levels = for_decoding(levels, form)
    return turboquant_decode.decode(dialect(), kind, codes, scales, levels)


def _as_mlx(array: Array) -> mx.array:
    return mx.array(np.ascontiguousarray(array))


def for_encoding(levels: Levels) -> mx.array:
    """Return float32 (2, heads, width) on the GPU: what the encoder subtracts and multiplies by."""
    return _in_gpu_memory(np.stack([levels.mean, levels.weight]))


def for_decoding(levels: Levels, form: Form) -> mx.array:
    """Return float32 (2, heads, width) on the GPU: what the decoder adds and multiplies by."""
    return _in_gpu_memory(np.stack([levels.mean, form.spread(levels)]))


def measure_levels(rows: mx.array, centred: bool, firsts: Sequence[int]) -> LazyLevels:
    """Do what `measure_levels_lazily` does with rows of any float dtype as they lie: in one launch, in no room of its own."""
    tokens, _, width = rows.shape
    if tokens > turboquant_measure.MOST_ROWS or width > turboquant_measure.MOST_WIDTH:
        return measure_levels_lazily(rows.astype(mx.float32), centred, firsts)
    kind = turboquant_measure.MeasureKind(
        width, name_of(rows.dtype), centred, LEAST_ROWS, FAR, FLOOR, STEPS * POWER, MOST_STEPS
    )
    mean, steps = turboquant_measure.measure(dialect(), kind, rows, mx.array(list(firsts), mx.int32))
    return LazyLevels(mean.astype(mx.bfloat16), steps.astype(mx.uint8))


def for_both(levels: LazyLevels, form: Form) -> tuple[mx.array, mx.array]:
    """Return what `for_encoding` and `for_decoding` give, of levels that were measured on the GPU and are there. Lazy."""
    weights = mx.take(_step_tables().weights, levels.steps.astype(mx.uint32))
    return mx.stack([levels.mean.astype(mx.float32), weights]), for_decoding_lazily(levels, form)


def for_decoding_lazily(levels: LazyLevels, form: Form) -> mx.array:
    """Return what `for_decoding` gives, of an image's numbers that are on the GPU. Lazy."""
    spread = _gain(form) * mx.take(_step_tables().divisors, levels.steps.astype(mx.uint32))
    return mx.stack([levels.mean.astype(mx.float32), spread])


class StepTables(NamedTuple):
    """By number of steps: what levelled rows are divided and multiplied by, float32, on the GPU."""

    divisors: mx.array
    weights: mx.array


@lru_cache(maxsize=1)
def _step_tables() -> StepTables:
    """Return what is made once: each copy to the GPU takes as long as encoding a chunk."""
    tables = StepTables(_in_gpu_memory(DIVISORS), _in_gpu_memory(np.float32(1) / DIVISORS))
    mx.eval(tables)
    return tables


@lru_cache(maxsize=64)
def _gain(form: Form) -> mx.array:
    """Return float32 (1, width): what a decoder multiplies unlevelled rows by."""
    gain = mx.array(form.spread(None))
    mx.eval(gain)
    return gain


def _in_gpu_memory(array: Array) -> mx.array:
    """Return the array in the GPU's own memory, where MLX puts only what a GPU computed: every group of threads reads levels
    anew, and from the host's memory that takes as long as all the rest."""
    return mx.array(array) * 1


def dialect() -> Dialect:
    """Return the dialect of the GPU's kernels. RuntimeError unless `available`."""
    here = dialect_here()
    if here is None:
        raise RuntimeError(f"{describe()}; ask `available` first")
    return here


@lru_cache(maxsize=64)
def _kind(form: Form, dtype: str, levelled: bool) -> RowKind:
    """Return what a kernel is compiled for."""
    codebook = form.codebook
    signs = form.rotation.signs
    flips = np.zeros((len(signs), -(-form.width // 32) * 32), np.uint8)
    flips[:, : form.width] = signs < 0
    return RowKind(
        width=form.width,
        bits=codebook.bits,
        rounds=form.rotation.rounds,
        dtype=dtype,
        levelled=levelled,
        magnitudes=codebook.magnitudes,
        shift=codebook.shift,
        per_length=float(form.per_length),
        per_peak=float(form.per_peak),
        decode_gain=float(form.decode_gain),
        flips=tuple(np.packbits(flips, axis=1, bitorder="little").view("<u4").reshape(-1).tolist()),
    )
