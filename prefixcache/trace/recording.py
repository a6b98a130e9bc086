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
import re
import secrets
import stat
import threading
import time
import weakref
from collections import Counter, OrderedDict
from pathlib import Path

from prefixcache.keys import BLOCK, TOKEN_BYTES, chain

log = logging.getLogger("prefixcache")

SECRET_BYTES = 32
ID_BITS = 53  # what every reader of JSON keeps exactly
FLUSH_SECONDS = 1.0
FLUSH_BYTES = 1 << 20
TAILS = 8192  # remembered, some 500 bytes each
_TIME = b'{"timestamp": '  # how each line begins, and how it goes on behind the number
_CALLS = [b', "call": "%s", "block_size": %d, ' % (call, BLOCK) for call in (b"fetch", b"store")]
_HEAD_BYTES = 80  # as many as the beginning of a line ever takes
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

_open: weakref.WeakSet[Recorder] = weakref.WeakSet()


class Recorder:
    """Appends one JSON line a call to a file that it alone writes to.

    `path` gets Mooncake's fields (`timestamp` in milliseconds since 1970, `output_length` 0: it isn't known here), `call` and
    `block_size`; `path`.secret gets the secret, so that ids go on after a restart. Both are the owner's alone (0600). The
    file grows for as long as the server runs, some 20 bytes a block. ValueError when it can't be written, is another
    recorder's, or holds something else.

    A tail that has grown has a new id, so a line says of a block that begins with a tail seen before (one of the `TAILS` last
    ones, not over a restart): `"grown": [[its index in hash_ids, the tail's id, the tail's tokens], ...]`, the longest tail
    where there are several. It is said when the block is new, and may be said again.

    Thread-safe: `_lock` guards the lines that wait, the last time written and the tails; `_writing`, taken before it, the
    descriptor and the order in the file. A call hashes in its own thread and leaves its line in memory. Once a second, or
    when a megabyte waits, a call also writes all that waits, in its own thread, to the disk that `path` is on; others go on
    meanwhile, until the next megabyte waits. A call never raises: what can't be written ends the recording with one
    warning, and `failed` says why. A forked child records nothing.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.failed: str | None = None
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._tails = Tails(TAILS)
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
        with self._writing:
            self._flush()
            self._let_go()

    def _record(self, call: str, root: bytes, raw: bytes) -> None:
        if self._fd < 0:
            return
        try:
            keys = block_keys(root, raw)
            ids = block_ids(self._secret, keys)
            with self._lock:
                self._append(call, raw, ids, self._tails.seen([root, *keys], ids, raw))
                full = self._nbytes >= FLUSH_BYTES
                due = full or time.monotonic() >= self._due
            if due and self._writing.acquire(blocking=full):
                try:
                    self._flush()
                finally:
                    self._writing.release()
        except Exception as error:  # a request must not fail for the sake of its record
            with self._writing:
                self._fail(str(error) or type(error).__name__)

    def _append(self, call: str, raw: bytes, ids: list[int], grown: list[Grown]) -> None:
        self._last = max(self._last, time.time_ns() // 1_000_000)
        fields = {
            "timestamp": self._last, "call": call, "block_size": BLOCK, "input_length": len(raw) // TOKEN_BYTES,
            "output_length": 0, "hash_ids": ids,
        }  # fmt: skip
        line = json.dumps(fields | {"grown": grown} if grown else fields)
        self._waiting.append(line.encode() + b"\n")
        self._nbytes += len(line) + 1

    def _flush(self) -> None:
        with self._lock:
            lines, self._waiting, self._nbytes = self._waiting, [], 0
            self._due = time.monotonic() + FLUSH_SECONDS
        if self._fd < 0 or not lines:
            return
        try:
            if not os.path.samestat(os.stat(self.path, follow_symlinks=False), os.fstat(self._fd)):
                raise FileNotFoundError("another file has its name now")
            _write(self._fd, b"".join(lines))
        except OSError as error:
            self._fail(error.strerror or str(error))

    def _fail(self, reason: str) -> None:
        if self.failed is None and self._fd >= 0:
            self.failed = reason
            log.warning("trace=%r: recording has stopped (%s); restart to record again", str(self.path), reason)
        self._let_go()

    def _let_go(self) -> None:
        fd, self._fd = self._fd, -1
        with self._lock:
            self._waiting, self._nbytes = [], 0
            self._tails = Tails(TAILS)
        _open.discard(self)
        if fd >= 0:
            os.close(fd)

    def _after_fork(self) -> None:
        self._lock, self._writing = threading.Lock(), threading.Lock()  # another thread may have held them
        self._let_go()


Grown = tuple[
    int, int, int
]  # a block's index in its prompt, the id of the tail that it begins with, that tail's tokens


class Tails:
    """The tails seen last, `most` of them, of prompts looked up as well as stored. Not thread-safe.

    A tail that was looked up is remembered because the store that follows goes on from it, and a prompt that is asked again,
    or edited behind it, then shares its tokens with what was stored.
    """

    def __init__(self, most: int):
        self._most = most
        self._known: OrderedDict[bytes, tuple[bytes, int, bytes, int]] = OrderedDict()  # key -> parent, tokens, end, id
        self._ends: dict[bytes, dict[int, Counter[bytes]]] = {}  # parent -> tokens -> last token of so many tails
        self._told: OrderedDict[int, None] = OrderedDict()  # ids that were compared with the tails at their parent

    def seen(self, keys: list[bytes], ids: list[int], raw: bytes) -> list[Grown]:
        """The blocks of a prompt that go on from a tail; its own tail is remembered. `keys` begin with the root."""
        grown: list[Grown] = []
        for index, one in enumerate(ids):
            parent = keys[index]
            if parent in self._ends and one not in self._told:
                start = index * BLOCK * TOKEN_BYTES
                tail = self._longest(parent, raw[start : start + BLOCK * TOKEN_BYTES])
                if tail is not None:
                    grown.append((index, *tail))
                self._told[one] = None
                if len(self._told) > self._most:
                    self._told.popitem(last=False)
        tokens = len(raw) // TOKEN_BYTES % BLOCK
        if tokens:
            self._remember(keys[-1], keys[-2], tokens, raw[-TOKEN_BYTES:], ids[-1])
        return grown

    def _longest(self, parent: bytes, block: bytes) -> tuple[int, int] | None:
        ends = self._ends[parent]
        for tokens in sorted(ends, reverse=True):
            size = tokens * TOKEN_BYTES
            if size < len(block) and block[size - TOKEN_BYTES : size] in ends[tokens]:  # else not worth a hash
                key = chain(parent, block[:size])
                if key in self._known:
                    self._known.move_to_end(key)
                    return self._known[key][3], tokens
        return None

    def _remember(self, key: bytes, parent: bytes, tokens: int, end: bytes, one: int) -> None:
        if key in self._known:
            self._known.move_to_end(key)
            return
        self._known[key] = parent, tokens, end, one
        self._ends.setdefault(parent, {}).setdefault(tokens, Counter())[end] += 1
        if len(self._known) > self._most:
            self._forget(*self._known.popitem(last=False)[1])

    def _forget(self, parent: bytes, tokens: int, end: bytes, one: int) -> None:
        ends = self._ends[parent]
        ends[tokens][end] -= 1
        if not ends[tokens][end]:
            del ends[tokens][end]
        if not ends[tokens]:
            del ends[tokens]
        if not ends:
            del self._ends[parent]


def block_keys(root: bytes, raw: bytes) -> list[bytes]:
    """The chained key of each 256 tokens, and one of a tail."""
    keys, key = [], root
    for at in range(0, len(raw), BLOCK * TOKEN_BYTES):
        key = chain(key, raw[at : at + BLOCK * TOKEN_BYTES])
        keys.append(key)
    return keys


def block_ids(secret: bytes, keys: list[bytes]) -> list[int]:
    """One id for each key: 0 to 2**53 - 1."""
    ids = []
    keyed = hashlib.blake2b(digest_size=8, key=secret)
    for key in keys:
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
    """Lines are cut and added here: only ever in a file that is a recording, or all of it what a crash left of one."""
    head = os.pread(fd, _HEAD_BYTES, 0)
    begun = re.match(re.escape(_TIME) + rb"\d{1,19}", head)
    rest = head[begun.end() :] if begun else b""
    if not (
        any(rest.startswith(call) or call.startswith(rest) for call in _CALLS) if begun else _TIME.startswith(head)
    ):
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
