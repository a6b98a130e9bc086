"""spill="through": what is whole is on its way to the SSD when `store` returns, so a kill -9 takes tails alone."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prefixcache import PrefixCache
from prefixcache.ssd import queue
from tests.inside import inside, queue_of
from tests.models import states
from tests.models.states import prompt, put
from tests.waiting import until

ROOT = Path(__file__).parents[2]


CACHE = {"ram": "40MB", "ssd": "40MB", "spill": "through", "memory_reserve": 0}


def written(cache: PrefixCache) -> None:
    """Wait until nothing is on its way to the SSD, as `stats()` tells it, and without asking for anything."""
    until(
        lambda: (
            (s := cache.stats()).ram_queued == 0
            and s.ssd.queued_bytes == 0
            and not inside(cache).storage.spilling._backlog
        )
    )


def on_ssd(cache: PrefixCache, tokens: list[int]) -> int:
    """How deep the SSD has a prompt, once RAM is empty."""
    return cache.promote(tokens, model="m").result(20)


CHILD = """
import sys, time
from prefixcache import PrefixCache
from tests.models import states
from tests.cache.test_write_through import written
from tests.models.states import prompt, put
cache = PrefixCache(ssd_dir=sys.argv[1], ram="40MB", ssd="40MB", codec="raw", spill=sys.argv[2], memory_reserve=0)
for seed, count in ((1, 600), (2, 1000), (3, 512), (4, 100)):
    put(cache, prompt(seed, count), states.hybrid if seed == 3 else states.sliceable)
written(cache)
print("durable", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(("spill", "depths"), [("through", [512, 768, 512, 0]), ("drop", [0, 0, 0, 0])])
def test_after_a_kill_9_whole_blocks_are_there(tmp_path, spill, depths):
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, tmp_path / "ssd", spill],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "durable\n"
    child.send_signal(signal.SIGKILL)
    assert child.wait(20) == -signal.SIGKILL
    child.stdout.close()
    with PrefixCache(ssd_dir=tmp_path / "ssd", ram="40MB", ssd="40MB", codec="raw") as cache:
        states.check_integrity(cache)
        for seed, depth in zip((1, 2, 3, 4), depths, strict=True):
            tokens = prompt(seed, 1000)
            assert cache.match(tokens, model="m").ssd == depth
            if depth:
                assert on_ssd(cache, tokens) == depth
                made, rest = cache.fetch(tokens, model="m")
                assert len(rest) == 1000 - depth
                states.check(made, tokens[:depth])


def test_a_tail_is_written_when_it_is_evicted_and_not_before(opened):
    cache = opened()
    tokens = prompt(1, 700)
    for length in range(520, 700, 20):  # a conversation that grows
        put(cache, tokens[:length])
    written(cache)
    stats = cache.stats()
    assert stats.ssd.written_files == stats.images_on_ssd == 2
    assert stats.images_in_ram == 3
    cache.trim_to(0)
    assert cache.match(tokens, model="m").ssd == 680
    cache.check_integrity()


def test_what_is_evicted_is_on_the_ssd_already(opened):
    cache = opened(ram="2MB", spill_queue="1MB")
    for seed in range(30):
        put(cache, prompt(seed, 1024))
        written(cache)
    assert cache.stats().counters.evicted
    assert cache.stats().counters.dropped == 0
    assert cache.stats().ssd.written_files == 30 * 4
    assert all(cache.match(prompt(seed, 1024), model="m").ssd == 1024 for seed in range(30))


def test_more_than_the_queue_takes_is_written_all_the_same(opened):
    cache = opened(spill_queue="100KB")
    for seed in range(8):
        put(cache, prompt(seed, 4096))
        image = cache.stats().ram_images // cache.stats().images_in_ram
        assert cache.stats().ram_queued <= 100_000 + image  # one is written and not yet reported
    written(cache)
    assert cache.stats().images_on_ssd == 8 * 16
    cache.check_integrity()


def test_windows_go_with_their_blocks_and_a_state_with_the_tail_that_it_needs(opened):
    cache = opened()
    put(cache, prompt(1, 600), states.windowed)
    put(cache, prompt(2, 600), states.hybrid)
    written(cache)
    cache.trim_to(0)  # tails and their windows are written now
    before = cache.stats().ssd.written_files
    assert on_ssd(cache, prompt(1, 600)) == 600
    assert on_ssd(cache, prompt(2, 600)) == 600
    assert cache.stats().ssd.written_files == before
    cache.check_integrity()


def test_a_disk_that_failed_gets_what_it_missed_with_the_next_store(opened, monkeypatch):
    monkeypatch.setattr(queue, "FIRST_DELAY", 0.02)
    monkeypatch.setattr(queue, "LONGEST_DELAY", 0.1)
    cache = opened()
    with monkeypatch.context() as patch:

        def fail(*args: Any) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        patch.setattr(os, "write", fail)
        for seed in range(5):
            put(cache, prompt(seed, 512))
        until(lambda: cache.stats().ssd.errors)
    until(lambda: inside(cache).ssd.has_room(1))
    put(cache, prompt(9, 512))
    written(cache)
    assert cache.stats().images_on_ssd == 6 * 2
    cache.check_integrity()


def test_images_that_left_a_failing_disk_s_queue_are_not_remembered_for_ever(opened, monkeypatch):
    monkeypatch.setattr(queue, "FIRST_DELAY", 60.0)
    cache = opened(ram="300KB")
    monkeypatch.setattr(os, "write", lambda *args: (_ for _ in ()).throw(OSError(errno.EIO, "broken")))
    queue_of(inside(cache).ssd)._delay = 60.0
    for seed in range(40):
        put(cache, prompt(seed, 512))
    assert len(inside(cache).storage.spilling._backlog) <= 2 * len(inside(cache).storage.graph.slots) + 1
    cache.check_integrity()
    monkeypatch.undo()


def test_a_directory_that_vanished_is_written_anew(opened, tmp_path):
    cache = opened()
    put(cache, prompt(1, 512))
    written(cache)
    shutil.rmtree(tmp_path / "ssd")
    put(cache, prompt(2, 512))
    until(lambda: cache.stats().images_on_ssd == 4)
    written(cache)
    assert cache.flush(5)
    states.check_integrity(cache)


def test_a_cleared_cache_writes_nothing_more(opened):
    cache = opened(spill_queue="20KB")
    for seed in range(8):
        put(cache, prompt(seed, 4096))
    cache.clear()
    assert cache.flush(20)
    assert cache.stats().images_on_ssd == 0
    cache.check_integrity()


def test_with_admission_at_second_sight_it_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r'spill="through" with ssd_admission="second".*choose one'):
        PrefixCache(ssd_dir=tmp_path, spill="through", ssd_admission="second")


def test_without_an_ssd_it_changes_nothing():
    with PrefixCache(ram="1MB", codec="raw", spill="through") as cache:
        put(cache, prompt(1, 512))
        assert cache.match(prompt(1, 512), model="m").ram == 512
        assert not inside(cache).storage.spilling._backlog
