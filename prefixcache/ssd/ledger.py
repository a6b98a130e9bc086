"""What the directory holds, to the byte: the one place where the SSD's limit is decided.

The real part is counted in `st_blocks`; the rest is what may still come: queued writes at the size that they will have,
and the room that the index needs to work. So `used` is never below what the disk holds, and a write that fits, fits.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from prefixcache.ssd.index import PAGE, ROW_PAGES

# For one file, besides its bytes: its row and tokens in the index (up to 3 kB), perhaps a new folder or a longer one.
ROW_ROOM = 8192
_LOG_ROOM = (64 << 10, 16 << 20)


class Holdings(NamedTuple):
    """Bytes by what holds them, and the count of the files. `real` are on the disk when nothing is queued; `total` is
    what the limit is held against.
    """

    number: int
    files: int
    queued: int
    leaving: int
    quarantine: int
    overhead: int
    reserve: int

    @property
    def real(self) -> int:
        return self.files + self.quarantine + self.overhead

    @property
    def total(self) -> int:
        return self.real + self.queued + self.reserve - self.leaving


class Ledger:
    """Thread-safe: `_lock`, a leaf (nothing is called while it is held), guards the counters.

    files: of the index's rows. queued: of writes admitted and not yet done. leaving: of rows whose deletion is queued.
    overhead: index, folders, LOCK, tmp/, as last measured. reserve: what the index may still grow by.
    """

    def __init__(self, limit: int, block: int):
        self.block = block
        self._lock = threading.Lock()
        self._count = self.log_room = 0
        self._files = self._queued = self._leaving = self._quarantine = self._overhead = self._reserve = 0
        self.resize(limit)

    def resize(self, limit: int) -> None:
        # The log of the index is cut when it has reached half of its room; one transaction stays within the other half.
        log_room = min(max(limit // 16, _LOG_ROOM[0]), _LOG_ROOM[1])
        with self._lock:
            self.limit, self._reserve = limit, self._reserve + max(0, log_room - self.log_room)
            self.log_room, self.rows = log_room, max(1, log_room // 2 // (ROW_PAGES * PAGE))

    def footprint(self, nbytes: int) -> int:
        """Real bytes to expect of a file of `nbytes`, its share of index and folders included."""
        return -(-nbytes // self.block) * self.block + ROW_ROOM

    def held(self) -> Holdings:
        with self._lock:
            return self._held()

    @property
    def used(self) -> int:
        return self.held().total

    def admit(self, nbytes: int) -> bool:
        """Reserve for a file of `nbytes`, or False."""
        room = self.footprint(nbytes)
        with self._lock:
            if self._held().total + room > self.limit:
                return False
            self._queued += room
            return True

    def settle(self, nbytes: int, disk: int | None) -> None:
        """A write that was admitted has ended: there is one more file, which takes `disk`; None: there is not."""
        with self._lock:
            self._queued -= self.footprint(nbytes)
            if disk is not None:
                self._files += disk
                self._count += 1

    def leave(self, disk: int) -> None:
        """A deletion of `disk` bytes is queued (> 0), or no more so (< 0)."""
        with self._lock:
            self._leaving += disk

    def dropped(self, disk: int | None, credit: int) -> None:
        """A row of `disk` bytes is gone (None: there was none), for which `credit` bytes were noted as leaving."""
        with self._lock:
            self._leaving -= credit
            if disk is not None:
                self._files -= disk
                self._count -= 1

    def quarantine(self, disk: int) -> None:
        with self._lock:
            self._quarantine += disk

    def stretch(self, nbytes: int) -> bool:
        """Reserve so much more for the log of the index, until the next `measure`; or False."""
        with self._lock:
            if self._held().total + nbytes > self.limit:
                return False
            self._reserve += nbytes
            return True

    def measure(self, overhead: int, reserve: int) -> None:
        with self._lock:
            self._overhead, self._reserve = overhead, reserve

    def begin(self, count: int, files: int, quarantine: int) -> None:
        """What an opening found."""
        with self._lock:
            self._count, self._files, self._quarantine = count, files, quarantine

    def _held(self) -> Holdings:
        return Holdings(
            self._count, self._files, self._queued, self._leaving, self._quarantine, self._overhead, self._reserve
        )
