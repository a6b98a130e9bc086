"""The tables of index.db: the steps that lead to them from an empty file, and their rows as records, read in bulk.

A row that a cache would not have written is doubt about the whole index: IndexBroken, and whoever opens the directory builds
the index from the files.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from prefixcache import keys
from prefixcache.image_format import CHECKSUM_DIGITS, KINDS, SNAPSHOT
from prefixcache.memory import collector_at_rest
from prefixcache.ssd.entries import BOUNDS, Address, Entry, NamespaceRow
from prefixcache.ssd.errors import IndexBroken, NewerFormat

NUMBER = {kind: number for number, kind in enumerate(KINDS)}
COLUMNS = "kind, key, namespace, parent, start, length, nbytes, checksum, disk, used, created, hits, extra, used_at"
_CHUNK = 64  # rows at a time: with their tokens few enough to stay in the processor's cache
_TIMES = 1e19  # Unix times are nearer to 0
_NOT_A_ROW = "an image has a value that no cache writes"

Columns = tuple[tuple[Any, ...], ...]

# Images' tokens are in a table apart, so that a touch rewrites 200 bytes and not 1200. They are little-endian int32 where all
# of an image's fit, else int64: `length` counts them, so the blob's size tells which. Neither STRICT (SQLite 3.37; some that
# are supported have 3.34) nor CHECK: `_check` judges values when they are read, so that it also judges what others put there.
_FORMAT_1 = (
    "CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    """CREATE TABLE namespace (
        id INTEGER PRIMARY KEY, root BLOB NOT NULL UNIQUE, model TEXT NOT NULL, codec TEXT NOT NULL,
        layout TEXT NOT NULL, created REAL NOT NULL)""",
    """CREATE TABLE image (
        id INTEGER PRIMARY KEY, kind INTEGER NOT NULL, key BLOB NOT NULL, namespace INTEGER NOT NULL,
        parent BLOB NOT NULL, start INTEGER NOT NULL, length INTEGER NOT NULL, nbytes INTEGER NOT NULL,
        checksum TEXT NOT NULL, disk INTEGER NOT NULL, used INTEGER NOT NULL, created REAL NOT NULL,
        hits INTEGER NOT NULL, extra TEXT NOT NULL, used_at REAL NOT NULL)""",
    "CREATE UNIQUE INDEX image_by_key ON image (key, kind)",
    "CREATE TABLE tokens (id INTEGER PRIMARY KEY, tokens BLOB NOT NULL)",
)

# The index's format, SQLite's `user_version`, counts the steps that were run. One that was released is never changed.
STEPS: tuple[tuple[str, ...], ...] = (_FORMAT_1,)


def check_format(connection: sqlite3.Connection, path: Path) -> None:
    """Raise NewerFormat when a newer release wrote the index at `path`, IndexBroken when its format is no number of steps."""
    number = _format(connection)
    if number > len(STEPS):
        raise NewerFormat(repr(str(path)), number, len(STEPS))
    if number < 0:
        raise IndexBroken("its format is no number of steps")


def upgrade(connection: sqlite3.Connection) -> None:
    """Run the steps that this index has not seen, each in one transaction."""
    run = connection.execute
    for number in range(_format(connection), len(STEPS)):
        run("BEGIN IMMEDIATE")
        try:
            for statement in STEPS[number]:
                run(statement)
            run(f"PRAGMA user_version = {number + 1}")
            run("COMMIT")
        except BaseException:
            if connection.in_transaction:
                run("ROLLBACK")
            raise


def check_tables(connection: sqlite3.Connection) -> None:
    """Raise IndexBroken unless it has the tables that the steps lead to, and nothing else."""
    if _format(connection) != len(STEPS) or _tables(connection) != _expected_tables():
        raise IndexBroken("its tables are not those that this release writes")


def _format(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def _tables(connection: sqlite3.Connection) -> dict[str, Any]:
    """Return what is in a database, by name: an index or the columns of a table."""
    listed = connection.execute("SELECT name, type FROM sqlite_master WHERE name NOT LIKE 'sqlite%'").fetchall()
    columns = "SELECT name, type, pk FROM pragma_table_info(?)"
    return {name: connection.execute(columns, [name]).fetchall() or kind for name, kind in listed}


@lru_cache(1)
def _expected_tables() -> dict[str, Any]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        upgrade(connection)
        return _tables(connection)


def read_namespaces(connection: sqlite3.Connection) -> list[NamespaceRow]:
    return list(_read_namespaces(connection).values())


def _read_namespaces(connection: sqlite3.Connection) -> dict[int, NamespaceRow]:
    """Return the namespaces by the number that images name them with."""
    spaces = {}
    for number, *row in connection.execute("SELECT id, root, model, codec, layout, created FROM namespace ORDER BY id"):
        space = spaces[number] = NamespaceRow(*row)
        key = isinstance(space.root, bytes) and len(space.root) == keys.KEY_BYTES
        if not (key and _are(str, space.stated) and _are(float, row[-1:]) and abs(space.created) < _TIMES):
            raise IndexBroken("a namespace has a value that no cache writes")
    return spaces


def check_rows(connection: sqlite3.Connection) -> None:
    """Raise IndexBroken unless every namespace and image has values that a cache writes. Tokens are not read."""
    spaces = _read_namespaces(connection)
    for columns in _chunks(connection, f"SELECT {COLUMNS} FROM image"):
        _check(columns, spaces)


def read_entries(connection: sqlite3.Connection) -> list[Entry]:
    """Return every image, parents before children where the index has the parent."""
    spaces = _read_namespaces(connection)
    roots = {number: space.root for number, space in spaces.items()}
    query = f"SELECT {COLUMNS}, tokens FROM image LEFT JOIN tokens USING (id) ORDER BY id"
    with collector_at_rest():
        rows = chain.from_iterable(_entries(columns, roots) for columns in _chunks(connection, query))
        entries = _parents_first(rows, roots.values())
    if len({entry.namespace for entry in entries}) != len(roots):
        raise IndexBroken("a namespace without an image")
    return entries


def read_places(connection: sqlite3.Connection, root: bytes) -> Iterator[Entry]:
    """Yield a namespace's entries, parents first, without what only a reader of files needs.

    Tokens take nearly all of the memory, and tell places apart beside a snapshot only, whose suffix is compared with them.
    Elsewhere, and where they don't give the key, the key stands in their place: it is another one for each sibling.
    """
    (number,) = connection.execute("SELECT id FROM namespace WHERE root = ?", [root]).fetchone()
    rows = connection.execute(
        "SELECT kind, key, parent, start, length, nbytes, disk, used, used_at, "
        "CASE WHEN parent IN (SELECT parent FROM image WHERE namespace = ?1 AND kind = ?2) "
        "THEN (SELECT tokens FROM tokens WHERE tokens.id = image.id) END "
        "FROM image WHERE namespace = ?1 ORDER BY start, kind",
        [number, NUMBER[SNAPSHOT]],
    )
    for kind, key, parent, start, length, nbytes, disk, used, used_at, packed in rows:
        tokens = key
        if packed is not None and keys.chain(parent, unpacked := unpack(packed, length)) == key:
            tokens = unpacked
        yield Entry(KINDS[kind], key, root, parent, start, tokens, nbytes, "", disk, used, 0.0, 0, "", used_at)


def read_addresses(connection: sqlite3.Connection) -> set[Address]:
    return {(KINDS[kind], key) for kind, key in connection.execute("SELECT kind, key FROM image")}


def _chunks(connection: sqlite3.Connection, query: str) -> Iterator[Columns]:
    cursor = connection.execute(query)
    while rows := cursor.fetchmany(_CHUNK):
        yield tuple(zip(*rows, strict=True))


def _entries(columns: Columns, roots: dict[int, bytes]) -> Iterator[Entry]:
    """Return the entries of a chunk, each a row whose tokens give its key."""
    *fields, packed = columns
    _check(fields, roots)
    kinds, image_keys, spaces, parents, starts, lengths, *rest = fields
    tokens = _unpack(packed, lengths)
    names = [KINDS[kind] for kind in kinds]
    window = KINDS.index("window")
    for kind, key, parent, raw in zip(kinds, image_keys, parents, tokens, strict=True):
        if kind != window and keys.chain(parent, raw) != key:
            raise IndexBroken("tokens of an image are not those of its key")
    return map(Entry, names, image_keys, [roots[number] for number in spaces], parents, starts, tokens, *rest)


def _check(columns: Iterable[tuple[Any, ...]], spaces: Collection[int]) -> None:
    column = dict(zip(COLUMNS.split(", "), columns, strict=True))
    numbers = {name: column[name] for name in BOUNDS}
    sound = (
        _are(int, column["kind"], column["namespace"], column["length"], *numbers.values())
        and _are(bytes, column["key"], column["parent"])
        and _are(str, column["checksum"], column["extra"])
        and _are(float, column["created"], column["used_at"])
        and min(column["kind"]) >= 0
        and max(column["kind"]) < len(KINDS)
        and min(column["length"]) >= 0
        and max(column["length"]) < 1 << 31
        and {*map(len, column["key"]), *map(len, column["parent"])} == {keys.KEY_BYTES}
        and set(map(len, column["checksum"])) == {CHECKSUM_DIGITS}
        and all(min(numbers[name]) >= 0 and max(numbers[name]) < bound for name, bound in BOUNDS.items())
        and max(column["used"]) < BOUNDS["used"] // 2  # ticks go on from the largest
        and min(*column["created"], *column["used_at"]) > -_TIMES
        and max(*column["created"], *column["used_at"]) < _TIMES
        and set(column["namespace"]) <= set(spaces)
    )
    if not sound:
        raise IndexBroken(_NOT_A_ROW)


def _are(kind: type, *columns: Iterable[Any]) -> bool:
    return all(set(map(type, column)) == {kind} for column in columns)


def _unpack(packed: Iterable[Any], lengths: tuple[int, ...]) -> list[bytes]:
    """Return tokens as raw int64; the index keeps them as int32 where they fit. Those are widened together."""
    blobs = [b"" if blob is None else blob for blob in packed]
    if not _are(bytes, blobs):
        raise IndexBroken("tokens of an image are missing or of a wrong size")
    sizes = list(map(len, blobs))
    if sizes == [4 * length for length in lengths]:
        narrow = blobs
    else:
        narrow = [blob for blob, size, length in zip(blobs, sizes, lengths, strict=True) if size == 4 * length]
    wide, at = np.frombuffer(b"".join(narrow), "<i4").astype("<i8").tobytes(), 0
    tokens = []
    for blob, size, length in zip(blobs, sizes, lengths, strict=True):
        if size == 4 * length:
            tokens.append(wide[at : at + 8 * length])
            at += 8 * length
        elif size == 8 * length:
            tokens.append(blob)
        else:
            raise IndexBroken("tokens of an image are missing or of a wrong size")
    return tokens


def pack(tokens: bytes) -> bytes:
    """Return int64 tokens as int32 where all fit: three blocks to a page of the index, not one."""
    wide = np.frombuffer(tokens, "<i8")
    narrow = wide.astype("<i4")
    return narrow.tobytes() if np.array_equal(narrow, wide) else tokens


def _parents_first(entries: Iterable[Entry], roots: Iterable[bytes]) -> list[Entry]:
    """Put parents first. Rows come by id, because sorting them by `start` and then looking 100 000 tokens up costs twice as
    much. Parents are nearly always written first; a child that comes earlier waits for its parent.
    """
    seen, early, ordered = set(roots), dict[bytes, list[Entry]](), list[Entry]()
    for entry in entries:
        if entry.parent not in seen:
            early.setdefault(entry.parent, []).append(entry)
            continue
        ordered.append(entry)
        if entry.kind == "rows":
            seen.add(entry.key)
            ready = [entry.key] if entry.key in early else []
            while ready:
                for child in early.pop(ready.pop(), ()):
                    ordered.append(child)
                    if child.kind == "rows":
                        seen.add(child.key)
                        ready.append(child.key)
    without = [entry for waiting in early.values() for entry in waiting]  # their parents are not in the index
    return ordered + sorted(without, key=lambda entry: (entry.start, NUMBER[entry.kind]))


def unpack(tokens: bytes, length: int) -> bytes:
    """Undo `pack`, of so many tokens."""
    return np.frombuffer(tokens, "<i4").astype("<i8").tobytes() if len(tokens) == 4 * length else tokens
