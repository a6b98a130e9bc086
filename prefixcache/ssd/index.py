"""index.db: what is on the SSD, as SQLite. Durable the moment a transaction has returned, believed only after a check.

One connection writes, on one thread at a time (the writer's, once it runs); reading connections are opened apart.
Nothing here touches image files. Never `open()` index.db by other means while a connection has it: closing that
descriptor would drop SQLite's POSIX locks.
"""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
from sqlite_utils import Database

from prefixcache import keys
from prefixcache.image import KINDS
from prefixcache.migrations.index import namespace_digest, schema  # type: ignore[import-not-found]
from prefixcache.ssd.directory import disk_at, identity_at, require_plain
from prefixcache.ssd.entries import BOUNDS, Address, Entry, Namespace, Touch
from prefixcache.ssd.errors import DirectoryError, IndexBroken, NewerFormat

FORMAT = 1  # of the meanings in the tables; a step of the schema that old releases could misread raises it
PAGE = 4096
# Pages that one row may dirty at worst: the image's, its tokens', the key index's, and their siblings when pages merge.
ROW_PAGES = 8

_NUMBER = {kind: number for number, kind in enumerate(KINDS)}
_PATIENCE = 5  # seconds that a lock of SQLite's is waited for
_CHUNK = 64  # rows at a time: few enough that their memory is used again, and not taken anew
_FOREIGN_TEXT = "Could not decode to UTF-8"
_NOT_OURS = (
    "no such table", "no such column", "already exists", "no column named", "is a view", "DROP VIEW", "duplicate column",
    _FOREIGN_TEXT,
)  # fmt: skip
_COLUMNS = (
    "id, kind, key, namespace, parent, start, length, nbytes, checksum, disk, used, created, hits, extra, used_at"
)
# What a row is, as SQL. One that is not was not written by us: nothing in the index is believed then.
_SOUND = " AND ".join((
    f"typeof(kind) = 'integer' AND kind BETWEEN 0 AND {len(KINDS) - 1}",
    *(f"typeof({name}) = 'blob' AND length({name}) = {keys.KEY_BYTES}" for name in ("key", "parent")),
    *(
        f"typeof({name}) = 'integer' AND {name} BETWEEN 0 AND {bound - 1}"
        for name, bound in {**BOUNDS, "used": BOUNDS["used"] // 2, "length": 1 << 31}.items()  # ticks go on from the largest
    ),
    *(f"typeof({name}) = 'real' AND abs({name}) < 1e19" for name in ("created", "used_at")),
    *(f"typeof({name}) = 'text'" for name in ("checksum", "extra")),
    f"checksum GLOB '{'[0-9a-f]' * 32}'",
    "namespace IN (SELECT id FROM namespace)",
))  # fmt: skip
_SOUND_TOKENS = "typeof(tokens) = 'blob' AND (length(tokens) = 4 * length OR length(tokens) = 8 * length)"


class Row(NamedTuple):
    """What a file must be for its row to be true."""

    namespace: bytes
    nbytes: int
    checksum: str
    disk: int


class Found(NamedTuple):
    """What a row says that its image says, too, and the real bytes of the file."""

    namespace: bytes
    parent: bytes
    nbytes: int
    checksum: str
    extra: str
    disk: int


def suffixes(path: Path) -> list[Path]:
    """The index's files: the database, its log, its shared memory."""
    return [path, *(path.with_name(path.name + end) for end in ("-wal", "-shm"))]


def check_age(connection: sqlite3.Connection, path: Path) -> None:
    """NewerFormat when a newer release wrote the index, IndexBroken when what it says of that is no sense."""
    known = {step.name for step in schema.pending(Database(memory=True))}
    there = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if "_sqlite_migrations" in there:
        found = connection.execute(
            "SELECT CAST(name AS BLOB) FROM _sqlite_migrations WHERE migration_set = ?", [schema.name]
        )
        newer = sorted({(name or b"").decode("utf-8", "replace") for (name,) in found} - known)
        if newer:
            raise NewerFormat(
                f"{str(path)!r} has the schema step {newer[0]!r}, which this release does not know: "
                "a newer release wrote it; upgrade prefixcache or name another directory"
            )
    if "meta" in there:
        row = connection.execute("SELECT CAST(value AS BLOB) FROM meta WHERE name = 'format'").fetchone()
        if row is None:
            return
        if not re.fullmatch(rb"[1-9][0-9]{0,8}", row[0] or b""):
            raise IndexBroken("its format is no number")
        if int(row[0]) > FORMAT:
            raise NewerFormat(
                f"{str(path)!r} is of format {int(row[0])}, this release knows {FORMAT}: a newer release wrote it; "
                "upgrade prefixcache or name another directory"
            )


class Index:
    """The writing connection. Not thread-safe: one thread at a time.

    A namespace is here as long as an image of it is: the transaction that takes its last image takes its row, too.

    Opening raises IndexBroken for a file that is no database of ours, DirectoryError for one that can't be opened now.
    """

    def __init__(self, path: Path):
        self.path = path
        # SQLite gives its log and shared memory the mode of the database: make that 0600 before SQLite makes it 0644.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        self.recovered = disk_at(suffixes(path)[1]) > 0
        self.identity = identity_at(path)
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=_PATIENCE)
        try:
            self._prepare()
        except BaseException as error:
            self._connection.close()
            if isinstance(error, sqlite3.DatabaseError) and _proves_damage(error):
                raise IndexBroken(_said(error)) from None
            if isinstance(error, UnicodeDecodeError):
                raise IndexBroken(_FOREIGN_TEXT) from None
            if isinstance(error, sqlite3.Error):
                raise DirectoryError(
                    f"{str(path)!r}: {error}: check the disk, its room and who else opens it"
                ) from error
            raise

    def _prepare(self) -> None:
        run = self._connection.execute
        run(f"PRAGMA page_size = {PAGE}")
        run("PRAGMA auto_vacuum = INCREMENTAL")
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = FULL")
        run("PRAGMA temp_store = MEMORY")
        run("PRAGMA cache_size = -16384")
        run("PRAGMA cache_spill = OFF")  # a page is logged once a transaction: that bounds the log
        run("PRAGMA wal_autocheckpoint = 0")  # the writer says when
        check_age(self._connection, self.path)
        schema.apply(Database(self._connection))
        run("INSERT OR IGNORE INTO meta VALUES ('format', ?)", [str(FORMAT)])
        # The schema stands in the database itself, not in its log alone: `formats` looks there.
        self.checkpoint()
        self.totals()
        run("DELETE FROM namespace WHERE id NOT IN (SELECT namespace FROM image)")  # of releases that left them
        known = run("SELECT id, root, model, codec, layout FROM namespace")
        self._namespaces = {root: (int(number), stated) for number, root, *stated in known}
        self._images: Counter[int] = Counter()  # of each namespace
        self._images.update(dict(run("SELECT namespace, count(*) FROM image GROUP BY namespace")))

    # What it says

    def check(self) -> None:
        """IndexBroken unless every page is in order, and every row one of ours."""
        check(self._connection)

    def totals(self) -> tuple[int, int, int]:
        """Number of images, their real bytes, the newest recency tick."""
        row = self._connection.execute("SELECT count(*), total(disk), coalesce(max(used), 0) FROM image").fetchone()
        return row[0], int(row[1]), row[2]

    def logical_size(self) -> int:
        """Bytes of the database once its log is copied into it."""
        return int(self._connection.execute("PRAGMA page_count").fetchone()[0]) * PAGE

    def find(self, addresses: Iterable[Address]) -> dict[Address, Found]:
        """What is known of those that are indexed."""
        found = {}
        for kind, key in addresses:
            row = self._connection.execute(
                "SELECT root, parent, nbytes, checksum, extra, disk FROM image "
                "JOIN namespace ON namespace.id = namespace WHERE key = ? AND kind = ?", [key, _NUMBER[kind]],
            ).fetchone()  # fmt: skip
            if row:
                found[kind, key] = Found(*row)
        return found

    def rows(self) -> dict[Address, Row]:
        return read_rows(self._connection)

    def namespaces(self) -> list[Namespace]:
        return read_namespaces(self._connection)

    def forged(self, namespace: Namespace) -> list[Address]:
        """The images under a row that says something else of this root key, which the caller knows the truth of."""
        number, stated = self._namespaces.get(namespace.root, (0, []))
        if not number or tuple(stated) == namespace.stated:
            return []
        found = self._connection.execute("SELECT kind, key FROM image WHERE namespace = ?", [number])
        return [(KINDS[kind], key) for kind, key in found]

    def names(self) -> dict[str, set[str]]:
        """By kind, the keys of all images as hex digits."""
        found: dict[str, set[str]] = {kind: set() for kind in KINDS}
        for number, kind in enumerate(KINDS):
            rows = self._connection.execute("SELECT lower(hex(key)) FROM image WHERE kind = ?", [number])
            found[kind].update(name for (name,) in rows)
        return found

    @property
    def clean(self) -> bool:
        return read_clean(self._connection)

    def mark(self, *, clean: bool) -> None:
        self._connection.execute("INSERT OR REPLACE INTO meta VALUES ('clean', ?)", [str(int(clean))])

    # What changes it

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing; durable when the block has ended."""
        before = dict(self._namespaces), self._images.copy()
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except BaseException:
            self._namespaces, self._images = before
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def insert(self, entry: Entry, namespace: Namespace) -> None:
        run = self._connection.execute
        number, stated = self._namespaces.get(namespace.root, (0, []))
        if not number:
            cursor = run(
                "INSERT INTO namespace (root, model, codec, layout, created, digest) VALUES (?, ?, ?, ?, ?, ?)",
                [*namespace[:4], namespace.created or time.time(), namespace_digest(*namespace[:4])],
            )
            number = int(cursor.lastrowid or 0)
        elif tuple(stated) != namespace.stated:  # what came under the other was taken out before: see `forged`
            run(
                "UPDATE namespace SET model = ?, codec = ?, layout = ?, digest = ? WHERE id = ?",
                [*namespace.stated, namespace_digest(*namespace[:4]), number],
            )
        self._namespaces[namespace.root] = number, list(namespace.stated)
        length = len(entry.tokens) // keys.TOKEN_BYTES
        cursor = run(
            f"INSERT INTO image ({_COLUMNS}) VALUES (NULL{', ?' * 14})",
            [
                _NUMBER[entry.kind], entry.key, number, entry.parent, entry.start, length, entry.nbytes,
                entry.checksum, entry.disk, entry.used, entry.created, entry.hits, entry.extra, entry.used_at,
            ],
        )  # fmt: skip
        if length:
            run("INSERT OR REPLACE INTO tokens VALUES (?, ?)", [cursor.lastrowid, _pack(entry.tokens)])
        self._images[number] += 1

    def remove(self, addresses: Iterable[Address]) -> None:
        """Images leave, and with its last image a namespace."""
        run = self._connection.execute
        images: list[tuple[int]] = []
        emptied: set[int] = set()
        for kind, key in dict.fromkeys(addresses):
            at = [key, _NUMBER[kind]]
            row = run("SELECT id, namespace FROM image WHERE key = ? AND kind = ?", at).fetchone()
            if row is None:
                continue
            image, number = row
            images.append((image,))
            self._images[number] -= 1
            if not self._images[number]:
                emptied.add(number)
        for table in ("tokens", "image"):
            self._connection.executemany(f"DELETE FROM {table} WHERE id = ?", images)
        for number in emptied:
            run("DELETE FROM namespace WHERE id = ?", [number])
            del self._images[number]
        if emptied:
            self._namespaces = {root: known for root, known in self._namespaces.items() if known[0] not in emptied}

    def touch(self, touches: Mapping[Address, Touch]) -> None:
        self._connection.executemany(
            "UPDATE image SET used = max(used, ?), hits = hits + ?, used_at = max(used_at, ?) "
            "WHERE key = ? AND kind = ?",
            [(*touch, key, _NUMBER[kind]) for (kind, key), touch in touches.items()],
        )

    def odd_sizes(self, block: int) -> Iterator[tuple[Address, int, int]]:
        """Sizes and real bytes of files that aren't whole blocks: of a file system that compresses, or wrong."""
        for kind, key, nbytes, disk in self._connection.execute(
            "SELECT kind, key, nbytes, disk FROM image WHERE disk != (nbytes + ? - 1) / ? * ?", [block] * 3
        ).fetchall():
            yield (KINDS[kind], key), nbytes, disk

    def correct(self, address: Address, disk: int) -> None:
        """The file takes `disk` bytes, whatever was noted."""
        self._connection.execute(
            "UPDATE image SET disk = ? WHERE key = ? AND kind = ?", [disk, address[1], _NUMBER[address[0]]]
        )

    def checkpoint(self) -> bool:
        """Copy the log into the database and cut it to nothing. False, at once, when a reader holds on to it: what he does
        not need is copied all the same.
        """
        run = self._connection.execute
        run("PRAGMA busy_timeout = 0")  # a reader may never end: nothing here waits for one
        try:
            return not run("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        finally:
            run(f"PRAGMA busy_timeout = {_PATIENCE * 1000}")

    def shrink(self, step: int) -> None:
        """Give pages that deletions left free back to the file system, `step` at a time, so that the log stays small."""
        free, before = self._free_pages(), None
        while free and free != before:
            self._connection.executescript(f"PRAGMA incremental_vacuum({step})")  # `execute` would free one page
            if not self.checkpoint():
                return
            free, before = self._free_pages(), free

    def _free_pages(self) -> int:
        return int(self._connection.execute("PRAGMA freelist_count").fetchone()[0])

    def close(self) -> None:
        self.identity = None
        self._connection.close()


def _proves_damage(error: sqlite3.DatabaseError) -> bool:
    # OperationalError is "can't now" (locked, I/O, no room), except where the tables are not ours.
    return not isinstance(error, sqlite3.OperationalError) or any(sign in str(error) for sign in _NOT_OURS)


@contextmanager
def reading(path: Path, *, live: bool) -> Iterator[sqlite3.Connection]:
    """A connection that writes nothing into the directory; IndexBroken for what is no index.

    `live`: somebody has the directory open, and SQLite shares his log. Else a log that a crash left is read in a copy,
    because reading it in place would make files.
    """
    for part in (*suffixes(path), path.with_name(f"{path.name}-journal")):
        require_plain(part)
    if not path.exists():
        raise IndexBroken("missing")
    with tempfile.TemporaryDirectory(prefix="prefixcache-") as scratch:
        options = "mode=ro"
        log = suffixes(path)[1]
        if not live:
            if disk_at(log):
                for part in (path, log):
                    shutil.copyfile(part, Path(scratch, part.name))
                path = Path(scratch, path.name)
            else:
                options += "&immutable=1"
        try:
            connection = _connect(path, options)
            try:
                yield connection
            finally:
                connection.close()
        except sqlite3.DatabaseError as error:
            raise IndexBroken(_said(error)) from None
        except UnicodeDecodeError:  # the schema's text
            raise IndexBroken("a text in it is not UTF-8") from None


def _said(error: sqlite3.Error) -> str:
    # SQLite's own text would quote the value.
    return "a text in it is not UTF-8" if _FOREIGN_TEXT in str(error) else str(error)


def _connect(path: Path, options: str) -> sqlite3.Connection:
    for mode in (options, "mode=ro&immutable=1"):
        connection = sqlite3.connect(f"{path.as_uri()}?{mode}", uri=True, isolation_level=None, check_same_thread=False)
        try:
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            check_age(connection, path)
            return connection
        except sqlite3.OperationalError as error:  # another user's live directory: its shared memory can't be opened
            connection.close()
            last = error
        except BaseException:
            connection.close()
            raise
    raise last


def connect(path: Path) -> sqlite3.Connection:
    """Another connection, for reading, in the process that holds the directory."""
    return _connect(path, "mode=ro")


def check(connection: sqlite3.Connection) -> None:
    """IndexBroken unless every page is in order, and every row one of ours. Reads all of it."""
    try:  # .3 s for 100 000 images; quick_check takes .15, and would not see a key that differs between table and index
        verdict = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
        if verdict != "ok":
            raise IndexBroken(verdict)
        check_rows(connection)
        odd = "SELECT 1 FROM image LEFT JOIN tokens USING (id) WHERE length > 0 AND NOT coalesce({}, 0) LIMIT 1"
        if connection.execute(odd.format(_SOUND_TOKENS)).fetchone():
            raise IndexBroken("tokens of an image are missing or of a wrong size")
    except sqlite3.DatabaseError as error:
        raise IndexBroken(_said(error)) from None


def check_rows(connection: sqlite3.Connection) -> None:
    """IndexBroken unless every namespace and every image, its tokens aside, has values that a cache writes."""
    columns = ("model", "codec", "layout")
    texts = ", ".join(f"typeof({name}), CAST({name} AS BLOB)" for name in columns)
    # An index that was made before there were digests is read by `inspect` as it is.
    known = [name for _, name, *_ in connection.execute("PRAGMA table_info(namespace)")]
    digest = "digest" if "digest" in known else "NULL"
    for root, created, noted, *told in connection.execute(f"SELECT root, created, {digest}, {texts} FROM namespace"):
        if not (isinstance(root, bytes) and len(root) == keys.KEY_BYTES and set(told[::2]) == {"text"}):
            raise IndexBroken("a namespace has a value that no cache writes")
        if not (isinstance(created, float) and abs(created) < 1e19 and all(map(_is_utf8, told[1::2]))):
            raise IndexBroken("a namespace has a value that no cache writes")
        if "digest" in known and noted != namespace_digest(root, *(text.decode() for text in told[1::2])):
            raise IndexBroken("a namespace is not what its digest says")
    if connection.execute(f"SELECT 1 FROM image WHERE NOT coalesce({_SOUND}, 0) LIMIT 1").fetchone():
        raise IndexBroken("an image has a value that no cache writes")
    for (extra,) in connection.execute("SELECT CAST(extra AS BLOB) FROM image WHERE extra GLOB '*[^ -~]*'"):
        if not _is_utf8(extra):
            raise IndexBroken("an image has a value that no cache writes")


def _is_utf8(text: bytes | None) -> bool:
    try:
        return (text or b"").decode() is not None
    except UnicodeDecodeError:
        return False


def read_clean(connection: sqlite3.Connection) -> bool:
    """Whether the last to have it open has closed it."""
    return connection.execute("SELECT 1 FROM meta WHERE name = 'clean' AND value = '1'").fetchone() is not None


def read_rows(connection: sqlite3.Connection) -> dict[Address, Row]:
    """None of an index that an earlier release left: what it wrote is not read, and leaves when the directory is opened."""
    if any(name == "statistics" for _, name, *_ in connection.execute("PRAGMA table_info(image)")):
        return {}
    roots = dict(connection.execute("SELECT id, root FROM namespace"))
    rows = connection.execute("SELECT kind, key, namespace, nbytes, checksum, disk FROM image")
    return {(KINDS[kind], key): Row(roots[namespace], *rest) for kind, key, namespace, *rest in rows}


def read_namespaces(connection: sqlite3.Connection) -> list[Namespace]:
    rows = connection.execute("SELECT root, model, codec, layout, created FROM namespace ORDER BY id")
    return [Namespace(*row) for row in rows]


def read_entries(connection: sqlite3.Connection, refused: list[Entry] | None = None) -> Iterator[Entry]:
    """Every entry, parents before children; those whose tokens do not give their key go to `refused` instead.

    Rows come by id, because sorting them by `start` and then looking 100 000 tokens up costs twice as much. Parents are
    nearly always written first; a child that comes earlier waits for its parent.
    """
    roots = dict(connection.execute("SELECT id, root FROM namespace"))
    seen = set(roots.values())
    early: dict[bytes, list[Entry]] = {}
    for entry in _read_by_id(connection, roots):
        if entry.kind != "window" and keys.chain(entry.parent, entry.tokens) != entry.key:
            if refused is not None:
                refused.append(entry)
        elif entry.parent in seen:
            yield entry
            if entry.kind == "rows":
                seen.add(entry.key)
                if entry.key in early:
                    yield from _released(entry.key, early, seen)
        else:
            early.setdefault(entry.parent, []).append(entry)
    lost = [entry for waiting in early.values() for entry in waiting]  # what they hang on is not in the index
    yield from sorted(lost, key=lambda entry: (entry.start, _NUMBER[entry.kind]))


def _released(key: bytes, early: dict[bytes, list[Entry]], seen: set[bytes]) -> Iterator[Entry]:
    """What has waited for the block of this key, and for those that waited."""
    ready = [key]
    while ready:
        for entry in early.pop(ready.pop(), ()):
            yield entry
            if entry.kind == "rows":
                seen.add(entry.key)
                ready.append(entry.key)


def _read_by_id(connection: sqlite3.Connection, roots: dict[int, bytes]) -> Iterator[Entry]:
    cursor = connection.execute(f"SELECT {_COLUMNS}, tokens FROM image LEFT JOIN tokens USING (id) ORDER BY id")
    while rows := cursor.fetchmany(_CHUNK):
        # Narrow tokens are widened together: one conversion for a chunk.
        packed = [row[-1] for row in rows if row[-1] is not None and len(row[-1]) == 4 * row[6]]
        wide, at = np.frombuffer(b"".join(packed), "<i4").astype("<i8").tobytes(), 0
        for _, kind, key, namespace, parent, start, length, *rest, tokens in rows:
            if tokens is None:
                tokens = b""
            elif len(tokens) == 4 * length:
                tokens, at = wide[at : at + 8 * length], at + 8 * length
            nbytes, checksum, disk, used, created, hits, extra, used_at = rest
            yield Entry(
                KINDS[kind], key, roots[namespace], parent, start, tokens, nbytes, checksum, disk, used, created, hits,
                extra, used_at,
            )  # fmt: skip


def _pack(tokens: bytes) -> bytes:
    """int64 tokens as int32 where all fit: three blocks to a page of the index, not one."""
    wide = np.frombuffer(tokens, "<i8")
    narrow = wide.astype("<i4")
    return narrow.tobytes() if np.array_equal(narrow, wide) else tokens


def unpack(tokens: bytes, length: int) -> bytes:
    """The inverse of `_pack`, of so many tokens."""
    return np.frombuffer(tokens, "<i4").astype("<i8").tobytes() if len(tokens) == 4 * length else tokens
