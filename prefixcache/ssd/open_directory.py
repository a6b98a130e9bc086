"""The opened directory: its lock, its index, its ledger and its quarantine, and the opening of them.

Opening refuses what a newer release wrote, and compares index and files after a crash or when they don't agree. From then on
the writer's thread alone changes what is here; readers only quarantine files.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from prefixcache.byte_sizes import as_setting
from prefixcache.ssd.directory import (
    LOCK,
    Directory,
    device_below,
    device_of,
    disk_at,
    disk_of,
    identity_at,
    refusal,
    remove_empty_folders,
    remove_folder,
    tree_size,
)
from prefixcache.ssd.entries import FOLDERS, Address, Entry, NamespaceRow, batched
from prefixcache.ssd.errors import LogHeld
from prefixcache.ssd.files import remove_file
from prefixcache.ssd.index import PAGE, IndexFiles
from prefixcache.ssd.ledger import NOISE_BYTES, DiskRoom, Ledger, free_space
from prefixcache.ssd.lock import Lock, refuse_newer
from prefixcache.ssd.quarantine import Quarantine, quarantined
from prefixcache.ssd.repair import mend, open_index
from prefixcache.sync_folder import sync_folder

log = logging.getLogger("prefixcache.ssd")

QUARANTINE_SHARE = 20  # quarantine may hold a 20th of the limit; beyond that its oldest are deleted


class Contents(NamedTuple):
    """What a directory has."""

    namespaces: list[NamespaceRow]
    entries: list[Entry]


class OpenDirectory:
    """A directory while a tier has it. Not thread-safe but for `ledger`, `quarantine`, `move_away`: the writer's thread uses
    it, and before that the opener's.

    `entries`: the index's entries at the opening, until somebody takes them. `note`: what the index is to tell the next
    opening. `newest`: the tick of the latest use that the index knew.
    """

    def __init__(self, root: str | os.PathLike[str], limit: int, reserve: int | None = None):
        """`reserve`: bytes of the disk that stay free; None: the disk is not asked."""
        if limit <= 0:
            raise ValueError(f"limit={limit}: give the SSD's size in bytes")
        self.directory = Directory(root)
        self.directory.create()
        self._lock = Lock(self.directory)
        try:
            self.ledger = Ledger(limit, max(512, os.statvfs(self.directory.root).f_frsize))
            self.quarantine = Quarantine(self.directory)
            self._room = DiskRoom(reserve) if reserve is not None else None
            self._is_short = False  # the log was told that the disk has less room than was asked for
            self._note_disk()
            self._open()
            self.note = self.index.note  # kept here: should the index be lost meanwhile, the next one gets it
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
        opened = open_index(self.directory, self.quarantine)
        self.index, entries = opened.index, opened.entries
        try:
            if opened.broken or self.index.recovered or not self.index.clean or not self._agree(entries):
                mended = mend(self.directory, opened, self.quarantine)
                self.index = mended.index
                if not mended.report.clean:
                    log.warning("SSD %s: %s", self.directory.root, mended.report.summary())
                entries = self.index.entries()
            self.index.mark(clean=False)
            for item in self.directory.strays():
                remove_file(item.path)
            self._lingering: set[str] = set()
            for folder in self.directory.image_folders():
                with suppress(OSError):  # not empty
                    remove_folder(folder)
            self._folders = self.directory.image_folders()
            self.entries: list[Entry] | None = entries
            self.newest = max((entry.used for entry in entries), default=0)
            disk = sum(entry.disk for entry in entries)
            self.ledger.begin(len(entries), disk, sum(item.disk for item in quarantined(self.directory)))
            self.maintain(idle=True)
            self.index.checkpoint()
            self.measure()
            self.update_ceiling()
            sync_folder(self.directory.root)
        except BaseException:
            self.index.close()
            raise

    def _agree(self, entries: list[Entry]) -> bool:
        """Tell whether index and files agree in names. An entry's bytes on the disk, whose sum is held against the limit, are
        looked up where its size lets expect others, and corrected, in `entries`, too.
        """
        names: dict[str, set[str]] = {kind: set() for kind in FOLDERS}
        for entry in entries:
            names[entry.kind].add(entry.key.hex())
        if sum(map(len, names.values())) != len(entries) or self.directory.names() != names:
            return False
        block = self.ledger.block
        wrong: list[int] = []
        for number, entry in enumerate(entries):
            if entry.disk == -(-entry.nbytes // block) * block:
                continue
            status = os.stat(self.directory.file(entry.address), follow_symlinks=False)
            if status.st_size != entry.nbytes:
                return False
            if disk_of(status) != entry.disk:
                entries[number] = entry._replace(disk=disk_of(status))
                wrong.append(number)
        for batch in batched(wrong, self.ledger.rows):
            with self.index.transaction():
                for number in batch:
                    self.index.correct(entries[number].address, entries[number].disk)
            self.index.checkpoint()
        return True

    # -- accounting ---------------------------------------------------------------------------------------------------

    def measure(self) -> None:
        """Tell the ledger the size of all that is neither an image nor in quarantine; the index's log with its allowance."""
        directory = self.directory
        database, log_file, shared = (disk_at(path) for path in IndexFiles.of(directory.index))
        overhead = directory.upper() + sum(self._folders.values()) + database + log_file + shared
        overhead += tree_size(directory.tmp) - disk_at(directory.tmp)
        overhead += sum(disk_at(path) for path in self._lingering)
        growth = max(0, self.index.logical_size() - database)
        self.ledger.measure(overhead, growth + max(0, self.ledger.log_allowance - log_file - shared))
        self.index.note_sizes()

    def update_ceiling(self) -> bool:
        """Set the ceiling to what the disk has room for now. Return whether the directory takes more: images must then go."""
        if self._room is None:
            return False
        held, before = self.ledger.held(), self.ledger.limit
        self.ledger.set_ceiling(self._room.ceiling_now(held.real, held.total, free_space(self.directory.root)))
        if self.ledger.limit != before:
            self.measure()  # the log's allowance is a share of the limit
        self._tell_of_room(self._room.reserve)
        return self.ledger.used > self.ledger.limit

    def note_full(self) -> None:
        """Note that a file found no room: the directory can't grow, and queued writes need the room of others."""
        if self._room is not None:
            self._room.note_full(self.ledger.held().real, free_space(self.directory.root))

    @contextmanager
    def deleting(self) -> Iterator[None]:
        """Note how much free space the disk gains by the deletions within the block."""
        if self._room is None:
            yield
            return
        files, free = self.ledger.held().file_bytes, free_space(self.directory.root)
        yield
        self._room.note_deletion(files - self.ledger.held().file_bytes, free_space(self.directory.root) - free)

    def _tell_of_room(self, reserve: int) -> None:
        """Log when the disk has less room than what was asked for, and when it has more again."""
        asked, limit, root = self.ledger.asked, self.ledger.limit, self.directory.root
        if limit < asked and not self._is_short:
            self._is_short = True
            short = as_setting(limit)
            less = f', or write --ssd {short} (ssd="{short}") or less' if limit > NOISE_BYTES else ""
            log.warning(
                "SSD %s: ssd=%s is more than its disk has room for beside ssd_reserve=%s: the limit is %s until "
                "there is more; make room there%s",
                root,
                as_setting(asked),
                as_setting(reserve),
                short,
                less,
            )
        elif self._is_short and self.ledger.ceiling > asked + asked // 16:  # and not at every file of another program
            self._is_short = False
            log.info("SSD %s: its disk has room again: the limit is back at %s", root, as_setting(asked))

    def note_folders(self, folders: list[str]) -> None:
        """Note that these folders may have come, grown or gone."""
        for folder in folders:
            if len(os.path.basename(folder)) == 2:
                self._folders[folder] = disk_at(folder)

    def linger(self, path: str) -> None:
        """Note a file that could not be deleted: it takes its room until it is."""
        if os.path.dirname(path) != str(self.directory.tmp):  # tmp/ is measured as a whole
            self._lingering.add(path)

    def note_written(self, path: str) -> None:
        """Note that an image has just been written there: whatever was to be deleted is gone."""
        self._lingering.discard(path)

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Begin a transaction of the index, whose log has room for it. Raises LogHeld at once where it has none."""
        self.require_log()
        with self.index.transaction():
            yield

    def leave_note(self) -> None:
        """Leave `note` in the index, where it has another."""
        if self.index.note != self.note:
            with self.transaction():
                self.index.leave_note(self.note)

    def require_log(self) -> None:
        """Raise LogHeld unless the log has room for one more transaction within its allowance. It has none while somebody
        reads it, so that it can't be cut.
        """
        self._cut_log()
        if disk_at(IndexFiles.of(self.directory.index).log) > self.ledger.begin_no_transaction_above:
            raise LogHeld(
                f"{str(self.directory.index)!r}: another program reads it in a transaction that does not end, so its log "
                "can't be cut: end that program; fuser names it"
            )

    def _cut_log(self) -> None:
        if disk_at(IndexFiles.of(self.directory.index).log) > self.ledger.checkpoint_above:
            self.index.checkpoint()

    def maintain(self, *, idle: bool = False) -> None:
        """Cut the index's log; retry what could not be deleted; keep quarantine small."""
        self._cut_log()
        for path in list(self._lingering) if idle else ():
            with suppress(OSError):  # one that can never be deleted keeps nobody from writing others
                remove_file(path)
                self._lingering.discard(path)
        held = self.ledger.held()
        excess = held.quarantine - self.ledger.limit // QUARANTINE_SHARE
        if excess > 0:
            self.ledger.quarantine(-self.quarantine.prune(excess))

    def delete(self, addresses: Iterable[Address], progress: Callable[[int], None]) -> None:
        """Delete rows, then files, then folders that are empty, in transactions of a bounded size; after each one `progress`
        is told how many images are deleted.
        """
        folders, count = set(), 0
        for batch in batched(addresses, self.ledger.rows):
            with self.index.transaction():
                self.index.remove(batch)
            for address in batch:
                remove_file(self.directory.file(address))
                folders.add(self.directory.folder(address))
            self.maintain()
            count += len(batch)
            progress(count)
        remove_empty_folders(folders)
        self.shrink_index()
        self.index.checkpoint()

    def shrink_index(self) -> None:
        """Give the file system the pages of the index that deletions left free."""
        self.index.shrink(self.ledger.checkpoint_above // PAGE)

    # -- by readers ---------------------------------------------------------------------------------------------------

    def move_away(self, path: str, reason: str, identity: tuple[int, int] | None) -> bool:
        """Move a bad file to quarantine. Return False when it is not there any more."""
        moved = self.quarantine.take(path, reason, identity)
        if moved is None:
            return False
        self.ledger.quarantine(moved)
        return True

    # -- lost, opened again, closed -----------------------------------------------------------------------------------

    @property
    def lost(self) -> str:
        """Return the file that is no longer the one that was opened, LOCK or one of the index's; "" if there is none."""
        if identity_at(self.directory.lock) != self._lock.identity:
            return LOCK
        return self.index.lost

    def reopen(self) -> Contents | None:
        """Mend the directory after an error. If it vanished, came back as another disk, or its index is lost or doubtful:
        open it again and return what it has now. Else make the folders that are gone.
        """
        lost = self.lost
        if not lost and not self.index.doubtful:
            self.directory.furnish()
            self._folders = self.directory.image_folders()
            return None
        if device_of(self.directory.root) == self._device:
            self.index.close()
            what = self._what_happened(lost)
        else:
            self._require_own_disk()
            self.index.abandon()
            what = "its disk is back"
        self.directory.create()
        if identity_at(self.directory.lock) != self._lock.identity:
            self._lock.release()
            self._lock = Lock(self.directory)
        self._note_disk()
        self._open()
        entries, self.entries = self.entries or [], None
        log.warning("SSD %s: %s", self.directory.root, what)
        return Contents(self.index.namespaces(), entries)

    def _what_happened(self, lost: str) -> str:
        if not lost:
            return "the index was damaged; it was rebuilt"
        if not os.path.lexists(self.directory.lock):
            return "the directory vanished; it was recreated"
        return (
            f"another program deleted, replaced or cut {lost}; the index was opened anew, and compared with the files"
        )

    def _note_disk(self) -> None:
        self._device, self._below = device_of(self.directory.root), device_below(self.directory.root)

    def _require_own_disk(self) -> None:
        """Raise OSError unless the disk that is at the path now, under another number than before, has this directory: a
        folder that stands there while no disk is mounted must not be filled.
        """
        root = self.directory.root
        if device_of(root) == self._below or not os.path.lexists(root):
            raise OSError(errno.ENODEV, "its disk is not mounted", str(root))
        if not self.directory.proven:
            raise OSError(errno.ENODEV, "its disk is not mounted: another disk is in its place", str(root))

    def close(self, *, clean: bool) -> None:
        """Close the index and release the lock. `clean`: nothing was left undone, so the next opening need not look at the
        files.
        """
        try:
            if clean and not self.lost:  # else what is said here may be in a file that nobody finds
                self.shrink_index()
                self.index.mark(clean=True)
            self.index.checkpoint()
        except sqlite3.Error as error:  # then the next opening reconciles
            log.warning("SSD %s: not closed cleanly: %s", self.directory.root, error)
        finally:
            self.index.close()
            self._lock.release()
