"""The SSD of a simulation: the cache's own queue and ledger, and in place of the disk an account of sizes.

It is a `Tier`, as `prefixcache.ssd.Ssd` is. Nothing is written by itself: the simulation calls `run_writer`
for the writer's turn. Reads answer at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from prefixcache.image_format import ImageKind
from prefixcache.ssd import Entry, NamespaceRow
from prefixcache.ssd.ledger import Ledger
from prefixcache.ssd.queue import Queue

DISK_BLOCK = 4096  # what file systems round a file up to
EMPTY = 134 << 10  # bytes of a directory without an image: LOCK, an index without rows
ROW = 1600  # bytes of a row of the index; measured, for blocks of 256 tokens (their tokens are compressed)
FOLDER = 4096  # bytes of each of the folders that images are spread over


class SimulatedImage(NamedTuple):
    """An image of which only the size is known."""

    nbytes: int
    checksum: str
    extra: str = "{}"

    def header(self) -> tuple[SimulatedImage, dict[str, Any]]:
        return self, {}

    def tensors(self) -> dict[str, Any]:
        return {}


class Done:
    """A future that has its result, or its error."""

    def __init__(self, value: Any = None, error: Exception | None = None):
        self._value, self._error = value, error

    def result(self, timeout: float | None = None) -> Any:
        if self._error is not None:
            raise self._error
        return self._value

    def done(self) -> bool:
        return True

    def cancel(self) -> bool:
        return False


class SimulatedSsd:
    """`written` as `Ssd` has it, called by `run_writer`. `written_bytes` are of files alone, as in `SsdStats`."""

    name = "ssd"

    def __init__(self, limit: int, queue_bytes: int, written: Callable[[Entry, Exception | None], None]):
        self._ledger = Ledger(limit, DISK_BLOCK)
        self._queue = Queue(self._ledger, queue_bytes)
        self._written = written
        self._images: dict[tuple[str, bytes], tuple[int, str]] = {}  # bytes on the disk, extra
        self._folders: set[tuple[str, int]] = set()
        self._busy = False
        self.written_files = self.written_bytes = self.read_files = self.read_bytes = self.peak = 0
        self._measure()

    # As `Ssd`

    @property
    def used(self) -> int:
        return self._ledger.used

    @property
    def stored(self) -> int:
        return self._ledger.held().stored

    @property
    def limit(self) -> int:
        return self._ledger.limit

    @property
    def failed(self) -> int:
        return 0

    def has_room(self, nbytes: int) -> bool:
        return self._queue.has_room(nbytes)

    def resize(self, limit: int) -> None:
        self._ledger.resize(limit)

    def footprint(self, nbytes: int) -> int:
        return self._ledger.footprint(nbytes)

    def write(self, entry: Entry, namespace: NamespaceRow, image: Any) -> bool:
        if not self._queue.write(entry, namespace, image):
            return False
        self._busy = True
        self.peak = max(self.peak, self.used)
        return True

    def delete(self, entries: Iterable[Entry]) -> None:
        self._busy = True
        self._queue.delete(entries)

    def touch(self, uses: Iterable[tuple[ImageKind, bytes, int, int]]) -> None:
        """Recency is for the next opening, and there is none."""

    def read(self, entry: Entry) -> Done:
        self.read_files += 1
        self.read_bytes += entry.nbytes
        extra = self._images[entry.address][1]
        return Done(SimulatedImage(entry.nbytes, entry.checksum, extra))

    def entries(self) -> Iterator[Entry]:
        return iter(())

    def max_tick(self) -> int:
        return 0

    def flush(self, timeout: float | None = None, since: int | None = None) -> bool:
        self.run_writer()
        return True

    # The writer's turn

    def run_writer(self) -> None:
        """Do and report all that waits, in the writer's order: deletions, then writes."""
        while self._busy:
            self._busy = False
            batch = self._queue.take()
            if batch is None:
                return
            for write in batch.cancelled:
                self._written(write.entry, write.error)
            for address, removal in batch.removals.items():
                image = self._images.pop(address, None)
                self._ledger.count_deleted(image[0] if image is not None else None, removal.credit)
            batch.removals.clear()
            for write in batch.writes:
                nbytes = write.image.nbytes
                disk = -(-nbytes // DISK_BLOCK) * DISK_BLOCK
                self._ledger.end_write(nbytes, disk)
                self._folders.add((write.entry.kind, write.entry.key[0]))
                self._images[write.entry.address] = disk, write.image.extra  # type: ignore[attr-defined]
                self._queue.released(write)
                self.written_files += 1
                self.written_bytes += nbytes
            self._measure()
            for write in batch.writes:
                self._written(write.entry._replace(disk=self._images[write.entry.address][0]), None)
            self._queue.finish(batch, None)
            self._busy |= self._queue.waiting

    def _measure(self) -> None:
        overhead = EMPTY + ROW * len(self._images) + FOLDER * len(self._folders)
        self._ledger.measure(overhead, self._ledger.log_allowance)
