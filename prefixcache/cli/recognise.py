"""Whether a directory is one of prefixcache's: asked before anything is shown of it or changed in it.

`ssd.reconcile` furnishes a directory, empties its tmp/ and sets aside what it does not know, and a file named LOCK or
index.db is enough for it. Other programs have files of these names; to their directories that must never happen.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator
from pathlib import Path

# What reading an index raises whose tables are ours and whose values are not.
NONSENSE = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)

FOLDERS = ("rows", "windows", "snapshots")
_IMAGE = re.compile(r"([0-9a-f]{2})[0-9a-f]{30}\.safetensors")


def why_not(directory: Path) -> str:
    """Why a directory is not one of prefixcache's, as one line with what to do; "" when it is.

    It is when it has an index of ours, a LOCK that a cache signed, or an index or LOCK of any content beside image
    files where images are kept. OSError when that can't be seen.
    """
    root = Path(os.path.abspath(directory.expanduser()))
    if not root.is_dir():
        what = "not a directory" if os.path.lexists(root) else "no such directory"
        return f"{str(root)!r}: {what}; check the name"
    if not os.listdir(root):
        return f"{str(root)!r}: not a prefixcache directory: it is empty; check the name"
    index, lock = root / "index.db", root / "LOCK"
    if _is_signed(lock) or _is_index(index):
        return ""
    if not any(_images(root)):
        return (
            f"{str(root)!r}: not a prefixcache directory: no index, lock or image of a cache is in it; check the name"
        )
    if os.path.lexists(index) or os.path.lexists(lock):
        return ""
    return (
        f"{str(root)!r}: has images of a cache, but no index or lock; to have them taken in, make an empty LOCK in it"
    )


def nonsense(directory: Path, error: BaseException) -> str:
    """One line on an error that is in `NONSENSE`. It quotes no value: one may be of a prompt."""
    return (
        f"{str(directory)!r}: the index has values that no cache writes ({type(error).__name__}); move index.db* away, "
        "and prefixcache reconcile makes a new one from the files"
    )


def _is_signed(lock: Path) -> bool:
    try:
        fd = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except PermissionError:
        raise
    except OSError:
        return False
    with os.fdopen(fd, "rb") as file:
        text = file.read(1000)
    return re.match(rb"pid \d+\nhost .+\nsince ", text) is not None


def _is_index(path: Path) -> bool:
    """Whether it is an SQLite database with our tables. Leaves no trace, and asks for no lock."""
    if not path.is_file():
        return False
    try:
        connection = sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)
        try:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        finally:
            connection.close()
    except sqlite3.DatabaseError:
        return False
    return {"namespace", "image", "meta"} <= tables


def _images(root: Path) -> Iterator[Path]:
    for folder in FOLDERS:
        for path in (root / folder).glob("??/*.safetensors"):
            found = _IMAGE.fullmatch(path.name)
            if found and found[1] == path.parent.name:
                yield path
