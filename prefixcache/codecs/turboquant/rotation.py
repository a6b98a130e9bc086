"""The randomised orthonormal transform of TurboQuant, for every width, without ever padding.

A round flips signs and mixes. The mixing matrix T of a width is the Kronecker product of one small symmetric matrix for
each prime factor of the width:

- 2: Hadamard, [[1, 1], [1, -1]], so a power of two is a Sylvester Hadamard by butterflies;
- 3, 5: Householder, f I - 2 J (J all ones), integers again: y_i = f x_i - 2 (x_0 + x_1 + ...);
- 7: the Fano plane, 2 - sqrt(2) where (i + j) mod 7 is 1, 2 or 4, and -1 elsewhere. Householder's is too uneven: at
  3 bits it left an error of .064, not .034, on rows of 112 whose variance sits in their first 14 values;
- 11 and above: Hartley, cos(2 pi ij / f) + sin(2 pi ij / f). No common model needs it.

The last two are tables rounded to float32. T T = gain**2 I, where gain is the product of the factors' own (`gain_of`).
Everything here is unnormalised, so on integers it is exact for widths without a table; the callers fold `gain` into
their own constant. A width such as 576 (512 + 64, a latent and its positions) is mixed as a whole, 9 x 64: blocks
rotated apart would put two variances under one scale.

The order of operations is part of the format: factors ascend, the first acts at stride 1, each next at the stride that
the ones before it span; sums of a factor run over ascending i, each product and each sum rounded by itself.
Decision 0016 says why.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from prefixcache.codecs.interchange import Array

HOUSEHOLDER = (3, 5)


def factors_of(width: int) -> tuple[int, ...]:
    """Return the prime factors of `width`, ascending: 48 -> (2, 2, 2, 2, 3); 1 -> ()."""
    factors, factor = [], 2
    while factor * factor <= width:
        while width % factor == 0:
            factors.append(factor)
            width //= factor
        factor += 1
    if width > 1:
        factors.append(width)
    return tuple(factors)


@lru_cache(maxsize=16)
def table_of(size: int) -> Array:
    """Return float32 (size, size): the symmetric matrix of a prime of 7 or more, unnormalised; its rows have length gain."""
    k = np.arange(size)
    if size == 7:
        line = np.isin(k, (1, 2, 4))
        fano: Array = np.where(line, 2 - math.sqrt(2), -1.0)[(k[:, None] + k) % 7]
        return fano.astype(np.float32)
    cas = [math.cos(2 * math.pi * i / size) + math.sin(2 * math.pi * i / size) for i in range(size)]
    hartley: Array = np.array(cas, np.float64)[k[:, None] * k % size]
    return hartley.astype(np.float32)


def gain_of(factor: int) -> float:
    """Say by how much the unnormalised matrix of a prime factor lengthens."""
    if factor == 2:
        return math.sqrt(2)
    if factor in HOUSEHOLDER:
        return float(factor)
    return math.sqrt(3 * (2 - math.sqrt(2)) ** 2 + 4 if factor == 7 else factor)


@dataclass(frozen=True)
class Rotation:
    """`rounds` rounds of sign flips and mixing of rows of `width` values: forward T D_r ... T D_1, up to gain**rounds.

    The signs of a round are the bits of SHAKE-128("prefixcache rotation <seed> <round>"), lowest bit of the first byte
    first, a set bit flips. They are the same for all widths.
    """

    width: int
    rounds: int
    seed: int

    @cached_property
    def factors(self) -> tuple[int, ...]:
        return factors_of(self.width)

    @cached_property
    def gain(self) -> float:
        """Say by how much one unnormalised T lengthens a row."""
        # Powers of two by themselves, so that the gain of 64 is 8 and not a rounded product.
        odd = math.prod(gain_of(factor) for factor in self.factors if factor != 2)
        return math.sqrt(2.0 ** self.factors.count(2)) * odd

    @property
    def integral(self) -> bool:
        """Tell whether T is made of integers."""
        return all(factor == 2 or factor in HOUSEHOLDER for factor in self.factors)

    @cached_property
    def signs(self) -> Array:
        """Return +1 and -1, float32 (rounds, width)."""
        drawn = []
        for turn in range(self.rounds):
            stream = hashlib.shake_128(f"prefixcache rotation {self.seed} {turn}".encode()).digest(-(-self.width // 8))
            flips = np.unpackbits(np.frombuffer(stream, np.uint8), count=self.width, bitorder="little")
            drawn.append(1.0 - 2.0 * flips)
        signs = np.array(drawn, np.float32).reshape(self.rounds, self.width)
        signs.flags.writeable = False
        return signs

    def forward(self, values: Array, spare: Array) -> tuple[Array, Array]:
        """Apply all rounds over float32 (width, n), a row in each column, using both buffers. Returns (result, the other)."""
        for turn in range(self.rounds):
            values *= self.signs[turn][:, None]
            values, spare = self.mix(values, spare)
        return values, spare

    def mix(self, values: Array, spare: Array) -> tuple[Array, Array]:
        """Apply T over (width, n) of float32, or integers if `integral`, using both buffers. Returns (result, the other)."""
        n = values.shape[1]
        stride = 1
        for factor in self.factors:
            x = values.reshape(-1, factor, stride, n)
            y = spare.reshape(-1, factor, stride, n)
            if factor == 2:
                np.add(x[:, 0], x[:, 1], out=y[:, 0])
                np.subtract(x[:, 0], x[:, 1], out=y[:, 1])
            elif factor in HOUSEHOLDER:
                total = x[:, 0] + x[:, 1]
                for i in range(2, factor):
                    total += x[:, i]
                total += total
                np.multiply(x, x.dtype.type(factor), out=y)
                np.subtract(y, total[:, None], out=y)
            else:
                matrix = table_of(factor)[:, None, :, None, None]
                np.multiply(x[:, :1], matrix[0], out=y)
                for i in range(1, factor):
                    y += x[:, i : i + 1] * matrix[i]
            values, spare = spare, values
            stride *= factor
        return values, spare
