"""Policies and admission to the SSD in a cache that stores, fetches and promotes: what they are told, what it is given."""

import random

import pytest

from prefixcache.blocks.node import RAM
from prefixcache.blocks.policies import POLICIES
from prefixcache.tiers.tier_in_graph import entry_of
from tests.inside import inside
from tests.models import states
from tests.models.states import prompt, put_prompts

CACHE = {"ram": "1MB", "ssd_admission": "second"}


def test_the_ssd_is_not_given_what_came_once(opened):
    cache = opened(spill_on_close=False)
    put_prompts(cache, *range(40))
    cache.flush(20)
    assert cache.stats().counters.declined > 20
    assert cache.stats().counters.dropped == 0
    cache.check_integrity()


def test_the_ssd_is_given_what_was_hit_and_all_that_it_hangs_on(opened):
    cache = opened()
    put_prompts(cache, 1)
    assert cache.fetch(prompt(1), model="m")[0] is not None
    put_prompts(cache, *range(100, 140))
    assert cache.match(prompt(1), model="m").ssd >= 599
    assert cache.match(prompt(100), model="m").ssd == 0


def test_the_ssd_is_given_what_was_declined_and_came_again(opened):
    cache = opened()
    put_prompts(cache, 1, *range(100, 140))
    assert cache.match(prompt(1), model="m").ssd == 0
    declined = cache.stats().counters.declined
    put_prompts(cache, 1, *range(200, 240))
    assert cache.match(prompt(1), model="m").ssd >= 599
    assert cache.stats().counters.declined > declined


def test_closing_writes_what_came_once_too(opened):
    cache = opened()
    put_prompts(cache, 1)
    cache.close()
    assert opened().match(prompt(1), model="m").ssd >= 599


def test_the_doorkeeper_is_paid_for_by_the_budget(opened):
    stats = opened().stats()
    assert stats.ram_reserved == stats.ram_held > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_cache_of_each_policy_serves_what_it_holds(opened, policy):
    cache = opened(policy=policy)
    rng = random.Random(5)
    for _ in range(60):
        seed = min(rng.randrange(30), rng.randrange(30))
        found, rest = cache.fetch(prompt(seed), model="m")
        if found is not None:
            states.check(found, prompt(seed)[: 600 - len(rest)])
        put_prompts(cache, seed)
        if rng.random() < 0.2:
            cache.promote(prompt(rng.randrange(30)), model="m").result(20)
    assert cache.flush(20)
    cache.check_integrity()


def test_giving_ram_back_writes_what_came_once_too(opened):
    for ask in (lambda cache: cache.trim_to(0, wait=20), lambda cache: cache.resize(ram="20kB", wait=20)):
        cache = opened()
        put_prompts(cache, 1)
        ask(cache)
        assert cache.match(prompt(1), model="m").ssd >= 599
        assert cache.stats().counters.declined == 0
        cache.close()


def test_the_ssd_is_given_what_it_has_something_hanging_on(opened):
    cache = opened()
    put_prompts(cache, 1)
    cache.flush(20)
    cache.trim_to(0)
    storage = inside(cache).storage
    with storage.lock:  # the first block's file went bad
        first = next(s for s in storage.graph.slots.values() if s.kind == "rows" and s.node.start == 0)
        storage.lower.spill_tier.tier.delete([entry_of(first)])
        storage.lower.spill_tier.invalidate(first)
    put_prompts(cache, 1, *range(100, 140))
    assert cache.match(prompt(1), model="m").ssd >= 599


def test_a_store_and_a_fetch_tell_the_policy_what_was_asked_for(opened):
    cache = opened(policy="adaptive", ssd_dir=None, ssd_admission="always")
    put_prompts(cache, 1)
    order = inside(cache).storage.graph.orders[RAM].rest
    assert len(order._once)
    assert not order._states  # none is NEW: the request that brought them has ended
    assert sum(len(shadow._once) + len(shadow._again) for shadow in order._duel._shadows) > 0
    cache.fetch(prompt(1), model="m")
    assert len(order._again)


@pytest.mark.parametrize("policy", POLICIES)
def test_flush_ends_where_ram_holds_more_than_the_ssd(opened, policy):
    """Each image that is written puts another out that RAM still has: none is written twice for it."""
    cache = opened(policy=policy, ssd_admission="always", ssd="2MB", ram="4MB", memory_reserve=0)
    rng = random.Random(3)
    for seed in range(40):
        cut = rng.randrange(100, 600)
        tokens = prompt(seed % 6)[:cut] + [rng.randrange(1000) for _ in range(rng.randrange(2500))]
        cache.fetch(tokens, model="m")
        cache.store(tokens, states.sliceable(tokens), model="m")
    before = cache.stats()
    assert cache.flush(20)
    assert cache.stats().ssd.written_files - before.ssd.written_files <= before.images_in_ram + before.blocks
    cache.check_integrity()
