"""Who may open a directory: one process at a time, by its LOCK, and no release that is older than what wrote it."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import sqlite3
import time
import weakref
from contextlib import closing
from itertools import islice
from pathlib import Path

from prefixcache.image_format import FORMAT
from prefixcache.ssd.directory import Directory, identity_of, lock_text, refusal, require_plain
from prefixcache.ssd.errors import DirectoryHeld, IndexBroken, NewerFormat
from prefixcache.ssd.files import DamagedFile, read_header
from prefixcache.ssd.index import IndexFiles
from prefixcache.ssd.tables import check_format
from prefixcache.sync_folder import sync_folder

_FORMAT = re.compile(rb"^format ([0-9]{1,9})$", re.MULTILINE)
_SAMPLE = 8  # images that are looked at where neither LOCK nor index is there to say
_held: weakref.WeakSet[Lock] = weakref.WeakSet()


class Lock:
    """`fcntl.flock` on DIR/LOCK, which holds the owner's pid, host and start time as text.

    flock belongs to the open file, so a second opener of the same process is refused too. A forked child closes its
    copy: the lock is the parent's alone.
    """

    def __init__(self, directory: Directory):
        self._fd = -1
        require_plain(directory.lock)
        try:
            fd = os.open(directory.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise refusal(directory.lock, error) from error
        try:
            for attempt in range(5):  # `holder` takes a shared lock for an instant
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if attempt == 4:
                        raise DirectoryHeld(
                            f"ssd_dir={str(directory.root)!r}: in use by {_owner(fd)}; "
                            "close that one, or give this one a directory of its own; commands ask a server by --url"
                        ) from None
                    time.sleep(0.02)
        except OSError as error:
            os.close(fd)
            raise refusal(directory.lock, error) from error
        except BaseException:
            os.close(fd)
            raise
        self._fd, self._root = fd, directory.root
        self.identity = identity_of(os.fstat(fd))
        _held.add(self)

    def sign(self) -> None:
        """Write who holds it, durable before anything else is made: it tells that the directory is a cache's, and there is no
        moment without it.
        """
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        said = f"pid {os.getpid()}\nhost {socket.gethostname()}\nsince {since}\nformat {FORMAT}\n"
        text = said.encode(errors="replace")  # a host's name may be any bytes
        os.pwrite(self._fd, text, 0)
        os.ftruncate(self._fd, len(text))
        os.fsync(self._fd)
        sync_folder(self._root)

    def release(self) -> None:
        fd, self._fd = self._fd, -1
        _held.discard(self)
        if fd >= 0:
            os.close(fd)


def _forget_locks() -> None:
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_forget_locks)


def holder(directory: Directory) -> str | None:
    """Return who holds the directory now ("pid 12 on host since ..."), None when nobody does. Writes nothing."""
    require_plain(directory.lock)
    try:
        fd = os.open(directory.lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        return _owner(fd)
    finally:
        os.close(fd)


def _owner(fd: int) -> str:
    text = os.pread(fd, 1000, 0).decode("utf-8", "replace")
    said = dict(line.split(" ", 1) for line in text.splitlines() if " " in line)
    if {"pid", "host", "since"} - said.keys():
        return "another process"
    return f"pid {said['pid']} on {said['host']} since {said['since']}"


def lock_format(directory: Directory) -> int:
    """Return the format that LOCK says the directory is of; 0 when it says none. Writes nothing."""
    try:
        match = _FORMAT.search(lock_text(directory.lock))
    except OSError:
        return 0
    return int(match[1]) if match else 0


def refuse_newer(directory: Directory) -> None:
    """Raise NewerFormat when LOCK, the index or, where that is missing, an image is of a newer release. Leaves no trace."""
    path = directory.index
    for part in (*IndexFiles.of(path), path.with_name(f"{path.name}-journal")):
        require_plain(part)
    said = lock_format(directory)
    if said > FORMAT:
        raise NewerFormat(repr(str(directory.lock)), said, FORMAT)
    if path.exists() and path.stat().st_size and _knows_index(path):
        return
    for _, item in islice((image for image in directory.files() if image[0]), _SAMPLE):
        try:
            read_header(item.path)
        except (DamagedFile, OSError):
            continue


def _knows_index(path: Path) -> bool:
    """Tell whether the index is of a format that this release knows. Raise NewerFormat for a newer one."""
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
            check_format(connection, path)
    except (sqlite3.DatabaseError, UnicodeDecodeError, IndexBroken):
        return False
    return True
