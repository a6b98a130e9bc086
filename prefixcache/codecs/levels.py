"""Levels: what is subtracted from each channel of a head and what it is divided by, before rows are rotated, so that channels
are alike. Here are the levels, and the integers that images keep of them.

`turboquant.measure_levels` measures them, `layers` decides of which rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from prefixcache.codecs.interchange import Array, as_float32, borrow, bring_in_stacked

STEPS = 16  # of a divisor, to each factor of two
MOST_STEPS = 255

DIVISORS = (2.0 ** (np.arange(MOST_STEPS + 1) / STEPS)).astype(np.float32)  # by their number of steps


class PackedLevels(NamedTuple):
    """Levels in the numbers that images have: `mean` bf16's bits as uint16, None where rows aren't centred, and `steps`
    uint8, the divisors as numbers of steps of 2**(1/16). Both (heads, width), or (blocks, heads, width)."""

    mean: Array | None
    steps: Array


class LazyLevels(NamedTuple):
    """Packed levels on MLX's device, (heads, width), lazy: mean bf16 (zeros where rows aren't centred), steps uint8."""

    mean: mx.array
    steps: mx.array

    @classmethod
    def brought_in(cls, several: Sequence[PackedLevels]) -> LazyLevels:
        """Bring levels of as many heads each to MLX's device -> (levels, heads, width). All have a mean, or none."""
        steps = bring_in_stacked([levels.steps for levels in several])
        means = [levels.mean for levels in several if levels.mean is not None]
        return cls(bring_in_stacked(means).view(mx.bfloat16) if means else mx.zeros(steps.shape, mx.bfloat16), steps)

    def packed(self, centred: bool) -> PackedLevels:
        """Evaluate the levels; return views of MLX's memory."""
        return PackedLevels(borrow(self.mean) if centred else None, borrow(self.steps))


@dataclass(frozen=True, eq=False)
class Levels:
    """The mean of each channel of each head, which is subtracted, and the divisor of the rest. Both float32 (heads, width).

    `divisor` is 1 or more: levelled values are never larger than centred ones, so nothing overflows on the way.
    """

    mean: Array
    divisor: Array

    @cached_property
    def weight(self) -> Array:
        """Return 1 / divisor, rounded once: float32 (heads, width)."""
        return np.float32(1) / self.divisor

    def of(self, first: int, heads: int) -> Levels:
        """Return the levels of some of the heads."""
        return Levels(self.mean[first : first + heads], self.divisor[first : first + heads])

    @classmethod
    def joined(cls, several: Sequence[Levels]) -> Levels:
        """Join one after the other, by heads."""
        if len(several) == 1:
            return several[0]
        return cls(np.concatenate([part.mean for part in several]), np.concatenate([part.divisor for part in several]))

    @classmethod
    def interleaved(cls, several: Sequence[Levels]) -> Levels:
        """Join the levels of blocks of the same heads: first all of the first head."""
        mean, divisor = (np.stack([getattr(part, name) for part in several], axis=1) for name in ("mean", "divisor"))
        return cls(mean.reshape(-1, mean.shape[-1]), divisor.reshape(-1, divisor.shape[-1]))

    def packed(self) -> PackedLevels:
        """Return the levels in the numbers of images, with a mean. What was measured comes back from them to the bit."""
        steps = np.rint(np.log2(self.divisor.astype(np.float64)) * STEPS).astype(np.uint8)
        return PackedLevels(bf16_bits(self.mean), steps)

    @classmethod
    def unpacked(cls, packed: PackedLevels) -> Levels:
        """Return the inverse of `packed`; without a mean it is zero."""
        divisor = DIVISORS[packed.steps]
        mean = as_float32(packed.mean, "bfloat16") if packed.mean is not None else np.zeros_like(divisor)
        return cls(mean, divisor)


def same_levels(a: Levels | None, b: Levels | None) -> bool:
    """Tell whether rows have the same codes with both; None: with no levels."""
    if a is None or b is None or a is b:
        return a is b
    return np.array_equal(a.mean, b.mean) and np.array_equal(a.divisor, b.divisor)


def neutral(heads: int, width: int) -> Levels:
    """Return levels that give the very codes that rows have without any."""
    return Levels(np.zeros((heads, width), np.float32), np.ones((heads, width), np.float32))


def bf16_bits(values: Array) -> Array:
    """Round float32 -> the bits of the nearest bf16, ties to even, uint16. NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    return rounded.astype(np.uint16)
