"""Levels, and what bad rows become with them; the judge is float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from roundtrip import as_float64, rows_of

from prefixcache.codecs.levels import Levels, PackedLevels, neutral
from prefixcache.codecs.turboquant.codec import TurboQuantRows
from prefixcache.codecs.turboquant.measure_levels import (
    FLOOR,
    LEAST_ROWS,
    POWER,
    _centres_and_spreads,
    _centres_and_spreads_lazily,
    measure_levels,
    measure_levels_lazily,
)

ERROR = {1: 0.45, 2: 0.13, 3: 0.040, 4: 0.0115, 8: 1.5e-4}  # relative squared error of a levelled row, with room


def judged(rows: np.ndarray, centred: bool) -> tuple[np.ndarray, np.ndarray]:
    """Mean and root as the docstring says, in float64, over each head's rows that are finite."""
    means, roots = [], []
    for head in rows.swapaxes(0, 1).astype(np.float64):
        own = head[np.isfinite(head).all(axis=1)]
        mean = own.mean(0) if centred else np.zeros(own.shape[1])
        spread = np.abs(own - mean).mean(0)
        spread = np.maximum(spread, FLOOR * np.median(spread))
        means.append(mean)
        roots.append((spread / spread.min()) ** POWER)
    return np.array(means), np.array(roots)


BF16 = 2.0**-8  # relative: the step in which a mean is kept, and
STEP = 2.0 ** (1 / 32)  # the factor by which a root is rounded at most


# Of narrower rows, one in thousands is as far out as those that don't count.
@given(
    seed=st.integers(0, 2**32 - 1),
    heads=st.integers(1, 3),
    width=st.integers(4, 80),
    scale=st.integers(-90, 90),
    unequal=st.floats(0, 3),
    bad=st.integers(0, 5),
    centred=st.booleans(),
)
def test_levels_are_those_of_float64_as_far_as_they_can_be_kept(
    seed: int, heads: int, width: int, scale: int, unequal: float, bad: int, centred: bool
) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((300, heads, width)) * np.exp(unequal * rng.standard_normal(width))
    rows = (np.ldexp(rows, scale) + np.ldexp(8.0 * centred, scale)).astype(np.float32)
    rows[rng.integers(0, 300, bad), 0, 0] = rng.choice([np.nan, np.inf, -np.inf], bad)
    levels = measure_levels(rows, centred)
    mean, root = judged(rows, centred)
    assert np.allclose(levels.mean, mean, rtol=BF16, atol=np.ldexp(1.0, scale - 10))
    assert (np.maximum(levels.divisor / root, root / levels.divisor) < 1.001 * STEP).all()
    assert (levels.divisor >= 1).all()
    assert np.allclose(levels.weight * levels.divisor, 1, rtol=1e-6)
    assert centred or not levels.mean.any()


@given(
    seed=st.integers(0, 2**32 - 1),
    tokens=st.integers(LEAST_ROWS, 300),
    heads=st.integers(1, 3),
    width=st.integers(8, 80),
    scale=st.integers(-60, 60),
    unequal=st.floats(0, 3),
    far=st.integers(0, 4),
    bad=st.integers(0, 5),
    centred=st.booleans(),
)
def test_the_gpu_s_way_of_measuring_gives_what_the_cpu_s_gives(
    seed: int, tokens: int, heads: int, width: int, scale: int, unequal: float, far: int, bad: int, centred: bool
) -> None:
    """Sums differ in their order, and so in the last bits; not which rows count."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((tokens, heads, width)) * np.exp(unequal * rng.standard_normal(width))
    rows = np.ldexp(rows + rng.standard_normal(width), scale).astype(np.float32)
    rows[rng.integers(0, tokens, far), 0] *= np.float32(1e4)
    rows[rng.integers(0, tokens, bad), heads - 1, 0] = rng.choice([np.nan, np.inf, -np.inf], bad)
    here = _centres_and_spreads([rows], centred)
    there = [np.array(found) for found in _centres_and_spreads_lazily(mx.array(rows), centred)]
    known = np.isfinite(here[0])
    assert np.array_equal(known, np.isfinite(there[0]))
    for a, b in zip(here, there, strict=True):
        assert np.allclose(a[known], b[known], rtol=1e-4, atol=np.ldexp(1e-4, scale))


def test_a_head_without_rows_enough_that_are_finite_is_none_to_the_gpu_too() -> None:
    rows = np.random.default_rng(0).standard_normal((LEAST_ROWS + 3, 2, 8)).astype(np.float32)
    rows[:4, 1, 5] = np.nan
    for measured in (
        _centres_and_spreads([rows], True),
        _centres_and_spreads_lazily(mx.array(rows), True),
    ):
        assert np.isfinite(np.array(measured[0])).all(axis=1).tolist() == [True, False]


@given(
    seed=st.integers(0, 2**32 - 1),
    tokens=st.integers(1, 200),
    blocks=st.integers(1, 3),
    heads=st.integers(1, 3),
    centred=st.booleans(),
    data=st.data(),
)
def test_the_gpu_measures_blocks_side_by_side_each_from_its_own_row_on(
    seed: int, tokens: int, blocks: int, heads: int, centred: bool, data: st.DataObject
) -> None:
    """A root that stands half-way between two steps may be taken for either."""
    rng = np.random.default_rng(seed)
    rows = (rng.standard_normal((tokens, blocks * heads, 64)) * np.exp(rng.standard_normal(64))).astype(np.float32)
    firsts = data.draw(st.lists(st.integers(0, tokens), min_size=blocks, max_size=blocks))
    measured = measure_levels_lazily(mx.array(rows), centred, firsts)
    steps = np.array(measured.steps).astype(int)
    mean = np.array(measured.mean.astype(mx.float32))
    for i, first in enumerate(firsts):
        own = slice(i, None, blocks)
        wanted = measure_levels(rows[first:, own], centred)
        assert np.abs(steps[own] - wanted.packed().steps).max() <= 1
        assert np.allclose(mean[own], wanted.mean, rtol=0.01, atol=1e-3)


def is_neutral(levels: Levels, head: int = 0) -> bool:
    return not levels.mean[head].any() and bool((levels.divisor[head] == 1).all())


def test_too_few_rows_or_none_that_is_finite_give_levels_that_change_nothing() -> None:
    rows = np.random.default_rng(0).standard_normal((LEAST_ROWS, 2, 8)).astype(np.float32)
    assert not is_neutral(measure_levels(rows, True))
    assert all(is_neutral(measure_levels(rows[1:], True), head) for head in (0, 1))
    assert all(is_neutral(measure_levels(rows[:0], True), head) for head in (0, 1))
    rows[0, 0] = np.nan  # that head has too few; the other does not notice
    assert is_neutral(measure_levels(rows, True))
    assert not is_neutral(measure_levels(rows, True), 1)
    assert is_neutral(measure_levels(np.full((400, 1, 8), np.inf, np.float32), True))
    assert is_neutral(measure_levels(np.full((400, 1, 8), 3e38, np.float32), True))  # their sum is not finite


@pytest.mark.parametrize("value", [0.0, 5.0, -(2.0**-100)])
def test_channels_that_never_move_are_left_at_their_mean(value: float) -> None:
    rows = np.full((LEAST_ROWS, 2, 64), value, np.float32)
    levels = measure_levels(rows, True)
    assert (levels.divisor == 1).all()
    assert np.allclose(levels.mean, value)
    rows[:, :, 3] = np.random.default_rng(0).standard_normal((LEAST_ROWS, 2))
    assert np.isfinite(measure_levels(rows, True).divisor).all()


@pytest.mark.parametrize("factor", [5.0, 30.0, 1e3, 1e30])
@pytest.mark.parametrize("few", [1, 4])
def test_rows_far_larger_than_the_others_do_not_count(factor: float, few: int) -> None:
    rows = np.random.default_rng(0).standard_normal((4 * LEAST_ROWS, 2, 64)).astype(np.float32)
    calm = measure_levels(rows, True)
    rows[:few, 0] *= np.float32(factor)
    moved = measure_levels(rows, True)
    assert np.abs(moved.divisor / calm.divisor - 1).max() < 0.1
    assert np.abs(moved.mean - calm.mean).max() < 0.1
    assert np.array_equal(moved.divisor[1], calm.divisor[1])


# --- as they are kept


@given(
    seed=st.integers(0, 2**32 - 1),
    heads=st.integers(1, 4),
    width=st.integers(1, 80),
    size=st.integers(-120, 120),
    centred=st.booleans(),
)
def test_measured_levels_come_back_to_the_bit_from_the_numbers_that_they_are_kept_in(
    seed: int, heads: int, width: int, size: int, centred: bool
) -> None:
    rng = np.random.default_rng(seed)
    rows = np.ldexp(rng.standard_normal((100, heads, width)) ** 3 + rng.standard_normal(width), size).astype(np.float32)
    levels = measure_levels(rows, centred)
    mean, steps = levels.packed()
    assert (mean.dtype, steps.dtype) == (np.uint16, np.uint8)
    back = Levels.unpacked(PackedLevels(mean if centred else None, steps))
    assert back.mean.tobytes() == levels.mean.tobytes()
    assert back.divisor.tobytes() == levels.divisor.tobytes()


def test_a_packed_divisor_is_a_number_of_sixteenths_of_a_factor_of_two() -> None:
    steps = np.array([[0, 16, 40, 255]], np.uint8)
    levels = Levels.unpacked(PackedLevels(None, steps))
    assert np.allclose(levels.divisor, [[1, 2, 2**2.5, 2 ** (255 / 16)]])
    assert np.array_equal(levels.packed().steps, steps)


def test_levels_of_several_heads_are_joined_and_taken_apart() -> None:
    parts = [
        Levels(np.full((n, 4), i, np.float32), np.full((n, 4), 1 + i, np.float32)) for i, n in enumerate((1, 3, 2))
    ]
    joined, first = Levels.joined(parts), 0
    for part in parts:
        own = joined.of(first, len(part.mean))
        assert np.array_equal(own.mean, part.mean)
        assert np.array_equal(own.divisor, part.divisor)
        first += len(part.mean)
    assert Levels.joined(parts[:1]) is parts[0]
    assert is_neutral(neutral(3, 8), 2)


# --- rows coded with levels


def some_levels(width: int, size: float = 1.0) -> Levels:
    rng = np.random.default_rng(5)
    root = np.exp(rng.random((1, width)))
    return Levels(
        (20 * size * rng.standard_normal((1, width))).astype(np.float32), (root / root.min()).astype(np.float32)
    )


def there_and_back(rows: mx.array, bits: int, levels: Levels) -> np.ndarray:
    codec = TurboQuantRows(rows.shape[-1], str(rows.dtype).rpartition(".")[2], bits, levelled=True)
    return as_float64(codec.decode(codec.encode(rows, levels), levels).swapaxes(0, 1))


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("width", [64, 72, 100, 128, 576])
@pytest.mark.parametrize(("dtype", "size"), [("float16", 1.0), ("bfloat16", 1e30), ("bfloat16", 1e-30)])
def test_levelled_rows_of_any_size_and_width_keep_their_error(bits: int, width: int, dtype: str, size: float) -> None:
    levels = some_levels(width, size)
    values = np.random.default_rng(1).standard_normal((200, 1, width)) * levels.divisor.astype(np.float64) ** 2 * size
    rows = rows_of(values + levels.mean, dtype)
    x, back = as_float64(rows), there_and_back(rows, bits, levels)
    wrong = np.sum(((back - x) / levels.divisor) ** 2, -1)
    right = np.sum(((x - levels.mean) / levels.divisor) ** 2, -1)
    rounding = (2.0**-8 if dtype == "bfloat16" else 2.0**-11) ** 2 / 3
    floor = rounding * np.sum((np.abs(x) / levels.divisor) ** 2, -1)  # what the dtype itself can't hold
    assert np.mean(wrong / (ERROR[bits] * right + floor)) < 1.05


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("bits", [1, 4, 8])
def test_a_row_at_the_mean_comes_back_as_the_mean(dtype: str, bits: int) -> None:
    levels = some_levels(64)
    at_mean = as_float64(mx.array(levels.mean).astype(getattr(mx, dtype)))
    exact = Levels(at_mean.astype(np.float32), levels.divisor)
    rows = rows_of(np.broadcast_to(at_mean[:, None], (3, 1, 64)), dtype)
    assert np.array_equal(there_and_back(rows, bits, exact), np.broadcast_to(at_mean[:, None], (3, 1, 64)))


def test_rows_of_zeros_come_back_near_zero() -> None:
    levels = some_levels(128)
    rows = mx.zeros((4, 1, 128), mx.float16)
    weighted = np.square(levels.mean / levels.divisor).sum()
    assert np.square(there_and_back(rows, 4, levels) / levels.divisor).sum(-1).max() < 0.02 * weighted


def test_rows_that_are_not_finite_come_back_as_nan_and_their_neighbours_do_not_notice() -> None:
    levels = some_levels(64)
    values = np.random.default_rng(0).standard_normal((5, 1, 64))
    clean = there_and_back(rows_of(values, "bfloat16"), 4, levels)
    for bad in (np.nan, np.inf, -np.inf):
        values[2, 0, 9] = bad
        back = there_and_back(rows_of(values, "bfloat16"), 4, levels)
        assert np.isnan(back[2]).all()
        assert np.array_equal(np.delete(back, 2, 0), np.delete(clean, 2, 0))


@pytest.mark.parametrize("tokens", [0, 1])
def test_no_token_and_one_token_are_fine(tokens: int) -> None:
    rows = rows_of(np.ones((tokens, 1, 64)), "float16")
    assert there_and_back(rows, 4, some_levels(64)).shape == (tokens, 1, 64)
