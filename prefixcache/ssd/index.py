"""index.db: what is on the SSD, as SQLite. Durable the moment a transaction has returned; on doubt rebuilt from the files.

One connection writes, on one thread at a time (the writer's, once it runs); reading connections are opened apart. `rows`
reads. Nothing here touches image files. Never `open()` index.db by other means while a connection has it: closing that
descriptor would drop SQLite's POSIX locks. Decision 0013 says why nothing waits for its readers.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from prefixcache import keys
from prefixcache.image_format import KINDS
from prefixcache.ssd.directory import disk_at, identity_at, require_plain
from prefixcache.ssd.entries import Address, Entry, NamespaceRow, Touch
from prefixcache.ssd.errors import DirectoryError, IndexBroken
from prefixcache.ssd.tables import (
    COLUMNS,
    NUMBER,
    check_format,
    check_tables,
    pack,
    read_entries,
    read_namespaces,
    upgrade,
)

PAGE = 4096
# Pages that one row may dirty at worst: the image's, its tokens', the key index's, and their siblings when pages merge.
ROW_PAGES = 8

_PATIENCE = 5  # seconds that a lock of SQLite's is waited for
_FOREIGN_TEXT = "Could not decode to UTF-8"
_NOT_OURS = (
    "no such table",
    "no such column",
    "already exists",
    "no column named",
    "is a view",
    "DROP VIEW",
    "duplicate column",
    _FOREIGN_TEXT,
)


class Row(NamedTuple):
    """What a row says that its image says, too, and the real bytes of the file."""

    namespace: bytes
    parent: bytes
    nbytes: int
    checksum: str
    extra: str
    disk: int


class IndexFiles(NamedTuple):
    """The files of an index, as SQLite names them: `shared` is the memory that its connections share."""

    database: Path
    log: Path
    shared: Path

    @classmethod
    def of(cls, path: Path) -> IndexFiles:
        return cls(path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm"))


def _size_at(path: Path) -> int:
    try:
        return os.stat(path, follow_symlinks=False).st_size
    except OSError:
        return 0


class Index:
    """The writing connection. Not thread-safe: one thread at a time.

    A namespace is here as long as an image of it is: the transaction that takes its last image takes its row, too.

    Opening raises IndexBroken for a file that is no database of ours, DirectoryError for one that can't be opened now.
    """

    def __init__(self, path: Path):
        self.path = path
        # SQLite gives its log and shared memory the mode of the database: make that 0600 before SQLite makes it 0644.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
        self.doubtful = False  # set by who met what proves that it is damaged
        self.clean = False  # closed by the last who had it open
        self.recovered = disk_at(IndexFiles.of(path).log) > 0
        self._identities: list[tuple[int, int] | None] = []  # of its files; none of a closed one
        self._sizes = [0, 0, 0]  # that its files had at least, when they were noted last
        identity = identity_at(path)
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=_PATIENCE)
        try:
            self._prepare()
            self._identities = [identity, *map(identity_at, IndexFiles.of(path)[1:])]
        except BaseException as error:
            self._connection.close()
            if isinstance(error, sqlite3.Error) and proves_damage(error):
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
        check_format(self._connection, self.path)
        upgrade(self._connection)
        check_tables(self._connection)
        # The schema stands in the database itself, not in its log alone: `refuse_newer` looks there.
        self.checkpoint()
        self.clean = read_clean(self._connection)
        known = run("SELECT id, root, model, codec, layout FROM namespace")
        self._namespaces = {root: (int(number), stated) for number, root, *stated in known}
        self._images: Counter[int] = Counter()  # of each namespace
        self._images.update(dict(run("SELECT namespace, count(*) FROM image GROUP BY namespace")))

    @property
    def lost(self) -> str:
        """Return the name of the first of its files that was deleted, replaced or cut by somebody else; "" when none was.
        What is written then is lost with this process, and a log that has no name is never cut.
        """
        files = IndexFiles.of(self.path)
        for path, identity, size in zip(files, self._identities or [None] * len(files), self._sizes, strict=True):
            if identity is None or identity_at(path) != identity or _size_at(path) < size:
                return path.name
        return ""

    def note_sizes(self) -> None:
        """Note the sizes that SQLite gave its files: what is shorter at the next look was cut by somebody else."""
        self._sizes = list(map(_size_at, IndexFiles.of(self.path)))

    # What it says

    def check(self) -> None:
        """Raise IndexBroken unless every page is in order."""
        check_pages(self._connection)

    def entries(self) -> list[Entry]:
        """Return every image, parents before children; IndexBroken when a row is not one of ours."""
        with _doubts():
            return read_entries(self._connection)

    def logical_size(self) -> int:
        """Return the bytes of the database once its log is copied into it."""
        return int(self._connection.execute("PRAGMA page_count").fetchone()[0]) * PAGE

    def find(self, addresses: Iterable[Address]) -> dict[Address, Row]:
        rows = {}
        for kind, key in addresses:
            row = self._connection.execute(
                "SELECT root, parent, nbytes, checksum, extra, disk FROM image "
                "JOIN namespace ON namespace.id = namespace WHERE key = ? AND kind = ?",
                [key, NUMBER[kind]],
            ).fetchone()
            if row:
                rows[kind, key] = Row(*row)
        return rows

    def namespaces(self) -> list[NamespaceRow]:
        return read_namespaces(self._connection)

    def stated_otherwise(self, namespace: NamespaceRow) -> list[Address]:
        """Return the images under a row that states something else of this root key, which the caller knows the truth of."""
        number, stated = self._namespaces.get(namespace.root, (0, []))
        if not number or tuple(stated) == namespace.stated:
            return []
        rows = self._connection.execute("SELECT kind, key FROM image WHERE namespace = ?", [number])
        return [(KINDS[kind], key) for kind, key in rows]

    def mark(self, *, clean: bool) -> None:
        self._connection.execute("INSERT OR REPLACE INTO meta VALUES ('clean', ?)", [str(int(clean))])

    @property
    def note(self) -> str:
        """Return the text that was left last; "" for none."""
        row = self._connection.execute("SELECT CAST(value AS BLOB) FROM meta WHERE name = 'note'").fetchone()
        return bytes(row[0]).decode(errors="replace") if row is not None else ""

    def leave_note(self, text: str) -> None:
        self._connection.execute("INSERT OR REPLACE INTO meta VALUES ('note', ?)", [text])

    # What changes it

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Do all of the block or nothing; it is durable when the block has ended."""
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

    def insert(self, entry: Entry, namespace: NamespaceRow) -> None:
        run = self._connection.execute
        number, stated = self._namespaces.get(namespace.root, (0, []))
        if not number:
            cursor = run(
                "INSERT INTO namespace (root, model, codec, layout, created) VALUES (?, ?, ?, ?, ?)",
                [*namespace[:4], namespace.created or time.time()],
            )
            number = int(cursor.lastrowid or 0)
        elif (
            tuple(stated) != namespace.stated
        ):  # what came under the other was taken out before: see `stated_otherwise`
            run("UPDATE namespace SET model = ?, codec = ?, layout = ? WHERE id = ?", [*namespace.stated, number])
        self._namespaces[namespace.root] = number, list(namespace.stated)
        length = len(entry.tokens) // keys.TOKEN_BYTES
        cursor = run(
            f"INSERT INTO image ({COLUMNS}) VALUES (?{', ?' * 13})",
            [NUMBER[entry.kind], entry.key, number, entry.parent, entry.start, length, *entry[6:]],
        )
        if length:
            run("INSERT OR REPLACE INTO tokens VALUES (?, ?)", [cursor.lastrowid, pack(entry.tokens)])
        self._images[number] += 1

    def remove(self, addresses: Iterable[Address]) -> None:
        """Delete rows of images, and with its last image a namespace. Decision 0014 says why."""
        run = self._connection.execute
        images: list[tuple[int]] = []
        emptied: set[int] = set()
        for kind, key in dict.fromkeys(addresses):
            at = [key, NUMBER[kind]]
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
            [(*touch, key, NUMBER[kind]) for (kind, key), touch in touches.items()],
        )

    def correct(self, address: Address, disk: int) -> None:
        """Note that the file takes `disk` bytes, whatever was noted."""
        self._connection.execute(
            "UPDATE image SET disk = ? WHERE key = ? AND kind = ?", [disk, address[1], NUMBER[address[0]]]
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
            self.note_sizes()

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
        self._identities = []
        self._connection.close()

    def abandon(self) -> None:
        """Close it without a word to its files: what is at their paths now is another disk's."""
        if sys.version_info >= (3, 12):  # else SQLite deletes that log by its name, and the next opening reconciles
            self._connection.setconfig(sqlite3.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE)
        self.close()


def proves_damage(error: BaseException | None) -> bool:
    """Tell whether an error says that the index is damaged, and not that it can't be had now."""
    if not isinstance(error, sqlite3.DatabaseError):
        return False
    # OperationalError is "can't now" (locked, I/O, no room), except where the tables are not ours.
    return not isinstance(error, sqlite3.OperationalError) or any(sign in str(error) for sign in _NOT_OURS)


@contextmanager
def reading(path: Path, *, live: bool) -> Iterator[sqlite3.Connection]:
    """Open a connection that writes nothing into the directory. Raises IndexBroken for what is no index. It sees one state of
    the index, and while it is open the log can't be cut.

    `live`: somebody has the directory open, and SQLite shares his log. Else a log that a crash left is read in a copy,
    because reading it in place would make files.
    """
    for part in (*IndexFiles.of(path), path.with_name(f"{path.name}-journal")):
        require_plain(part)
    if not path.exists():
        raise IndexBroken("missing")
    with tempfile.TemporaryDirectory(prefix="prefixcache-") as scratch:
        options = "mode=ro"
        log = IndexFiles.of(path).log
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
                connection.execute("BEGIN")
                check_tables(connection)
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
            check_format(connection, path)
            return connection
        except sqlite3.OperationalError as error:  # another user's live directory: its shared memory can't be opened
            connection.close()
            last = error
        except BaseException:
            connection.close()
            raise
    raise last


def connect(path: Path) -> sqlite3.Connection:
    """Return another connection, for reading, in the process that holds the directory."""
    return _connect(path, "mode=ro")


def check_pages(connection: sqlite3.Connection) -> None:
    """Raise IndexBroken unless every page is in order. Reads all of it."""
    with _doubts():  # quick_check takes half as long, and would not see a key that differs between table and index
        verdict = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if verdict != "ok":
        raise IndexBroken(verdict)


@contextmanager
def _doubts() -> Iterator[None]:
    """Raise IndexBroken for what SQLite can't read; a disk that fails is another error."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        if proves_damage(error):
            raise IndexBroken(_said(error)) from None
        raise


def read_clean(connection: sqlite3.Connection) -> bool:
    """Tell whether the last to have it open has closed it."""
    return connection.execute("SELECT 1 FROM meta WHERE name = 'clean' AND value = '1'").fetchone() is not None
