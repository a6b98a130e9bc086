"""The machine's memory: how much this process may use, and giving back what it freed."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path


def machine_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or its control group's limit when that is lower."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        try:
            memory = min(memory, int(limit.read_text()))
        except (OSError, ValueError):
            continue
    return memory


def give_back() -> None:
    """Have the allocator return freed memory to the system, where it would not by itself (glibc).

    glibc serves ever larger blocks from its heap once one of their size was freed, and keeps them: after a gigabyte of
    images half of it, or all, stayed with the process. This takes some 50 ms a gigabyte; hold no lock.
    """
    if sys.platform == "linux":
        try:
            ctypes.CDLL(None).malloc_trim(0)
        except (AttributeError, OSError):
            return  # another C library
