"""A disk that fails: the cache is told, the writer goes on by itself, nothing is left lying about."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
import sys

import pytest

from prefixcache.ssd import queue
from tests.inside import directory_of, queue_of
from tests.waiting import until

from .images import SPACE, chain, full, make, path_of

pytestmark = pytest.mark.usefixtures("impatient")


@contextlib.contextmanager
def failing(monkeypatch, call, number, when=lambda *args: True):
    original = getattr(os, call)

    def fail(*args, **more):
        if when(*args):
            raise OSError(number, os.strerror(number))
        return original(*args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        yield


def writing(*args):
    return len(args) > 1 and isinstance(args[1], int) and bool(args[1] & os.O_CREAT)


FAULTS = [
    ("write", errno.ENOSPC, lambda *args: True),
    ("fsync", errno.EIO, lambda *args: True),
    ("open", errno.ENOSPC, writing),
    ("open", errno.EMFILE, writing),
    ("rename", errno.EIO, lambda *args: True),
    ("mkdir", errno.EDQUOT, lambda *args: True),
]


@pytest.mark.parametrize(("call", "number", "when"), FAULTS, ids=lambda value: str(value)[:12])
def test_a_failing_disk_is_reported_and_outlived(ssd, root, monkeypatch, call, number, when):
    pairs = chain(12)
    ssd.put(*pairs[:3])
    with failing(monkeypatch, call, number, when):
        for entry, image in pairs[3:9]:
            assert ssd.write(entry, SPACE, image) or ssd.stats().errors
        until(lambda: ssd.stats().errors)
        assert not ssd.flush(5)
    failed = {entry.key for entry, error in ssd.reports if isinstance(error, OSError)}
    assert failed
    assert os.strerror(number) in ssd.stats().last_error
    until(lambda: ssd.write(pairs[11][0], SPACE, pairs[11][1]))
    until(lambda: ssd.flush(5))
    assert list((root / "tmp").iterdir()) == []
    assert ssd.holds(*pairs[11])
    ssd.check_integrity()
    for entry, image in pairs[3:9]:
        if entry.key in failed:
            assert not path_of(root, entry).exists()
            assert ssd.write(entry, SPACE, image)
    assert ssd.flush(10)
    assert all(ssd.holds(entry, image) for entry, image in pairs[:3])


def test_while_the_disk_fails_writes_are_refused_at_once(ssd, monkeypatch):
    monkeypatch.setattr(queue, "FIRST_DELAY", 60.0)
    queue_of(ssd)._delay = 60.0
    with failing(monkeypatch, "write", errno.ENOSPC):
        ssd.write(make(1)[0], SPACE, make(1)[1])
        until(lambda: ssd.reports)
        until(lambda: ssd.stats().errors)
    assert not ssd.write(make(2)[0], SPACE, make(2)[1])
    assert ssd.stats().queued_bytes == 0
    ssd.flush(5)  # a flush tries at once
    assert ssd.write(make(2)[0], SPACE, make(2)[1])
    assert ssd.flush(5)


def test_what_waits_behind_a_failure_is_reported_too(ssd, monkeypatch):
    monkeypatch.setattr(queue, "BATCH_FILES", 2)
    with failing(monkeypatch, "fsync", errno.EIO):
        pairs = chain(10)
        taken = [pair for pair in pairs if ssd.write(pair[0], SPACE, pair[1])]
        until(lambda: len(ssd.reports) == len(taken))
    assert all(error is not None for _, error in ssd.reports)
    assert ssd.stats().queued_bytes == 0


def test_an_index_that_can_t_commit_fails_the_writes_and_keeps_no_file_that_was_deleted(ssd, root, monkeypatch):
    stored = ssd.put(*chain(3))
    index = directory_of(ssd).index
    with monkeypatch.context() as patch:
        patch.setattr(index, "transaction", full)
        ssd.write(make(9)[0], SPACE, make(9)[1])
        ssd.delete(stored[:1])
        assert not ssd.flush(5)
        assert not path_of(root, stored[0]).exists()  # that takes no room
        assert ssd.stats().files == 2
        assert directory_of(ssd).ledger.held().file_bytes == sum(entry.disk for entry in stored[1:])
    until(lambda: ssd.flush(5))
    assert not path_of(root, stored[0]).exists()
    assert not path_of(root, make(9)[0]).exists()
    ssd.check_integrity()
    assert ssd.stats().files == 2


def test_a_flush_on_a_dead_disk_comes_back(ssd, monkeypatch):
    stored = ssd.put(make(1))
    with failing(monkeypatch, "write", errno.EIO), failing(monkeypatch, "fsync", errno.EIO):
        ssd.write(make(2)[0], SPACE, make(2)[1])
        assert not ssd.flush(None)
        ssd.delete(stored)
        assert not ssd.flush(None)
    until(lambda: ssd.flush(5))
    ssd.check_integrity()


def test_a_close_on_a_dead_disk_comes_back_and_the_next_opening_repairs(open_tier, monkeypatch):
    ssd = open_tier()
    pairs = chain(4)
    ssd.put(*pairs[:2])
    with failing(monkeypatch, "write", errno.EIO):
        for entry, image in pairs[2:]:
            ssd.write(entry, SPACE, image)
        ssd.close(1)
    again = open_tier()
    assert again.stats().files == 2
    again.check_integrity()


def test_a_file_that_can_t_be_deleted_stays_in_the_account_until_it_can(ssd, root, monkeypatch):
    stored = ssd.put(*chain(2))
    with failing(monkeypatch, "unlink", errno.EIO):
        ssd.delete(stored[:1])
        ssd.flush(5)
        assert ssd.stats().disk >= sum(entry.disk for entry in stored)
    ssd.touch([("rows", stored[1].key, 3, 1)])
    ssd.delete([make(50)[0]])
    until(lambda: ssd.flush(5))
    ssd.check_integrity()


def test_a_file_that_can_never_be_deleted_keeps_no_other_from_being_written(ssd, root, monkeypatch):
    stored = ssd.put(*chain(2))
    locked = str(path_of(root, stored[1]))
    with failing(monkeypatch, "unlink", errno.EPERM, lambda path, *more: str(path) == locked):
        ssd.delete(stored[1:])
        assert ssd.flush(5)
        ssd.touch([("rows", stored[0].key, 3, 1)])
        assert ssd.flush(5)
        ssd.put(make(50))
        assert ssd.stats().errors == 0
        assert ssd.stats().disk >= sum(entry.disk for entry in stored)


def test_an_image_that_is_written_where_a_deleted_file_had_stayed_is_kept(ssd, root, monkeypatch):
    pairs = chain(2)
    stored = ssd.put(*pairs)
    with failing(monkeypatch, "unlink", errno.EPERM):
        ssd.delete(stored[1:])
        assert ssd.flush(5)
    ssd.put(pairs[1])
    ssd.touch([("rows", stored[0].key, 3, 1)])
    assert ssd.flush(5)
    assert ssd.holds(*pairs[1])
    ssd.check_integrity()


def test_a_directory_that_vanished_is_recreated(ssd, root):
    stored = ssd.put(*chain(3))
    shutil.rmtree(root)
    for seed in (10, 11):
        until(lambda seed=seed: ssd.write(make(seed)[0], SPACE, make(seed)[1]))
        until(lambda: ssd.flush(5))
        assert ssd.holds(*make(seed))
    assert ssd.read(stored[0]).exception(10)
    ssd.flush(10)
    ssd.check_integrity()
    assert ssd.stats().files == 2


def test_an_index_that_sqlite_finds_damaged_is_rebuilt_from_the_files_while_it_runs(
    open_tier, root, monkeypatch, caplog
):
    there: list[tuple[list, list]] = []
    ssd = open_tier(reopened=lambda *contents: there.append(contents))
    stored = ssd.put(*chain(5))
    index = directory_of(ssd).index._connection
    (page,) = index.execute("SELECT rootpage FROM sqlite_master WHERE name = 'image_by_key'").fetchone()
    directory_of(ssd).index.checkpoint()
    index.execute("PRAGMA shrink_memory")
    # By another process: a descriptor of this one that is closed would drop SQLite's locks.
    script = f"f = open({str(root / 'index.db')!r}, 'r+b'); f.seek({(page - 1) * 4096}); f.write(b'\\xff' * 4096)"
    subprocess.run([sys.executable, "-c", script], check=True)
    until(lambda: ssd.write(*pair(make(9))) and ssd.flush(5))
    ((namespaces, entries),) = there
    assert [namespace.stated for namespace in namespaces] == [SPACE.stated]
    assert {entry.address for entry in entries} == {entry.address for entry in stored}
    assert "the index was damaged; it was rebuilt" in caplog.text
    assert all(ssd.read(entry).result(10) for entry in stored)
    ssd.check_integrity()
    assert ssd.stats().files == 6


def pair(made):
    entry, image = made
    return entry, SPACE, image


def test_a_folder_that_vanished_is_made_again(ssd, root):
    stored = ssd.put(*chain(5))
    shutil.rmtree(root / "rows")
    for seed in range(20, 30):
        ssd.write(make(seed)[0], SPACE, make(seed)[1])
    until(lambda: ssd.stats().errors or ssd.flush(1))
    until(lambda: ssd.write(make(31)[0], SPACE, make(31)[1]))
    until(lambda: ssd.flush(5))
    assert ssd.holds(*make(31))
    for entry in stored:
        assert ssd.read(entry).exception(10)
    until(lambda: ssd.flush(5))
    ssd.check_integrity()
