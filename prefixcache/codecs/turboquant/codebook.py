"""The codebooks of TurboQuant: centroids that are small integers, near Lloyd-Max's for N(0,1) up to 4 bits.

A codebook is data; the back ends quantise with it. The integers are part of the format: with them the length of a code
vector and its inverse rotation are exact, whatever the order of the sums, and dot products of codes fit int8.
Decision 0015 says why.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prefixcache.codecs.interchange import Array


@dataclass(frozen=True)
class Codebook:
    """A symmetric codebook of 2**bits codes, each of which stands for an integer c in [-127, 127].

    A rotated value v becomes the c whose cell holds v on the codebook's grid, a = |v| in its steps; cells end half-way
    between neighbours (a multiple of 1/2, so comparisons are exact), a value on the border belongs to the outer cell.

    How many steps v has: |v| * `grid` * (`by_rms` / rms of the row + `by_peak` / largest |v| of the row). Normal values
    alone would ask for by_rms = 1. But of 128 of them the largest is anything from 2 to 4 times their rms, and a row
    whose peak is low has outer centroids to spare, one whose peak is high too few: a finer or coarser grid for that row
    takes 2 % off the squared error at 3 bits and 9 % at 4, for nothing but a maximum. 1 and 2 bits have nothing to gain.

    1 to 4 bits: codes ascend with c: 2**(bits-1) + index for v >= 0, its complement for v < 0.
    8 bits: steps of 1/127 of the peak, and code = 128 + c. Code 0 is never written.
    """

    bits: int
    magnitudes: tuple[int, ...]
    grid: float
    by_rms: float
    by_peak: float
    shift: int
    """A row's scale is kept as that of c / 2**shift: near the row's rms, so that it has bf16's whole range."""

    @property
    def half(self) -> int:
        """Return the code of the least c that isn't negative."""
        return 1 << (self.bits - 1)

    @property
    def mask(self) -> int:
        return (1 << self.bits) - 1

    @property
    def borders(self) -> tuple[float, ...]:
        """Return where one magnitude's cell ends and the next begins, ascending, in steps of the grid."""
        return tuple((low + high) / 2 for low, high in zip(self.magnitudes, self.magnitudes[1:], strict=False))

    def centroids(self) -> Array:
        """Return int8 (2**bits,): the integer c of each code."""
        if self.bits == 8:
            return np.maximum(np.arange(256) - 128, -127).astype(np.int8)
        outward = np.array(self.magnitudes, np.int8)
        return np.concatenate([-outward[::-1], outward])


# Magnitudes and grids of 1 to 4 bits: found by searching the grids up to int8's range for the least mean squared error,
# .363380 .117482 .034549 .009506 a value of N(0,1); Lloyd-Max without a grid has .363380 .117482 .034548 .009501. The
# shares of rms and peak: the best pairs of sixteenths over rows of 64 to 256 normal values. 8 bits: steps of the peak give
# 4.2e-5 at width 128 and cut nothing; Lloyd-Max for N(0,1) has 4.1e-5, the best uniform grid 8.9e-5.
CODEBOOKS: dict[int, Codebook] = {
    1: Codebook(1, (1,), grid=1.25, by_rms=1.0, by_peak=0.0, shift=0),
    2: Codebook(2, (3, 10), grid=6.625, by_rms=1.0, by_peak=0.0, shift=2),
    3: Codebook(3, (10, 31, 55, 88), grid=40.875, by_rms=0.46875, by_peak=1.5, shift=5),
    4: Codebook(4, (5, 15, 25, 36, 48, 62, 79, 104), grid=38.125, by_rms=0.15625, by_peak=2.5, shift=5),
    8: Codebook(8, tuple(range(128)), grid=127.0, by_rms=0.0, by_peak=1.0, shift=2),
}
