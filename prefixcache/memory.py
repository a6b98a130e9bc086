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

import psutil

from prefixcache import image_memory

_GROUP = Path("/sys/fs/cgroup")


def machine_memory() -> int:
    """Return the bytes of memory that this process may use: the machine's, or its control group's where that is less."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in (_GROUP / "memory.max", _GROUP / "memory" / "memory.limit_in_bytes"):
        try:
            memory = min(memory, int(limit.read_text()))
        except (OSError, ValueError):
            continue
    return memory


def available_memory() -> int:
    """Return the bytes that programs could take now without others being swapped out: the machine's, or what is left of this
    process's control group (its file cache counted as free) when that is less.
    """
    available = int(psutil.virtual_memory().available)
    for limit, current, stat, cached in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        try:
            left = int((_GROUP / limit).read_text()) - int((_GROUP / current).read_text())
            counts = dict(line.split() for line in (_GROUP / stat).read_text().splitlines())
            available = min(available, left + int(counts.get(cached, 0)))
        except (OSError, ValueError):  # no such group, or one without a limit
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
