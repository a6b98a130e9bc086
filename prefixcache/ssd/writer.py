"""The thread that changes the directory: it takes what is queued, in batches, and makes it durable in the order
described below.

Of a batch the deletions go first (rows, then files: what they free is free before a write begins), then the files of
the writes (tmp, fsync, rename, fsync of the folders), then one transaction with their rows. So a row is never older
than its file, and the disk never holds more than was admitted. Only where the index can't be written do deleted files
go before their rows. Which image is written or deleted is decided elsewhere.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from prefixcache.metrics.histogram import Histogram
from prefixcache.ssd.directory import make_folder, remove_folder
from prefixcache.ssd.entries import Address, Entry, Item, NamespaceRow, Touch, batched
from prefixcache.ssd.files import remove_file, write_file
from prefixcache.ssd.index import Row, proves_damage
from prefixcache.ssd.ledger import DISK_POLL_SECONDS, is_full
from prefixcache.ssd.open_directory import OpenDirectory
from prefixcache.ssd.queue import Queue, QueuedBatch, Removal, Write
from prefixcache.sync_folder import sync_folder

log = logging.getLogger("prefixcache.ssd")

# fsync waits for the disk, so more threads than cores pay: 8 write 1.2x as fast as 4, 16 no faster than 8.
SYNCERS = 8
ATTEMPTS = 3  # that a write has on a full disk, each after deletions
SILENCE = 60.0  # seconds between two log lines of the same error


class WriterEvents(NamedTuple):
    """Whom the writer tells, on its thread and with no lock of this package held. None of these may call `flush` or `close`.

    `written` hears once of each accepted write: with None after the row is committed (the entry then has its real `disk`),
    else with the error (`Cancelled` for one deleted before its turn). `reopened` is given what the directory has when
    it was opened anew: it was gone, its disk came back, its index was lost or damaged. `shrunk` deletes images when the
    limit fell below the bytes in use, or a write found the disk full, and returns whether it could.
    """

    written: Callable[[Entry, Exception | None], None]
    reopened: Callable[[list[NamespaceRow], list[Entry]], None] | None = None
    shrunk: Callable[[], bool] | None = None


class Writer:
    """One thread and its helpers; what it shares with others is in the queue, the ledger and the opened directory.

    Only this thread makes and deletes folders. `written_*` are read by others, written here.
    """

    def __init__(self, opened: OpenDirectory, queue: Queue, events: WriterEvents):
        self._opened, self._queue, self._events = opened, queue, events
        self._unsynced: set[str] = set()
        self._told = "", 0.0  # the error that was logged last, and when
        self._ending = threading.Lock()  # guards the two below
        self._ended: Callable[[], None] | None = None
        self._over = False
        self.written_files = self.written_bytes = 0
        self.spill_seconds = Histogram()  # from the queue to a file that is durable and indexed
        self._pool = ThreadPoolExecutor(SYNCERS, thread_name_prefix="prefixcache-fsync")
        self._thread = threading.Thread(target=self._run, name="prefixcache-ssd-writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout: float | None) -> bool:
        """Wait for the thread, and return whether it ended in time."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def detach(self, ended: Callable[[], None]) -> None:
        """Wait no more: `ended` is called when the thread has ended, on it, or here when it has already."""
        with self._ending:
            self._ended = ended
            late = self._over
        if late:
            ended()

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._pool.shutdown(wait=False)
            with self._ending:
                self._over = True
                ended = self._ended
            if ended is not None:
                ended()

    def _work(self) -> None:
        while (batch := self._next()) is not None:
            self._do(batch)
            del batch  # its images may be evicted while the next one is waited for

    def _do(self, batch: QueuedBatch) -> None:
        for write in batch.cancelled:
            self._call(write)
        error = self._attempt(batch)
        again = self._make_room(batch, error)
        ended = [write for write in batch.writes if write not in again]
        for write in ended:
            self._report(write, error)
        if again:
            error = None
        batch.failed = sum(not write.done for write in ended)
        for write in self._queue.finish(batch, error, again):
            self._call(write)
        if error is not None:
            self._tell(str(error))
        elif batch.writes:
            self._told = "", 0.0

    def _next(self) -> QueuedBatch | None:
        """Return the next batch. While none comes, check that the directory is still there and how much its disk has free."""
        while not self._queue.wait(DISK_POLL_SECONDS):
            if self._queue.stuck:
                continue  # the next batch detects it
            try:
                if not self._opened.lost:
                    self._evict_for_disk()
                    continue
            except Exception:  # the error is logged when the next batch fails
                log.debug("SSD %s: could not look at the disk", self._opened.directory.root, exc_info=True)
            self._queue.nudge()
        return self._queue.take()

    def _evict_for_disk(self) -> None:
        """Have the cache delete images that the disk has no more room for."""
        if self._opened.update_ceiling() and self._events.shrunk is not None:
            self._events.shrunk()

    def _make_room(self, batch: QueuedBatch, error: Exception | None) -> list[Write]:
        """Have the cache delete its least recent images if the disk was full. Returns the writes to be tried again."""
        failed = [write for write in batch.writes if not write.done and is_full(write.error or error)]
        again = [write for write in failed if write.attempts < ATTEMPTS]
        if not again or self._events.shrunk is None:
            return []
        try:
            if any(write.error is not None for write in again):
                self._opened.note_full()
            self._opened.update_ceiling()
        except (OSError, sqlite3.Error):
            return []
        if not self._events.shrunk():
            return []
        for write in again:
            write.attempts += 1
            write.error = None
        return again

    def _tell(self, error: str) -> None:
        """Log what went wrong; the same again after a minute at the earliest."""
        told, at = self._told
        if error != told or time.monotonic() > at + SILENCE:
            self._told = error, time.monotonic()
            log.warning("SSD %s: %s; resumes by itself", self._opened.directory.root, error)

    def _attempt(self, batch: QueuedBatch) -> Exception | None:
        """Do the batch; the error that stopped it or the first that one of its writes met."""
        error: Exception | None = None
        if batch.note is not None:
            self._opened.note = batch.note
        try:
            if batch.probe or self._opened.lost or self._opened.index.doubtful:
                contents = self._opened.reopen()
                if contents is not None and self._events.reopened is not None:
                    self._events.reopened(contents.namespaces, contents.entries)
            if batch.removals:
                with self._opened.deleting():
                    self._delete(batch.removals)
            if batch.probe:  # after the deletions: they need no room
                self._probe()
            self._write_images(batch)
            self._touch(batch.touches)
            self._opened.leave_note()
            self._sync_folders()
            self._opened.maintain(idle=not batch.writes and not self._queue.waiting)
        except Exception as problem:  # whatever it is, the thread lives on, and tells
            error = problem
        for write in batch.writes:
            error = error or write.error
        self._opened.index.doubtful |= proves_damage(error)
        try:
            self._opened.measure()
            self._evict_for_disk()
        except Exception as problem:
            error = error or problem
        return error

    def _report(self, write: Write, error: Exception | None) -> None:
        """End a write of a batch: let go of its bytes, then tell the cache. `error` is the batch's."""
        if write.done:
            write.error = None
            self.written_files += 1
            self.written_bytes += write.image.nbytes
            self.spill_seconds.observe(time.monotonic() - write.queued_at)
        else:
            write.error = write.error or error or OSError("the write was not done")
            self._opened.ledger.end_write(write.image.nbytes, None)
        self._queue.released(write)
        self._call(write)

    def _call(self, write: Write) -> None:
        try:
            self._events.written(write.entry, write.error)
        except Exception:
            log.exception("the callback of a write failed: %r", write.entry)

    def _probe(self) -> None:
        path = str(self._opened.directory.tmp / "probe")
        remove_file(path)
        write_file(path, np.zeros(4096, np.uint8))
        remove_file(path)
        self._opened.require_log()

    def _delete(self, removals: dict[Address, Removal]) -> None:
        """Delete rows, committed, and then files: what a crash leaves is a file, which the next opening takes in.

        Where the index can't be written, on a full disk or because somebody reads it and does not end, files go first: that
        takes no room, and makes some. Takes the removals that are done out of `removals`; rows that still can't be deleted
        stay there, and the last error is raised.
        """
        directory, ledger, index = self._opened.directory, self._opened.ledger, self._opened.index
        failed: Exception | None = None
        for part in batched(list(removals), ledger.rows):
            # If the old file was already deleted and a file is there now, it is a newer one: keep it and its row.
            doomed = [a for a in part if not (removals[a].gone and os.path.lexists(directory.file(a)))]
            rows = index.find(doomed)
            try:
                self._delete_rows(rows)
            except Exception:
                for address in filter(self._unlink, doomed):
                    removals[address] = self._account(removals[address], rows.get(address))
                try:
                    self._delete_rows(rows)
                except Exception as error:
                    failed = error
                    continue
            for address in part:
                self._account(removals.pop(address), rows.get(address))
            for address in doomed:
                if not self._unlink(address):  # it has no row any more: the next reconcile finds it
                    self._opened.linger(directory.file(address))
            self._remove_folders({directory.folder(address) for address in doomed})
        if failed:
            raise failed

    def _delete_rows(self, rows: Mapping[Address, Row]) -> None:
        if rows:
            with self._opened.transaction():
                self._opened.index.remove(rows)

    def _remove_folders(self, folders: set[str]) -> None:
        """Remove folders that are empty: 256 of them take a megabyte, in which a small limit has images."""
        for folder in folders:
            with suppress(OSError):  # not empty
                remove_folder(folder)
                self._unsynced.discard(folder)
                self._unsynced.add(os.path.dirname(folder))
                self._opened.note_folders([folder])

    def _account(self, removal: Removal, row: Row | None) -> Removal:
        """Count the deletion of a file or its row, whichever was first, and return the rest of its removal."""
        self._opened.ledger.count_deleted(row.disk if row is not None and removal.counted else None, removal.credit)
        return Removal(0, gone=True, counted=False)

    def _unlink(self, address: Address) -> bool:
        """Delete a file, and return whether it is gone."""
        try:
            os.unlink(self._opened.directory.file(address))
            self._unsynced.add(self._opened.directory.folder(address))
        except FileNotFoundError:
            pass
        except OSError as error:
            log.warning("SSD %s: a deleted file stays: %s", self._opened.directory.root, error)
            return False
        return True

    def _write_images(self, batch: QueuedBatch) -> None:
        """Write files, folders and rows, in this order. Each write ends with `disk` or with `error`."""
        standing = self._skip_durable(batch)
        fresh = [write for write in batch.writes if write.entry.address not in standing]
        self._each(self._write_file, fresh)
        placed = [write for write in fresh if write.error is None and self._place(write)]
        if placed:
            self._sync_folders(placed)
            self._commit([write for write in placed if write.error is None], batch.touches)

    def _each(self, work: Callable[[Item], None], items: list[Item]) -> None:
        """Do the work on the helpers; on this thread where they can't be had: the interpreter is ending, or no thread can be
        made.
        """
        begun: set[int] = set()
        claiming = threading.Lock()

        def once(number: int) -> None:
            with claiming:
                if number in begun:  # the pool takes an item before it finds that it has no thread for it
                    return
                begun.add(number)
            work(items[number])

        futures = []
        for number in range(len(items)):
            try:
                futures.append(self._pool.submit(once, number))
            except RuntimeError:
                once(number)
        for number in range(len(items)):
            once(number)  # this thread works too, in place of waiting
        for future in futures:
            future.result()

    def _skip_durable(self, batch: QueuedBatch) -> set[Address]:
        """Return the addresses of writes that are on the disk already, byte for byte. Deleted first: other content under the
        same name, and images under a root key whose stored model, codec or layout differ from what the cache computes.
        """
        touches = batch.touches
        same: set[Address] = set()
        other: dict[Address, Removal] = {}
        spaces = {write.namespace.root: write.namespace for write in batch.writes}
        forged = [address for space in spaces.values() for address in self._opened.index.stated_otherwise(space)]
        if forged:
            log.warning(
                "SSD %s: %d images of a namespace that was forged: deleted", self._opened.directory.root, len(forged)
            )
            self._delete({address: Removal(0, gone=False) for address in forged})
        rows = self._opened.index.find(write.entry.address for write in batch.writes)
        for write in batch.writes:
            row = rows.get(write.entry.address)
            if row is None:
                continue
            path, entry = self._opened.directory.file(write.entry.address), write.entry
            extra = entry.extra if entry.kind == "window" else row.extra  # the cache keeps no other's
            says = (entry.namespace, entry.parent, write.image.nbytes, entry.checksum, extra)
            has_right_size = os.path.exists(path) and os.stat(path).st_size == write.image.nbytes
            if row[:-1] == says and has_right_size:
                same.add(write.entry.address)
                write.entry = write.entry._replace(disk=row.disk)
                self._opened.ledger.end_write(write.image.nbytes, None)
                write.done = True
                used = Touch(write.entry.used, 0, write.entry.used_at)
                touches[write.entry.address] = used.joined(touches.get(write.entry.address))
            else:
                other[write.entry.address] = Removal(0, gone=False)
        try:
            self._delete(other)
        finally:
            batch.removals.update(other)  # rows that could not be deleted
        return same

    def _tmp(self, write: Write) -> str:
        return str(self._opened.directory.tmp / f"{write.sequence}.safetensors")

    def _write_file(self, write: Write) -> None:
        try:
            write.entry = write.entry._replace(disk=write_file(self._tmp(write), write.image.data))
        except Exception as error:
            write.error = error

    def _place(self, write: Write) -> bool:
        directory, tmp = self._opened.directory, self._tmp(write)
        folder, path = directory.folder(write.entry.address), directory.file(write.entry.address)
        try:
            if make_folder(folder):
                self._unsynced.add(os.path.dirname(folder))
            with self._opened.quarantine.paths:
                os.rename(tmp, path)
            self._opened.note_written(path)
        except Exception as error:
            write.error = error
            self._clear(tmp)
            return False
        self._unsynced.add(folder)
        return True

    def _sync_folders(self, placed: list[Write] | None = None) -> None:
        """Make the folders durable where names have come or gone. The writes into one that fails, fail."""
        folders, self._unsynced = sorted(self._unsynced), set()
        failed: dict[str, Exception] = {}

        def sync(folder: str) -> None:
            try:
                sync_folder(folder)
            except Exception as error:
                failed[folder] = error

        self._each(sync, folders)
        # What made them must not be taken for durable by a later batch; those that are gone are nobody's.
        self._unsynced |= {folder for folder, error in failed.items() if not isinstance(error, FileNotFoundError)}
        self._opened.note_folders(folders)
        for write in placed or ():
            folder = self._opened.directory.folder(write.entry.address)
            problem = failed.get(folder) or failed.get(os.path.dirname(folder))
            if problem:
                write.error = problem
                self._clear(self._opened.directory.file(write.entry.address))
        if failed and placed is None:
            raise next(iter(failed.values()))

    def _commit(self, writes: list[Write], touches: dict[Address, Touch]) -> None:
        """Insert rows and the touches in one transaction; in several where the limit leaves the log little room."""
        index, ledger = self._opened.index, self._opened.ledger
        later: Exception | None = None
        for part in batched(writes, ledger.rows):
            try:
                with self._opened.transaction():
                    for write in part:
                        index.insert(write.entry, write.namespace)
                    travel = touches if len(part) + len(touches) <= ledger.rows else {}
                    index.touch(travel)
            except Exception as error:
                for write in part:
                    write.error = error
                    self._clear(self._opened.directory.file(write.entry.address))
                continue
            if travel:
                touches.clear()
            try:
                self._opened.measure()  # before the room that was kept for the index's growth is given back
            except Exception as error:  # these rows stand all the same, and the next part may
                later = error
            for write in part:
                ledger.end_write(write.image.nbytes, write.entry.disk)
                write.done = True
        if later:
            raise later

    def _touch(self, touches: dict[Address, Touch]) -> None:
        for part in batched(list(touches), self._opened.ledger.rows * 4):  # a touch dirties one page, not eight
            with self._opened.transaction():
                self._opened.index.touch({address: touches[address] for address in part})
            for address in part:
                del touches[address]

    def _clear(self, path: str) -> None:
        try:
            remove_file(path)
        except OSError:
            self._opened.linger(path)
