"""What the disk has room for, told by a clock and figures of the test."""

from __future__ import annotations

import errno
import sqlite3

import pytest

from prefixcache.byte_sizes import as_setting
from prefixcache.ssd import ledger
from prefixcache.ssd.ledger import FREEING_SECONDS, FULL_HOLD_SECONDS, NOISE_BYTES, DiskRoom, is_full

MB = 10**6


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_ceiling_is_what_it_has_and_what_is_free_beyond_the_reserve():
    room = DiskRoom(5 * MB)
    assert room.ceiling_now(held=20 * MB, total=22 * MB, free=10 * MB) == 25 * MB
    assert room.ceiling_now(held=25 * MB, total=25 * MB, free=5 * MB) == 25 * MB  # its own growth changes nothing
    assert room.ceiling_now(held=25 * MB, total=25 * MB, free=2 * MB) == 22 * MB
    assert room.ceiling_now(held=1 * MB, total=1 * MB, free=0) == 0


def test_where_deletions_are_free_space_at_once_every_look_counts():
    room = DiskRoom(5 * MB)
    room.note_deletion(4 * MB, freed=4 * MB)
    assert room.ceiling_now(20 * MB, 20 * MB, free=4 * MB) == 19 * MB
    assert room.ceiling_now(19 * MB, 19 * MB, free=4 * MB) == 18 * MB


def test_where_deletions_are_free_space_later_they_are_waited_for(monkeypatch):
    """Else each look would have as much deleted again, until nothing is left."""
    clock = Clock()
    monkeypatch.setattr(ledger, "monotonic", clock)
    room = DiskRoom(5 * MB)
    room.note_deletion(4 * MB, freed=0)
    assert room.ceiling_now(20 * MB, 20 * MB, free=4 * MB) == 19 * MB
    assert room.ceiling_now(19 * MB, 19 * MB, free=4 * MB) == 19 * MB
    clock.now += FREEING_SECONDS / 2
    assert room.ceiling_now(19 * MB, 19 * MB, free=6 * MB) == 20 * MB
    clock.now += FREEING_SECONDS
    assert room.ceiling_now(19 * MB, 19 * MB, free=4 * MB) == 18 * MB


def test_a_small_deletion_proves_nothing():
    room = DiskRoom(0)
    room.note_deletion(NOISE_BYTES - 1, freed=0)
    assert room.ceiling_now(20 * MB, 21 * MB, free=0) == 20 * MB
    assert room.ceiling_now(19 * MB, 21 * MB, free=0) == 19 * MB


def test_a_quota_holds_for_a_while_or_until_others_make_room(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(ledger, "monotonic", clock)
    room = DiskRoom(0)
    room.note_full(held=20 * MB, free=500 * MB)
    assert room.ceiling_now(20 * MB, 20 * MB, free=500 * MB) == 20 * MB
    assert room.ceiling_now(18 * MB, 18 * MB, free=502 * MB) == 20 * MB  # what it has deleted itself
    assert room.ceiling_now(18 * MB, 18 * MB, free=510 * MB) == 528 * MB
    room.note_full(held=20 * MB, free=500 * MB)
    clock.now += FULL_HOLD_SECONDS
    assert room.ceiling_now(20 * MB, 20 * MB, free=500 * MB) == 520 * MB


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(errno.ENOSPC, ""), True),
        (OSError(errno.EDQUOT, ""), True),
        (OSError(errno.EIO, ""), False),
        (sqlite3.OperationalError("database or disk is full"), True),
        (sqlite3.OperationalError("database is locked"), False),
        (None, False),
    ],
)
def test_which_errors_say_that_there_is_no_room(error, full):
    assert is_full(error) is full


def test_a_size_is_written_as_a_setting_takes_it():
    assert [as_setting(size) for size in (58_100_000, 1_500_000, 2 * MB, 200 * 10**9, 512)] == [
        "58MB",
        "1500KB",
        "2MB",
        "200GB",
        "512",
    ]
