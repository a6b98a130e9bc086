"""Somebody reads the index in a transaction that does not end: its log can't be cut. Nobody waits, the limit holds."""

import time

import pytest

from prefixcache.ssd.errors import LogHeld
from tests.inside import directory_of
from tests.waiting import until
from tools.faults.evidence import du

from .images import SPACE, chain, full, make, path_of, while_read

pytestmark = pytest.mark.usefixtures("impatient")


def test_a_log_that_can_t_be_cut_grows_within_its_allowance_and_is_cut_afterwards(open_tier, root):
    ssd = open_tier(limit=8 << 20)
    allowance = directory_of(ssd).ledger.log_allowance
    with while_read(root):
        stored = 0
        for entry, image in chain(200):
            if not (ssd.write(entry, SPACE, image) and ssd.flush(5)):
                break
            stored += 1
            assert ssd.stats().disk == du(root)
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
    assert (root / "index.db-wal").stat().st_size <= directory_of(ssd).ledger.checkpoint_above
    ssd.check_integrity()


def test_a_log_that_has_no_room_to_grow_fails_the_writes_and_deletes_the_files_all_the_same(open_tier, root):
    ssd = open_tier(limit=1 << 20)
    stored = ssd.put(*chain(40))
    with while_read(root):
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
        assert directory_of(ssd).ledger.held().deleting == 0
    until(lambda: ssd.flush(5))
    ssd.check_integrity()
    ssd.put(make(2000))
    ssd.check_integrity()


def test_a_closing_beside_a_reader_ends_and_the_next_opening_finds_all(open_tier, root):
    ssd = open_tier()
    stored = ssd.put(*chain(30))
    with while_read(root):
        ssd.delete(stored[20:])
        assert ssd.flush(10)
        ssd.close()
        again = open_tier()
        assert {entry.key for entry in again.entries()} == {entry.key for entry in stored[:20]}
        again.put(make(500))
        again.close()
    last = open_tier()
    assert last.stats().files == 21
    last.check_integrity()


def test_the_rows_of_files_that_left_first_are_forgotten_by_the_next_opening(open_tier, root, monkeypatch):
    ssd = open_tier()
    stored = ssd.put(*chain(4))
    monkeypatch.setattr(directory_of(ssd).index, "transaction", full)
    ssd.delete(stored[2:])
    assert not ssd.flush(5)
    ssd.close(1)
    again = open_tier()
    assert {entry.key for entry in again.entries()} == {entry.key for entry in stored[:2]}
    again.check_integrity()
