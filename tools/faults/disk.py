"""A disk that fails, and a clock that steps, below a cache that knows nothing of it: this process's own calls, patched.

Only calls that concern the cache's directory are touched; what SQLite does by itself is out of reach, so that a
transaction is made to fail as a whole.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

KINDS = ("ENOSPC", "EIO", "EROFS", "stall")
STALL = 0.4  # seconds that one fsync of a stalled disk takes

_CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_SQLITE = {
    "ENOSPC": "database or disk is full",
    "EIO": "disk I/O error",
    "EROFS": "attempt to write a readonly database",
}


class Disk:
    """`kind` is what is wrong with the disk now: one of KINDS, or "" for nothing. `failed` counts calls that were failed
    or slowed. `_lock` guards `_ours`, the open descriptors of files in the directory.
    """

    def __init__(self, directory: str):
        self.kind = ""
        self.failed = 0
        self._directory = os.path.abspath(directory)
        self._ours: set[int] = set()
        self._lock = threading.Lock()

    def install(self) -> None:
        opened, closed = os.open, os.close

        def open_(path: Any, flags: int, *rest: Any, **more: Any) -> int:
            ours = self._below(path)
            if ours and ((self.kind in ("ENOSPC", "EROFS") and flags & _CHANGES) or self.kind == "EIO"):
                self._fail()
            fd = opened(path, flags, *rest, **more)
            with self._lock:
                (self._ours.add if ours else self._ours.discard)(fd)
            return fd

        def close(fd: int) -> None:
            with self._lock:
                self._ours.discard(fd)
            closed(fd)

        os.open, os.close = open_, close  # type: ignore[assignment]
        for name in ("write", "fsync"):
            setattr(os, name, self._of_descriptor(name, getattr(os, name)))
        for name in ("rename", "mkdir", "unlink"):
            setattr(os, name, self._of_path(name, getattr(os, name)))

    def install_transactions(self, index: Any) -> None:
        """`index`: the class whose `transaction` is to fail as SQLite's would."""
        original = index.transaction

        @contextmanager
        def transaction(one: Any) -> Iterator[None]:
            if self.kind in _SQLITE:
                self.failed += 1
                raise sqlite3.OperationalError(_SQLITE[self.kind])
            with original(one):
                yield

        index.transaction = transaction

    def _of_descriptor(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(fd: int, *rest: Any) -> Any:
            if self.kind and fd in self._ours:
                if self.kind != "stall":
                    self._fail()
                elif name == "fsync":
                    self.failed += 1
                    time.sleep(STALL)
            return original(fd, *rest)

        return call

    def _of_path(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        kinds = ("EIO", "EROFS") if name == "unlink" else ("ENOSPC", "EIO", "EROFS")

        def call(path: Any, *rest: Any, **more: Any) -> Any:
            if self.kind in kinds and self._below(path):
                self._fail()
            return original(path, *rest, **more)

        return call

    def _below(self, path: Any) -> bool:
        if isinstance(path, int):
            return False
        text = os.fspath(path)
        return isinstance(text, str) and (text == self._directory or text.startswith(f"{self._directory}/"))

    def _fail(self) -> None:
        self.failed += 1
        number = getattr(errno, self.kind)
        raise OSError(number, os.strerror(number))


class Clock:
    """The wall clock, `offset` seconds off."""

    def __init__(self) -> None:
        self.offset = 0.0

    def install(self) -> None:
        seconds, nanoseconds = time.time, time.time_ns
        time.time = lambda: seconds() + self.offset
        time.time_ns = lambda: nanoseconds() + int(self.offset * 1e9)
