"""The queue of the SSD's writer: writes, deletions, touches, a note. A lock and dictionaries, never the disk.

The request path ends here; `writer` takes batches from the other side. Also the back-off after an error and the waiting
of `flush`, because both are about what the queue may take and when it is empty.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from prefixcache.image_format import Image
from prefixcache.ssd.entries import Address, Entry, NamespaceRow, Touch, Use
from prefixcache.ssd.errors import Cancelled
from prefixcache.ssd.ledger import Ledger

BATCH_FILES = 256
BATCH_BYTES = 256 << 20
FIRST_DELAY, LONGEST_DELAY = 0.1, 30.0  # seconds of back-off: after the first error, at most
TOUCH_DELAY = 30.0  # seconds that touches may wait for a batch to travel with


class Write:
    """A write on its way. It ends `done`, its row committed and its file counted in the ledger, or with an `error`."""

    __slots__ = ("attempts", "done", "entry", "error", "image", "namespace", "queued_at", "sequence")

    def __init__(self, entry: Entry, namespace: NamespaceRow, image: Image, sequence: int):
        self.entry, self.namespace, self.image, self.sequence = entry, namespace, image, sequence
        self.error: Exception | None = None
        self.done = False
        self.attempts = 0  # that found the disk full
        self.queued_at = time.monotonic()


class Removal(NamedTuple):
    """A deletion on its way. `credit`: bytes that the ledger expects to become free. `gone`: the file has left before
    its row, so that a file which stands at the path by now is a newer one and stays. `counted`: the ledger still counts it.
    """

    credit: int
    gone: bool
    counted: bool = True


@dataclass
class QueuedBatch:
    """A batch that the writer took. It removes from `removals` and `touches` those that are done; the rest comes back."""

    removals: dict[Address, Removal]
    writes: list[Write]
    touches: dict[Address, Touch]
    note: str | None  # the text that the index is to have from now on
    cancelled: list[Write]
    probe: bool  # the attempt before failed: see first whether the disk works again
    through: int  # all queued up to this sequence number is settled when the batch is
    failed: int = field(default=0)


class QueueCounters(NamedTuple):
    queued_bytes: int
    queued_files: int
    dropped: int
    errors: int
    last_error: str


class Queue:
    """Thread-safe: `_lock` guards everything, and is never held during I/O or a callback; the ledger's lock nests in
    it.

    Invariant: `_queued` is the sum of the images in `_waiting` and of those that the writer has taken and not yet
    reported; each of them is reserved in the ledger; every sequence number up to `_settled` has been dealt with.
    """

    def __init__(self, ledger: Ledger, queue_bytes: int):
        self._ledger = ledger
        self._limit = queue_bytes
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._done = threading.Condition(self._lock)
        self._waiting: dict[Address, Write] = {}
        self._removals: dict[Address, Removal] = {}
        self._touches: dict[Address, Touch] = {}
        self._touched_at = 0.0
        self._note: str | None = None
        self._cancelled: list[Write] = []
        self._queued = 0
        self._sequence = self._settled = 0
        self._attempts = 0  # batches that have ended
        self._working: QueuedBatch | None = None
        self._writing: set[Address] = set()  # the addresses of its writes
        self._hurry = 0  # flushes that wait
        self._closing = False
        self._stuck = False  # the last attempt failed
        self._nudged = False  # the writer is to look at the directory although nothing is queued
        self._delay = FIRST_DELAY
        self._retry_at = 0.0
        self._hurry_at = 0.0  # when a flush tries again: at once after the first failure, then ten times a second
        self._failed = self._failed_at_flush = 0
        self._dropped = self._errors = 0
        self._last_error = ""

    # The request path

    def write(self, entry: Entry, namespace: NamespaceRow, image: Image) -> bool:
        with self._lock:
            if not self._has_room(image.nbytes) or not self._ledger.admit(image.nbytes):
                self._dropped += 1
                self._failed += self._stuck  # for a flush that waits for what was refused
                return False
            self._sequence += 1
            older = self._waiting.pop(entry.address, None)
            if older:
                self._cancel(older, "written again before its turn")
            self._waiting[entry.address] = Write(entry, namespace, image, self._sequence)
            self._queued += image.nbytes
            self._wake.notify()
            return True

    @property
    def is_new(self) -> bool:
        with self._lock:
            return not self._sequence

    @property
    def waiting(self) -> bool:
        with self._lock:
            return bool(self._waiting)

    def delete(self, entries: Iterable[Entry]) -> None:
        with self._lock:
            for entry in entries:
                self._sequence += 1
                waiting = self._waiting.pop(entry.address, None)
                if waiting:
                    self._cancel(waiting, "deleted before its turn")
                self._remove(entry.address, Removal(self._credit(entry, waiting), gone=False))
                self._touches.pop(entry.address, None)
            # A deletion takes no room, and may make the room that the disk lacked.
            self._retry_at = min(self._retry_at, self._hurry_at)
            self._wake.notify()

    def _credit(self, entry: Entry, waiting: Write | None) -> int:
        """Return the bytes that the deletion of `entry` will free for sure."""
        if waiting:
            return 0  # its room has just been given back; an older file of that name is not known here
        if entry.address in self._writing:
            return entry.nbytes  # its file is being written
        return entry.disk

    def forget(self, entry: Entry) -> None:
        """Delete the row of an entry whose file was moved away."""
        with self._lock:
            self._sequence += 1
            # No credit: until the row is gone the bytes count twice, which errs on the safe side.
            self._remove(entry.address, Removal(0, gone=True))
            self._wake.notify()

    def touch(self, uses: Iterable[Use]) -> None:
        now = time.time()
        with self._lock:
            if not self._touches:
                self._touched_at = time.monotonic()
                self._wake.notify()  # it sleeps without an end when nothing is pending
            self._sequence += 1
            for kind, key, tick, hits in uses:
                self._touches[kind, key] = Touch(tick, hits, now).joined(self._touches.get((kind, key)))

    def leave_note(self, text: str) -> None:
        with self._lock:
            self._sequence += 1
            self._note = text
            self._wake.notify()

    def _remove(self, address: Address, removal: Removal) -> None:
        older = self._removals.get(address)
        if older:
            self._removals[address] = _both(older, removal)
        else:
            if self._working and address in self._working.removals:
                removal = Removal(0, removal.gone)  # its deletion is under way
            self._removals[address] = removal
            self._ledger.expect_deletion(removal.credit)

    def _cancel(self, write: Write, why: str) -> None:
        self._queued -= write.image.nbytes
        self._ledger.end_write(write.image.nbytes, None)
        write.error = Cancelled(f"{write.entry.kind} {write.entry.key.hex()}: {why}")
        self._cancelled.append(write)

    # Waiting

    @property
    def failed(self) -> int:
        """Return how many writes failed, or found the disk failing."""
        with self._lock:
            return self._failed

    def has_room(self, nbytes: int) -> bool:
        """Tell whether a write of so many bytes would be taken now, if the directory has room."""
        with self._lock:
            return self._has_room(nbytes)

    def _has_room(self, nbytes: int) -> bool:
        full = self._queued and self._queued + nbytes > self._limit
        return not (full or self._closing or self._stuck)

    def resize(self, queue_bytes: int) -> None:
        with self._lock:
            self._limit = queue_bytes

    def flush(self, timeout: float | None, since: int | None = None) -> bool:
        """Wait for what is queued. True when all of it is durable and indexed, and no write failed since the flush before, or
        since `failed` was `since`.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            target, attempts = self._sequence, self._attempts + (self._working is not None)
            self._hurry += 1
            self._wake.notify()
            try:
                while self._settled < target or self._cancelled:
                    # On a disk that fails, one attempt begun after this call is answer enough.
                    if (self._stuck and self._attempts > attempts) or self._closing:
                        return False
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        return False
                    self._done.wait(left)
                before = self._failed_at_flush if since is None else since
                self._failed_at_flush = self._failed
                return self._failed == before
            finally:
                self._hurry -= 1

    def close(self) -> None:
        """Take nothing any more; cancel what waits. The writer ends once it has reported that."""
        with self._lock:
            self._closing = True
            for write in self._waiting.values():
                self._cancel(write, "the cache was closed before its turn")
            self._waiting.clear()
            self._wake.notify()
            self._done.notify_all()

    @property
    def drained(self) -> bool:
        with self._lock:
            is_noted = self._note is None
            return is_noted and not (self._waiting or self._removals or self._touches or self._working is not None)

    def counters(self) -> QueueCounters:
        with self._lock:
            return QueueCounters(self._queued, len(self._waiting), self._dropped, self._errors, self._last_error)

    # The writer's side

    def wait(self, seconds: float) -> bool:
        """Wait for work, or for the end, so many seconds at most; False when there was none."""
        end = time.monotonic() + seconds
        with self._lock:
            while not (self._due() or self._closing):
                left, patience = end - time.monotonic(), self._patience()
                if left <= 0:
                    return False
                self._wake.wait(left if patience is None else min(left, patience))
            return True

    @property
    def stuck(self) -> bool:
        """Tell whether the last attempt failed, and another is to come."""
        with self._lock:
            return self._stuck

    def nudge(self) -> None:
        """Let `take` give a batch, with nothing in it."""
        with self._lock:
            self._nudged = True

    def take(self) -> QueuedBatch | None:
        """Wait for work; None when closed and nothing is left to report or to do."""
        with self._lock:
            while not self._due():
                if self._closing:
                    return None
                self._wake.wait(self._patience())
            writes: list[Write] = []
            size = 0
            for write in self._waiting.values():
                if writes and (len(writes) == BATCH_FILES or size + write.image.nbytes > BATCH_BYTES):
                    break
                writes.append(write)
                size += write.image.nbytes
            for write in writes:
                del self._waiting[write.entry.address]
            first = next(iter(self._waiting.values()), None)
            batch = QueuedBatch(
                self._removals,
                writes,
                self._touches,
                self._note,
                self._cancelled,
                self._stuck,
                first.sequence - 1 if first else self._sequence,
            )
            self._removals, self._touches, self._note, self._cancelled = {}, {}, None, []
            self._nudged = False
            self._working = batch
            self._writing = {write.entry.address for write in writes}
            return batch

    def _due(self) -> bool:
        if self._cancelled or (self._nudged and not self._closing):
            return True
        if self._stuck:
            return not self._closing and time.monotonic() >= (self._hurry_at if self._hurry else self._retry_at)
        if self._waiting or self._removals or self._note is not None:
            return True
        if self._settled < self._sequence and self._hurry:
            return True
        late = time.monotonic() >= self._touched_at + TOUCH_DELAY
        return bool(self._touches) and (late or self._closing)

    def _patience(self) -> float | None:
        if self._stuck:
            return max(0.0, (self._hurry_at if self._hurry else self._retry_at) - time.monotonic())
        return max(0.0, self._touched_at + TOUCH_DELAY - time.monotonic()) if self._touches else None

    def released(self, write: Write) -> None:
        """Count the bytes of a write no more: it is about to be reported."""
        with self._lock:
            self._queued -= write.image.nbytes

    def finish(self, batch: QueuedBatch, error: Exception | None, again: Sequence[Write] = ()) -> list[Write]:
        """End a batch whose writes are reported, but for those that are to be tried `again`. What is left of it waits again.
        After an error: back off, and return the writes that waited behind it, which share its fate (the disk that failed one
        would fail them all).
        """
        stranded: list[Write] = []
        with self._lock:
            self._put_back(again)
            self._working = None
            self._writing = set()
            self._attempts += 1
            self._failed += batch.failed
            newer_removals = bool(self._removals)
            for address, removal in batch.removals.items():
                newer = self._removals.pop(address, None)
                if newer:
                    self._ledger.expect_deletion(-newer.credit)
                    removal = _both(removal, newer)
                self._removals[address] = removal
            for address, touch in batch.touches.items():
                self._touches[address] = touch.joined(self._touches.get(address))
            if error is None:
                self._stuck = False
                through = min([batch.through, *(write.sequence - 1 for write in again)])
                self._settled = max(self._settled, through)
                if batch.writes:
                    self._delay = FIRST_DELAY
            else:
                self._errors += 1
                self._last_error = f"{type(error).__name__}: {error}"
                self._stuck = True
                self._hurry_at = time.monotonic() + (FIRST_DELAY if batch.probe else 0.0)
                self._retry_at = self._hurry_at if newer_removals else time.monotonic() + self._delay
                self._delay = min(self._delay * 2, LONGEST_DELAY)
                stranded = list(self._waiting.values())
                self._waiting.clear()
                self._failed += len(stranded)
                for write in stranded:
                    self._queued -= write.image.nbytes
                    self._ledger.end_write(write.image.nbytes, None)
                    write.error = error
            self._done.notify_all()
        return stranded

    def _put_back(self, writes: Sequence[Write]) -> None:
        """Let writes wait for another turn, before all others; what was deleted or written again meanwhile is cancelled."""
        waiting = dict(self._waiting)
        self._waiting.clear()
        for write in writes:
            if write.entry.address in waiting or write.entry.address in self._removals:
                self._cancel(write, "deleted or written again before its turn")
            else:
                self._waiting[write.entry.address] = write
        self._waiting.update(waiting)


def _both(older: Removal, newer: Removal) -> Removal:
    """Join two deletions of one image."""
    return Removal(older.credit, older.gone and newer.gone, older.counted)
