"""`Ssd`: the SSD tier as the cache sees it. An executor with exact accounting; what is written or deleted is not its
choice.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from prefixcache.image_format import Image
from prefixcache.keys import KEY_BYTES, TOKEN_BYTES
from prefixcache.metrics.histogram import Observed
from prefixcache.ssd.entries import BOUNDS, FOLDERS, Entry, NamespaceRow, Use
from prefixcache.ssd.errors import SsdError
from prefixcache.ssd.index import connect
from prefixcache.ssd.open_directory import OpenDirectory
from prefixcache.ssd.queue import Queue
from prefixcache.ssd.reader import Reader
from prefixcache.ssd.tables import read_entries, read_namespaces
from prefixcache.ssd.writer import Writer, WriterEvents

log = logging.getLogger("prefixcache.ssd")

GRACE = 5.0  # seconds that a close() waits beyond its time for what the disk is doing


class SsdStats(NamedTuple):
    """Counts and bytes since the opening; `files`, `used`, `limit`, `queued_*` and `quarantine_bytes` are of now.

    `limit` is the one in force, less than asked for where the disk has no room. `used`: what is on the disk (`disk`) and what
    is queued for it. Together with `reserve`, which is kept for the index to grow, it never exceeds the limit.
    `dropped` writes were refused (queue, limit, back-off); `errors` are failed attempts of the writer. `quarantined` files
    were quarantined, at the opening too. `spill_seconds`: from `write` to durable, a file; `read_seconds`: of an image.
    """

    files: int
    used: int
    limit: int
    disk: int
    reserve: int
    queued_files: int
    queued_bytes: int
    written_files: int
    written_bytes: int
    read_files: int
    read_bytes: int
    dropped: int
    corrupt: int
    unreadable: int
    quarantine_bytes: int
    errors: int
    last_error: str
    quarantined: int
    spill_seconds: Observed
    read_seconds: Observed


class Ssd:
    """Images on a directory, under a limit that holds at every moment, and that leaves `reserve` bytes of the disk free.

    `write`, `delete`, `touch`, `leave_note`, `read` and the properties never touch the disk; `flush` and `close` wait for it.
    In a forked child the object is dead: it accepts nothing and touches nothing.

    Raises DirectoryHeld, NewerFormat or DirectoryError when the directory can't be had.
    """

    name = "ssd"

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        limit: int,
        reserve: int = 0,
        queue_bytes: int,
        readers: int = 4,
        events: WriterEvents,
    ):
        if readers < 1 or queue_bytes < 0:
            raise ValueError(
                f"readers={readers}, queue_bytes={queue_bytes}: give readers=1 or more, queue_bytes=0 or more"
            )
        self._opened = OpenDirectory(directory, limit, reserve)
        self._queue = Queue(self._opened.ledger, queue_bytes)
        self._writer = Writer(self._opened, self._queue, events)
        self._reader = Reader(self._opened, self._queue, readers)
        self._closing = threading.Lock()  # held by the one close() that does it
        self._closed = False
        self._pid = os.getpid()
        self._tick = self._opened.newest
        self._writer.start()

    @property
    def directory(self) -> Path:
        return self._opened.directory.root

    # What was there at the opening

    def namespaces(self) -> list[NamespaceRow]:
        with closing(connect(self._opened.directory.index)) as connection:
            return read_namespaces(connection)

    def entries(self) -> Iterator[Entry]:
        entries, self._opened.entries = self._opened.entries, None
        if entries is None or not self._queue.is_new:
            with closing(connect(self._opened.directory.index)) as connection:
                entries = read_entries(connection)
        return iter(entries)

    def max_tick(self) -> int:
        """Return the newest recency tick that `write` or `touch` was given, or that was in the index; 0 at the very start."""
        return self._tick

    @property
    def note(self) -> str:
        """Return the text that `leave_note` was given last, by whoever had the directory open; "" for none."""
        return self._opened.note

    # The request path

    @property
    def used(self) -> int:
        """Return the bytes accounted for; never below what the disk holds once all that is queued is done."""
        return self._opened.ledger.used

    @property
    def stored(self) -> int:
        """Return `used` of `stats`: without the reserve for the index."""
        return self._opened.ledger.held().stored

    @property
    def limit(self) -> int:
        """Return the limit in force: what was asked for, or less where the disk has no room for that."""
        return self._opened.ledger.limit

    def resize(self, limit: int) -> None:
        """Set a new limit. Nothing is written beyond it from now on; what is too much is for the caller to delete."""
        self._opened.ledger.resize(limit)

    def resize_queue(self, queue_bytes: int) -> None:
        """Let so many bytes wait from now on."""
        self._queue.resize(queue_bytes)

    def has_room(self, nbytes: int) -> bool:
        return self._queue.has_room(nbytes)

    def footprint(self, nbytes: int) -> int:
        """Return the room to expect of a file of `nbytes`: its blocks, and its share of index and folders."""
        return self._opened.ledger.footprint(nbytes)

    def write(self, entry: Entry, namespace: NamespaceRow, image: Image) -> bool:
        """Queue a write. False, and no callback: the queue is full, the limit is reached, or the disk failed lately."""
        sizes = [len(key) for key in (entry.key, entry.parent, entry.namespace)]
        if entry.kind not in FOLDERS or sizes != [KEY_BYTES] * 3 or len(entry.tokens) % TOKEN_BYTES:
            raise ValueError(f"{entry!r}: not an entry; kind, length of a key or of the tokens is wrong")
        for name, bound in BOUNDS.items():
            if not 0 <= getattr(entry, name) < bound:
                raise ValueError(f"{entry!r}: {name}={getattr(entry, name)}: give 0 to {bound - 1}")
        if entry.namespace != namespace.root:
            raise ValueError(f"{entry!r}: of namespace {entry.namespace.hex()}, not {namespace.root.hex()}")
        if self._pid != os.getpid():
            return False
        now = time.time()
        entry = entry._replace(
            nbytes=image.nbytes, checksum=image.checksum, created=entry.created or now, used_at=entry.used_at or now
        )
        self._tick = max(self._tick, entry.used)
        return self._queue.write(entry, namespace, image)

    def delete(self, entries: Iterable[Entry]) -> None:
        """Queue deletions of entries as `entries` or `written` gave them. A write that still waits is cancelled."""
        if self._pid == os.getpid():
            self._queue.delete(entries)

    def touch(self, uses: Iterable[Use]) -> None:
        """Note that images were used now. The uses reach the index with the next batch, at the latest by `flush`, `close`."""
        if self._pid == os.getpid():
            uses = list(uses)
            self._tick = max(self._tick, max((tick for _, _, tick, _ in uses), default=0))
            self._queue.touch(uses)

    def leave_note(self, text: str) -> None:
        """Queue a text, of some kB at most, for whoever opens the directory next. It takes the place of the one before."""
        if self._pid == os.getpid():
            self._queue.leave_note(text)

    def read(self, entry: Entry) -> Future[Image]:
        """Begin to read an image, which is checked in the pool. The future raises Corrupt (quarantined) or Unreadable (left
        there).
        """
        if self._pid != os.getpid() or self._closed:
            future: Future[Image] = Future()
            future.set_exception(SsdError(f"ssd_dir={str(self.directory)!r} is closed; open it again"))
            return future
        return self._reader.read(entry)

    # Waiting

    @property
    def failed(self) -> int:
        """Return how many writes failed, or were refused because the disk was failing; for `flush`."""
        return self._queue.failed

    def flush(self, timeout: float | None = None, since: int | None = None) -> bool:
        """Wait until all queued before is durable and indexed. False: not in time, or a write failed since the last
        flush, or since `failed` was `since`.
        """
        if self._pid != os.getpid():
            return False
        return self._queue.flush(timeout, since)

    def close(self, timeout: float | None = None) -> None:
        """Close: flush, end the threads, mark the directory clean, let it go. What was not done in time is cancelled.

        A disk that does not answer in time, and some seconds more, keeps the directory: it is let go of when it does.
        """
        if self._pid != os.getpid():
            return
        with self._closing:
            if self._closed:
                return
            end = None if timeout is None else time.monotonic() + timeout + GRACE
            self._queue.flush(timeout)
            self._closed = True
            self._reader.close(_left(end))
            self._queue.close()
            if self._writer.join(_left(end)):
                self._opened.close(clean=self._queue.drained)
                return
            log.warning(
                "SSD %s: the disk does not answer: closed all the same; the directory stays in use until it does",
                self.directory,
            )
            self._writer.detach(lambda: self._opened.close(clean=False))

    def __enter__(self) -> Ssd:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # Looking at it

    def stats(self) -> SsdStats:
        held, queue, writer, reader = self._opened.ledger.held(), self._queue.counters(), self._writer, self._reader
        return SsdStats(
            files=held.file_count,
            used=held.stored,
            limit=self.limit,
            disk=held.real,
            reserve=held.reserve,
            queued_files=queue.queued_files,
            queued_bytes=queue.queued_bytes,
            written_files=writer.written_files,
            written_bytes=writer.written_bytes,
            read_files=reader.read_files,
            read_bytes=reader.read_bytes,
            dropped=queue.dropped,
            corrupt=reader.corrupt,
            unreadable=reader.unreadable,
            quarantine_bytes=held.quarantine,
            errors=queue.errors,
            last_error=queue.last_error,
            quarantined=self._opened.quarantine.taken,
            spill_seconds=writer.spill_seconds.read(),
            read_seconds=reader.read_seconds.read(),
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless ledger, index and directory agree. For tests: nothing may be queued, and it reads the
        disk.
        """
        assert self._queue.drained, "not idle: flush first"
        held, directory = self._opened.ledger.held(), self._opened.directory
        assert (held.queued, held.deleting) == (0, 0), held
        assert held.real == directory.size(), (held, directory.size())
        assert held.real <= held.total
        with closing(connect(directory.index)) as connection:
            rows = {entry.address: entry for entry in read_entries(connection)}
            roots = {namespace.root for namespace in read_namespaces(connection)}
        files = {address: item.stat() for address, item in directory.files()}
        assert rows.keys() == files.keys(), rows.keys() ^ files.keys()
        assert held.file_count == len(rows), (held.file_count, len(rows))
        assert held.file_bytes == sum(entry.disk for entry in rows.values())
        assert roots == {entry.namespace for entry in rows.values()}, "a namespace without an image"
        for address, entry in rows.items():
            assert (entry.nbytes, entry.disk) == (files[address].st_size, files[address].st_blocks * 512), entry


def _left(end: float | None) -> float | None:
    return None if end is None else max(end - time.monotonic(), 0.0)
