"""What the directory holds, to the byte, and how much of its disk it may take: the one place where the SSD's limit is
decided, the user's or what the disk has room for.

The real part is counted in `st_blocks`; the rest is what may still come: queued writes at the size that they will have,
and an allowance for the log of the index, which stays below it. So `used` is never below what the disk holds, and a write
that fits, fits.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from prefixcache.ssd.index import PAGE, ROW_PAGES

# For one file, besides its bytes: its row and tokens in the index (up to 3 kB), perhaps a new folder or a longer one.
ROW_ROOM = 8192
LOG_ALLOWANCE = (128 << 10, 32 << 20)  # of index.db-wal and index.db-shm: a 16th of the limit, within these
SHARED_MEMORY = 64 << 10  # of it for index.db-shm, which SQLite grows by 32 kB for every 16 MB of log
DISK_POLL_SECONDS = 2.0  # between two looks at the disk when nothing is written
FREEING_SECONDS = 60.0  # that deletions may take to become free space
FULL_HOLD_SECONDS = 60.0  # that a disk which was full is taken for full
NOISE_BYTES = 1 << 20  # other programs are taken to write and delete less than this meanwhile
_MOST_ROWS = 256  # in one transaction
_UNBOUNDED = 1 << 62  # until the disk is asked


class Holdings(NamedTuple):
    """Bytes by what holds them, and how many files there are. `real` bytes are on the disk when nothing is queued; `total`
    must not exceed the limit.
    """

    file_count: int
    file_bytes: int
    queued: int
    deleting: int
    quarantine: int
    overhead: int
    reserve: int

    @property
    def real(self) -> int:
        return self.file_bytes + self.quarantine + self.overhead

    @property
    def total(self) -> int:
        return self.stored + self.reserve

    @property
    def stored(self) -> int:
        return self.real + self.queued - self.deleting


class Ledger:
    """Thread-safe: `_lock`, a leaf (nothing is called while it is held), guards the counters.

    `asked` is the user's limit, `ceiling` what the disk has room for, `limit` the one in force: the less of both.

    files: of the index's rows. queued: of writes admitted and not yet done. deleting: of rows whose deletion is queued.
    overhead: index, folders, LOCK, tmp/, as last measured. reserve: what the index may still grow by.
    """

    def __init__(self, limit: int, block: int):
        self.block = block
        self._lock = threading.Lock()
        self._count = self.log_allowance = 0
        self._files = self._queued = self._deleting = self._quarantine = self._overhead = self._reserve = 0
        self.asked, self.ceiling = limit, _UNBOUNDED
        self.resize(limit)

    def resize(self, limit: int) -> None:
        """Set what the user asks for. The disk's ceiling stands."""
        with self._lock:
            self.asked = limit
            self._set_limit()

    def set_ceiling(self, ceiling: int) -> None:
        """Note that the disk has room for so many bytes, whatever was asked for."""
        with self._lock:
            self.ceiling = ceiling
            self._set_limit()

    def _set_limit(self) -> None:
        least, most = LOG_ALLOWANCE
        self.limit = min(self.asked, self.ceiling)
        allowance = min(max(self.limit // 16, least), most)
        self._reserve += max(0, allowance - self.log_allowance)
        self.log_allowance, self._log_room = allowance, allowance - SHARED_MEMORY
        self.rows = max(1, min(self._log_room // 4 // (ROW_PAGES * PAGE), _MOST_ROWS))

    @property
    def checkpoint_above(self) -> int:
        """Return the bytes of the index's WAL above which it is cut: what a transaction of `rows` rows writes at worst."""
        return self.rows * ROW_PAGES * PAGE

    @property
    def begin_no_transaction_above(self) -> int:
        """Return the bytes of the WAL above which no transaction may begin: with it, the WAL would exceed its allowance."""
        return self._log_room - self.checkpoint_above

    def footprint(self, nbytes: int) -> int:
        """Return the real bytes to expect of a file of `nbytes`, its share of index and folders included."""
        return -(-nbytes // self.block) * self.block + ROW_ROOM

    def held(self) -> Holdings:
        with self._lock:
            return self._held()

    @property
    def used(self) -> int:
        return self.held().total

    def admit(self, nbytes: int) -> bool:
        """Reserve for a file of `nbytes`, or False."""
        footprint = self.footprint(nbytes)
        with self._lock:
            if self._held().total + footprint > self.limit:
                return False
            self._queued += footprint
            return True

    def end_write(self, nbytes: int, disk: int | None) -> None:
        """End a write that was admitted. `disk`: the bytes that its file takes; None if there is no file."""
        with self._lock:
            self._queued -= self.footprint(nbytes)
            if disk is not None:
                self._files += disk
                self._count += 1

    def expect_deletion(self, disk: int) -> None:
        """Note that a deletion of `disk` bytes is queued (> 0), or no more so (< 0)."""
        with self._lock:
            self._deleting += disk

    def count_deleted(self, disk: int | None, credit: int) -> None:
        """Count a row of `disk` bytes as deleted (None: there was no row), for which `credit` bytes were expected."""
        with self._lock:
            self._deleting -= credit
            if disk is not None:
                self._files -= disk
                self._count -= 1

    def quarantine(self, disk: int) -> None:
        with self._lock:
            self._quarantine += disk

    def measure(self, overhead: int, reserve: int) -> None:
        """Note the overhead, and as `reserve` what the log and the index may still take."""
        with self._lock:
            self._overhead, self._reserve = overhead, reserve

    def begin(self, count: int, files: int, quarantine: int) -> None:
        """Begin with what an opening found."""
        with self._lock:
            self._count, self._files, self._quarantine = count, files, quarantine

    def _held(self) -> Holdings:
        return Holdings(
            self._count, self._files, self._queued, self._deleting, self._quarantine, self._overhead, self._reserve
        )


class DiskRoom:
    """Tells how much of its disk the directory may take: what it has, plus what is free, less the `reserve` for others.

    `ceiling_now` is asked after each batch and every few seconds. `held` are the real bytes of the directory, `total` those
    and what is queued, `free` the bytes that statvfs calls free. Not thread-safe: the writer's thread and the opener use it.
    """

    def __init__(self, reserve: int):
        self.reserve = reserve
        self._frees_late = False  # deleted files take their room for a while: copy on write, snapshots
        self._evicting_until = self._full_until = float("-inf")
        self._full_held = self._full_free = 0

    def ceiling_now(self, held: int, total: int, free: int) -> int:
        """Return the bytes that the directory may take in all."""
        ceiling, now = max(0, held + free - self.reserve), monotonic()
        if now < self._full_until:
            if free > self._full_free + max(0, self._full_held - held) + NOISE_BYTES:
                self._full_until = now  # others made room
            else:
                ceiling = min(ceiling, self._full_held)
        if ceiling < total:
            if self._frees_late and now < self._evicting_until:
                return total  # what was deleted for it a moment ago is not free yet
            self._evicting_until = now + FREEING_SECONDS
        return ceiling

    def note_full(self, held: int, free: int) -> None:
        """Note that a write found no room, whatever statvfs says: a quota, no more inodes. The directory can't grow for a
        while.
        """
        self._full_held, self._full_free, self._full_until = held, free, monotonic() + FULL_HOLD_SECONDS

    def note_deletion(self, nbytes: int, freed: int) -> None:
        """Note that files of so many bytes were deleted, and the free space has grown by `freed`."""
        if nbytes >= NOISE_BYTES:
            self._frees_late = freed < nbytes // 2


def free_space(path: Path) -> int:
    """Return the bytes that the disk of `path` has for us."""
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def is_full(error: BaseException | None) -> bool:
    """Tell whether an error says that the disk, or a quota, has no room."""
    if isinstance(error, sqlite3.OperationalError):
        return "disk is full" in str(error)
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
