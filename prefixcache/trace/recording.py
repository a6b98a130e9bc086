"""What the setting `trace` (PREFIXCACHE_TRACE) writes on a live server: which blocks were asked for and when, for a planner.

There is no text, no token and no model's name in it: a block's id is a hash of its key under a secret that stays beside the
file. `cache` calls a `Recorder`, which hashes and writes on a thread of its own; `format` says what a line is, `reading`
reads it.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import stat
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from prefixcache.keys import BLOCK, TOKEN_BYTES
from prefixcache.trace.format import (
    FETCH,
    HEAD_BYTES,
    SECRET_BYTES,
    STORE,
    Line,
    begins_recording,
    block_ids,
    block_keys,
    encode,
)
from prefixcache.trace.tails import Tails

log = logging.getLogger("prefixcache")

FLUSH_SECONDS = 1.0
FLUSH_BYTES = 1 << 20  # of tokens that wait to be written: then at once
QUEUE_BYTES = 64 << 20  # of tokens that wait at most
CLOSE_SECONDS = 10.0  # that `close` waits for the disk at most
TAILS = 8192  # remembered, some 500 bytes each
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

_open: weakref.WeakSet[Recorder] = weakref.WeakSet()


class _Call(NamedTuple):
    call: str
    time: int  # milliseconds
    root: bytes
    token_bytes: bytes
    keys: Sequence[bytes]


class Recorder:
    """Appends one JSON line a call to a file that it alone writes to.

    `path` gets the lines; `path`.secret gets the secret, so that ids go on after a restart. Both are the owner's alone
    (0600). The file grows for as long as the server runs, some 20 bytes a block. ValueError when it can't be written, is
    another recorder's, or holds something else.

    A line names the tails that its blocks have grown from, of the last `TAILS` ones, not over a restart; the longest where
    there are several. It is said when the block is new, and may be said again.

    Thread-safe: `_changed` guards the calls that wait and `_closing`. A call is put in memory, and never waits or raises.
    A thread writes what waits once a second, or when a megabyte of tokens waits. What can't be written, or not as fast as it
    comes, ends the recording with one warning, and `failed` says why. A forked child records nothing.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.failed: str | None = None
        self._changed = threading.Condition()  # an RLock: a signal's handler may close what it interrupts
        self._calls: list[_Call] = []
        self._nbytes = 0
        self._last = 0  # milliseconds
        self._closing = False
        self._tails = Tails(TAILS)
        self._fd = -1
        try:
            self._fd = _opened(self.path)
            self._secret = _secret(self.path.with_name(self.path.name + ".secret"))
            _end_line(self._fd)
        except OSError as error:
            self._let_go()
            raise _refused(Path(error.filename or self.path), error.strerror or str(error)) from None
        except BaseException:
            self._let_go()
            raise
        self._writer = threading.Thread(target=self._run, name="prefixcache-trace", daemon=True)
        _open.add(self)
        self._writer.start()

    def fetch(self, root: bytes, token_bytes: bytes, keys: Sequence[bytes] = ()) -> None:
        """Record that a prompt was looked up: its tokens (little-endian int64), and what its blocks' keys are chained
        from.

        Any bytes that stand for the namespace will do for `root`, the same ones for what is fetched and what is stored.
        A namespace that isn't there yet has no root key, so a hash of model and salt serves better: ids then agree between a
        model's first fetch, its later ones and its different layouts. `keys`: those of its first blocks, chained from `root`,
        where the caller has them; the others are made here.
        """
        self._record(FETCH, root, token_bytes, keys)

    def store(self, root: bytes, token_bytes: bytes, keys: Sequence[bytes] = ()) -> None:
        """Record that a prompt cache of these tokens was stored; arguments as for `fetch`."""
        self._record(STORE, root, token_bytes, keys)

    def close(self) -> None:
        """Write what waits and let go of the file; later calls do nothing."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._writer.join(CLOSE_SECONDS)

    def _record(self, call: str, root: bytes, token_bytes: bytes, keys: Sequence[bytes]) -> None:
        with self._changed:
            if self._closing:
                return
            try:
                self._nbytes += len(token_bytes)
                if self._nbytes > QUEUE_BYTES:
                    raise OSError(f"the disk is too slow: {self._nbytes >> 20} MiB of tokens wait to be recorded")
                self._last = max(self._last, time.time_ns() // 1_000_000)
                self._calls.append(_Call(call, self._last, root, token_bytes, keys))
                if len(self._calls) == 1 or self._nbytes >= FLUSH_BYTES:
                    self._changed.notify()
            except Exception as error:  # a request must not fail for the sake of its record
                self._fail(error)

    def _run(self) -> None:
        closing = False
        while not closing:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._closing)
                self._changed.wait_for(lambda: self._nbytes >= FLUSH_BYTES or self._closing, FLUSH_SECONDS)
                calls, self._calls, self._nbytes = self._calls, [], 0
                closing = self._closing
            try:
                self._write(calls)
            except Exception as error:
                self._fail(error)
                break
        self._let_go()

    def _write(self, calls: list[_Call]) -> None:
        lines = [encode(self._line(call)) for call in calls]
        if lines:
            if not os.path.samestat(os.stat(self.path, follow_symlinks=False), os.fstat(self._fd)):
                raise FileNotFoundError("another file has its name now")
            _write(self._fd, b"".join(lines))

    def _line(self, call: _Call) -> Line:
        keys = block_keys(call.root, call.token_bytes, call.keys)
        ids = block_ids(self._secret, keys)
        grown = self._tails.seen([call.root, *keys], ids, call.token_bytes)
        return Line(call.time, len(call.token_bytes) // TOKEN_BYTES, 0, ids, call.call, BLOCK, grown)

    def _fail(self, error: Exception) -> None:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        with self._changed:
            if self.failed is None:
                self.failed = reason
                log.warning("trace=%r: recording has stopped (%s); restart to record again", str(self.path), reason)
            self._closing, self._calls, self._nbytes = True, [], 0
            self._changed.notify()

    def _let_go(self) -> None:
        fd, self._fd = self._fd, -1
        _open.discard(self)
        if fd >= 0:
            os.close(fd)

    def _after_fork(self) -> None:
        self._changed = threading.Condition()  # another thread may have held it
        self._closing, self._calls = True, []
        self._let_go()


def _opened(path: Path) -> int:
    """Return the file's descriptor, locked; made when it is missing. What isn't a recording stays as it is."""
    fd = os.open(path, _FLAGS | os.O_APPEND, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise _refused(path, "no regular file")
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _require_recording(path, fd)
        os.fchmod(fd, 0o600)
    except BlockingIOError:
        os.close(fd)
        raise _refused(path, "another server records into it") from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _require_recording(path: Path, fd: int) -> None:
    """Refuse to cut and add lines but in a file that is a recording, or all of it what a crash left of one."""
    if not begins_recording(os.pread(fd, HEAD_BYTES, 0)):
        raise _refused(path, "it holds something else than a recording")


def _end_line(fd: int) -> None:
    """Cut what a crash left of a last line; a whole one without its newline gets it."""
    size = at = os.fstat(fd).st_size
    rest = b""
    while at and b"\n" not in rest:
        start = max(at - FLUSH_BYTES, 0)
        rest, at = os.pread(fd, at - start, start) + rest, start
    rest = rest.rpartition(b"\n")[2]
    if not rest:
        return
    try:
        json.loads(rest)
    except (ValueError, RecursionError):
        os.ftruncate(fd, size - len(rest))
    else:
        _write(fd, b"\n")


def _secret(path: Path) -> bytes:
    """Return the secret in `path`, made when there is none."""
    if not os.path.lexists(path):
        fresh = path.with_name(path.name + ".new")
        fd = os.open(fresh, _FLAGS | os.O_TRUNC, 0o600)
        try:
            os.fchmod(fd, 0o600)
            _write(fd, secrets.token_bytes(SECRET_BYTES))
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(fresh, path)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        secret = os.read(fd, SECRET_BYTES + 1)
        if len(secret) != SECRET_BYTES:
            raise _refused(
                path, f"not the {SECRET_BYTES} bytes of a recording's secret; delete it to begin with new ids"
            )
        os.fchmod(fd, 0o600)
    finally:
        os.close(fd)
    return secret


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _refused(path: Path, reason: str) -> ValueError:
    return ValueError(
        f"trace={str(path)!r}: can't be recorded into ({reason}); give the setting trace (PREFIXCACHE_TRACE) a new file in a "
        "folder that can be written to, or leave it out"
    )


def _after_fork() -> None:
    for recorder in list(_open):
        recorder._after_fork()


os.register_at_fork(after_in_child=_after_fork)
