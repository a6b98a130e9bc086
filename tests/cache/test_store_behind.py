"""Stores that a thread of the cache ends: the same images, in the order of the calls, and nothing left where one fails."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache, RotatingKVCache

from prefixcache import PrefixCache
from prefixcache.store_fetch_remove import image_maker, store
from tests.cache.test_write_back import alike, extend, images, some_rows
from tests.models.states import whole_hit

TOKENS = 900


def opened(**options):
    return PrefixCache(ram="64MB", codec="turboquant:4", **options)


def prefilled(tokens, window=False):
    return extend([KVCache(), RotatingKVCache(300) if window else KVCache()], some_rows(TOKENS), 0, tokens)


@given(ends=st.sets(st.integers(1, TOKENS), min_size=1, max_size=4), window=st.booleans(), batch=st.integers(1, 3))
def test_it_keeps_what_a_store_keeps(ends, window, batch):
    prompt = list(range(TOKENS))
    with opened() as one, opened() as other, pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "BATCH", batch)
        for end in sorted(ends):
            layers = [prefilled(end, window) for _ in range(2)]
            stored = one.store(prompt[:end], layers[0], model="m", write_back_from=0)
            behind = other.store_behind(other.prompt(prompt[:end], model="m"), layers[1], write_back_from=0)
            assert other.match(prompt[:end], model="m").ram == stored.tokens  # it waits
            assert behind.result() == stored
            assert alike(layers[0], layers[1])
        assert images(one) == images(other)
        other.check_integrity()


def test_what_is_asked_next_waits_for_it():
    prompt = list(range(TOKENS))
    with opened() as cache:
        begun = cache.prompt(prompt, model="m")
        cache.store_behind(begun.first(512), prefilled(512), write_back_from=0)
        cache.store_behind(begun, prefilled(TOKENS), write_back_from=512)
        assert begun.given_rows.tokens < TOKENS
        assert alike(prefilled(100), whole_hit(cache, prompt), below=4)
        assert cache.keep_hot(begun, whole_hit(cache, prompt))


def test_what_was_deleted_meanwhile_stays_so():
    prompt = list(range(TOKENS))
    with opened() as cache:
        call = cache._store_call(cache.prompt(prompt, model="m"), prefilled(TOKENS), None, snapshot=True)
        end = call.begin()
        cache.clear()
        end()
        cache.check_integrity()
        assert cache.stats().ram_reserved == 0
        assert cache.store(prompt, prefilled(TOKENS), model="m").tokens == TOKENS


@pytest.mark.parametrize("which", [1, 2])
def test_one_that_fails_leaves_nothing_reserved_and_what_came_before_it(which, monkeypatch):
    prompt, calls, sealed = list(range(TOKENS)), [], image_maker.LiveMaker._sealed

    def fails(*args):
        calls.append(1)
        if len(calls) == which:
            raise OSError("no memory")
        return sealed(*args)

    monkeypatch.setattr(store, "BATCH", 1)
    monkeypatch.setattr(image_maker.LiveMaker, "_sealed", fails)
    with opened() as cache:
        behind = cache.store_behind(cache.prompt(prompt, model="m"), prefilled(TOKENS))
        with pytest.raises(OSError, match="no memory"):
            behind.result()
        assert cache.match(prompt, model="m").ram == 256 * (which - 1)
        assert cache.stats().ram_reserved == 0
        cache.check_integrity()
        assert cache.store(prompt, prefilled(TOKENS), model="m").tokens == TOKENS


def test_a_closed_cache_has_ended_its_stores(tmp_path):
    prompt = list(range(TOKENS))
    cache = opened(ssd_dir=tmp_path / "ssd", ssd="1GB")
    cache.store_behind(cache.prompt(prompt, model="m"), prefilled(TOKENS))
    cache.close()
    with opened(ssd_dir=tmp_path / "ssd", ssd="1GB") as again:
        assert again.match(prompt, model="m").ssd == TOKENS
