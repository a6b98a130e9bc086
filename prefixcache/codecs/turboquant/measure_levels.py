"""Measuring levels: each channel of a head is brought nearer to the others before its row is rotated.

A key channel with a huge constant (Qwen2's k_proj bias) or a large spread would otherwise own the row: rotation spreads
it over every value, and the code is spent on what all keys have in common. The levels are those of the rows that are
coded together, a block's, and stand beside their codes: keys after RoPE have other means at every position, and text
differs.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from prefixcache.codecs.c_library import address_of
from prefixcache.codecs.interchange import Array, as_float32, borrow, on_cpu
from prefixcache.codecs.levels import MOST_STEPS, STEPS, LazyLevels, Levels, PackedLevels, bf16_bits, neutral
from prefixcache.codecs.threads import SHARE, WORTH_A_THREAD, share_out
from prefixcache.codecs.turboquant.c_rows import DTYPES, MEASURING, loaded, path_number

LEAST_ROWS = 64  # fewer give a mean and spreads too rough to code by
FAR = 16.0  # times the median of the rows' squared sizes, in deviations: such rows don't count
FLOOR = 0.1  # of the head's median spread: a channel that hardly moved may yet
POWER = 0.45  # of a spread in its divisor: for white error .5 is best, on a pretrained model less, down to .25

TILE = 16  # channels that the kernel takes at a time
_NUMBERS = {np.dtype(np.float16): 0, np.dtype(np.uint16): 1, np.dtype(np.float32): 2}  # in the order of DTYPES
assert len(_NUMBERS) == len(DTYPES)


def measure_levels(rows: Array | mx.array | Sequence[Array], centred: bool) -> Levels:
    """Return levels of rows (tokens, heads, width), as they can be packed: neutral from fewer than 64 rows, and for a
    head that holds what is no finite number. An MLX array is of float32; NumPy's may be float16, or bf16's bits as
    uint16, too. Several are taken side by side, by heads.

    mean is the channel's where rows are `centred`, else 0; divisor is (s / smallest s)**POWER, s the channel's mean absolute
    deviation from it, at least `FLOOR` of the median of its head's. Dividing by sqrt(s), half-way to equal channels, would
    leave the least squared error after the way back: the error is white in between, so channel c's is divisor_c**2 times the
    mean of (s / divisor)**2. Rows far larger than most of their head's don't count.
    """
    parts = [rows] if isinstance(rows, (mx.array, np.ndarray)) else rows
    tokens, _, width = parts[0].shape
    if tokens < LEAST_ROWS:
        return neutral(sum(part.shape[1] for part in parts), width)
    if isinstance(rows, mx.array) and not on_cpu():
        return Levels.unpacked(measure_levels_lazily(rows, centred).packed(centred))
    mean, spread = _centres_and_spreads([borrow(p) if isinstance(p, mx.array) else p for p in parts], centred)
    spread = np.maximum(spread, FLOOR * np.median(spread, axis=1, keepdims=True))
    finite = np.isfinite(mean).all(axis=1, keepdims=True) & np.isfinite(spread).all(axis=1, keepdims=True)
    least = spread.min(axis=1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        steps = np.rint(np.log2(spread / least) * (STEPS * POWER))
    steps = np.where(finite & (least > 0), np.clip(steps, 0, MOST_STEPS), 0).astype(np.uint8)
    return Levels.unpacked(PackedLevels(bf16_bits(np.where(finite, mean, 0)) if centred else None, steps))


def measure_levels_lazily(rows: mx.array, centred: bool, firsts: Sequence[int] = (0,)) -> LazyLevels:
    """Do what `measure_levels` does by MLX's operations, on its device, which the rows don't leave: float32 (64 tokens or
    more, heads, width).

    Of `len(firsts)` blocks side by side (`base.side_by_side`); of each the rows before its first don't count.
    """
    mean, spread = _centres_and_spreads_lazily(rows, centred, firsts)
    ordered, width = mx.sort(spread, axis=1), spread.shape[1]
    median = (ordered[:, (width - 1) // 2] + ordered[:, width // 2])[:, None] / 2
    spread = mx.maximum(spread, FLOOR * median)
    finite = mx.all(mx.isfinite(mean), axis=1, keepdims=True) & mx.all(mx.isfinite(spread), axis=1, keepdims=True)
    least = mx.min(spread, axis=1, keepdims=True)
    usable = finite & (least > 0)
    steps = mx.round(mx.log2(mx.where(usable, spread / mx.where(usable, least, 1), 1)) * (STEPS * POWER))
    return LazyLevels(mx.where(finite, mean, 0).astype(mx.bfloat16), mx.clip(steps, 0, MOST_STEPS).astype(mx.uint8))


def _centres_and_spreads(parts: Sequence[Array], centred: bool) -> tuple[Array, Array]:
    """Return mean and mean absolute deviation by head and channel, (heads, width); not finite for a head that has no
    usual row.
    """
    mean, spread, size = channel_statistics(parts, centred)
    with np.errstate(invalid="ignore"):
        usual = size <= FAR * np.median(size, axis=1, keepdims=True)
    unusual = ~usual.all(axis=1)
    if not unusual.any():
        return mean, spread
    by_head = [part[:, i : i + 1] for part in parts for i in range(part.shape[1])]
    for head in np.flatnonzero(unusual):
        rows = by_head[head]
        finite = np.isfinite(as_float32(rows, "bfloat16" if rows.dtype == np.uint16 else rows.dtype.name)).all(
            axis=(1, 2)
        )
        if finite.sum() < LEAST_ROWS or (finite.all() and not usual[head].any()):
            mean[head] = np.nan
        elif not finite.all():  # nothing was learned of which are far
            (mean[head],), (spread[head],) = _centres_and_spreads([rows[finite]], centred)
        else:
            (mean[head],), (spread[head],), _ = channel_statistics([rows[usual[head]]], centred)
    return mean, spread


def _centres_and_spreads_lazily(
    rows: mx.array, centred: bool, firsts: Sequence[int] = (0,)
) -> tuple[mx.array, mx.array]:
    """Do what `_centres_and_spreads` does, in passes for all heads."""
    usual = mx.all(mx.isfinite(rows), axis=2, keepdims=True)
    if any(firsts):
        begin = mx.tile(mx.array(list(firsts)), rows.shape[1] // len(firsts))
        usual = usual & (mx.arange(len(rows))[:, None] >= begin)[..., None]
    enough = mx.sum(usual, axis=0) >= LEAST_ROWS
    for _ in range(2):  # of all finite rows, then without those that are far
        count = mx.maximum(mx.sum(usual, axis=0), 1)
        mean = mx.sum(mx.where(usual, rows, 0), axis=0) / count if centred else mx.zeros(rows.shape[1:])
        apart = mx.where(usual, mx.abs(rows - mean), 0)
        spread = mx.sum(apart, axis=0) / count
        size = mx.mean(mx.square(apart / mx.where(spread > 0, spread, 1)), axis=2, keepdims=True)
        middle = mx.maximum(mx.sum(usual, axis=0, keepdims=True) - 1, 0) // 2
        median = mx.take_along_axis(mx.sort(mx.where(usual, size, mx.inf), axis=0), middle, axis=0)
        unusual = mx.any(usual & (size > FAR * median))
        usual = usual & (size <= FAR * median)
        if not unusual.item():
            break
    return mx.where(enough, mean, mx.nan), spread


# -- sums of channels: float32, token by token, in C and in NumPy and on every processor: the same means and spreads --------


def channel_statistics(parts: Sequence[Array], centred: bool) -> tuple[Array, Array, Array]:
    """Measure parts (tokens, heads, width) side by side -> by head and channel the mean, 0 where rows aren't `centred`, and
    the mean absolute deviation, (all heads, width); by row its mean squared deviation, each channel's in spreads (where one
    is 0: in ones), (all heads, tokens).

    Rows are one or more, of float32, float16 or bf16's bits (uint16), strided as they may be; results are float32. What is
    not finite makes its channels and its row so. ValueError for other elements.
    """
    for rows in parts:
        if rows.dtype not in _NUMBERS:
            raise ValueError(f"rows of {rows.dtype}: these are float32, float16 or bf16's bits as uint16")
    tokens, _, width = parts[0].shape
    library = loaded().functions
    if library is None or width % TILE or not all(rows.size and rows.strides[2] == rows.itemsize for rows in parts):
        return channel_statistics_numpy(parts, centred)
    heads = sum(rows.shape[1] for rows in parts)
    mean, spread = np.empty((2, heads, width), np.float32)
    size = np.empty((heads, tokens), np.float32)
    jobs, at = [], 0
    for rows in parts:
        if rows.shape != (tokens, rows.shape[1], width):
            raise ValueError(f"rows of shape {rows.shape} beside {tokens} tokens of width {width}")
        where = (address_of(mean[at:]), address_of(spread[at:]), address_of(size[at:]))
        shape = (tokens, rows.shape[1], width, _NUMBERS[rows.dtype], centred)
        jobs.append(MEASURING.pack(address_of(rows), *rows.strides[:2], *where, *shape))
        at += rows.shape[1]
    packed, function, path = b"".join(jobs), library.turboquant_measure, path_number()
    nbytes = sum(rows.nbytes for rows in parts)
    share = -(-heads * SHARE // nbytes)
    share_out(heads, share, nbytes // WORTH_A_THREAD, lambda first, last: function(packed, first, last, path))
    return mean, spread, size


def channel_statistics_numpy(parts: Sequence[Array], centred: bool) -> tuple[Array, Array, Array]:
    """Measure the same without a compiler; sizes differ in their last bits."""
    rows = np.concatenate(parts, axis=1)
    rows = as_float32(rows, "bfloat16" if rows.dtype == np.uint16 else rows.dtype.name)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        mean = rows.mean(0) if centred else np.zeros(rows.shape[1:], np.float32)
        apart = rows - mean
        spread = np.abs(apart).mean(0)
        size = np.square(apart / np.where(spread > 0, spread, 1)).mean(2)
    return mean, spread, size.T
