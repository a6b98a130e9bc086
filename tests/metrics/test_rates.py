"""Rates that are learnt: guesses before, medians after, and which hits they call slow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefixcache.metrics.rates import (
    AGAIN,
    CLEAR,
    DECODE_TOKENS,
    EVIDENCE,
    LONG,
    REACH,
    SECONDS,
    LinearTime,
    MeasuredRates,
    line_through,
)

LENGTHS = (300, 600, 1200, 2500, 5000)
lines = st.builds(LinearTime, st.floats(0, 0.5), st.floats(1e-5, 1e-1))
slopes = st.floats(1e-5, 1e-1)


def measured(fetch: LinearTime, prefill: LinearTime, lengths: tuple[int, ...] = LENGTHS) -> MeasuredRates:
    """The rates of a machine where both take so long."""
    rates = MeasuredRates()
    for tokens in lengths:
        rates.learn_prefill("m", tokens, prefill.at(tokens))
    for tokens in lengths:
        rates.learn_fetch("m", tokens, fetch.at(tokens))
    return rates


# -- what things take -------------------------------------------------------------------------------------------------


def test_before_anything_was_measured_rates_are_cautious_guesses():
    rates = MeasuredRates()
    assert 0 < rates.reading(0) < rates.reading(10**9) < 10
    assert 0 < rates.computing("m", 2000) < 10
    assert rates.fetching("m", 2000) == 0


@given(slopes, st.lists(st.tuples(st.integers(64, 5000), st.integers(0, 500)), min_size=1))
def test_the_time_of_an_answer_is_not_taken_for_its_prompts(each, requests):
    rates = MeasuredRates()
    for computed, generated in requests:
        rates.learn_prefill("m", computed, each * (computed + DECODE_TOKENS * generated), generated)
    assert rates.computing("m", 1000) == pytest.approx(1000 * each)


def test_a_few_tokens_and_a_few_bytes_say_little_of_many():
    rates = MeasuredRates()
    for _ in range(5):
        rates.learn_read(10**9, 1.0)
        rates.learn_prefill("m", 10_000, 10.0)
    for _ in range(50):
        rates.learn_read(1000, 1e-6)
        rates.learn_prefill("m", 10, 10.0)
        rates.learn_prefill("m", 100, 0.1)
    assert rates.reading(10**9) == pytest.approx(1.0, rel=0.1)
    assert rates.computing("m", 10_000) == pytest.approx(10.0)


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(-5, 10**5), st.floats(-1, 1e4)), max_size=40))
def test_no_measurement_makes_an_estimate_negative(times):
    rates = MeasuredRates()
    for a, b, seconds in times:
        rates.learn_prefill("m", a, seconds, b)
        rates.learn_fetch("m", a, seconds)
        rates.learn_read(a, seconds)
    assert rates.computing("m", 100) > 0
    assert rates.fetching("m", 100) >= 0
    assert rates.reading(100) > 0


def test_rates_follow_the_machine():
    rates = MeasuredRates()
    for seconds in (0.01, 1.0):
        for _ in range(50):
            rates.learn_read(10**6, seconds)
            rates.learn_prefill("m", 1000, seconds)
    assert rates.reading(10**6) == pytest.approx(1.0, rel=0.1)
    assert rates.computing("m", 1000) == pytest.approx(1.0)


def test_models_have_rates_of_their_own():
    rates = MeasuredRates()
    rates.learn_prefill("m", 1000, 1.0)
    rates.learn_prefill("n", 1000, 9.0)
    assert rates.computing("m", 1000) == pytest.approx(1.0)
    for number in range(100):  # of which many come and go
        rates.learn_prefill(str(number), 1000, 2.0)
    assert rates.computing("m", 1000) == MeasuredRates().computing("m", 1000)


@given(lines, st.lists(st.integers(64, 20_000), min_size=4, unique=True), st.floats(0.5, 60))
def test_a_line_is_found_though_one_time_in_four_is_far_off(line, lengths, late):
    lengths = sorted({*lengths, 64, 20_000})  # so that pairs tell of the slope
    times = [(tokens, line.at(tokens)) for tokens in lengths for _ in range(4)]
    found = line_through(times)
    assert found.fixed == pytest.approx(line.fixed, abs=1e-6 + 1e-6 * line.at(20_000))
    assert found.each == pytest.approx(line.each)
    off = [(tokens, seconds + late * (i % 4 == 0)) for i, (tokens, seconds) in enumerate(times)]
    assert line_through(off).at(20_000) <= line.at(20_000) + late


# -- which hits are slow ----------------------------------------------------------------------------------------------


@given(lines, slopes, st.integers(1, REACH * LENGTHS[-1]), st.data())
def test_the_chosen_depth_is_never_slower_than_all_of_the_hit_or_than_none(fetch, each, depth, data):
    hot, prefill = data.draw(st.integers(0, depth - 1)), LinearTime(0.0, each)
    rates = measured(fetch, prefill)
    is_declined = rates.declines("m", depth, depth - hot)
    takes = prefill.at(depth - hot) if is_declined else fetch.at(depth)
    about = 1e-9 + 1e-6 * (fetch.at(depth) + prefill.at(depth))  # medians of floats
    assert takes <= fetch.at(depth) + about
    assert takes <= max(CLEAR * prefill.at(depth), prefill.at(depth) + SECONDS) + about
    assert takes <= max(CLEAR * prefill.at(depth - hot), prefill.at(depth - hot) + SECONDS) + about


SLOW, QUICK = LinearTime(0.05, 0.002), LinearTime(0.0, 0.001)


def test_a_slow_hit_is_declined_again_and_again_and_now_and_then_given_to_be_measured():
    rates = measured(SLOW, QUICK)
    for _ in range(3):
        assert [rates.declines("m", 1000, 1000) for _ in range(AGAIN + 1)] == [True] * AGAIN + [False]
        rates.learn_fetch("m", 1000, SLOW.at(1000))  # the hit that was given
    assert rates.declines("m", 1000, 1000)


def test_hits_that_have_become_quick_are_given_from_the_first_that_is_measured_on():
    rates = measured(SLOW, QUICK)
    while rates.declines("m", 1000, 1000):
        pass
    for _ in range(EVIDENCE + 1):
        rates.learn_fetch("m", 1000, 0.1)
        assert not rates.declines("m", 1000, 1000)


def test_short_hits_that_are_quick_enough_do_not_make_long_ones_be_given():
    rates = measured(LinearTime(0.0, 0.0015), QUICK)
    for _ in range(AGAIN - 1):
        rates.learn_fetch("m", 10, 0.015)
        assert not rates.declines("m", 10, 10)
        assert rates.declines("m", 1000, 1000)


@pytest.mark.parametrize(("fetches", "prefills"), [(EVIDENCE - 1, 20), (20, EVIDENCE - 1), (20, 0), (0, 20)], ids=str)
def test_without_evidence_every_hit_is_given(fetches, prefills):
    rates = MeasuredRates()
    for i in range(max(fetches, prefills)):
        tokens = 300 << i % 4
        if i < prefills:
            rates.learn_prefill("m", tokens, QUICK.at(tokens))
        if i < fetches:
            rates.learn_fetch("m", tokens, SLOW.at(tokens))
    assert not rates.declines("m", 1000, 1000)


def test_short_prefills_and_answers_are_no_evidence():
    rates = MeasuredRates()
    for _ in range(20):
        rates.learn_prefill("m", LONG - 1, QUICK.at(LONG))
        rates.learn_prefill("m", 1000, QUICK.at(1000), generated=1)
        rates.learn_fetch("m", 1000, SLOW.at(1000))
    assert not rates.declines("m", 1000, 1000)


def test_what_is_much_longer_than_all_that_was_measured_is_given():
    rates = measured(SLOW, QUICK)
    assert rates.declines("m", REACH * LENGTHS[-1], REACH * LENGTHS[-1])
    assert not rates.declines("m", REACH * LENGTHS[-1] + 1, REACH * LENGTHS[-1] + 1)


def test_one_slow_fetch_in_five_declines_nothing():
    rates = measured(LinearTime(0.0, 0.0005), QUICK, (1000,) * EVIDENCE)
    rates.learn_fetch("m", 1000, 24.0)  # kernels were compiled
    assert not rates.declines("m", 1000, 1000)
