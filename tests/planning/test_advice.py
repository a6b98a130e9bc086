"""What follows from simulated runs: the formulas on numbers done by hand, and what must hold for all numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.planning import advice
from prefixcache.planning.advice import Latency, Prices, Rates, Served, Wear

RATES = Rates(prefill=1000.0, ssd=2e9, decode=10e9)
GB = 10**9

sizes = st.integers(0, 512).map(lambda n: n * GB)
points = st.lists(st.tuples(sizes, sizes, st.integers(0, 10**9)), min_size=1, max_size=12)
prices = st.builds(Prices, st.floats(0.01, 100), st.floats(0.01, 100))


def costs_of(points: list[tuple[int, int, int]], prices: Prices) -> list[float]:
    return [advice.cost(ram, ssd, prices) for ram, ssd, _ in points]


def values_of(points: list[tuple[int, int, int]]) -> list[int]:
    return [value for _, _, value in points]


# -- time -------------------------------------------------------------------------------------------------------------


def test_what_is_not_hit_is_computed_and_what_is_hit_is_read_and_decoded_unless_it_is_hot():
    asked, hit = np.array([1000, 4000, 4000, 4000]), np.array([0, 3000, 4000, 4000])
    hot, read = np.array([0, 0, 0, 3000]), np.array([0, 0, 160_000_000, 0])
    served = Served(9.0, asked, hit, hot, read, np.array([0, 0, 0, 5_000_000]), np.array([0, 0, 1, 2]))
    seconds = advice.times_to_first_token(served, 40_000, RATES)
    assert seconds.tolist() == pytest.approx([1.0, 1.0 + 0.012, 0.08 + 0.016, 0.004])
    with_remote = advice.times_to_first_token(served, 40_000, RATES, advice.Link(0.25, 10_000_000))
    assert (with_remote - seconds).tolist() == pytest.approx([0, 0, 0.25, 1.0])


def test_percentiles_are_of_the_requests():
    assert advice.percentiles(np.arange(101.0)) == Latency(50, 90, 99)
    assert advice.percentiles(np.array([3.0])) == Latency(3, 3, 3)
    assert advice.percentiles(np.array([])) is None


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1, max_size=30),
    st.floats(1, 1e5),
    st.floats(1.01, 100),
)
def test_nobody_waits_longer_on_a_quicker_machine(requests, prefill, times):
    asked = np.array([a + b for a, b in requests])
    hit = np.array([b for _, b in requests])
    slow = Rates(prefill, 1e9, 1e10)
    for quick in (
        slow._replace(prefill=prefill * times),
        slow._replace(ssd=1e9 * times),
        slow._replace(decode=1e10 * times),
    ):
        served = Served(9.0, asked, hit, hit // 2, hit * 40_000, 0 * hit, 0 * hit)
        before, after = (advice.times_to_first_token(served, 40_000, of) for of in (slow, quick))
        assert (after <= before).all()


def test_reading_pays_while_a_token_comes_sooner_than_it_is_computed():
    assert advice.reading_pays(40_000, RATES)
    assert not advice.reading_pays(40_000, RATES._replace(ssd=40e6))
    assert not advice.reading_pays(40_000, RATES._replace(prefill=60_000))


# -- wear -------------------------------------------------------------------------------------------------------------


def test_an_hour_of_writing_is_scaled_to_a_day():
    worn = advice.wear(10 * GB, 3600, 600 * 10**12)
    assert worn == Wear(pytest.approx(240 * GB), pytest.approx(2500 / 365.25))


def test_what_writes_nothing_never_wears_and_no_time_tells_nothing():
    assert advice.wear(0, 3600, 10**12) == Wear(0.0, None)
    assert advice.wear(GB, 0, 10**12) == Wear(None, None)


@given(st.integers(1, 10**15), st.floats(1, 1e7), st.integers(1, 10**16))
def test_years_last_as_the_rated_bytes_do(written, seconds, tbw):
    once, twice = advice.wear(written, seconds, tbw), advice.wear(written, seconds, 2 * tbw)
    assert twice.years == pytest.approx(2 * once.years)
    assert once.bytes_per_day * once.years * advice.YEAR == pytest.approx(tbw)


# -- money ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("costs", "values", "advised"),
    [
        ([1, 2, 4, 8, 16, 32], [30, 45, 60, 75, 85, 90], 3),  # value/90 - cost/64: .32, .47, .60, .71, .69, .50
        ([16, 64], [28, 100], 1),
        ([16, 64], [97, 100], 0),
        ([1, 2, 4], [1, 2, 4], 2),
        ([0, 0, 0], [1, 3, 2], 1),
        ([1, 2], [0, 0], None),
        ([], [], None),
    ],
)
def test_the_size_at_the_knee_is_advised(costs, values, advised):
    assert advice.knee(costs, values) == advised


def test_what_can_not_be_lived_with_is_advised_only_where_nothing_else_hits():
    assert advice.advised([1, 2, 4], [1, 2, 4], [True, True, False]) == 1
    assert advice.advised([1, 2, 4], [0, 2, 4], [True, False, False]) == 2
    assert advice.advised([1, 2, 4], [1, 2, 4], [False] * 3) == 2
    assert advice.advised([1, 2], [0, 0], [True, False]) is None


def test_where_nothing_comes_back_nothing_is_advised():
    assert advice.front([1, 2], [0, 0]) == []
    assert advice.cheapest([1, 2], [0, 0], 0.5) is None


def test_of_what_costs_nothing_the_best_is_advised():
    assert advice.front([0, 0, 0], [1, 3, 2]) == [1]


@given(points, prices)
def test_the_front_is_what_no_other_beats(points, prices):
    costs, values = costs_of(points, prices), values_of(points)
    front = advice.front(costs, values)
    for i in range(len(points)):
        beaten = any(
            (costs[j] <= costs[i] and values[j] > values[i]) or (costs[j] < costs[i] and values[j] >= values[i])
            for j in range(len(points))
        )
        if i in front:
            assert not beaten
        else:
            twin = any(costs[j] == costs[i] and values[j] == values[i] for j in front)
            assert beaten or twin or not values[i]
    for of in (costs, values):
        rising = [of[i] for i in front]
        assert rising == sorted(set(rising))


@given(points, prices)
def test_the_knee_is_on_the_front_and_has_half_of_the_best(points, prices):
    costs, values = costs_of(points, prices), values_of(points)
    chosen, front = advice.knee(costs, values), advice.front(costs, values)
    assert (chosen is None) == (not front)
    if chosen is not None:
        assert chosen in front
        most, best = costs[front[-1]], values[front[-1]]
        assert values[chosen] / best >= 0.5 + (0.5 * costs[chosen] / most if most else 0) - 1e-9


@given(points, st.integers(1, 100), st.integers(1, 100), st.integers(-6, 6))
def test_only_the_ratio_of_prices_matters(points, ram, ssd, power):
    values, scale = values_of(points), 2.0**power  # exact in binary
    once, scaled = (costs_of(points, Prices(of * ram, of * ssd)) for of in (1.0, scale))
    assert advice.front(once, values) == advice.front(scaled, values)
    assert advice.knee(once, values) == advice.knee(scaled, values)


@given(points, prices)
def test_what_is_beaten_changes_no_advice(points, prices):
    costs, values = costs_of(points, prices), values_of(points)
    chosen = advice.knee(costs, values)
    if chosen is not None:
        costs, values = [*costs, costs[chosen] + 1], [*values, values[chosen]]
        assert advice.knee(costs, values) == chosen


@given(points, prices, st.integers(1, 10**9), st.integers(1, 10**9))
def test_to_want_more_never_costs_less(points, prices, less, more):
    costs, values = costs_of(points, prices), values_of(points)
    least, most = (advice.cheapest(costs, values, of) for of in sorted((less, more)))
    if most is not None:
        assert least is not None
        assert costs[least] <= costs[most]
        assert values[most] >= max(less, more)


@given(points, prices, st.integers(1, 10**9), st.floats(1.01, 10))
def test_dearer_ram_is_never_a_reason_to_buy_more_of_it(points, prices, least, times):
    values = values_of(points)
    before, after = (
        advice.cheapest(costs_of(points, of), values, least) for of in (prices, prices._replace(ram=prices.ram * times))
    )
    assert (before is None) == (after is None)
    if before is not None:
        cheap, dear = costs_of(points, prices), costs_of(points, prices._replace(ram=prices.ram * times))
        assert points[after][0] <= points[before][0] or dear[after] == pytest.approx(dear[before])
        assert dear[after] >= cheap[before] or dear[after] == pytest.approx(cheap[before])
