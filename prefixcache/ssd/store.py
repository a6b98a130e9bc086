"""The opened directory: its lock, its index, its ledger, its quarantine, and how they come to be.

Opening refuses what a newer release wrote, rebuilds an index that is broken, and reconciles after a crash. From then on
the writer's thread alone changes what is here; readers only set files aside.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from prefixcache.ssd.directory import (
    LEVELS,
    Directory,
    Lock,
    device_of,
    disk_at,
    disk_of,
    identity_at,
    refusal,
    sync_folder,
    tree_size,
)
from prefixcache.ssd.entries import Address
from prefixcache.ssd.errors import IndexBroken, LogHeld
from prefixcache.ssd.files import remove_file
from prefixcache.ssd.formats import refuse_newer
from prefixcache.ssd.index import PAGE, Index, suffixes
from prefixcache.ssd.ledger import Ledger
from prefixcache.ssd.quarantine import Quarantine
from prefixcache.ssd.reconcile import Report, mend

log = logging.getLogger("prefixcache.ssd")

QUARANTINE_SHARE = 20  # quarantine may hold a 20th of the limit; beyond that its oldest leave
SHARED_MEMORY = 64 << 10  # index.db-shm, which SQLite grows by 32 kB for every 4096 pages of log
STRETCH = 4  # times its room that the index's log may take while a reader keeps it from being cut


class Store:
    """Not thread-safe but for `ledger`, `quarantine`, `set_aside`: its user is the writer's thread, or the opener."""

    probe = np.zeros(4096, np.uint8)

    def __init__(self, root: str | os.PathLike[str], limit: int):
        if limit <= 0:
            raise ValueError(f"limit={limit}: give the SSD's size in bytes")
        self.directory = Directory(root)
        self.directory.create()
        self._lock = Lock(self.directory)
        try:
            self.ledger = Ledger(limit, max(512, os.statvfs(self.directory.root).f_frsize))
            self.quarantine = Quarantine(self.directory)
            self._device = device_of(self.directory.root)
            self._open()
        except (OSError, sqlite3.Error) as error:
            self._lock.release()
            raise refusal(self.directory.root, error) from error
        except BaseException:
            self._lock.release()
            raise

    def _open(self) -> None:
        refuse_newer(self.directory)
        self._lock.sign()
        self.directory.furnish()
        for item in self.directory.links():
            self.quarantine.take(item.path, "a link: images are written into folders of the cache alone")
        self.index, broken = open_index(self.directory, self.quarantine)
        try:
            if broken or self.index.recovered or not self.index.clean or not self._agree():
                self.index, report = mended(self.directory, self.index, self.quarantine, broken=broken)
                if not report.clean:
                    log.warning("SSD %s: %s", self.directory.root, report.summary())
            self.index.mark(clean=False)
            for item in self.directory.strays():
                remove_file(item.path)
            self._lingering: set[str] = set()
            for folder in (*self.directory.image_folders(), f"{self.directory.root}/{LEVELS}"):
                with suppress(OSError):  # not empty
                    os.rmdir(folder)
            self._folders = self.directory.image_folders()
            count, files, self.newest = self.index.totals()
            self.ledger.begin(count, files, sum(item.disk for item in self.quarantine.items()))
            self.maintain(idle=True)
            self.index.checkpoint()
            self.measure()
            sync_folder(self.directory.root)
        except BaseException:
            self.index.close()
            raise

    def _agree(self) -> bool:
        """Whether index and files agree in names and, where the index's sizes are odd, in sizes. Real sizes are corrected:
        their sum is held against the limit.
        """
        wrong: list[tuple[Address, int]] = []
        for address, nbytes, disk in self.index.odd_sizes(self.ledger.block):
            try:
                found = os.stat(self.directory.file(address), follow_symlinks=False)
            except OSError:
                return False
            if found.st_size != nbytes:
                return False
            if disk_of(found) != disk:
                wrong.append((address, disk_of(found)))
        for at in range(0, len(wrong), self.ledger.rows):
            with self.index.transaction():
                for address, there in wrong[at : at + self.ledger.rows]:
                    self.index.correct(address, there)
            self.index.checkpoint()
        return self.directory.names() == self.index.names()

    # Accounting

    def measure(self) -> None:
        """Take the size of all that is neither an image nor set aside."""
        directory = self.directory
        database, log_file, shared = (disk_at(path) for path in suffixes(directory.index))
        overhead = directory.upper() + sum(self._folders.values()) + database + log_file + shared
        overhead += tree_size(directory.tmp) - disk_at(directory.tmp)
        overhead += sum(disk_at(path) for path in self._lingering)
        growth = max(0, self.index.logical_size() - database) + max(0, SHARED_MEMORY - shared)
        self.ledger.measure(overhead, growth + max(0, self.ledger.log_room - log_file))

    def note_folders(self, folders: list[str]) -> None:
        """These may have come, grown or gone."""
        for folder in folders:
            if len(os.path.basename(folder)) == 2:
                self._folders[folder] = disk_at(folder)

    def linger(self, path: str) -> None:
        """A file that should be gone but could not be deleted: it takes its room until it is."""
        if os.path.dirname(path) != str(self.directory.tmp):  # tmp/ is measured as a whole
            self._lingering.add(path)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """One of the index, whose log has room for it. LogHeld, and nothing done, where it has none."""
        self.require_log()
        with self.index.transaction():
            yield

    def require_log(self) -> None:
        """LogHeld unless the log has room for one more transaction.

        A log that can't be cut grows into room that is free; nothing leaves for it.
        """
        if self._cut_log():
            return
        self.measure()
        size, half = disk_at(suffixes(self.directory.index)[1]), self.ledger.log_room // 2
        if size + half > STRETCH * self.ledger.log_room or not self.ledger.stretch(half + SHARED_MEMORY // 2):
            raise LogHeld(
                f"{str(self.directory.index)!r}: another program reads it in a transaction that does not end, so its log "
                "can't be cut: end that program; fuser names it"
            )

    def _cut_log(self) -> bool:
        """Cut the log once it has used half of its room; whether the other half is free then."""
        log_file, half = suffixes(self.directory.index)[1], self.ledger.log_room // 2
        if disk_at(log_file) > half:
            self.index.checkpoint()
        return disk_at(log_file) <= half

    def maintain(self, *, idle: bool = False) -> None:
        """Cut the index's log; retry what could not be deleted; keep quarantine small."""
        self._cut_log()
        if idle and self._lingering:
            for path in list(self._lingering):
                remove_file(path)
                self._lingering.discard(path)
        held = self.ledger.held()
        excess = held.quarantine - self.ledger.limit // QUARANTINE_SHARE
        if excess > 0:
            self.ledger.quarantine(-self.quarantine.prune(excess))

    def shrink_index(self) -> None:
        """Give the file system the pages of the index that deletions left free."""
        self.index.shrink(max(1, self.ledger.log_room // 2 // PAGE))

    # Setting aside, by readers

    def set_aside(self, path: str, reason: str, identity: tuple[int, int] | None) -> bool:
        """Move a bad file to quarantine; False when it is not there any more."""
        moved = self.quarantine.take(path, reason, identity)
        if moved is None:
            return False
        self.ledger.quarantine(moved)
        return True

    # Life

    @property
    def stands(self) -> bool:
        """Whether the directory is still the one that was opened."""
        here = identity_at(self.directory.index)  # a closed index has no identity
        return (
            here is not None and here == self.index.identity and identity_at(self.directory.lock) == self._lock.identity
        )

    def revive(self) -> set[Address] | None:
        """After an error: make its folders where they are gone. If all of it vanished, begin it anew, and return the images
        that it has now.
        """
        if self.stands:
            self.directory.furnish()
            self._folders = self.directory.image_folders()
            return None
        if device_of(self.directory.root) != self._device:
            raise OSError(errno.ENODEV, "its disk is not mounted", str(self.directory.root))
        self.index.close()
        self.directory.create()
        if identity_at(self.directory.lock) != self._lock.identity:
            self._lock.release()
            self._lock = Lock(self.directory)
        self._open()
        log.warning("SSD %s: the directory vanished; it was begun anew", self.directory.root)
        return set(self.index.rows())

    def close(self, *, clean: bool) -> None:
        """Let go; `clean`: nothing was left undone, so that the next opening need not look at the files."""
        try:
            if clean:
                self.shrink_index()
                self.index.mark(clean=True)
            self.index.checkpoint()
        except sqlite3.Error as error:  # then the next opening reconciles
            log.warning("SSD %s: not closed cleanly: %s", self.directory.root, error)
        finally:
            self.index.close()
            self._lock.release()


def open_index(directory: Directory, quarantine: Quarantine) -> tuple[Index, str]:
    """The index, and why it is new: "" when it is not. One that is broken is set aside."""
    missing = not directory.index.exists()
    try:
        index = Index(directory.index)
        try:
            index.check()
        except BaseException:
            index.close()
            raise
        return index, "missing" if missing else ""
    except IndexBroken as error:
        return _new_index(directory, quarantine, str(error)), str(error)


def mended(
    directory: Directory, index: Index, quarantine: Quarantine, *, broken: str, **more: Any
) -> tuple[Index, Report]:
    """`mend`, and the index that stands then: a new one where the old one contradicts itself."""
    try:
        return index, mend(directory, index, quarantine, broken=broken, **more)
    except sqlite3.IntegrityError as error:
        reason = str(error)
    index.close()
    index = _new_index(directory, quarantine, reason)
    try:
        return index, mend(directory, index, quarantine, broken=reason, **more)
    except BaseException:
        index.close()
        raise


def _new_index(directory: Directory, quarantine: Quarantine, reason: str) -> Index:
    for path in suffixes(directory.index):
        if path.exists():
            quarantine.take(str(path), f"the index is broken: {reason}")
    return Index(directory.index)
