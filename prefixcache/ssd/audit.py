"""DIR/audit.log: a line of JSON for each command that changed a directory or took data out of it. Who, when, what, with which
result; never tokens. Bounded: beyond `MOST` bytes the older half leaves.
"""

from __future__ import annotations

import errno
import fcntl
import getpass
import json
import os
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from prefixcache.ssd.directory import Directory, identity_at, sync_folder

NAME = "audit.log"
MOST = 1_000_000  # bytes
_LONGEST = 64_000  # of a line


def append(directory: Directory, record: dict[str, Any]) -> None:
    """Add one line: `record` after the time (UTC), user, host and process. OSError when it can't be written."""
    line = _line(record)
    with _opened(directory) as fd:
        if os.fstat(fd).st_size + len(line) > MOST:
            _halve(directory, fd, line)
            return
        at = 0
        while at < len(line):
            at += os.write(fd, line[at:])
        os.fsync(fd)


def _line(record: dict[str, Any]) -> bytes:
    who = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "uid": os.getuid(),
        "user": _user(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
    }
    line = json.dumps({**who, **record}, ensure_ascii=True, separators=(",", ":"))
    if len(line) >= _LONGEST:
        kept = {name: value for name, value in record.items() if name in ("release", "command", "result")}
        line = json.dumps({**who, **kept, "cut": f"a line of {len(line)} bytes"}, separators=(",", ":"))
    return line.encode("ascii") + b"\n"


def _user() -> str:
    try:
        return getpass.getuser()
    except Exception:  # an id without a name
        return ""


@contextmanager
def _opened(directory: Directory) -> Iterator[int]:
    """The log's descriptor, locked: of the file that has the name now, whoever has halved it meanwhile."""
    path = directory.root / NAME
    while True:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        fd = os.open(path, flags, 0o600)
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "not a plain file", str(path))
            fcntl.flock(fd, fcntl.LOCK_EX)
            if identity_at(path) != (found.st_dev, found.st_ino):
                continue
            if stat.S_IMODE(found.st_mode) != 0o600:
                os.fchmod(fd, 0o600)
            yield fd
            return
        finally:
            os.close(fd)


def _halve(directory: Directory, fd: int, line: bytes) -> None:
    """The newer half and `line` in the place of the log."""
    path, fresh = directory.root / NAME, directory.root / f"{NAME}.new"
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
        size = os.fstat(fd).st_size
        file.seek(max(0, size - MOST // 2))
        kept = file.read(MOST // 2)
    kept = kept.partition(b"\n")[2] if size > MOST // 2 else kept
    with suppress(FileNotFoundError):  # left by a crash
        os.unlink(fresh)
    new = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        view, at = memoryview(kept + line), 0
        while at < len(view):
            at += os.write(new, view[at:])
        os.fsync(new)
    finally:
        os.close(new)
    os.rename(fresh, path)
    sync_folder(directory.root)
