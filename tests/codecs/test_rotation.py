from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from roundtrip import ODD_WIDTHS, WIDTHS

from prefixcache.codecs.turboquant.rotation import Rotation, factors_of


def matrix_of(rotation: Rotation) -> np.ndarray:
    """The unnormalised T, in float64, column by column."""
    identity = np.eye(rotation.width, dtype=np.float32)
    mixed, _ = rotation.mix(identity, np.empty_like(identity))
    return mixed.astype(np.float64)


@pytest.mark.parametrize("width", WIDTHS + ODD_WIDTHS)
def test_mixing_is_orthogonal_and_symmetric(width: int) -> None:
    rotation = Rotation(width, 1, 0)
    matrix = matrix_of(rotation) / rotation.gain
    assert np.abs(matrix @ matrix.T - np.eye(width)).max() < 1e-6
    assert np.array_equal(matrix, matrix.T)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_spike_is_spread_over_the_row_of_every_common_width(width: int) -> None:
    rotation = Rotation(width, 1, 0)
    assert np.abs(matrix_of(rotation)).max() / rotation.gain * np.sqrt(width) < 2.1


@pytest.mark.parametrize("width", [width for width in WIDTHS if Rotation(width, 1, 0).integral])
def test_common_widths_mix_integers_exactly(width: int) -> None:
    rotation = Rotation(width, 1, 0)
    integers = np.random.default_rng(0).integers(-127, 128, (width, 5))
    exact, _ = rotation.mix(integers.copy(), np.empty_like(integers))
    floats = integers.astype(np.float32)
    assert np.array_equal(rotation.mix(floats, np.empty_like(floats))[0], exact)


def test_few_widths_need_more_than_integers() -> None:
    assert [width for width in WIDTHS if not Rotation(width, 1, 0).integral] == [112]


def test_signs_follow_the_seed_and_the_round_alone() -> None:
    long, short, other = Rotation(256, 2, 7).signs, Rotation(100, 1, 7).signs, Rotation(256, 2, 8).signs
    assert np.array_equal(long[:1, :100], short)
    assert 80 < np.sum(long[0] != long[1]) < 176
    assert 80 < np.sum(long[0] != other[0]) < 176
    assert set(np.unique(long)) == {-1.0, 1.0}


def test_signs_are_part_of_the_format() -> None:
    assert Rotation(16, 1, 0).signs[0].astype(int).tolist() == [
        -1,
        -1,
        1,
        -1,
        1,
        -1,
        1,
        -1,
        -1,
        1,
        -1,
        1,
        1,
        -1,
        -1,
        -1,
    ]


@given(st.integers(1, 5000))
def test_factors_are_the_prime_factors(width: int) -> None:
    factors = factors_of(width)
    assert int(np.prod(factors, dtype=np.int64)) == width
    assert list(factors) == sorted(factors)
    assert all(f > 1 and all(f % i for i in range(2, int(f**0.5) + 1)) for f in factors)
