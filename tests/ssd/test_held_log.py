"""Somebody reads the index in a transaction that does not end: its log can't be cut. Nobody waits, the limit holds."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixcache import PrefixCache
from prefixcache.ssd import queue
from prefixcache.ssd.errors import LogHeld
from tests.models import states
from tools.faults.evidence import du

from .images import SPACE, chain, make, path_of, until

READER = """
import sqlite3, sys
reader = sqlite3.connect(f"file:{sys.argv[1]}/index.db?mode=ro", uri=True, isolation_level=None)
reader.execute("BEGIN")
reader.execute("SELECT count(*) FROM image").fetchone()
print("reading", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(queue, "FIRST_DELAY", 0.02)
    monkeypatch.setattr(queue, "LONGEST_DELAY", 0.1)


@contextlib.contextmanager
def held(root: Path) -> Iterator[None]:
    """Another process reads, and does not end its transaction until the block ends."""
    with subprocess.Popen(
        [sys.executable, "-c", READER, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "reading\n"
        try:
            yield
        finally:
            reader.communicate()


def put(cache: PrefixCache, seed: int) -> None:
    tokens = [(seed * 7919 + i * 13) % 50_000 for i in range(600)]
    cache.store(tokens, states.sliceable(tokens), model="m")


def test_the_limit_holds_while_an_index_is_read_without_an_end_and_writing_goes_on_afterwards(root, monkeypatch):
    asked: list[str] = []  # how long SQLite may wait for locks, whenever it copies its log
    limit = 3_000_000
    with PrefixCache(ram="1MB", ssd_dir=root, ssd=limit, codec="raw", memory_reserve=0) as cache:
        index = cache._ssd._store.index
        original = type(index).checkpoint

        def checkpoint(index) -> bool:
            seen = []
            index._connection.set_trace_callback(seen.append)
            done = original(index)
            index._connection.set_trace_callback(None)
            asked.extend(seen)
            return done

        monkeypatch.setattr(type(index), "checkpoint", checkpoint)
        for seed in range(20):
            put(cache, seed)
        assert cache.flush(30)
        with held(root):
            for seed in range(100, 160):
                put(cache, seed)
                cache.flush(0.05)
                assert du(root) <= limit
            assert "fuser" in cache.stats().ssd.last_error
            assert cache.stats().images_on_ssd > 0
        until(lambda: cache.flush(5))
        for seed in range(200, 220):
            put(cache, seed)
        assert cache.flush(30)
        assert du(root) <= limit
        cache._ssd.check_integrity()
    assert [text for text in asked if "checkpoint" in text]
    for at, text in enumerate(asked):
        assert "checkpoint" not in text or asked[at - 1] == "PRAGMA busy_timeout = 0"


def test_a_log_that_can_t_be_cut_grows_within_its_allowance_and_is_cut_afterwards(opened, root):
    ssd = opened(limit=8 << 20)
    allowance = ssd._store.ledger.log_allowance
    with held(root):
        stored = 0
        for entry, image in chain(200):
            if not (ssd.write(entry, SPACE, image) and ssd.flush(5)):
                break
            stored += 1
            assert ssd._store.ledger.held().real == du(root)
            assert sum(path.stat().st_blocks * 512 for path in root.glob("index.db-*")) <= allowance
        assert "fuser" in ssd.stats().last_error
        assert 10 < stored < 200
        assert (root / "index.db-wal").stat().st_size > allowance / 2
        before = time.monotonic()
        for entry, image in chain(50, first=500):
            ssd.write(entry, SPACE, image)
        assert time.monotonic() - before < 1  # no write waits for the reader
    until(lambda: ssd.flush(5))
    ssd.put(make(999))
    assert (root / "index.db-wal").stat().st_size <= ssd._store.ledger.log_at_rest
    ssd.check_integrity()


def test_a_log_that_has_no_room_to_grow_fails_the_writes_and_deletes_the_files_all_the_same(opened, root):
    ssd = opened(limit=1 << 20)
    stored = ssd.put(*chain(40))
    with held(root):
        failed = None
        for seed in range(1000, 1200):
            entry, image = make(seed)
            if ssd.write(entry, SPACE, image):
                ssd.flush(5)
            failed = next((error for _, error in ssd.reports if error is not None), None)
            if failed is not None:
                break
            assert du(root) <= 1 << 20
        assert isinstance(failed, LogHeld)
        before = du(root)
        ssd.delete(stored)
        assert not ssd.flush(5)
        until(lambda: not any(path_of(root, entry).exists() for entry in stored))
        assert du(root) < before
        assert ssd._store.ledger.held().deleting == 0
    until(lambda: ssd.flush(5))
    ssd.check_integrity()
    ssd.put(make(2000))
    ssd.check_integrity()


def test_a_closing_beside_a_reader_ends_and_the_next_opening_finds_all(opened, root):
    ssd = opened()
    stored = ssd.put(*chain(30))
    with held(root):
        ssd.delete(stored[20:])
        assert ssd.flush(10)
        ssd.close()
        again = opened()
        assert {entry.key for entry in again.entries()} == {entry.key for entry in stored[:20]}
        again.put(make(500))
        again.close()
    last = opened()
    assert last.stats().files == 21
    last.check_integrity()


def test_the_rows_of_files_that_left_first_are_forgotten_by_the_next_opening(opened, root, monkeypatch):
    ssd = opened()
    stored = ssd.put(*chain(4))

    @contextlib.contextmanager
    def full():
        raise sqlite3.OperationalError("database or disk is full")
        yield

    monkeypatch.setattr(ssd._store.index, "transaction", full)
    ssd.delete(stored[2:])
    assert not ssd.flush(5)
    ssd.close(1)
    again = opened()
    assert {entry.key for entry in again.entries()} == {entry.key for entry in stored[:2]}
    again.check_integrity()
