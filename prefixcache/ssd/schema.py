"""The tables of index.db, and the steps that lead to them from an empty file."""

from __future__ import annotations

import sqlite3
from functools import lru_cache
from pathlib import Path
from typing import Any

from prefixcache.ssd.errors import IndexBroken, NewerFormat

# Images' tokens are in a table apart, so that a touch rewrites 200 bytes and not 1200. They are little-endian int32 where all
# of an image's fit, else int64: `length` counts them, so the blob's size tells which. Neither STRICT (SQLite 3.37; some that
# are supported have 3.34) nor CHECK: `rows` judges values when they are read, so that it also judges what others put there.
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
    """What is in a database, by name: an index or the columns of a table."""
    listed = connection.execute("SELECT name, type FROM sqlite_master WHERE name NOT LIKE 'sqlite%'").fetchall()
    columns = "SELECT name, type, pk FROM pragma_table_info(?)"
    return {name: connection.execute(columns, [name]).fetchall() or kind for name, kind in listed}


@lru_cache(1)
def _expected_tables() -> dict[str, Any]:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    try:
        upgrade(connection)
        return _tables(connection)
    finally:
        connection.close()
