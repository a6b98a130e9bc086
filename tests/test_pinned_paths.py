"""A path is kept by the pins of its last block, its windows and its snapshot: nothing that they hang on leaves meanwhile."""

import numpy as np
import pytest

from prefixcache import PrefixCache
from prefixcache.operations.store import Store
from prefixcache.tiers.finding import hit
from tests import states

PROMPT = [(7919 + i * 13) % 50_000 for i in range(256 * 7)]


@pytest.fixture
def cache(tmp_path):
    """The first five blocks are in RAM and on SSD, the sixth is in RAM only."""
    with PrefixCache(ram="4MB", ssd_dir=tmp_path, ssd="20MB", codec="raw", memory_reserve=0) as opened:
        put(opened, 5)
        assert opened.flush(20)
        put(opened, 6)
        yield opened
        opened.check_integrity()


def put(cache: PrefixCache, blocks: int):
    tokens = PROMPT[: blocks * 256]
    return cache.store(tokens, states.sliceable(tokens), model="m")


def by_a_lower_budget(tiers) -> None:
    tiers.resize(26_000)


def by_nodes_that_fill_the_budget(tiers) -> None:
    tiers.budget.limit = 26_000
    while tiers._forget_one():
        pass


@pytest.mark.parametrize("push", [by_a_lower_budget, by_nodes_that_fill_the_budget])
def test_a_hit_keeps_what_its_images_hang_on(cache, push):
    tiers, tokens = cache._tiers, PROMPT[: 6 * 256]
    with tiers.lock:
        found = hit(tiers, np.array(tokens, "<i8").tobytes(), cache._homes("m", b""), len(tokens), len(tokens))
        push(tiers)
        assert found.depth == len(tokens)
        assert all(node.rows is not None and node.rows.image is not None for node in found.walk.nodes)
        tiers.unpin(found.pinned)


def test_a_store_keeps_what_it_goes_on_from(cache, monkeypatch):
    make = Store._make

    def under_pressure(store, jobs):
        cache.resize(ram=26_000, wait=0)
        cache.resize(ram="4MB")
        return make(store, jobs)

    monkeypatch.setattr(Store, "_make", under_pressure)
    assert put(cache, 7).tokens == cache.match(PROMPT, model="m").ram == 7 * 256
