"""What a newer release wrote is refused before anything in it is changed: asked by whoever opens or repairs a directory."""

from __future__ import annotations

import sqlite3
from itertools import islice
from pathlib import Path

from prefixcache.image_format import FORMAT
from prefixcache.ssd.directory import Directory, lock_format, require_plain
from prefixcache.ssd.errors import IndexBroken, NewerFormat
from prefixcache.ssd.files import Damaged, read_header
from prefixcache.ssd.index import suffixes
from prefixcache.ssd.schema import check_format

_SAMPLE = 8  # images that are looked at where neither LOCK nor index is there to say


def refuse_newer(directory: Directory) -> None:
    """NewerFormat when LOCK, the index or, where that is missing, an image is of a newer release. Leaves no trace."""
    path = directory.index
    for part in (*suffixes(path), path.with_name(f"{path.name}-journal")):
        require_plain(part)
    said = lock_format(directory)
    if said > FORMAT:
        raise NewerFormat(repr(str(directory.lock)), said, FORMAT)
    if path.exists() and path.stat().st_size and _knows_index(path):
        return
    for _, item in islice((found for found in directory.files() if found[0]), _SAMPLE):
        try:
            read_header(item.path)
        except (Damaged, OSError):
            continue


def _knows_index(path: Path) -> bool:
    """Whether the index is of a format that this release knows; NewerFormat for a newer one. A broken one says nothing."""
    connection = sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)
    try:
        check_format(connection, path)
        return True
    except (sqlite3.DatabaseError, UnicodeDecodeError, IndexBroken):
        return False
    finally:
        connection.close()
