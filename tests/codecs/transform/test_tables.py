"""The tables of the entropy coder: what they may be, what they cost, and that a fit makes them cost less."""

from __future__ import annotations

import numpy as np
import pytest
from coded import TABLES, falling, laplacian, tables_of
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.codecs.transform.tables import (
    CLASSES,
    COST,
    DIRECT,
    ESCAPE,
    ESCAPE_BITS,
    FITTED,
    GAINS,
    MOST,
    PRECISION,
    SYMBOLS,
    TOTAL,
    Tables,
    class_of,
    extra_bits,
    first_guess,
    fit,
    gains_of,
    least_magnitude,
    quantised,
    shifted,
    symbol_of,
)


def test_every_magnitude_has_one_symbol_and_extra_bits_that_reach_it():
    magnitudes = np.arange(MOST + 1)
    symbols = symbol_of(magnitudes)
    extra = magnitudes - least_magnitude(symbols)
    assert (np.diff(symbols) >= 0).all()
    assert symbols[-1] == ESCAPE - 1
    assert (extra >= 0).all()
    assert (extra < 1 << extra_bits(symbols)).all()
    assert (extra_bits(symbols[:DIRECT]) == 0).all()
    assert extra_bits(np.array([ESCAPE]))[0] == ESCAPE_BITS


@pytest.mark.parametrize("kind", TABLES)
def test_slots_are_shared_out_among_the_symbols_of_a_class(kind: str):
    tables = tables_of(kind)
    assert (tables.frequencies.sum(axis=1, dtype=int) == TOTAL).all()
    assert (tables.frequencies[:, ESCAPE] > 0).all()
    for index in range(0, CLASSES, 6):
        for symbol in np.flatnonzero(tables.frequencies[index]):
            start = int(tables.starts[index, symbol])
            assert (tables.symbols[index, start : start + tables.frequencies[index, symbol]] == symbol).all()


@pytest.mark.parametrize("kind", TABLES)
def test_a_cost_has_the_symbol_its_extra_bits_and_its_sign(kind: str):
    tables = tables_of(kind)
    for index, symbol in ((0, 0), (0, 1), (20, 5), (30, 12), (60, 55), (7, 0), (14, 0), (60, ESCAPE)):
        coded = symbol if tables.frequencies[index, symbol] else ESCAPE
        bits = PRECISION - np.log2(float(tables.frequencies[index, coded])) + extra_bits(np.array(coded))
        assert tables.costs[index, symbol] == pytest.approx((bits + (coded > 0)) * COST, abs=0.51)


@given(st.integers(0, 2**32 - 1))
def test_values_are_rounded_to_steps_with_a_wide_zero(seed: int):
    values = (np.random.default_rng(seed).laplace(size=(3, 50)) * 3).astype(np.float32)
    steps = quantised(values)
    assert steps.dtype == np.int32
    assert (np.abs(steps - values) <= 0.581).all()
    assert ((steps == 0) == (np.abs(values) < np.float32(0.58))).all()


def test_no_step_is_beyond_the_largest_and_what_is_no_number_is_0():
    values = np.array([[np.nan, np.inf, -np.inf, 3e38, -40000, 32767.9, -0.0]], np.float32)
    assert quantised(values).tolist() == [[0, MOST, -MOST, MOST, -MOST, MOST, 0]]


def test_classes_are_quarters_of_octaves_and_gains_shift_them():
    assert class_of(np.array([2.0**-5, 1.0, 2**0.25, 2.0, 2.0**10, 0.0, 1e9])).tolist() == [0, 20, 21, 24, 60, 0, 60]
    classes = np.array([0, 20, 60], np.int32)
    assert shifted(classes, np.array([0, 7, 14])).tolist() == [[0, 13, 53], [0, 20, 60], [7, 27, 60]]


def test_rows_that_are_larger_than_their_classes_say_take_a_higher_gain():
    spreads, tables = falling(300), tables_of("fitted")
    values = laplacian(np.random.default_rng(0), 20, spreads)
    for octaves in (-1, 0, 1):
        gains = gains_of(quantised(values * np.float32(2.0**octaves)), class_of(spreads), tables)
        assert (np.abs(gains - (GAINS // 2 + 4 * octaves)) <= 2).all()


def test_of_gains_that_cost_the_same_the_lowest_is_taken():
    frequencies = np.zeros((CLASSES, SYMBOLS), np.uint16)
    frequencies[:, 0], frequencies[:, ESCAPE] = TOTAL - 1, 1
    alike = Tables(frequencies, np.ones((CLASSES, FITTED), np.float32))
    assert gains_of(np.ones((2, 5), np.int32), np.full(5, 30, np.int32), alike).tolist() == [0, 0]


def bits_of(values: np.ndarray, classes: np.ndarray, tables: Tables) -> float:
    steps = quantised(values)
    of_rows = shifted(classes, gains_of(steps, classes, tables))
    return float(tables.costs[of_rows, symbol_of(np.abs(steps))].sum()) / COST


def test_fitted_tables_cost_less_than_guessed_ones_and_know_the_means():
    rng, spreads = np.random.default_rng(0), falling(300)
    classes = class_of(spreads)
    values, others = (rng.standard_normal((2, 300, 300)) * spreads).astype(np.float32)
    tables = fit([(values[:, :150], classes[:150]), (values[:, 150:], classes[150:])])
    assert bits_of(others, classes, tables) < 0.99 * bits_of(others, classes, first_guess())
    small = class_of(np.array([0.5]))[0]
    assert tables.points[small, 0] < 1  # of a falling density the mean is below the middle


def test_what_was_never_seen_is_decoded_as_it_is():
    assert (first_guess().points == [1, 2]).all()
    nothing = fit([(np.zeros((0, 4), np.float32), np.zeros(4, np.int32))])
    assert (nothing.frequencies == first_guess().frequencies).all()


def altered(**changes: np.ndarray) -> Tables:
    sound = first_guess()
    return Tables(changes.get("frequencies", sound.frequencies), changes.get("points", sound.points))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("frequencies", lambda array: array.astype(np.int32)),
        ("frequencies", lambda array: array[:-1]),
        ("frequencies", lambda array: array + np.uint16(1)),
        ("frequencies", lambda array: array * np.uint16(0)),
        ("points", lambda array: array.astype(np.float64)),
        ("points", lambda array: array[:, :1]),
        ("points", lambda array: array * np.float32(np.nan)),
        ("points", lambda array: array * 0),
        ("points", lambda array: array + 2),
    ],
)
def test_tables_that_are_none_are_refused(name: str, change):
    with pytest.raises(ValueError, match=name):
        altered(**{name: change(getattr(first_guess(), name))})


def test_a_class_without_an_escape_is_refused():
    frequencies = first_guess().frequencies.copy()
    frequencies[5, 0] += frequencies[5, ESCAPE]
    frequencies[5, ESCAPE] = 0
    with pytest.raises(ValueError, match="escape"):
        altered(frequencies=frequencies)
