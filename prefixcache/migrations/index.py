"""The steps that lead from an empty file to the schema of `index.db`, oldest first.

A step that was released is never changed: a later schema is a new step at the end. A directory that knows a step which
is not in this list was written by a newer release and is refused; but for `UNRELEASED`, steps of versions that nobody was
given: such an index is rebuilt from the files.
"""

from __future__ import annotations

from sqlite_utils import Database, Migrations

schema = Migrations("prefixcache.index")
UNRELEASED = frozenset({"m002_digests", "m003_levels_in_images"})


@schema()
def m001_images(db: Database) -> None:
    """Namespaces, images, and the images' tokens in a table apart, so that a touch rewrites 200 bytes and not 1200.

    Tokens are little-endian int32 where all of an image's fit, else int64: `length` counts them, so the blob's size
    tells which. Neither STRICT (SQLite 3.37; some that are supported have 3.34) nor CHECK: `ssd.rows` judges values when
    they are read, so that it also judges what other means than ours have put there.
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
            hits INTEGER NOT NULL, extra TEXT NOT NULL, used_at REAL NOT NULL)""",
        "CREATE UNIQUE INDEX image_by_key ON image (key, kind)",
        "CREATE TABLE tokens (id INTEGER PRIMARY KEY, tokens BLOB NOT NULL)",
    ):
        db.conn.execute(statement)
