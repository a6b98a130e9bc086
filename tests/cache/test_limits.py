"""Limits that change while the cache runs, by hand or because the machine is short of memory; and odd sizes of everything."""

from __future__ import annotations

import gc
import logging
import re
import threading
import weakref

import mlx.core as mx
import pytest

from prefixcache import PrefixCache, memory
from prefixcache.open_cache import usable_memory
from prefixcache.tiers.memory_pressure import LEAST, Pressure
from tests.inside import inside
from tests.models import states
from tests.models.states import exact, prompt, put_prompts
from tests.waiting import until
from tools.faults.evidence import du

CACHE = {"ram": "2MB", "ssd": "20MB", "memory_reserve": 0}


# -- by hand ----------------------------------------------------------------------------------------------------------


def test_a_lower_ram_budget_holds_at_once_and_what_left_is_on_the_ssd(opened):
    cache = opened()
    put_prompts(cache, *range(8))
    assert cache.stats().ram_held > 500_000
    cache.resize(ram="200KB", wait=20)
    assert cache.stats().ram_held <= 200_000
    assert cache.stats().ram_limit == cache.stats().ram_configured == 200_000
    assert all(exact(cache, prompt(seed)) for seed in range(8))
    assert cache.stats().counters.dropped == 0
    cache.check_integrity()


def test_a_lower_ram_budget_without_an_ssd_keeps_the_hottest(opened):
    cache = opened(ssd_dir=None)
    put_prompts(cache, *range(8))
    cache.resize(ram="200KB")
    assert cache.stats().ram_held <= 200_000
    assert exact(cache, prompt(7))
    assert cache.match(prompt(0), model="m").ram == 0
    cache.resize(ram="2MB")
    put_prompts(cache, *range(6))
    assert all(exact(cache, prompt(seed)) for seed in range(6))


def test_pinned_images_stay_and_the_limit_follows_when_they_go(opened):
    cache = opened(ssd_dir=None)
    put_prompts(cache, 1)
    cache.pin(prompt(1), model="m")
    held = cache.stats().ram_held
    cache.resize(ram=20_000)
    assert cache.stats().ram_held == cache.stats().ram_limit == held
    assert cache.stats().ram_configured == 20_000
    cache.check_integrity()
    assert cache.store(prompt(2), states.sliceable(prompt(2)), model="m").tokens == 0
    cache.unpin(prompt(1), model="m")
    assert cache.trim_to(0) == 0
    assert cache.stats().ram_limit == 20_000


def test_a_budget_too_small_for_its_nodes_leaves_the_files_where_they_are(opened, tmp_path):
    cache = opened(ram="4MB")
    put_prompts(cache, *range(30))
    cache.flush()
    files = len(list((tmp_path / "ssd" / "rows").rglob("*.safetensors")))
    cache.resize(ram=60_000, wait=20)
    assert cache.stats().ram_nodes <= 30_000
    cache.check_integrity()
    cache.flush()
    assert len(list((tmp_path / "ssd" / "rows").rglob("*.safetensors"))) == files
    cache.resize(ram="2MB")
    put_prompts(cache, 0)  # its file is there already
    cache.close()
    again = opened()
    assert all(exact(again, prompt(seed)) for seed in range(30))


def test_what_was_out_of_reach_and_is_stored_again_is_not_deleted_for_the_limit(opened):
    cache = opened(ssd="2MB")
    put_prompts(cache, *range(20))
    cache.flush()
    cache.resize(ram=60_000, wait=20)  # most are out of reach now
    cache.resize(ram="2MB")
    put_prompts(cache, 0, 1)
    cache.flush()
    put_prompts(cache, *range(100, 140))  # the SSD is full: what is out of reach goes first
    cache.flush()
    put_prompts(cache, 0)
    cache.flush()
    assert exact(cache, prompt(0))
    assert cache.stats().counters.corrupt == 0


def test_a_lower_ssd_limit_holds_once_the_writer_is_done(opened, tmp_path):
    cache = opened()
    put_prompts(cache, *range(30))
    cache.flush()
    assert du(tmp_path / "ssd") > 1_000_000
    cache.resize(ssd="800KB")
    assert cache.flush()
    assert du(tmp_path / "ssd") <= 800_000
    assert cache.stats().ssd.limit == 800_000
    states.check_integrity(cache)
    put_prompts(cache, *range(50, 60))
    cache.flush()
    assert du(tmp_path / "ssd") <= 800_000
    assert exact(cache, prompt(59))


def test_what_was_pinned_when_the_ssd_limit_fell_leaves_when_it_is_let_go(opened, tmp_path):
    cache = opened(ram="4MB")
    put_prompts(cache, *range(30))
    for seed in range(30):
        cache.pin(prompt(seed), model="m")
    cache.flush()
    cache.resize(ssd="800KB")
    cache.flush()
    assert du(tmp_path / "ssd") > 1_000_000
    for seed in range(30):
        cache.unpin(prompt(seed), model="m")
    cache.flush()
    assert du(tmp_path / "ssd") <= 800_000


def test_a_lower_ssd_limit_holds_though_ram_goes_on_from_what_the_ssd_alone_has(opened, tmp_path):
    cache = opened()
    for seed in range(30):
        states.put(cache, prompt(seed, 512))
    cache.flush()
    cache.trim_to(0)
    put_prompts(cache, *range(30))  # their ends: the first blocks are on the SSD alone
    cache.resize(ssd="2MB")
    until(lambda: du(tmp_path / "ssd") + cache.stats().ssd.reserve <= 2_000_000)
    cache.flush()
    states.check_integrity(cache)
    assert exact(cache, prompt(29))


def test_a_prompt_larger_than_the_ssd_is_written_once_and_keeps_its_leading_part(opened):
    cache = opened(ram="20MB", ssd="1MB")
    tokens = prompt(1, 20_000)
    cache.store(tokens, states.sliceable(tokens), model="m")
    assert cache.flush(20)
    stats = cache.stats()
    assert stats.ssd.written_files == stats.ssd.files
    assert stats.counters.ssd_evicted == 0
    cache.close()
    again = opened(ram="20MB", ssd="1MB")
    depth = again.match(tokens, model="m").ssd
    assert depth >= 256
    assert again.promote(tokens, model="m").result(20) == depth


def test_a_higher_ssd_limit_is_used(opened, tmp_path):
    cache = opened(ssd="400KB")
    put_prompts(cache, *range(10))
    cache.flush()
    assert du(tmp_path / "ssd") <= 400_000
    cache.resize(ssd="20MB")
    put_prompts(cache, *range(100, 110))
    cache.flush()
    assert exact(cache, prompt(100))
    assert du(tmp_path / "ssd") > 700_000


def test_limits_that_change_all_the_time_under_load_are_kept(opened):
    cache = opened()
    ended = threading.Event()
    wrong: list[BaseException] = []

    def load(first: int) -> None:
        try:
            seed = first
            while not ended.is_set():
                put_prompts(cache, seed % 40)
                tokens = prompt((seed * 5) % 40)
                cache.promote(tokens, model="m").result(20)
                made, rest = cache.fetch(tokens, model="m", leave=0)  # some of it may have left again
                if made is not None:
                    states.check(made, tokens[: len(tokens) - len(rest)])
                seed += 1
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=load, args=(n * 11,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for size in (200_000, 1_500_000, 60_000, 900_000, 300_000, 2_000_000) * 2:
        cache.resize(ram=size, ssd=size * 2 + 500_000, wait=0.02)
        cache.check_integrity()
        stats = cache.stats()
        assert stats.ram_held <= stats.ram_limit
    ended.set()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    assert cache.flush()
    states.check_integrity(cache)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"ram": "20QB"}, "ram='20QB': not a size"),
        ({"ssd": -1}, "ssd=-1: not a size"),
        ({"ram": 0}, "ram=0: a tier can't be taken away"),
        ({"ssd": 0}, "ssd=0: a tier can't be taken away"),
        ({"ram": "1MB", "ssd": "bad"}, "ssd='bad'"),
    ],
)
def test_bad_limits_change_nothing(opened, values, text):
    cache = opened()
    before = cache.stats()
    with pytest.raises(ValueError, match=text):
        cache.resize(**values)
    assert cache.stats().ram_limit == before.ram_limit
    assert cache.stats().ssd.limit == before.ssd.limit


def test_an_ssd_that_is_not_there_can_t_be_resized(opened):
    with pytest.raises(ValueError, match="opened without an SSD"):
        opened(ssd_dir=None).resize(ssd="1MB")


def test_ram_that_holds_no_block_is_said_at_the_start_and_when_a_block_is_larger_than_it(opened, caplog):
    opened(ram="64KB", ssd_dir=None)
    assert not caplog.messages
    opened(ram="10KB", ssd_dir=None)
    why = 'holds no block of 256 tokens of any usual model, so nothing is kept; write "1GB" or more'
    assert caplog.messages == [f"ram=10.0 kB: {why}"]
    caplog.clear()
    cache = opened(ram="70KB", ssd_dir=None, codec="raw")
    for seed in (1, 2):
        cache.store(prompt(seed), states.sliceable(prompt(seed), layers=8), model="m")
    (said,) = caplog.messages
    assert re.fullmatch(
        r'ram=70\.0 kB: a block of 256 tokens of m takes [\d.]+ kB, so nothing of it is kept; write "1GB" or more', said
    )


def test_an_image_larger_than_a_tier_is_not_kept_there_and_stops_nothing(opened, tmp_path):
    cache = opened(ram="20KB", ssd_dir=None)
    put_prompts(cache, 1)
    assert cache.stats().counters.unkept_tokens > 0
    assert cache.stats().ram_peak <= 20_000
    larger = opened(ram="2MB", ssd="70KB", ssd_dir=tmp_path / "small")
    put_prompts(larger, 1)
    assert exact(larger, prompt(1))
    larger.flush()
    assert du(tmp_path / "small") <= 200_000  # an index and folders, whatever the limit
    assert exact(larger, prompt(1))


# -- because the machine is short of memory ---------------------------------------------------------------------------


class Machine:
    """So much memory is free beside what the cache holds."""

    def __init__(self, cache: PrefixCache, free: int):
        self.cache, self.free = cache, free

    def available(self) -> int:
        return self.free - self.cache.stats().ram_held


def pressed(cache: PrefixCache, free: int, reserve: int) -> tuple[Pressure, Machine]:
    machine = Machine(cache, free)
    return Pressure(inside(cache).storage, reserve, machine.available), machine


@pytest.mark.parametrize("ssd", [True, False])
def test_it_shrinks_until_the_reserve_is_free_and_grows_back_when_there_is_more(opened, tmp_path, ssd, caplog):
    cache = opened(ssd_dir=tmp_path / "ssd" if ssd else None)
    put_prompts(cache, *range(8))
    pressure, machine = pressed(cache, cache.stats().ram_held + 1_000_000, 1_000_000)
    pressure.look()
    assert cache.stats().ram_limit == 2_000_000
    machine.free -= 300_000
    with caplog.at_level(logging.INFO, "prefixcache"):
        for _ in range(50):
            pressure.look()
            cache.flush()
            if machine.available() >= 1_000_000:
                break
        stats = cache.stats()
        assert machine.available() >= 1_000_000
        assert stats.ram_limit < 2_000_000 == stats.ram_configured
        assert ("less than memory_reserve=1.00 MB" in caplog.text) == 1
        put_prompts(cache, *range(20, 28))
        assert machine.available() >= 1_000_000
        machine.free = 10_000_000
        for _ in range(20):
            pressure.look()
        assert cache.stats().ram_limit == 2_000_000
        assert "is back at 2.00 MB" in caplog.text
    put_prompts(cache, *range(40, 48))
    assert cache.stats().ram_held > 500_000
    if ssd:
        assert all(exact(cache, prompt(seed)) for seed in range(8))
    cache.check_integrity()


def test_it_never_falls_below_a_sixteenth_and_lets_no_file_go(opened, tmp_path):
    cache = opened(ram="3200KB")
    put_prompts(cache, *range(20))
    cache.flush()
    files = len(list((tmp_path / "ssd" / "rows").rglob("*.safetensors")))
    pressure, _ = pressed(cache, 0, 1 << 40)
    for _ in range(10):
        pressure.look()
        cache.flush()
    stats = cache.stats()
    assert max(3_200_000 // LEAST, 2 * stats.ram_nodes) <= stats.ram_limit < 400_000
    assert len(list((tmp_path / "ssd" / "rows").rglob("*.safetensors"))) == files
    assert exact(cache, prompt(3))


def test_its_thread_runs_while_the_cache_is_open(opened, monkeypatch):
    monkeypatch.setattr("prefixcache.tiers.memory_pressure.PERIOD", 0.01)
    monkeypatch.setattr("prefixcache.memory.psutil.virtual_memory", lambda: type("Found", (), {"available": 0})())
    cache = opened(ssd_dir=None, memory_reserve="1GB")
    put_prompts(cache, *range(8))
    until(lambda: cache.stats().ram_limit < 300_000)
    named = {thread.name for thread in threading.enumerate()}
    assert "prefixcache-memory" in named
    cache.close()
    until(lambda: "prefixcache-memory" not in {thread.name for thread in threading.enumerate()})


def test_a_cache_that_nobody_has_any_more_is_freed(opened, monkeypatch):
    monkeypatch.setattr("prefixcache.tiers.memory_pressure.PERIOD", 0.01)
    cache = PrefixCache(ram="2MB", codec="raw")
    put_prompts(cache, 1)
    tiers = weakref.ref(inside(cache).storage)
    del cache
    gc.collect()
    assert tiers() is None
    until(lambda: "prefixcache-memory" not in {thread.name for thread in threading.enumerate()})


def test_it_never_raises_the_budget_while_memory_is_short(opened):
    cache = opened(ssd_dir=None)
    pressure, _ = pressed(cache, 0, 1 << 40)
    limits = []
    for turn in range(12):
        pressure.look()
        limits.append(cache.stats().ram_limit)
        for seed in range(turn * 30, turn * 30 + 30):
            put_prompts(cache, seed, count=1)
    assert limits == sorted(limits, reverse=True)
    assert limits[-1] <= 2_000_000 // LEAST + 20_000


def test_what_is_free_heeds_the_control_group(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_GROUPS", tmp_path)
    machine = memory.available_memory()
    assert machine > 0
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("4000000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 300000\n")
    assert memory.available_memory() == 1_300_000
    assert memory.machine_memory() == 5_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available_memory() > 1_300_000


@pytest.mark.parametrize("limited", ["system.slice/serve.service", "system.slice"])
@pytest.mark.parametrize(
    ("version", "own", "files"),
    [
        ("", "0::/system.slice/serve.service", ("memory.max", "memory.current", "inactive_file")),
        (
            "memory",
            "5:cpuset:/\n4:cpu,memory:/system.slice/serve.service\n0::/",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_the_limit_of_a_service_and_of_its_slice_is_heeded(tmp_path, monkeypatch, limited, version, own, files):
    (tmp_path / "own").write_text(own + "\n")
    monkeypatch.setattr(memory, "_OWN", tmp_path / "own")
    monkeypatch.setattr(memory, "_GROUPS", tmp_path)
    group = tmp_path / version / limited
    group.mkdir(parents=True)
    limit, usage, cached = files
    (group / limit).write_text("5000000\n")
    (group / usage).write_text("4000000\n")
    (group / "memory.stat").write_text(f"anon 1\n{cached} 300000\n")
    assert memory.machine_memory() == 5_000_000
    assert memory.available_memory() == 1_300_000


def test_on_a_mac_metals_working_set_is_asked_for_by_the_name_that_stays(monkeypatch):
    told = {mx.gpu: {"max_recommended_working_set_size": 5_000_000}}
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", told.get)
    monkeypatch.delattr(mx.metal, "device_info")  # it says at each call that it will go
    assert usable_memory() == 5_000_000


# -- odd tokens and clocks --------------------------------------------------------------------------------------------


def test_token_ids_of_any_size_come_back_after_a_restart(opened):
    tokens = [2**32 + i for i in range(300)] + [-(2**63) + i for i in range(200)] + [2**63 - 1 - i for i in range(100)]
    cache = opened()
    cache.store(tokens, states.sliceable(tokens), model="m")
    cache.close()
    again = opened()
    assert again.promote(tokens, model="m").result(20) == 600
    states.check(again.fetch(tokens, model="m", leave=0)[0], tokens)
    assert again.match([t & 0xFFFFFFFF for t in tokens], model="m").ssd == 0


def test_a_clock_that_goes_backwards_costs_nothing(opened, monkeypatch):
    now = [2e9]
    monkeypatch.setattr("time.time", lambda: now[0])
    monkeypatch.setattr("time.time_ns", lambda: int(now[0] * 1e9))
    cache = opened(ram="300KB", ssd="1MB")
    for seed in range(40):
        now[0] -= 86_400.0
        put_prompts(cache, seed)
        assert exact(cache, prompt(seed))
    assert cache.flush()
    cache.check_integrity()
    cache.close()
    now[0] = -1e9  # before 1970
    again = opened(ram="300KB", ssd="1MB")
    assert again.stats().ssd.files > 0
    assert exact(again, prompt(39))
    put_prompts(again, 77)
    again.flush()
    states.check_integrity(again)
