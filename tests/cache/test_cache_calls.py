"""Calls of the cache from many threads, at the end of a process, and with bad input."""

import gc
import os
import random
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest

from prefixcache import DirectoryError, DirectoryHeld, PrefixCache, Settings
from tests.models import states
from tests.models.states import got, put

LONG = list(range(1000))


# -- threads and ends ---------------------------------------------------------------------------------------------------


def test_many_threads_at_once(opened):
    cache = opened(ram=400_000, spill="wait", spill_wait=5)
    prompts = [[i % 3] * 300 + [i] * 400 + [i % 5] * 100 for i in range(12)]
    over = []

    def work(seed):
        rng = random.Random(seed)
        for _ in range(25):
            tokens = rng.choice(prompts)[: rng.choice([300, 555, 700, 800])]
            act = rng.random()
            if act < 0.4:
                put(cache, tokens)
            elif act < 0.75:
                got(cache, tokens)
            elif act < 0.85:
                cache.promote(tokens, model="m").result(30)
            elif act < 0.9:
                cache.trim_to(200_000)
            elif act < 0.95:
                cache.remove(tokens, model="m")
            else:
                cache.pin(tokens, model="m")
                cache.unpin(tokens, model="m")
            stats = cache.stats()
            if stats.ram_held > stats.ram_limit:
                over.append(stats)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert not over
    cache.check_integrity()
    assert cache.flush(20)
    stats = cache.stats()
    assert (stats.ram_reserved, stats.ram_queued, stats.pinned) == (0, 0, 0)
    cache.check_integrity()


def test_a_closed_cache_says_so_and_closes_twice(opened):
    cache = opened()
    put(cache, LONG)
    cache.close()
    cache.close()
    for call in (cache.match, cache.fetch, cache.promote, cache.pin, cache.remove):
        with pytest.raises(RuntimeError, match="closed"):
            call(LONG, model="m")


def test_nothing_is_reserved_or_pinned_after_an_encode_that_fails(opened, monkeypatch):
    cache = opened()

    def fail(*a):
        raise RuntimeError("no memory on the device")

    monkeypatch.setattr("prefixcache.store_fetch_remove.image_maker.encode", fail)
    with pytest.raises(RuntimeError, match="device"):
        put(cache, LONG)
    monkeypatch.undo()
    stats = cache.stats()
    assert (stats.ram_reserved, stats.pinned, stats.blocks) == (0, 0, 0)
    assert put(cache, LONG).tokens == 1000
    cache.check_integrity()


def test_no_array_of_mlx_outlives_a_call(opened):
    cache = opened()
    live = states.sliceable(LONG)
    gc.collect()
    seen = []
    for _ in range(5):
        cache.store(LONG, live, model="m")
        cache.fetch(LONG, model="m")
        gc.collect()
        seen.append(mx.get_active_memory())
    assert len(set(seen)) == 1


# -- bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens",
    [[[1, 2]], [1.0, 2.0], [True], [2**63], "text", b"bytes", None, 5, {1, 2}, (i for i in range(5)), np.ones(3)],
)
def test_bad_tokens_are_an_error_at_every_call(opened, tokens):
    cache = opened(disk=False)
    for call in (cache.match, cache.fetch, cache.lookup, cache.promote, cache.pin, cache.unpin, cache.remove):
        with pytest.raises((TypeError, ValueError), match="token"):
            call(tokens, model="m")
    with pytest.raises((TypeError, ValueError), match="token"):
        cache.store(tokens, states.sliceable([1]), model="m")


def test_no_tokens(opened):
    cache = opened(disk=False)
    assert cache.match([], model="m") == (0, 0)
    assert cache.fetch([], model="m") == (None, [])
    assert cache.promote([], model="m").result(1) == 0
    with pytest.raises(ValueError, match="empty"):
        cache.store([], states.sliceable([]), model="m")


def test_negative_and_60_bit_ids_are_valid(opened):
    cache = opened()
    tokens = [-(2**60) - i for i in range(300)] + [2**40 + i for i in range(300)]
    put(cache, tokens)
    cache.trim_to(0)
    cache.promote(tokens, model="m").result(10)
    assert got(cache, tokens) == 599


def test_tokens_may_be_arrays_and_rest_is_of_their_kind(opened):
    cache = opened(disk=False)
    put(cache, LONG)
    for kind in (np.array, mx.array, tuple, lambda t: np.array(t, np.uint32)):
        tokens = kind([*LONG, 5, 6])
        made, rest = cache.fetch(tokens, model="m")
        states.check(made, LONG)
        assert type(rest) is type(tokens)
        assert [int(t) for t in rest] == [5, 6]


@pytest.mark.parametrize(
    ("model", "error"), [(None, TypeError), (b"m", TypeError), ("", ValueError), ("x" * 10_000, ValueError)]
)
def test_bad_models(opened, model, error):
    cache = opened(disk=False)
    with pytest.raises(error, match="model"):
        cache.match(LONG, model=model)
    with pytest.raises(error, match="model"):
        cache.store(LONG, states.sliceable(LONG), model=model)


@pytest.mark.parametrize("salt", ["text", None, 5])
def test_bad_salts(opened, salt):
    cache = opened(disk=False)
    with pytest.raises(TypeError, match="salt"):
        cache.fetch(LONG, model="m", salt=salt)


@pytest.mark.parametrize("leave", [-1, 1.5, True, "1"])
def test_bad_leave(opened, leave):
    with pytest.raises(ValueError, match="leave"):
        opened(disk=False).fetch(LONG, model="m", leave=leave)


def test_tokens_and_cache_of_different_lengths_are_stored_to_the_shorter(opened):
    cache = opened(disk=False)
    assert cache.store(LONG, states.sliceable(LONG[:400]), model="m").tokens == 400
    assert cache.store([1] * 300, states.sliceable([1] * 500), model="m").tokens == 300
    assert got(cache, [1] * 500) == 300
    # A state that can't be cut is kept only for the boundary that it belongs to.
    assert not cache.store([2] * 300, states.hybrid([2] * 500), model="m").snapshot
    assert cache.store([3] * 500, states.hybrid([3] * 300), model="m").snapshot
    assert got(cache, [3] * 500) == 300


def test_a_second_cache_on_a_directory_is_refused_by_name(opened):
    opened()
    with pytest.raises(DirectoryHeld, match=str(os.getpid())):
        opened()


def test_a_directory_that_is_a_file_or_of_a_newer_format(tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(DirectoryError, match="file"):
        PrefixCache(ram="1MB", ssd_dir=file, ssd="50MB")
    (tmp_path / "cache").mkdir()
    with PrefixCache(ram="1MB", ssd_dir=tmp_path / "cache", ssd="50MB"):
        pass
    (tmp_path / "cache" / "index.db").unlink()
    (tmp_path / "cache" / "index.db").mkdir()
    with pytest.raises(DirectoryError, match=r"index\.db"):
        PrefixCache(ram="1MB", ssd_dir=tmp_path / "cache", ssd="50MB")


def test_settings_of_a_wrong_type():
    with pytest.raises(TypeError, match="settings of type str"):
        PrefixCache("8MB")


@pytest.mark.parametrize("ram", ["20QB", "-1", "1e400", "", None, "0"])
def test_bad_sizes_are_errors_at_construction(ram):
    with pytest.raises(ValueError, match="ram"):
        Settings(ram=ram)


def test_ram_auto_says_what_it_took():
    with PrefixCache() as cache:
        stats = cache.stats()
        assert stats.ram_setting == "auto"
        assert stats.ram_limit > 100_000_000
