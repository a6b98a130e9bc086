"""What is on the disk, to be held against what was promised: its size, each image bit for bit, and what the cache has
deleted by itself.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from prefixcache.image_format import ImageError, examine
from prefixcache.ssd import Entry, Ssd
from prefixcache.ssd.directory import Directory
from prefixcache.ssd.entries import Address
from prefixcache.tiers.storage import Storage


def du(root: str | os.PathLike[str]) -> int:
    """Real bytes, as the cache's account has them: every name of a file with several; what is renamed meanwhile once."""
    sizes: dict[object, int] = {}
    for path in _all(os.fspath(root)):
        with suppress(FileNotFoundError):
            status = os.lstat(path)
            several = stat.S_ISREG(status.st_mode) and status.st_nlink > 1
            sizes[path if several else (status.st_dev, status.st_ino)] = status.st_blocks * 512
    return sum(sizes.values())


def _all(root: str) -> Iterator[str]:
    yield root
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            yield os.path.join(folder, name)


def image_fault(directory: Directory, address: Address, checksum: str) -> str:
    """Why the file of an image is not what was promised; "" where it is, bit for bit."""
    try:
        meta = examine(np.fromfile(directory.file(address), np.uint8), checksum).fields
    except FileNotFoundError:
        return "the file is missing"
    except ImageError as error:
        return str(error)
    return "" if (meta.kind, meta.key) == (address[0], address[1].hex()) else "another image is in its place"


def before_deletion(call: Callable[[list[Entry], bool], None]) -> Callable[[], None]:
    """From now on, in this process: `call` gets the entries that a cache is about to delete from its SSD, before that is
    queued, and whether they are superseded: a successor is durable that has what they were good for. Returns the undoing.
    """
    delete, drop_superseded = Ssd.delete, Storage.drop_superseded
    dropping = threading.local()

    def announced(ssd: Ssd, entries: Iterable[Entry]) -> None:
        entries = list(entries)
        call(entries, getattr(dropping, "superseded", False))
        delete(ssd, entries)

    def dropped(storage: Storage, *changed: Any) -> None:
        outer, dropping.superseded = getattr(dropping, "superseded", False), True
        try:
            drop_superseded(storage, *changed)
        finally:
            dropping.superseded = outer

    def undo() -> None:
        Ssd.delete, Storage.drop_superseded = delete, drop_superseded  # type: ignore[method-assign]

    Ssd.delete, Storage.drop_superseded = announced, dropped  # type: ignore[method-assign, assignment]
    return undo
