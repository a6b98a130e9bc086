"""Images that the SSD has and the graph doesn't, for want of RAM or because their directory was away: deleted with their
prompt, in the order of their use.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixcache import PrefixCache
from prefixcache.store_fetch_remove import namespaces
from tests.models import states
from tests.models.states import put
from tests.waiting import until

PROMPTS = range(1, 40)


def tokens(number: int, count: int = 256) -> list[int]:
    return [number] * count


def open_on(root: Path) -> PrefixCache:
    return PrefixCache(ram="20MB", ssd_dir=root, ssd="100MB", codec="raw", memory_reserve=0)


def unindexed(cache: PrefixCache) -> int:
    """How many images of the SSD the graph doesn't know."""
    stats = cache.stats()
    return stats.ssd.files - stats.images_on_ssd


def kept(root: Path) -> list[int]:
    with open_on(root) as cache:
        cache.check_integrity()
        return [number for number in PROMPTS if cache.match(tokens(number), model="m").ssd]


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[PrefixCache]:
    """Half of the prompts, the older ones, are not indexed."""
    with open_on(tmp_path) as cache:
        for number in PROMPTS:
            put(cache, tokens(number))
        assert cache.flush(20)
        cache.resize(ram=150_000)
        cache.resize(ram="20MB")
        assert 10 < unindexed(cache) < 30
        assert cache.match(tokens(1), model="m") == (0, 0)
        yield cache


@pytest.mark.parametrize("again", [True, False])
def test_a_prompt_that_is_removed_does_not_come_back(cache, tmp_path, again):
    if again:
        put(cache, tokens(1))
    assert cache.remove(tokens(1), model="m") > 0
    assert cache.flush(20)
    cache.close()
    assert kept(tmp_path) == list(PROMPTS)[1:]


def test_of_no_sequences_that_are_kept_none_comes_back(cache, tmp_path):
    assert cache.keep(0) == 0
    assert cache.flush(20)
    cache.close()
    assert kept(tmp_path) == []


def test_what_was_stored_again_is_the_newest(cache, tmp_path):
    put(cache, tokens(1))
    assert cache.flush(20)
    cache.resize(ram=1000, wait=5)
    assert unindexed(cache) == len(PROMPTS)
    cache.check_integrity()
    ssd = cache.stats().ssd
    cache.resize(ssd=ssd.used + ssd.reserve - 60_000)
    assert cache.flush(20)
    cache.close()
    left = kept(tmp_path)
    assert 1 in left
    assert 2 not in left


def test_what_a_directory_brings_that_was_away_is_cleared(tmp_path):
    root, aside = tmp_path / "ssd", tmp_path / "aside"
    with open_on(root) as cache:
        put(cache, tokens(1))
        assert cache.flush(20)
        cache.trim_to(0)
        root.rename(aside)
        put(cache, tokens(2))
        until(lambda: cache.flush(5))
        assert cache.match(tokens(1), model="m") == (0, 0)
        shutil.rmtree(root)
        aside.rename(root)
        put(cache, tokens(3))
        until(lambda: cache.flush(5))
        assert unindexed(cache) == 1
        cache.check_integrity()
        cache.clear(model="m")
        assert cache.flush(20)
        assert cache.stats().ssd.files == 0


def test_images_that_this_process_can_t_use_leave_for_others_and_are_cleared(tmp_path, monkeypatch):
    with open_on(tmp_path) as cache:
        for number in PROMPTS:
            put(cache, tokens(number))
        assert cache.flush(20)
        held = cache.stats().ssd.used + cache.stats().ssd.reserve
    with monkeypatch.context() as patch:

        def unknown(spec: object) -> None:
            raise ValueError(f"{spec}: unknown")

        patch.setattr(namespaces, "codec_from_spec", unknown)
        with open_on(tmp_path) as cache:
            assert unindexed(cache) == len(PROMPTS)
            cache.resize(ssd=held)
            put(cache, tokens(100, 1000))
            assert cache.flush(20)
            assert cache.match(tokens(100, 1000), model="m").ssd == 1000
            assert 0 < unindexed(cache) < len(PROMPTS)
            cache.check_integrity()
            cache.clear()
            assert cache.flush(20)
            assert cache.stats().ssd.files == 0


@pytest.mark.parametrize("make", [states.sliceable, states.windowed, states.hybrid])
def test_what_another_prompt_goes_on_from_stays(tmp_path, make):
    short, long, other = tokens(7, 600), [*tokens(7, 600), *range(300)], [*tokens(7, 512), *range(90)]
    with open_on(tmp_path) as cache:
        for prompt in (short, long, other):
            put(cache, prompt, make)
        assert cache.flush(20)
        cache.resize(ram=4000)
        cache.resize(ram="20MB")
        assert cache.match(other, model="m").ssd < 600
        cache.remove(other, model="m")
        assert cache.flush(20)
    with open_on(tmp_path) as cache:
        assert cache.match(other, model="m").ssd <= 512
        assert cache.match(long, model="m").ssd == 900
        cache.resize(ram=4000)
        cache.resize(ram="20MB")
        cache.remove(long, model="m")
    with open_on(tmp_path) as cache:
        cache.check_integrity()
        assert cache.match(long, model="m").ssd < 900
        if make is not states.hybrid:
            return
        assert cache.match(short, model="m").ssd == 600
        cache.remove(short, model="m")
        assert cache.flush(20)
        assert cache.stats().ssd.files == 0


def test_a_prompt_whose_end_alone_is_not_indexed_leaves_whole(tmp_path):
    prompt = [*range(1000)]
    with open_on(tmp_path) as cache:
        put(cache, prompt)
        assert cache.flush(20)
        cache.resize(ram=10_000)
        cache.resize(ram="20MB")
        assert 0 < cache.match(prompt, model="m").ssd < 1000
        cache.remove(prompt, model="m")
        assert cache.flush(20)
        assert cache.stats().ssd.files == 0
    with open_on(tmp_path) as cache:
        assert cache.stats().ssd.files == 0
