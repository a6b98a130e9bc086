"""A salt for each session: what holds nothing any more is nowhere, and takes no room from what is kept."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixcache import PrefixCache
from tests.inside import directory_of, inside
from tests.models import states
from tests.models.states import prompt
from tools.faults.evidence import du

LIMIT = 1_300_000
SESSIONS = 140


def open_on(root: Path, codec: str) -> PrefixCache:
    """Open a cache that waits for a slow disk, so that which images it keeps doesn't depend on it."""
    return PrefixCache(ram="1MB", ssd_dir=root, ssd=LIMIT, codec=codec, memory_reserve=0, spill="wait", spill_wait=60)


def store(cache: PrefixCache, session: int, salt: bytes, codec: str) -> None:
    tokens = prompt(session, 300)
    made = states.sliceable(tokens, 1) if codec == "raw" else states.uneven(tokens, 1)
    cache.store(tokens, made, model="m", salt=salt)


def namespaces(root: Path) -> tuple[int, int]:
    """In the index: all, and those that have an image."""
    with contextlib.closing(sqlite3.connect(f"file:{root}/index.db?mode=ro", uri=True)) as index:
        (all_,) = index.execute("SELECT count(*) FROM namespace").fetchone()
        (used,) = index.execute("SELECT count(DISTINCT namespace) FROM image").fetchone()
        return all_, used


def kept(cache: PrefixCache) -> int:
    stats = cache.stats().ssd
    assert stats is not None
    return stats.files


def sessions(cache: PrefixCache, root: Path, codec: str, salted: bool) -> Iterator[None]:
    """Stores, and a pause after each twentieth when all is on the disk."""
    for session in range(SESSIONS):
        store(cache, session, b"session %d" % session if salted else b"", codec)
        if session % 20 == 19:
            assert cache.flush(30)
            assert du(root) <= LIMIT
            yield


@pytest.mark.parametrize("codec", ["raw", "turboquant:4"])
def test_sessions_with_a_salt_each_leave_nothing_behind_but_their_images(tmp_path, codec):
    root = tmp_path / "ssd"
    with open_on(root, codec) as cache:
        for _ in sessions(cache, root, codec, salted=True):
            in_index, used = namespaces(root)
            assert in_index == used
            assert os.stat(root / "index.db-wal").st_size <= directory_of(inside(cache).ssd).ledger.log_allowance
        assert used < SESSIONS / 2  # most sessions' images have left
        states.check_integrity(cache)
    with open_on(root, codec) as cache:
        assert kept(cache) >= used / 2
        states.check_integrity(cache)


def test_sessions_with_a_salt_each_keep_nearly_as_many_images_as_with_one(tmp_path):
    counts = {}
    for salted in (False, True):
        root = tmp_path / str(salted)
        with open_on(root, "raw") as cache:
            for _ in sessions(cache, root, "raw", salted):
                assert kept(cache) > 0
            counts[salted] = kept(cache)
    assert counts[True] > 0.9 * counts[False], counts  # a namespace's row is a twentieth of an image


def test_an_index_with_a_namespace_that_has_no_image_is_rebuilt(tmp_path):
    root = tmp_path / "ssd"
    with open_on(root, "raw") as cache:
        store(cache, 1, b"", "raw")
    index = sqlite3.connect(root / "index.db")
    with contextlib.closing(index), index:
        index.execute(
            "INSERT INTO namespace (root, model, codec, layout, created) "
            "SELECT zeroblob(32), model, codec, layout, created FROM namespace"
        )
    assert namespaces(root) == (2, 1)
    with open_on(root, "raw") as cache:
        states.check_integrity(cache)
        assert kept(cache) == 2
    assert namespaces(root) == (1, 1)
