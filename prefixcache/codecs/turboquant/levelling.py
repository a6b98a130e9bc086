"""Levelling: each channel of a head is brought nearer to the others before its row is rotated.

A key channel with a huge constant (Qwen2's k_proj bias) or a large spread would otherwise own the row: rotation spreads
it over every value, and the code is spent on what all keys have in common. The levels are those of the rows that are
coded together, a block's, and stand beside their codes: keys after RoPE have other means at every position, and text
differs. Here is what they are, how they are measured, and the numbers that images have of them; `layers` decides of which
rows. Decision 0017 says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from prefixcache.codecs.interchange import Array, as_float32, borrow, on_cpu
from prefixcache.codecs.turboquant.c_measure import channel_statistics

LEAST_ROWS = 64  # fewer give a mean and spreads too rough to code by
FAR = 16.0  # times the median of the rows' squared sizes, in deviations: such rows don't count
FLOOR = 0.1  # of the head's median spread: a channel that hardly moved may yet
STEPS = 16  # of a divisor, to each factor of two
MOST_STEPS = 255
POWER = 0.45  # of a spread in its divisor: for white error .5 is best, on a pretrained model less, down to .25

DIVISORS = (2.0 ** (np.arange(MOST_STEPS + 1) / STEPS)).astype(np.float32)  # by their number of steps


class PackedLevels(NamedTuple):
    """Levels in the numbers that images have: `mean` bf16's bits as uint16, None where rows aren't centred, and `steps`
    uint8, the divisors as numbers of steps of 2**(1/16). Both (heads, width), or (blocks, heads, width)."""

    mean: Array | None
    steps: Array

    def block(self, i: int) -> PackedLevels:
        """Those of one of several blocks."""
        return PackedLevels(self.mean[i] if self.mean is not None else None, self.steps[i])

    @classmethod
    def joined(cls, several: Sequence[PackedLevels]) -> PackedLevels:
        """One after the other, by heads. All have a mean, or none."""
        means = [one.mean for one in several if one.mean is not None]
        return cls(np.concatenate(means) if means else None, np.concatenate([one.steps for one in several]))


class LazyLevels(NamedTuple):
    """The same on MLX's device, (heads, width), lazy: mean bf16 (zeros where rows aren't centred), steps uint8."""

    mean: mx.array
    steps: mx.array

    def packed(self, centred: bool) -> PackedLevels:
        """Evaluated; views of MLX's memory."""
        return PackedLevels(borrow(self.mean) if centred else None, borrow(self.steps))


@dataclass(frozen=True, eq=False)
class Levels:
    """Per head and channel: what to subtract, and what to divide by then. Both float32 (heads, width).

    `divisor` is 1 or more: levelled values are never larger than centred ones, so nothing overflows on the way.
    """

    mean: Array
    divisor: Array

    @cached_property
    def weight(self) -> Array:
        """float32 (heads, width): 1 / divisor, rounded once."""
        return np.float32(1) / self.divisor

    def of(self, first: int, heads: int) -> Levels:
        """The levels of some of the heads."""
        return Levels(self.mean[first : first + heads], self.divisor[first : first + heads])

    @classmethod
    def joined(cls, several: Sequence[Levels]) -> Levels:
        """One after the other, by heads."""
        if len(several) == 1:
            return several[0]
        return cls(np.concatenate([part.mean for part in several]), np.concatenate([part.divisor for part in several]))

    @classmethod
    def interleaved(cls, several: Sequence[Levels]) -> Levels:
        """Those of blocks of the same heads: first all of the first head."""
        mean, divisor = (np.stack([getattr(part, name) for part in several], axis=1) for name in ("mean", "divisor"))
        return cls(mean.reshape(-1, mean.shape[-1]), divisor.reshape(-1, divisor.shape[-1]))

    def packed(self) -> PackedLevels:
        """In the numbers that images have, with a mean. What was measured comes back from them to the bit."""
        steps = np.rint(np.log2(self.divisor.astype(np.float64)) * STEPS).astype(np.uint8)
        return PackedLevels(_bf16_bits(self.mean), steps)

    @classmethod
    def unpacked(cls, packed: PackedLevels) -> Levels:
        """The inverse of `packed`; without a mean it is zero."""
        divisor = DIVISORS[packed.steps]
        mean = as_float32(packed.mean, "bfloat16") if packed.mean is not None else np.zeros_like(divisor)
        return cls(mean, divisor)


def neutral(heads: int, width: int) -> Levels:
    """Levels that give the very codes that rows have without any."""
    return Levels(np.zeros((heads, width), np.float32), np.ones((heads, width), np.float32))


def measure_levels(rows: Array | mx.array | Sequence[Array], centred: bool) -> Levels:
    """Levels of rows (tokens, heads, width), as they can be packed: neutral from fewer than 64 rows, and for a head that
    holds what is no finite number. An MLX array is of float32; NumPy's may be float16, or bf16's bits as uint16, too. Several
    are taken side by side, by heads.

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
    return Levels.unpacked(PackedLevels(_bf16_bits(np.where(finite, mean, 0)) if centred else None, steps))


def measure_levels_lazily(rows: mx.array, centred: bool, firsts: Sequence[int] = (0,)) -> LazyLevels:
    """`measure_levels` in MLX's operations, on its device, which the rows don't leave: float32 (64 tokens or more, heads,
    width).

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
    """Mean and mean absolute deviation by head and channel, (heads, width); not finite for a head that has no usual row."""
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
    """`_centres_and_spreads` in passes for all heads."""
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


def _bf16_bits(values: Array) -> Array:
    """float32 -> the bits of the nearest bf16, ties to even, uint16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
