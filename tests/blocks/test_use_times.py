"""`UseTimes`: what it takes for unused since a time was surely not used since; what was not used long before it is found."""

from hypothesis import given
from hypothesis import strategies as st

from prefixcache.blocks.recency import MOST, STEP, UseTimes

PAUSES = st.lists(st.sampled_from([0.0, 0.5, 20.0, 59.0, 61.0, 3600.0]), min_size=1, max_size=60)


@given(PAUSES, st.integers(0, 59), st.sampled_from([0.0, 1.0, 90.0]))
def test_nothing_that_was_used_since_is_taken_for_unused(pauses, which, later):
    times, at, used = UseTimes(), 1e9, []
    for pause in pauses:
        at += pause
        used.append(at)
        times.note(len(used), at)
    since = used[which % len(used)] + later
    newest = times.last_before(since)
    assert all(when < since for when in used[:newest])
    assert all(when >= since - STEP for when in used[newest:])


def test_a_long_life_takes_no_more_memory_and_forgets_nothing_lately():
    times = UseTimes()
    for tick in range(1, 5 * MOST):
        times.note(tick, 1e9 + tick * STEP)
    assert len(times._times) <= MOST
    assert times.last_before(1e9 + 4 * MOST * STEP) in range(4 * MOST - 64, 4 * MOST)
    assert 0 < times.last_before(1e9 + MOST * STEP) < MOST


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 2e9)), max_size=50))
def test_what_an_index_says_is_read_in_any_order(uses):
    times = UseTimes()
    times.load(uses)
    newest = times.last_before(1.5e9)
    assert all(tick > newest for tick, at in uses if at >= 1.5e9)


def test_a_clock_that_goes_back_takes_nothing_for_unused():
    times = UseTimes()
    times.note(1, 2e9)
    times.note(2, 1e9)
    assert times.last_before(1.5e9) == 0
    assert times.last_before(2e9 + 1) == 2
