"""`prune`, `clear` of a tenant and `remove(following=)` on an open cache: what goes, in which tiers, and what stays."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from prefixcache import PrefixCache
from prefixcache.ssd.entries import FOLDERS
from prefixcache.store_fetch_remove import pruning
from prefixcache.store_fetch_remove.selection import NoSuchNamespace
from tests.inside import inside
from tests.models import states

HOUR = 3600.0


class Clock:
    """The time of day, ahead of the real one by `ahead` seconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.ahead, real = 0.0, time.time
        monkeypatch.setattr(time, "time", lambda: real() + self.ahead)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def tokens_of(name: int, count: int = 600) -> list[int]:
    return [name * 1000 + i % 997 for i in range(count)]


def bytes_of_files(folder: Path) -> int:
    """The real bytes of the images."""
    return sum(
        file.stat().st_blocks * 512 for kind in FOLDERS for file in (folder / "ssd" / kind).rglob("*") if file.is_file()
    )


def put(cache: PrefixCache, tokens: list[int], **whose: Any) -> None:
    assert cache.store(tokens, states.sliceable(tokens), model="m@1", **whose).tokens == len(tokens)


def depth(cache: PrefixCache, tokens: list[int], **whose: Any) -> int:
    return cache.match(tokens, model="m@1", **whose).ssd


@pytest.fixture(params=["ram", "both"])
def options(request: pytest.FixtureRequest, tmp_path: Any) -> dict[str, Any]:
    options: dict[str, Any] = {"ram": "20MB", "codec": "raw", "memory_reserve": 0}
    if request.param != "ram":
        options |= {"ssd_dir": tmp_path / "ssd", "ssd": "60MB"}
    return options


def test_what_was_not_used_since_a_time_goes_and_what_was_stays(options, clock):
    with PrefixCache(**options) as cache:
        for name in range(3):
            put(cache, tokens_of(name))
            clock.ahead += HOUR
        cache.fetch(tokens_of(0), model="m@1")  # used again
        cache.flush(30)
        clock.ahead += HOUR
        deleted = cache.prune(used_before=time.time() - 2.5 * HOUR)  # between 1 and 2
        assert deleted.images == 3 or "ssd_dir" in options
        assert depth(cache, tokens_of(1)) == 0
        assert depth(cache, tokens_of(2)) == 600
        assert depth(cache, tokens_of(0)) == 600
        cache.check_integrity()
        assert cache.prune(used_before=time.time() - 2.5 * HOUR).images == 0


def test_times_of_use_survive_a_restart(tmp_path, clock):
    options = {"ram": "20MB", "codec": "raw", "ssd_dir": tmp_path / "ssd", "ssd": "60MB"}
    for name in range(3):
        with PrefixCache(**options) as cache:
            put(cache, tokens_of(name))
        clock.ahead += HOUR
    with PrefixCache(**options) as cache:
        cache.prune(used_before=time.time() - 1.5 * HOUR)
        assert [depth(cache, tokens_of(name)) for name in range(3)] == [0, 0, 600]
        cache.flush(30)
        states.check_integrity(cache)


def test_a_tenant_is_cleared_in_every_tier_and_its_pins_end(options):
    with PrefixCache(**options) as cache:
        for salt in (b"", b"one", b"other"):
            put(cache, tokens_of(1), salt=salt)
            cache.pin(tokens_of(1), model="m@1", salt=salt)
        cache.flush(30)
        assert cache.clear(salt=b"one").images == 3
        assert [depth(cache, tokens_of(1), salt=salt) for salt in (b"", b"one", b"other")] == [600, 0, 600]
        assert len(cache.pinned()) == 2
        assert cache.clear(salt=b"").images == 3
        assert cache.clear(model="m").images == 3
        assert cache.pinned() == []
        with pytest.raises(NoSuchNamespace, match="nothing is of that model"):
            cache.clear(model="n")
        cache.check_integrity()


def test_what_is_removed_is_pinned_no_longer(options):
    """What another prompt has of it is."""
    shared = tokens_of(1, 512)
    with PrefixCache(**options) as cache:
        for tokens in (tokens_of(1), [*shared, *tokens_of(2, 88)]):
            put(cache, tokens)
        assert cache.pin(tokens_of(1), model="m@1") == 600
        (whole,) = cache.pinned()
        cache.remove(tokens_of(1), model="m@1")
        (left,) = cache.pinned()
        assert 0 < left.nbytes < whole.nbytes
        cache.remove(tokens, model="m@1")
        assert cache.pinned() == []
        assert cache.unpin(tokens_of(1), model="m@1")
        cache.check_integrity()


@pytest.mark.parametrize("evicted", [1, 2])
def test_remove_with_what_follows_takes_what_is_left_of_a_prompt_whose_end_was_evicted(options, evicted):
    tokens = tokens_of(1)
    with PrefixCache(**options) as cache:
        put(cache, tokens)
        cache.flush(30)
        storage, prompt = inside(cache).storage, cache.prompt(tokens, model="m@1")
        with storage.lock:
            (namespace,) = prompt.namespaces()
            for node in prompt.walk(namespace).nodes[: -evicted - 1 : -1]:
                storage.lower.discard(node.rows)
        assert depth(cache, tokens) == 256 * (3 - evicted)
        cache.remove(tokens, model="m@1", following=True)
        assert depth(cache, tokens) == 0
        cache.check_integrity()


def test_remove_with_what_follows_leaves_what_others_share(options):
    shared = tokens_of(1, 512)
    chats = [[*shared, *tokens_of(name, 400)] for name in (2, 3)]
    with PrefixCache(**options) as cache:
        for chat in chats:
            put(cache, chat)
            put(cache, [*chat, *tokens_of(9, 300)])
        cache.flush(30)
        assert cache.remove(chats[0][:700], model="m@1", following=True) > 0
        assert depth(cache, chats[0]) <= 512
        assert depth(cache, [*chats[1], *tokens_of(9, 300)]) == 1212
        assert cache.remove(shared[:256], model="m@1", following=True) > 0
        assert cache.stats().blocks == 0
        with pytest.raises(ValueError, match="tokens are empty"):
            cache.remove([], model="m@1", following=True)
        cache.check_integrity()


def test_pruning_to_a_size_spares_ram_and_other_models(tmp_path):
    with PrefixCache(ram="20MB", codec="raw", ssd_dir=tmp_path / "ssd", ssd="60MB", spill_idle=0) as cache:
        for name in range(6):
            put(cache, tokens_of(name))
        cache.store(tokens_of(7), states.sliceable(tokens_of(7)), model="other")
        cache.flush(30)
        used, before = cache.stats().ssd.used, bytes_of_files(tmp_path)
        assert cache.prune(model="m", ssd_to=used).images == 0  # what is kept for the index to grow doesn't count
        deleted = cache.prune(model="m", ssd_to=used - 100_000)
        assert 0 < deleted.images < 18
        assert inside(cache).ssd.flush(30)  # the cache's own would write them again, from RAM
        assert bytes_of_files(tmp_path) <= before - 100_000  # the index's log has the deletions until it is cut
        assert cache.match(tokens_of(0), model="m@1").ram == 600  # RAM has it still
        cache.prune(model="m", ssd_to=0)
        assert cache.stats().images_on_ssd == 3
        cache.trim_to(0)
        assert cache.match(tokens_of(7), model="other").ssd == 600
        cache.check_integrity()


def test_what_is_used_while_the_ssd_is_pruned_by_time_stays(tmp_path, clock, monkeypatch):
    with PrefixCache(ram="20MB", codec="raw", ssd_dir=tmp_path / "ssd", ssd="60MB", memory_reserve=0) as cache:
        for name in range(2):
            put(cache, tokens_of(name))
        cache.flush(30)
        clock.ahead += HOUR
        before, portions = time.time(), pruning._portions

        def used_meanwhile(slots):
            cache.fetch(tokens_of(0), model="m@1")
            yield from portions(slots)

        monkeypatch.setattr(pruning, "_portions", used_meanwhile)
        assert cache.prune(used_before=before, ssd_to=0).held == 3
        assert cache.stats().images_on_ssd == 3
        cache.check_integrity()


def test_a_shorter_prompt_stays_when_one_beyond_it_is_removed_with_what_follows(options):
    with PrefixCache(**options) as cache:
        put(cache, tokens_of(1, 300))
        cache.flush(30)
        assert cache.remove(tokens_of(1, 900), model="m@1", following=True) == 0
        assert depth(cache, tokens_of(1, 300)) == 300


def test_a_time_that_is_none_is_told():
    with PrefixCache(ram="1MB") as cache:
        for value in ("yesterday", float("nan"), True):
            with pytest.raises(ValueError, match=r"prune: used_before=.*give a Unix time in seconds"):
                cache.prune(used_before=value)


def test_nothing_selected_and_no_ssd_are_told():
    with PrefixCache(ram="1MB") as cache:
        with pytest.raises(ValueError, match="nothing is selected"):
            cache.prune()
        with pytest.raises(ValueError, match="without an SSD"):
            cache.prune(ssd_to=1)
