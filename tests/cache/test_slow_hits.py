"""Hits that are declined since computing is quicker: what is given instead, and what is counted and said."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from mlx_lm.models.cache import KVCache

from prefixcache import PrefixCache
from prefixcache.metrics.rates import AGAIN, LinearTime
from tests.given_rates import GivenRates, computing_is
from tests.models import states
from tests.models.states import prompt

HOT = prompt(1, 512)
LONG = HOT + prompt(2, 400)
ALONE = prompt(3, 600)


@pytest.fixture
def cache() -> Iterator[PrefixCache]:
    """RAM has LONG, of which HOT is hot, and ALONE."""
    with PrefixCache(ram="20MB", codec="turboquant:4", memory_reserve=0, decline_slow_hits=True) as opened:
        whole = opened.prompt(LONG, model="m")
        live = states.stored_in_steps(opened, whole.first(len(HOT)), [KVCache(), KVCache()], 0, 256)
        assert opened.keep_hot(whole.first(len(HOT)), live)
        states.stored_in_steps(opened, whole, live, len(HOT), 256)
        opened.store(ALONE, states.uneven(ALONE), model="m")
        yield opened
        opened.check_integrity()


def fetched(cache: PrefixCache, tokens: list[int]) -> int:
    asked = cache.prompt(tokens, model="m")
    made, rest = cache.fetch(asked, leave=0)
    assert (made is None) == (len(rest) == len(tokens))
    assert asked.given_rows.tokens == len(tokens) - len(rest)
    if made is not None:
        states.check_uneven(made, tokens[: len(tokens) - len(rest)])
    return len(tokens) - len(rest)


def declined(cache: PrefixCache) -> tuple[int, int]:
    counters = cache.stats().counters
    return counters.declined_hits, counters.declined_hit_tokens


def test_a_hit_that_is_quicker_than_computing_is_given(cache):
    cache.rates = computing_is("slower")
    assert (fetched(cache, ALONE), fetched(cache, LONG)) == (600, 912)
    assert declined(cache) == (0, 0)


def test_a_slow_hit_is_a_miss_but_for_what_is_hot_of_it(cache):
    cache.rates = computing_is("quicker")
    assert fetched(cache, ALONE) == 0
    assert declined(cache) == (1, 600)
    assert fetched(cache, LONG) == 512
    assert declined(cache) == (2, 1000)
    counters = cache.stats().counters
    assert (counters.hit_tokens, counters.hot_hit_tokens) == (512, 512)


def test_only_what_is_decoded_behind_a_hot_beginning_takes_time(cache):
    cache.rates = GivenRates(
        LinearTime(0.0, 0.0012), LinearTime(0.0, 0.001)
    )  # slower than computing, if all is decoded
    assert fetched(cache, LONG) == 912
    assert declined(cache) == (0, 0)


def test_hot_hits_are_always_given(cache):
    cache.rates = computing_is("quicker")
    assert (fetched(cache, HOT), fetched(cache, LONG[:256])) == (512, 256)
    assert declined(cache) == (0, 0)


def test_what_a_declined_hit_computes_is_known_and_becomes_hot(cache):
    cache.rates = computing_is("quicker")
    asked = cache.prompt(ALONE, model="m")
    assert cache.fetch(asked)[0] is None
    before = cache.stats().counters.stored_bytes
    live = states.stored_in_steps(cache, asked, [KVCache(), KVCache()], 0, 256)
    assert cache.keep_hot(asked, live)
    assert cache.stats().counters.stored_bytes == before
    assert fetched(cache, ALONE) == 600


def test_it_is_said_once(cache, caplog):
    cache.rates = computing_is("quicker")
    with caplog.at_level(logging.INFO, "prefixcache"):
        for _ in range(3):
            fetched(cache, ALONE)
    (line,) = [record.getMessage() for record in caplog.records if "declined" in record.getMessage()]
    assert line.startswith(
        "a hit of 600 tokens is declined: fetching takes 600.000 s, computing what is not hot of it 0.600 s"
    )


def test_now_and_then_a_slow_hit_is_given(cache):
    cache.rates = computing_is("quicker")
    assert [fetched(cache, ALONE) for _ in range(AGAIN + 2)] == [0] * AGAIN + [600, 0]


def test_what_ram_has_is_matched_and_looked_up_all_the_same(cache):
    cache.rates = computing_is("quicker")
    assert cache.match(ALONE, model="m").ram == 600
    stored = cache.lookup(ALONE, model="m")
    assert stored is not None
    assert stored.tokens == 600


def test_without_the_setting_every_hit_is_given():
    with PrefixCache(ram="20MB", codec="turboquant:4", memory_reserve=0) as cache:
        cache.rates = computing_is("quicker")
        cache.store(ALONE, states.uneven(ALONE), model="m")
        assert fetched(cache, ALONE) == 600


def test_a_cache_learns_from_its_fetches_and_from_who_computes(cache):
    for _ in range(5):
        cache.learn_prefill(600, 60.0, model="m")
        assert fetched(cache, ALONE) == 600
    assert 0 < cache.rates.fetching("m", 600) < 60
    assert cache.rates.computing("m", 600) == pytest.approx(60)
    assert cache.rates.fetching("n", 600) == 0
    cache.rates.learn_fetch("m", 600, 1e-9)
    taken = cache.rates.fetching("m", 600)
    for _ in range(9):
        assert fetched(cache, HOT) == 512  # what is hot takes no time
        assert fetched(cache, LONG) == 912  # and goes on with blocks that are decoded
    assert cache.rates.fetching("m", 600) == taken


@pytest.mark.parametrize("tokens", [-1, 1.5, "many"])
def test_a_bad_number_of_computed_tokens_is_named(cache, tokens):
    with pytest.raises((TypeError, ValueError), match="learn_prefill"):
        cache.learn_prefill(tokens, 1.0, model="m")


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), "1", None])
def test_a_bad_time_of_a_prefill_is_named(cache, seconds):
    with pytest.raises(ValueError, match="learn_prefill: seconds="):
        cache.learn_prefill(600, seconds, model="m")
