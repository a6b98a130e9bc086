"""quarantine/: what failed its check, each file beside a small JSON of the reason. The oldest are deleted
when it grows too large.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from prefixcache.ssd.directory import Directory, disk_at, identity_at, is_foreign, tree_size
from prefixcache.ssd.files import remove_file, write_file

_LARGEST_NOTE = 64 << 10
_LONGEST_NAME = 200  # bytes of a file's name here, besides its time and the ending of its note: systems take 255


class Item(NamedTuple):
    """One item: its file's name in quarantine/, why, when (Unix time), its real bytes with the note's."""

    name: str
    reason: str
    origin: str
    when: float
    disk: int


class Quarantine:
    """`_lock` guards the folder's names; `paths` guards which inode an image's path leads to, and is taken by whoever
    renames a file away from a path or to it."""

    def __init__(self, directory: Directory):
        self._directory = directory
        self._lock = threading.Lock()
        self._last = 0
        self.taken = 0  # files moved here by this process
        self.paths = threading.Lock()

    def take(self, path: str, reason: str, identity: tuple[int, int] | None = None) -> int | None:
        """Move `path` here; its real bytes with the note's, None when there is nothing to move (any more).

        `identity`: only while the path still leads to that inode; another may have been written there since.
        """
        with self._lock:
            self._last = stamp = max(time.time_ns(), self._last + 1)
        name = os.path.basename(path)
        if len(os.fsencode(name)) > _LONGEST_NAME:
            name = name[-_LONGEST_NAME // 4 :]  # a character is four bytes at most
        name = f"{stamp}-{name}"
        target = str(self._directory.quarantine / name)
        with self.paths:
            here = identity_at(path)
            if here is None or (identity is not None and here != identity):
                return None
            os.rename(path, target)
            self.taken += 1
        note: dict[str, Any] = {"reason": reason, "origin": self._directory.relative(path), "when": stamp / 1e9}
        with suppress(OSError):  # on a full disk it goes without
            write_file(_note(target), np.frombuffer(json.dumps(note).encode(), np.uint8))
        return tree_size(target) + disk_at(_note(target))

    def prune(self, excess: int) -> int:
        """Delete the oldest until `excess` bytes are freed; the bytes freed."""
        freed = 0
        for item in quarantined(self._directory):
            if freed >= excess:
                break
            target = str(self._directory.quarantine / item.name)
            if os.path.isdir(target) and not os.path.islink(target):
                shutil.rmtree(target)
            else:
                remove_file(target)
            if _is_file(_note(target)):
                remove_file(_note(target))
            freed += item.disk
        return freed


def quarantined(directory: Directory) -> list[Item]:
    """Return what lies in quarantine/, oldest first. Writes nothing."""
    items = []
    try:
        names = {name for name in os.listdir(directory.quarantine) if not is_foreign(name)}
    except OSError:
        return []
    for name in sorted(names):
        target = str(directory.quarantine / name)
        if name.endswith(".json") and name.removesuffix(".json") in names and _is_file(target):
            continue
        note = _read_note(target)
        disk = tree_size(target) + (disk_at(_note(target)) if _is_file(_note(target)) else 0)
        items.append(Item(name, str(note.get("reason", "")), str(note.get("origin", "")), _when(name), disk))
    return sorted(items, key=lambda item: item.when)


def _note(target: str) -> str:
    return f"{target}.json"


def _read_note(target: str) -> dict[str, Any]:
    if not _is_file(_note(target)):
        return {}
    try:
        with open(_note(target), "rb") as file:
            note = json.loads(file.read(_LARGEST_NOTE))
    except (OSError, ValueError, RecursionError):
        return {}
    return note if isinstance(note, dict) else {}


def _is_file(path: str) -> bool:
    return os.path.isfile(path) and not os.path.islink(path)


def _when(name: str) -> float:
    """Return the time that a file's name in quarantine/ begins with, since one may be without a note; 0 where it has none."""
    stamp = name.partition("-")[0]
    return int(stamp) / 1e9 if stamp.isascii() and stamp.isdecimal() and len(stamp) <= 19 else 0.0
