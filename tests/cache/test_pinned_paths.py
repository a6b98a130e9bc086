"""A path is kept by the pins of its last block, its windows and its snapshot: nothing of it is evicted meanwhile."""

import pytest

from prefixcache import PrefixCache
from prefixcache.store_fetch_remove.image_maker import LiveMaker
from prefixcache.tiers.prompt import take_hit
from tests.inside import inside
from tests.models import states
from tests.models.states import prompt

PROMPT = prompt(1, 256 * 7)


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


def by_a_lower_budget(storage) -> None:
    storage.ram.resize(26_000)


def by_nodes_that_fill_the_budget(storage) -> None:
    storage.budget.limit = 26_000
    while storage.ram._discard_for_nodes():
        pass


@pytest.mark.parametrize("push", [by_a_lower_budget, by_nodes_that_fill_the_budget])
def test_a_hit_keeps_what_its_images_hang_on(cache, push):
    storage, tokens = inside(cache).storage, PROMPT[: 6 * 256]
    with storage.lock:
        found = take_hit(storage, cache.prompt(tokens, model="m"), 0)
        push(storage)
        assert found.depth == len(tokens)
        assert all(node.rows is not None and node.rows.image is not None for node in found.walk.nodes)
        storage.unpin(found.pinned)


def test_a_store_keeps_what_it_goes_on_from(cache, monkeypatch):
    make = LiveMaker.make

    def under_pressure(store, jobs):
        cache.resize(ram=26_000, wait=0)
        cache.resize(ram="4MB")
        return make(store, jobs)

    monkeypatch.setattr(LiveMaker, "make", under_pressure)
    assert put(cache, 7).tokens == cache.match(PROMPT, model="m").ram == 7 * 256
