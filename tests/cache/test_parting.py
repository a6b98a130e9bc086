"""`PrefixCache.parting`: where a prompt parts from what is stored, to the token, and why it was not hit deeper."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefixcache import PrefixCache
from prefixcache.keys import common_prefix
from prefixcache.tiers.parting import (
    DECLINED,
    EVICTED,
    NO_STATE,
    NO_WINDOW,
    NOT_READ,
    NOTHING_STORED,
    PARTED,
    REASONS,
    Parting,
)
from prefixcache.tiers.state import EVICTED_PLACES, EvictedKeys
from tests.given_rates import computing_is
from tests.models import states
from tests.models.states import prompt

PROMPT = prompt(1, 256 * 3 + 100)
RUNS = st.lists(st.tuples(st.integers(0, 2), st.sampled_from([1, 2, 100, 255, 256, 257, 300])), min_size=1, max_size=4)


def spelled(runs: list[tuple[int, int]]) -> list[int]:
    return [token for token, count in runs for _ in range(count)]


def parted(cache: PrefixCache, tokens: list[int], **more: bytes) -> Parting:
    asked = cache.prompt(tokens, model="m", **more)
    return cache.parting(asked, len(tokens) - len(cache.fetch(asked)[1]))


@pytest.fixture(scope="module")
def roomy():
    with PrefixCache(ram="50MB", codec="raw", memory_reserve=0) as opened:
        yield opened


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stored=st.lists(RUNS, max_size=4), asked=RUNS)
def test_the_position_is_how_many_tokens_the_nearest_stored_prompt_shares(roomy, stored, asked):
    roomy.clear()
    prompts, tokens = [spelled(runs) for runs in stored], spelled(asked)
    for one in prompts:
        roomy.store(one, states.sliceable(one), model="m")
    nearest = max((common_prefix(tokens, one) for one in prompts), default=0)
    told = parted(roomy, tokens)
    assert told == (len(tokens), min(nearest, len(tokens) - 1), nearest, PARTED if prompts else NOTHING_STORED)
    assert told.has_parted == (bool(prompts) and nearest < len(tokens))
    assert parted(roomy, tokens, salt=b"other")[1:] == (0, 0, NOTHING_STORED)
    roomy.check_integrity()


def test_a_recurrent_model_without_a_state_before_it_is_said_to_lack_one(roomy):
    roomy.clear()
    roomy.store(PROMPT, states.hybrid(PROMPT), model="m")
    assert parted(roomy, [*PROMPT[:700], 7, 7]) == (702, 0, 700, NO_STATE)
    roomy.store(PROMPT[:300], states.hybrid(PROMPT[:300]), model="m")
    assert parted(roomy, [*PROMPT[:700], 7, 7]) == (702, 300, 700, NO_STATE)
    assert parted(roomy, [*PROMPT, 7]) == (len(PROMPT) + 1, len(PROMPT), len(PROMPT), PARTED)


def test_windows_that_lack_rows_are_said(roomy):
    roomy.clear()
    roomy.store(PROMPT, states.windowed(PROMPT), model="m")
    told = parted(roomy, [*PROMPT[:200], 7, 7])
    assert told.position == 200
    assert told.reason == (PARTED if told.hit == 200 else NO_WINDOW)


def test_what_was_evicted_is_told_from_what_never_came():
    with PrefixCache(ram="3MB", codec="raw", memory_reserve=0) as cache:
        cache.store(PROMPT, states.sliceable(PROMPT), model="m")
        cache.trim_to(0)
        assert parted(cache, [*PROMPT[:600], 7]) == (601, 0, 512, EVICTED)
        assert parted(cache, [7, *PROMPT]).position == 0
        cache.store(PROMPT[:300], states.sliceable(PROMPT[:300]), model="m")
        assert parted(cache, [*PROMPT[:600], 7]) == (601, 300, 512, EVICTED)
        assert parted(cache, [*PROMPT[:300], 7]) == (301, 300, 300, PARTED)


def test_what_only_the_ssd_has_was_not_read(tmp_path):
    with PrefixCache(ram="8MB", ssd_dir=tmp_path, ssd="40MB", codec="raw", memory_reserve=0) as cache:
        cache.store(PROMPT, states.sliceable(PROMPT), model="m")
        assert cache.flush(20)
        cache.trim_to(0)
        assert parted(cache, [*PROMPT, 7]) == (len(PROMPT) + 1, 0, len(PROMPT), NOT_READ)


def test_a_hit_that_computing_beats_was_declined():
    with PrefixCache(ram="8MB", codec="raw", memory_reserve=0, decline_slow_hits=True) as cache:
        cache.store(PROMPT, states.sliceable(PROMPT), model="m")
        cache.rates = computing_is("quicker")
        assert parted(cache, [*PROMPT, 7]) == (len(PROMPT) + 1, 0, len(PROMPT), DECLINED)


@given(
    st.lists(
        st.binary(min_size=32, max_size=32),
        max_size=50,
        unique_by=lambda key: int.from_bytes(key[:8], "little") % EVICTED_PLACES,
    )
)
def test_evicted_keys_knows_those_that_no_other_has_replaced(keys):
    evicted = EvictedKeys()
    for key in keys:
        assert key not in evicted or not any(key[:8])
        evicted.add(key)
    assert all(key in evicted for key in keys)


def test_each_reason_is_said_in_words():
    assert len({*REASONS.values()}) == len(REASONS) == 11
