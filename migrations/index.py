"""The steps that lead from an empty file to the schema of `index.db`, oldest first.

A step that was released is never changed: a later schema is a new step at the end. A directory that knows a step which
is not in this list was written by a newer release and is refused.
"""

from __future__ import annotations

import xxhash
from sqlite_utils import Database, Migrations

schema = Migrations("prefixcache.index")


@schema()
def m001_images(db: Database) -> None:
    """Namespaces, images, and the images' tokens in a table apart, so that a touch rewrites 200 bytes and not 1200.

    Tokens are little-endian int32 where all of an image's fit, else int64: `length` counts them, so the blob's size
    tells which. Neither STRICT (SQLite 3.37; some that are supported have 3.34) nor CHECK: `index.check` judges values
    when they are read, so that it also judges what other means than ours have put there.
    """
    for statement in (
        "CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
        """CREATE TABLE namespace (
            id INTEGER PRIMARY KEY, root BLOB NOT NULL UNIQUE, model TEXT NOT NULL, codec TEXT NOT NULL,
            layout TEXT NOT NULL, created REAL NOT NULL)""",
        """CREATE TABLE image (
            id INTEGER PRIMARY KEY, kind INTEGER NOT NULL, key BLOB NOT NULL, namespace INTEGER NOT NULL,
            parent BLOB NOT NULL, start INTEGER NOT NULL, length INTEGER NOT NULL, nbytes INTEGER NOT NULL,
            checksum TEXT NOT NULL, disk INTEGER NOT NULL, used INTEGER NOT NULL, created REAL NOT NULL,
            hits INTEGER NOT NULL, extra TEXT NOT NULL, statistics TEXT NOT NULL, used_at REAL NOT NULL)""",
        "CREATE UNIQUE INDEX image_by_key ON image (key, kind)",
        "CREATE TABLE tokens (id INTEGER PRIMARY KEY, tokens BLOB NOT NULL)",
    ):
        db.conn.execute(statement)


@schema()
def m002_digests(db: Database) -> None:
    """A digest of what a namespace is. Nothing else proves that: of a salted one the root key can't be computed again, and
    a layout with another number in it would be believed. Rows that are there already are taken for sound.
    """
    db.conn.execute("ALTER TABLE namespace ADD COLUMN digest BLOB")
    for number, *said in db.conn.execute("SELECT id, root, model, codec, layout FROM namespace").fetchall():
        db.conn.execute("UPDATE namespace SET digest = ? WHERE id = ?", [namespace_digest(*said), number])


@schema()
def m003_levels_in_images(db: Database) -> None:
    """The levels of an image stand in the image, and no row names a file of them. Images from before are of a format that is
    not read any more: their rows leave here, their files when the opening finds them without rows. So the table is made
    anew, which no SQLite is too old for (DROP COLUMN came with 3.35).
    """
    for statement in (
        "DROP TABLE image",
        """CREATE TABLE image (
            id INTEGER PRIMARY KEY, kind INTEGER NOT NULL, key BLOB NOT NULL, namespace INTEGER NOT NULL,
            parent BLOB NOT NULL, start INTEGER NOT NULL, length INTEGER NOT NULL, nbytes INTEGER NOT NULL,
            checksum TEXT NOT NULL, disk INTEGER NOT NULL, used INTEGER NOT NULL, created REAL NOT NULL,
            hits INTEGER NOT NULL, extra TEXT NOT NULL, used_at REAL NOT NULL)""",
        "CREATE UNIQUE INDEX image_by_key ON image (key, kind)",
        "DELETE FROM tokens",
        "DELETE FROM namespace",
    ):
        db.conn.execute(statement)


def namespace_digest(root: bytes, model: str, codec: str, layout: str) -> bytes:
    """16 bytes of xxh3 over the four, each after its length."""
    state = xxhash.xxh3_128()
    for part in (root, model.encode(), codec.encode(), layout.encode()):
        state.update(len(part).to_bytes(8, "little") + part)
    return state.digest()
