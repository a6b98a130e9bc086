"""`PrefixCache.branch_point`: where prompts part, which is where a model with recurrent layers leaves a snapshot."""

import pytest

from prefixcache import PrefixCache
from tests.models import states
from tests.models.states import prompt

SHARED = prompt(1, 256 * 5 + 100)
POINT = 256 * 5
ENDS = [prompt(number, 300) for number in range(2, 42)]


def test_it_is_the_end_of_the_last_block_that_a_stored_prompt_shares():
    with PrefixCache(ram="20MB", codec="raw", memory_reserve=0) as cache:
        assert cache.branch_point(SHARED, model="m") == 0
        cache.store([*SHARED, *ENDS[0]], states.hybrid([*SHARED, *ENDS[0]]), model="m")
        assert cache.branch_point([*SHARED, *ENDS[1]], model="m") == POINT
        assert cache.branch_point(SHARED[:1000], model="m") == 768
        assert cache.branch_point(SHARED[:1024], model="m") == 768  # the last token is always computed
        assert cache.branch_point(ENDS[0], model="m") == 0
        assert cache.branch_point([*SHARED, *ENDS[1]], model="m", salt=b"another") == 0


@pytest.mark.parametrize("make", [states.sliceable, states.windowed, states.chunked])
def test_layers_without_recurrent_state_need_none(make):
    with PrefixCache(ram="20MB", codec="raw", memory_reserve=0) as cache:
        cache.store(SHARED, make(SHARED), model="m")
        assert cache.branch_point([*SHARED, *ENDS[0]], model="m") == 0


def test_one_that_is_hit_outlives_the_turns_that_hit_it():
    """Three times as much as RAM has room for goes through it; only what others hit is of use, and it stays."""
    with PrefixCache(ram="400KB", codec="raw", memory_reserve=0) as cache:
        cache.store(SHARED[:POINT], states.hybrid(SHARED[:POINT]), model="m")
        for end in ENDS:
            asked = [*SHARED, *end]
            assert len(asked) - len(cache.fetch(asked, model="m")[1]) == POINT
            cache.store(asked, states.hybrid(asked), model="m")
            cache.check_integrity()
        counters = cache.stats().counters
        assert counters.stored_bytes > 3 * cache.stats().ram_limit
        assert counters.evicted + counters.dropped > 0
