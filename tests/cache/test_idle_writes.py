"""What RAM alone has is written while nobody asks: whole blocks, once, within a number of bytes a day."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixcache import PrefixCache
from prefixcache.ssd import ledger
from prefixcache.tiers.idle import DAY, LOOKS, Idle
from tests.cache.test_write_through import put, written
from tests.inside import inside
from tests.models import states
from tests.models.states import prompt
from tests.servers.serving import ask, save_model, serving, text, wait_for
from tests.waiting import until

ROOT = Path(__file__).parents[2]
CACHE = {"ram": "40MB", "ssd": "40MB", "memory_reserve": 0, "spill_idle": "auto"}


class Clock:
    def __init__(self) -> None:
        self.now = 1000 * DAY

    def __call__(self) -> float:
        return self.now


def quiet(cache: PrefixCache) -> Idle:
    """The cache's idle writes, by hand."""
    inside(cache).idle.stop()
    return Idle(inside(cache).storage, Clock())


def rest(cache: PrefixCache, idle: Idle) -> None:
    """Nobody asks until nothing more is written."""
    for _ in range(LOOKS + 1):
        idle.look()
    while cache.stats().ram_queued:
        written(cache)
        idle.look()


CHILD = """
import sys, time
from prefixcache import PrefixCache
from tests.models import states
from tests.models.states import prompt
from tests.waiting import until
from tests.cache.test_write_through import put, written
cache = PrefixCache(ssd_dir=sys.argv[1], ram="40MB", ssd="400MB", codec="raw", memory_reserve=0)
for seed in range(16):
    put(cache, prompt(seed, 600), states.hybrid if seed == 3 else states.sliceable)
until(lambda: cache.stats().images_on_ssd >= 16 * 2, 60)
written(cache)
print("durable", flush=True)
time.sleep(600)
"""


def test_a_kill_9_of_an_idle_cache_loses_tails_alone(tmp_path):
    """With the defaults, and its own thread."""
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, tmp_path / "ssd"],
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
    with PrefixCache(ssd_dir=tmp_path / "ssd", ram="40MB", ssd="400MB", codec="raw") as cache:
        states.check_integrity(cache)
        for seed in range(16):
            tokens = prompt(seed, 1000)
            depth = cache.promote(tokens, model="m").result(20)
            assert depth == (600 if seed == 3 else 512)
            states.check(cache.fetch(tokens, model="m")[0], tokens[:depth])


def test_nothing_is_written_before_nobody_has_asked_for_a_while(opened):
    cache = opened()
    idle = quiet(cache)
    for seed in range(2 * LOOKS):
        put(cache, prompt(seed, 512))
        idle.look()
        cache.fetch(prompt(seed, 512), model="m")
        for _ in range(LOOKS):
            idle.look()
    assert cache.stats().counters.idle_bytes == 0
    idle.look()
    assert cache.stats().counters.idle_bytes > 0


def test_whole_blocks_are_written_once_and_tails_are_not(opened):
    cache = opened()
    idle = quiet(cache)
    tokens = prompt(1, 1000)
    for length in (600, 700, 800):
        put(cache, tokens[:length])
        rest(cache, idle)
    stats = cache.stats()
    assert stats.ssd.written_files == stats.images_on_ssd == 3
    assert stats.images_in_ram == 4
    assert stats.counters.idle_bytes == stats.ssd.written_bytes
    cache.trim_to(0)
    assert cache.stats().ssd.written_files == 4  # the tail
    cache.check_integrity()


def test_no_more_than_its_bytes_are_written_in_a_day(opened):
    cache = opened(spill_idle="100KB")
    idle = quiet(cache)
    for seed in range(10):
        put(cache, prompt(seed, 2048))
    sizes = {slot.nbytes for slot in inside(cache).storage.graph.orders[0]}
    rest(cache, idle)
    first = cache.stats().counters.idle_bytes
    assert 100_000 - max(sizes) < first <= 100_000
    rest(cache, idle)
    assert cache.stats().counters.idle_bytes == first
    idle._clock.now += DAY
    rest(cache, idle)
    assert first < cache.stats().counters.idle_bytes <= 200_000
    cache.check_integrity()


def test_the_most_recent_prompt_is_written_first(opened):
    cache = opened(spill_idle="80KB")
    idle = quiet(cache)
    for seed in range(3):
        put(cache, prompt(seed, 512))
    cache.fetch(prompt(0, 513), model="m")
    rest(cache, idle)
    blocks = {slot.node.tokens for slot in inside(cache).storage.graph.slots.values() if slot.is_in(1)}
    assert blocks == {np.array(prompt(0, 512)[at : at + 256], "<i8").tobytes() for at in (0, 256)}


def test_it_keeps_the_queue_free_for_what_is_evicted(opened):
    cache = opened(ram="2MB")
    idle = quiet(cache)
    for seed in range(3):
        put(cache, prompt(seed, 4096))
    written(cache)
    before = cache.stats().ram_queued
    idle.write()
    assert cache.stats().ram_queued - before <= 2_000_000 // 8
    assert cache.flush(30)


def test_what_the_ssd_admits_at_second_sight_only_is_left_out(opened):
    cache = opened(ssd_admission="second")
    idle = quiet(cache)
    put(cache, prompt(1, 512))
    put(cache, prompt(2, 512))
    cache.fetch(prompt(2, 513), model="m")
    rest(cache, idle)
    assert cache.stats().images_on_ssd == 2
    cache.trim_to(0)


@pytest.mark.parametrize("values", [{"spill_idle": 0}, {"spill_on_close": False}])
def test_nothing_is_written_where_it_is_not_wanted(opened, values):
    cache = opened(**values)
    put(cache, prompt(1, 512))
    idle = quiet(cache)
    rest(cache, idle)
    assert cache.stats().ssd.written_files == 0


def test_a_disk_that_was_full_gets_it_when_there_is_room(opened, monkeypatch):
    monkeypatch.setattr(ledger, "FULL_HOLD_SECONDS", 2.0)
    cache = opened()
    idle = quiet(cache)
    put(cache, prompt(1, 512))

    def fail(*args: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fail)
        rest(cache, idle)
        until(lambda: cache.stats().ssd.errors)
        rest(cache, idle)
    until(lambda: inside(cache).ssd.has_room(1))
    until(lambda: rest(cache, idle) or cache.stats().images_on_ssd == 2)
    cache.check_integrity()


def test_a_rest_that_found_nothing_to_write_is_not_looked_through_again(opened, monkeypatch):
    cache = opened()
    idle = quiet(cache)
    put(cache, prompt(1, 600))
    rest(cache, idle)
    rest(cache, idle)
    looked = []
    monkeypatch.setattr(idle, "write", lambda: looked.append(1) or 0)
    for _ in range(10):
        idle.look()
    assert not looked


def test_a_server_that_is_killed_after_16_answers_and_a_rest_has_their_whole_blocks(tmp_path):
    model = save_model(tmp_path / "model")
    flags = ["--model", model, "--ssd-dir", tmp_path / "ssd", "--ssd", "100MB"]
    questions = [[{"role": "user", "content": text(600, f"word{number}")}] for number in range(16)]
    with serving(tmp_path / "first.log", *flags) as server:
        for question in questions:
            ask(server, question)
        written = "prefixcache_ssd_written_files_total"
        wait_for(lambda: server.metrics()[written] >= 2 * len(questions), "whole blocks to be written", server.log)
        wait_for(lambda: server.metrics()["prefixcache_ssd_queued_bytes"] == 0, "the queue to be empty", server.log)
        server.process.kill()
        server.process.wait(20)
    with serving(tmp_path / "second.log", *flags) as server:
        for question in questions:
            answer = ask(server, question)
            assert answer.cached >= answer.prompt // 256 * 256 - 256
            assert answer.cached >= 256


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
@pytest.mark.parametrize("how", ["flush", "idle"])
def test_what_was_written_keeps_its_place_in_the_order_of_eviction(opened, policy, how):
    cache = opened(ram="600KB", policy=policy)
    idle = quiet(cache)
    for seed in range(20):
        put(cache, prompt(seed, 512))
        if how == "flush":
            assert cache.flush(30)
        else:
            rest(cache, idle)
    here = [cache.match(prompt(seed, 512), model="m").ram == 512 for seed in range(20)]
    assert here == sorted(here)  # the last stored
    assert 4 <= sum(here) < 20
