"""What a newer release wrote is refused before anything in it is changed: asked by whoever opens or repairs a directory."""

from __future__ import annotations

import sqlite3
from itertools import islice

from prefixcache.image_format import FORMAT
from prefixcache.ssd.directory import Directory, lock_format, require_plain
from prefixcache.ssd.errors import IndexBroken, NewerFormat
from prefixcache.ssd.files import Damaged, read_header
from prefixcache.ssd.index import check_age, suffixes

_SAMPLE = 8  # images that are looked at where neither LOCK nor index is there to say


def refuse_newer(directory: Directory) -> None:
    """NewerFormat when LOCK, the index or, where that is missing, an image is of a newer release. Leaves no trace."""
    path = directory.index
    for part in (*suffixes(path), path.with_name(f"{path.name}-journal")):
        require_plain(part)
    said = lock_format(directory)
    if said > int(FORMAT):
        raise NewerFormat(
            f"{str(directory.lock)!r} is of format {said}, this release knows {FORMAT}: a newer release wrote it; "
            "upgrade prefixcache or name another directory"
        )
    if path.exists() and path.stat().st_size:
        _refuse_newer_index(directory)
        return
    for _, item in islice((found for found in directory.files() if found[0]), _SAMPLE):
        try:
            read_header(item.path)
        except (Damaged, OSError):
            continue


def _refuse_newer_index(directory: Directory) -> None:
    connection = sqlite3.connect(f"{directory.index.as_uri()}?mode=ro&immutable=1", uri=True)
    try:
        check_age(connection, directory.index)
    except (sqlite3.DatabaseError, UnicodeDecodeError, IndexBroken):
        return  # broken: not newer
    finally:
        connection.close()
