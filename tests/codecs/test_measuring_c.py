"""What levels are made of: in C the means and spreads of NumPy, bit for bit, on every path of this processor."""

from __future__ import annotations

import numpy as np
import pytest

from prefixcache.codecs.turboquant import c_rows as turboquant_c
from prefixcache.codecs.turboquant.measure_levels import channel_statistics, channel_statistics_numpy, measure_levels

KINDS = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


def rows_of(kind: str, tokens: int, heads: int, width: int, seed: int = 1) -> np.ndarray:
    """As a live cache has them: (heads, tokens, width) in memory, channels apart in mean and spread."""
    draw = np.random.default_rng(seed)
    rows = draw.standard_normal((heads, tokens, width)) * draw.exponential(1, width) + 4 * draw.standard_normal(width)
    rows = rows.astype(np.float32)
    if kind == "bfloat16":
        rows = (rows.view(np.uint32) >> 16).astype(np.uint16)
    return rows.astype(KINDS[kind], copy=False).swapaxes(0, 1)


@pytest.mark.parametrize("path", turboquant_c.paths())
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [16, 80, 128, 256])
def test_every_path_measures_what_numpy_does(kind: str, width: int, centred: bool, path: str) -> None:
    rows = rows_of(kind, 252, 3, width)
    mean, spread, size = channel_statistics_numpy([rows], centred)
    with turboquant_c.forced(path):
        own_mean, own_spread, own_size = channel_statistics([rows], centred)
    np.testing.assert_array_equal(own_mean, mean)
    np.testing.assert_array_equal(own_spread, spread)
    np.testing.assert_allclose(own_size, size, rtol=1e-5)


def test_parts_side_by_side_are_measured_as_one() -> None:
    rows = rows_of("float16", 100, 5, 64)
    parts = channel_statistics([rows[:, :2], rows[:, 2:3], rows[:, 3:]], True)
    for own, expected in zip(parts, channel_statistics([rows], True), strict=True):
        np.testing.assert_array_equal(own, expected)


@pytest.mark.skipif(not turboquant_c.available(), reason="no C kernel here")
def test_sizes_are_the_same_on_every_path() -> None:
    found = []
    for path in turboquant_c.paths():
        with turboquant_c.forced(path):
            found.append(channel_statistics([rows_of("float16", 100, 2, 96)], True)[2])
    for own in found[1:]:
        np.testing.assert_array_equal(own, found[0])


def test_a_width_that_the_kernel_does_not_take_is_measured_too() -> None:
    rows = rows_of("float32", 70, 2, 24)
    for own, expected in zip(channel_statistics([rows], True), channel_statistics_numpy([rows], True), strict=True):
        np.testing.assert_array_equal(own, expected)


def test_channels_that_are_no_longer_contiguous_are_measured_too() -> None:
    rows = rows_of("float32", 70, 2, 64)[:, :, ::2]
    np.testing.assert_array_equal(channel_statistics([rows], True)[1], channel_statistics_numpy([rows], True)[1])


def test_what_is_not_finite_stays_in_its_head() -> None:
    rows = np.array(rows_of("float32", 70, 2, 32))
    rows[5, 1, 7] = np.inf
    mean, spread, size = channel_statistics([rows], True)
    for finite in (mean[0], spread[0], size[0]):
        assert np.isfinite(finite).all()
    for value in (mean[1, 7], spread[1, 7], size[1, 5]):
        assert not np.isfinite(value)


def test_other_elements_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of float64"):
        channel_statistics([np.zeros((70, 1, 32))], True)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_levels_of_16_bit_rows_are_those_of_the_same_rows_as_float32(kind: str) -> None:
    rows = np.array(rows_of(kind, 256, 3, 64))
    rows[9, 1] = rows_of(kind, 1, 1, 64, seed=2)[0, 0]
    rows[9, 1, 3] = np.float16(6e4) if kind == "float16" else 0x7F80  # a row that is far, a row that is not finite
    wide = rows.astype(np.float32) if kind == "float16" else (rows.astype(np.uint32) << 16).view(np.float32)
    own, expected = measure_levels(rows, True), measure_levels(wide, True)
    np.testing.assert_array_equal(own.mean, expected.mean)
    np.testing.assert_array_equal(own.divisor, expected.divisor)
