"""How much of its disk the directory may take: what is free there, less what is to stay free for others (the setting
`ssd_reserve`).

A look is one statvfs, after each batch and every few seconds, on the writer's thread. What it gives bounds the ledger's
limit; who is deleted for it is decided above.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

PERIOD = 2.0  # seconds between two looks when nothing is written
AGAIN = 60.0  # seconds that deletions may take to become free space, and that a disk which was full is taken for full
SURE = 1 << 20  # bytes: what other programs write and delete meanwhile is taken to be less


class Room:
    """`held` are the real bytes of the directory, `total` those with what is queued. Not thread-safe: its user is the
    writer's thread, or the opener.
    """

    def __init__(self, reserve: int, clock: Callable[[], float] = time.monotonic):
        self.reserve = reserve
        self._clock = clock
        self._frees_late = False  # deleted files take their room for a while: copy on write, snapshots
        self._evicting_until = self._full_until = float("-inf")
        self._full_held = self._full_free = 0

    def look(self, held: int, total: int, free: int) -> int:
        """Bytes that the directory may take in all."""
        ceiling, now = max(0, held + free - self.reserve), self._clock()
        if now < self._full_until:
            if free > self._full_free + max(0, self._full_held - held) + SURE:
                self._full_until = now  # others made room
            else:
                ceiling = min(ceiling, self._full_held)
        if ceiling < total:
            if self._frees_late and now < self._evicting_until:
                return total  # what was deleted for it a moment ago is not free yet
            self._evicting_until = now + AGAIN
        return ceiling

    def note_full(self, held: int, free: int) -> None:
        """A write found no room, whatever statvfs says: a quota, no more inodes. The directory can't grow for a while."""
        self._full_held, self._full_free, self._full_until = held, free, self._clock() + AGAIN

    def note_deletion(self, nbytes: int, freed: int) -> None:
        """Files of so many bytes were deleted, and the free space has grown by `freed`."""
        if nbytes >= SURE:
            self._frees_late = freed < nbytes // 2


def free_space(path: Path) -> int:
    """Bytes that the disk of `path` has for us."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def is_full(error: BaseException | None) -> bool:
    """Whether an error says that the disk, or a quota, has no room."""
    if isinstance(error, sqlite3.OperationalError):
        return "disk is full" in str(error)
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
