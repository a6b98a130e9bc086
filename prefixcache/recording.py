"""What the setting `trace` (PREFIXCACHE_TRACE) writes on a live server: which blocks were asked for and when, for a planner.

There is no text, no token and no model's name in it: a block's id is a hash of its key under a secret that stays beside the
file. `cache` calls a `Recorder`; `planning.trace` reads what it wrote.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import secrets
import stat
import threading
import time
import weakref
from pathlib import Path

from prefixcache.keys import BLOCK, TOKEN_BYTES, chain

log = logging.getLogger("prefixcache")

SECRET_BYTES = 32
ID_BITS = 53  # what every reader of JSON keeps exactly
FLUSH_SECONDS = 1.0
FLUSH_BYTES = 1 << 20
_HEAD = b'{"timestamp": '  # how each line begins
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

_open: weakref.WeakSet[Recorder] = weakref.WeakSet()


class Recorder:
    """Appends one JSON line a call to a file that it alone writes to.

    `path` gets Mooncake's fields (`timestamp` in milliseconds since 1970, `output_length` 0: it isn't known here), `call` and
    `block_size`; `path`.secret gets the secret, so that ids go on after a restart. Both are the owner's alone (0600). The
    file grows for as long as the server runs, some 20 bytes a block. ValueError when it can't be written, is another
    recorder's, or holds something else.

    Thread-safe: `_lock` guards the lines that wait, the last time written and the descriptor. A call hashes in its own thread
    and leaves its line in memory; the first call a second later, or `close`, writes all that wait. A call never raises: what
    can't be written ends the recording with one warning, and `failed` says why. A forked child records nothing.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.failed: str | None = None
        self._lock = threading.Lock()
        self._waiting: list[bytes] = []
        self._nbytes = 0
        self._last = 0  # milliseconds
        self._due = time.monotonic() + FLUSH_SECONDS
        self._fd = -1
        try:
            self._fd = _opened(self.path)
            _require_recording(self.path, self._fd)
            self._secret = _secret(self.path.with_name(self.path.name + ".secret"))
            _end_line(self._fd)
        except OSError as error:
            self.close()
            raise _refused(Path(error.filename or self.path), error.strerror or str(error)) from None
        except BaseException:
            self.close()
            raise
        _open.add(self)

    def fetch(self, root: bytes, raw: bytes) -> None:
        """A prompt was looked up: `raw` are its tokens (little-endian int64), `root` what its blocks' keys are chained from.

        Any 16 bytes that stand for the namespace will do for `root`, the same ones for what is fetched and what is stored.
        A namespace that isn't there yet has no root key, so a hash of model and salt serves better: ids then agree between a
        model's first fetch, its later ones and its different layouts.
        """
        self._record("fetch", root, raw)

    def store(self, root: bytes, raw: bytes) -> None:
        """A prompt cache of these tokens was stored; `root` and `raw` as in `fetch`."""
        self._record("store", root, raw)

    def close(self) -> None:
        """Write what waits and let go of the file; later calls do nothing."""
        with self._lock:
            self._flush()
            self._let_go()

    def _record(self, call: str, root: bytes, raw: bytes) -> None:
        if self._fd < 0:
            return
        try:
            ids = block_ids(self._secret, root, raw)
            with self._lock:
                self._last = max(self._last, time.time_ns() // 1_000_000)
                line = json.dumps({
                    "timestamp": self._last, "input_length": len(raw) // TOKEN_BYTES, "output_length": 0, "hash_ids": ids,
                    "call": call, "block_size": BLOCK,
                })  # fmt: skip
                self._waiting.append(line.encode() + b"\n")
                self._nbytes += len(line) + 1
                if self._nbytes >= FLUSH_BYTES or time.monotonic() >= self._due:
                    self._flush()
        except Exception as error:  # a request must not fail for the sake of its record
            with self._lock:
                self._fail(str(error) or type(error).__name__)

    def _flush(self) -> None:
        lines, self._waiting, self._nbytes = b"".join(self._waiting), [], 0
        self._due = time.monotonic() + FLUSH_SECONDS
        if self._fd < 0 or not lines:
            return
        try:
            if not os.path.samestat(os.stat(self.path, follow_symlinks=False), os.fstat(self._fd)):
                raise FileNotFoundError("another file has its name now")
            _write(self._fd, lines)
        except OSError as error:
            self._fail(error.strerror or str(error))

    def _fail(self, reason: str) -> None:
        if self.failed is None and self._fd >= 0:
            self.failed = reason
            log.warning("trace=%r: recording has stopped (%s); restart to record again", str(self.path), reason)
        self._let_go()

    def _let_go(self) -> None:
        fd, self._fd = self._fd, -1
        self._waiting = []
        _open.discard(self)
        if fd >= 0:
            os.close(fd)

    def _after_fork(self) -> None:
        self._lock = threading.Lock()  # another thread may have held it
        self._let_go()


def block_ids(secret: bytes, root: bytes, raw: bytes) -> list[int]:
    """One id for each 256 tokens and one for a tail, each from the block's chained key: 0 to 2**53 - 1."""
    ids, key = [], root
    keyed = hashlib.blake2b(digest_size=8, key=secret)
    for at in range(0, len(raw), BLOCK * TOKEN_BYTES):
        key = chain(key, raw[at : at + BLOCK * TOKEN_BYTES])
        hashed = keyed.copy()  # two thirds of the time of a new one
        hashed.update(key)
        ids.append(int.from_bytes(hashed.digest(), "little") >> (64 - ID_BITS))
    return ids


def _opened(path: Path) -> int:
    """The file's descriptor, locked; made when it is missing."""
    fd = os.open(path, _FLAGS | os.O_APPEND, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise _refused(path, "no regular file")
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.fchmod(fd, 0o600)
    except BlockingIOError:
        os.close(fd)
        raise _refused(path, "another server records into it") from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _require_recording(path: Path, fd: int) -> None:
    """Lines are cut and added here: only ever in a file that is a recording."""
    head = os.pread(fd, len(_HEAD), 0)
    if not _HEAD.startswith(head):
        raise _refused(path, "it holds something else than a recording")


def _end_line(fd: int) -> None:
    """What a crash left of a last line goes; a whole one without its newline gets it."""
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
    """The secret in `path`, made when there is none."""
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
