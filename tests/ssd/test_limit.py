"""The limit holds on the real disk at every moment, and the account is what `du` says."""

from __future__ import annotations

import os
import random

import pytest

from prefixcache.ssd import Ssd, clear, queue, reconcile, survey
from prefixcache.store_fetch_remove.prune_directory import prune
from prefixcache.store_fetch_remove.selection import Selection
from tools.faults.evidence import du

from .images import SPACE, chain, make


@pytest.mark.parametrize(("limit", "size"), [(1 << 20, 3000), (3 << 20, 30_000), (12 << 20, 200_000)])
def test_the_disk_never_holds_more_than_the_limit(open_tier, root, monkeypatch, limit, size):
    peaks = [0]
    for name in ("fsync", "rename", "unlink", "close"):
        original = getattr(os, name)

        def watched(*args, original=original, **more):
            result = original(*args, **more)
            if random.random() < 0.4:
                peaks.append(du(root))
            return result

        monkeypatch.setattr(os, name, watched)
    # One file at a time: a `du` that runs beside other threads counts what is never there at once.
    monkeypatch.setattr("prefixcache.ssd.writer.SYNCERS", 1)
    ssd = open_tier(limit=limit)
    chance = random.Random(1)
    waiting: dict[bytes, object] = {}
    evicted = 0
    for number in range(150):
        entry, image = make(number, size=chance.randrange(size // 2, size))
        while ssd.used + ssd.footprint(image.nbytes) > limit:
            stored = {e.key: e for e, error in ssd.reports if error is None}
            oldest = next((key for key in waiting if key in stored), None)
            if oldest is None:
                assert ssd.flush(10)
                continue
            ssd.delete([stored[oldest]])
            del waiting[oldest]
            evicted += 1
        assert ssd.write(entry, SPACE, image)
        waiting[entry.key] = entry
        if number % 40 == 0:
            ssd.touch([("rows", key, number, 1) for key in waiting])
    assert ssd.flush(30)
    assert evicted > 20
    assert max(peaks) <= limit
    free = 0 if os.lstat(root).st_blocks else 4096 * sum(1 for _ in os.walk(root))  # folders cost nothing in memory
    assert max(peaks) + free > limit * 0.7  # and the room is used
    ssd.check_integrity()
    assert ssd.stats().disk == du(root) <= ssd.used <= limit


def test_used_is_what_is_there_and_queued_and_the_reserve_is_kept_beside_it(open_tier, root):
    ssd = open_tier(limit=1 << 30)
    empty = ssd.stats()
    assert empty.used == empty.disk == du(root) < 500_000  # an index and folders
    assert empty.reserve > 10_000_000
    ssd.put(*chain(40))
    ssd.flush(10)
    full = ssd.stats()
    assert full.used == full.disk == du(root)
    assert full.used + full.reserve == ssd.used <= ssd.limit


def test_the_account_is_what_du_says_also_after_a_restart(open_tier, root):
    ssd = open_tier()
    stored = ssd.put(*chain(40))
    ssd.delete(stored[30:])
    ssd.flush(10)
    assert ssd.stats().disk == du(root)
    ssd.close()
    again = open_tier()
    assert again.stats().disk == du(root)
    assert again.stats().files == 30


def test_a_smaller_limit_after_a_restart_refuses_writes_until_there_is_room(open_tier):
    ssd = open_tier()
    ssd.put(*chain(100, size=20_000))
    ssd.close()
    small = open_tier(limit=2 << 20)
    entry, image = make(999)
    assert small.used > small.limit
    assert not small.write(entry, SPACE, image)
    small.delete(list(small.entries())[20:])
    assert small.used <= small.limit
    assert small.flush(10)
    assert small.put((entry, image))
    small.check_integrity()


def test_files_of_others_in_the_directory_count(open_tier, root):
    open_tier().close()
    (root / "notes.txt").write_bytes(b"x" * 50_000)
    (root / "mine").mkdir()
    (root / "mine" / "file").write_bytes(b"x" * 50_000)
    ssd = open_tier()
    assert ssd.stats().disk == du(root) > 100_000
    assert (root / "notes.txt").exists()


def test_queued_bytes_never_pass_the_queue(open_tier, monkeypatch):
    monkeypatch.setattr(queue, "BATCH_FILES", 4)
    ssd: Ssd = open_tier(queue_bytes=60_000)
    for entry, image in chain(60):
        while not ssd.write(entry, SPACE, image):
            assert ssd.stats().queued_bytes <= 60_000
            ssd.flush(10)
        assert ssd.stats().queued_bytes <= 60_000
    assert ssd.flush(10)
    assert ssd.stats().files == 60


def test_a_file_that_an_earlier_release_left_counts_and_stays(open_tier, root):
    """The audit log of releases before 0.1, or anything else that lies beside the images."""
    open_tier().close()
    (root / "audit.log").write_bytes(b"{}\n" * 5000)
    ssd = open_tier()
    stored = ssd.put(*chain(3))
    ssd.check_integrity()
    assert ssd.stats().disk == du(root)
    ssd.close()
    assert survey(root).disk == du(root)
    assert reconcile(root).clean
    assert prune(root, Selection(to_size=1)).images == len(stored)
    assert clear(root).left == ()
    assert (root / "audit.log").stat().st_size == 15_000
    again = open_tier()
    again.check_integrity()
