from __future__ import annotations

import math

import numpy as np
import pytest
from roundtrip import BITS

from prefixcache.codecs.turboquant.codebook import CODEBOOKS, Codebook

LLOYD_MAX = {1: 0.363380, 2: 0.117482, 3: 0.034548, 4: 0.009501}
DISTORTION = {1: 0.363380, 2: 0.117482, 3: 0.034549, 4: 0.009506}


def distortion(book: Codebook) -> float:
    """1 - E[u c]^2 / E[c^2] over u ~ N(0,1), from the integrals over each cell."""
    assert book.grid is not None
    edges = [0.0, *(border / book.grid for border in book.borders), math.inf]
    uc = cc = 0.0
    for c, low, high in zip(book.magnitudes, edges, edges[1:], strict=False):
        uc += 2 * c * (math.exp(-low * low / 2) - math.exp(-high * high / 2)) / math.sqrt(2 * math.pi)
        cc += c * c * (math.erfc(low / math.sqrt(2)) - math.erfc(high / math.sqrt(2)))
    return 1 - uc * uc / cc


@pytest.mark.parametrize("bits", DISTORTION)
def test_the_stated_distortion_is_the_real_one(bits: int) -> None:
    assert distortion(CODEBOOKS[bits]) == pytest.approx(DISTORTION[bits], abs=1e-6)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_the_integer_grid_costs_less_than_a_thousandth(bits: int) -> None:
    assert distortion(CODEBOOKS[bits]) <= 1.001 * LLOYD_MAX[bits]


@pytest.mark.parametrize("bits", BITS)
def test_centroids_are_symmetric_int8_and_ascend_with_the_code(bits: int) -> None:
    centroids = CODEBOOKS[bits].centroids()
    assert centroids.dtype == np.int8
    assert centroids.shape == (2**bits,)
    written = centroids[1:] if bits == 8 else centroids
    assert np.array_equal(written, -written[::-1])
    assert (np.diff(written.astype(int)) > 0).all()


@pytest.mark.parametrize("bits", BITS)
def test_borders_are_multiples_of_one_half(bits: int) -> None:
    assert all((2 * border).is_integer() for border in CODEBOOKS[bits].borders)
