"""The machine's memory: how much this process may use, how much of it is free, how freed memory goes back to the
system, and Python's garbage collector.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from prefixcache import image_memory

_GROUPS, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


class _Files(NamedTuple):
    """The files of a control group: its limit, what it uses, and a table with a line for its file cache."""

    limit: str
    usage: str
    table: str
    cached: str


_VERSIONS = {  # by controller, which version 2 doesn't name
    "": _Files("memory.max", "memory.current", "memory.stat", "inactive_file"),
    "memory": _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat", "total_inactive_file"),
}


def _groups() -> Iterator[tuple[Path, _Files]]:
    """Yield the folders of this process's control group and of those that it is in, as far as they can be seen here."""
    try:
        lines = [line.split(":", 2) for line in _OWN.read_text().splitlines()]
    except OSError:
        lines = []
    own = {name: line[2] for line in lines if len(line) == 3 for name in line[1].split(",")}
    for controller, files in _VERSIONS.items():
        root = _GROUPS / controller
        group = root / own.get(controller, "").lstrip("/")
        yield from ((folder, files) for folder in (group, *group.parents) if folder.is_relative_to(root))


def machine_memory() -> int:
    """Return the bytes of memory that this process may use: the machine's, or its control group's where that is less."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for folder, files in _groups():
        try:
            memory = min(memory, int((folder / files.limit).read_text()))
        except (OSError, ValueError):  # no such group, or one without a limit
            continue
    return memory


def available_memory() -> int:
    """Return the bytes that programs could take now without others being swapped out: the machine's, or what is left of this
    process's control group (its file cache counted as free) when that is less.
    """
    available = int(psutil.virtual_memory().available)
    for folder, files in _groups():
        try:
            left = int((folder / files.limit).read_text()) - int((folder / files.usage).read_text())
            counts = dict(line.split() for line in (folder / files.table).read_text().splitlines())
            available = min(available, left + int(counts.get(files.cached, 0)))
        except (OSError, ValueError):
            continue
    return max(available, 0)


def trim_process_memory() -> None:
    """Let the allocator return freed memory to the system, where it would not by itself (glibc).

    glibc serves ever larger blocks from its heap once one of their size was freed, and keeps them: after a gigabyte of
    images half of it, or all, stayed with the process. This takes some 50 ms a gigabyte; hold no lock.
    """
    image_memory.release_kept()
    if sys.platform == "linux":
        try:
            ctypes.CDLL(None).malloc_trim(0)
        except (AttributeError, OSError):
            return  # another C library


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Disable the garbage collector in the block, then move all objects to its oldest generation: it visits those seldom.
    Decision 0008 says why.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting and not gc.get_freeze_count():  # else `unfreeze` would undo what the program froze itself
            gc.freeze()
            gc.unfreeze()
        if collecting:
            gc.enable()
