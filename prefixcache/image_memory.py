"""Memory for images: cut out of mappings of ours, used again by the next images, given back to the system page by page.

A heap keeps freed images in arenas of each thread (glibc), so the process grows beyond its budget; a mapping for each image
costs a page fault for every 4 kB. Here freed memory is kept for the next images, up to the budgets' free bytes plus a 16th of
the budgets. `take` is called wherever an image comes into being, `release_kept` by who wants to give free memory back.

Memory that nobody uses is `kept` (its pages are the process's) or `clean` (address space only). Decision 0009 says why, and
why regions are in huge pages at first.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
from bisect import bisect_left, insort
from collections import deque
from contextlib import suppress
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import numpy as np

LEAST = 64 << 10  # bytes; smaller ones are the heap's: of the last page half is lost on average
SLACK = 16  # kept extents are fragmented, so a 16th of the budgets is kept beyond their free bytes
REGION = 256 << 20  # bytes of address space that are mapped at once; for a larger image, its size
SPAN = 1 << 48  # address in the pool = number of the region * SPAN + offset in it; every region is shorter than SPAN


class ForImages(NamedTuple):
    """Bytes of a budget: what its images may take, and what they take, those in the heap included."""

    limit: int
    taken: int


class HasImages(Protocol):
    """A budget."""

    def for_images(self) -> ForImages:
        """Return the bytes that images may take, and those that they take. Called at any moment: it may take no lock."""


class Extent(NamedTuple):
    """Memory that an image has, and the pool to put it back to."""

    pool: Pool
    start: int
    nbytes: int


class FreeSpace:
    """Extents that no image has, joined with their neighbours. Not thread-safe."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._sizes: list[tuple[int, int]] = []  # (bytes, start), sorted
        self._ends: dict[int, int] = {}  # start -> end
        self._starts: dict[int, int] = {}  # end -> start

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, start: int, nbytes: int) -> None:
        self.nbytes += nbytes
        end = start + nbytes
        if start in self._starts:
            start = self._cut(self._starts[start])[0]
        if end in self._ends:
            end = self._cut(end)[1]
        self._ends[start], self._starts[end] = end, start
        insort(self._sizes, (end - start, start))

    def take(self, nbytes: int) -> int | None:
        """Take so many bytes off the smallest extent that has them. Returns their start, or None if no extent has so many."""
        at = bisect_left(self._sizes, (nbytes, 0))
        if at == len(self._sizes):
            return None
        start, end = self._cut(self._sizes[at][1])
        self.nbytes -= end - start
        if end - start > nbytes:
            self.add(start + nbytes, end - start - nbytes)
        return start

    def pop_smallest(self) -> tuple[int, int]:
        """Return the start and the bytes of the smallest extent, which is no longer free."""
        nbytes, start = self._sizes[0]
        self._cut(start)
        self.nbytes -= nbytes
        return start, nbytes

    def remove(self, start: int, nbytes: int) -> bool:
        """Remove an extent. Returns whether this very one was there, undivided."""
        if self._ends.get(start) != start + nbytes:
            return False
        self._cut(start)
        self.nbytes -= nbytes
        return True

    def _cut(self, start: int) -> tuple[int, int]:
        end = self._ends.pop(start)
        del self._starts[end]
        del self._sizes[bisect_left(self._sizes, (end - start, start))]
        return start, end


class Pool:
    """`_lock` guards all but `_left`: the collector frees images at any moment, also while the lock is held."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._budgets: WeakSet[Any] = WeakSet()
        self._left: deque[Extent] = deque()  # by images that are gone, not kept yet
        self._regions: dict[int, mmap.mmap] = {}
        self._in_huge_pages: set[int] = set()  # numbers of regions none of whose memory was given back
        self._numbers = 0
        self._used = 0  # bytes of the extents that images have
        self._kept = FreeSpace()
        self._clean = FreeSpace()

    @property
    def kept_bytes(self) -> int:
        return self._kept.nbytes

    def keep_within(self, budget: HasImages) -> None:
        """Keep memory up to this budget's free bytes, too, as long as it lives."""
        with self._lock:
            self._budgets.add(budget)
        self._drain()

    def take(self, nbytes: int) -> np.ndarray | None:
        """Return memory for an image; None where the system has none."""
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            self._keep_left()
            start = self._kept.take(size)
            was_kept = start is not None
            if start is None:
                start = self._clean_extent(size)
            if start is None:
                return None
            self._used += size
            if not was_kept:
                self._release(self._allowed())
            region = self._regions[start // SPAN]
        self._drain()
        buffer = _Buffer.__new__(_Buffer, (nbytes,), np.uint8, region, start % SPAN)
        buffer.extent = Extent(self, start, size)
        return buffer.view(np.ndarray)

    def put(self, extent: Extent) -> None:
        """Take memory back: the image that had it is gone."""
        self._left.append(extent)
        self._drain()

    def release_kept(self) -> None:
        """Give the system all memory that no image has."""
        with self._lock:
            self._keep_left()
            self._release(0)
            for number, region in list(self._regions.items()):
                if self._clean.remove(number * SPAN, len(region)):
                    del self._regions[number]
                    self._in_huge_pages.discard(number)
        self._drain()

    def _drain(self) -> None:
        """Keep the memory that images left, as far as the budgets allow. Does nothing while a thread, maybe this one, has
        the lock: that thread calls `_drain` after it has released it.
        """
        while self._left and self._lock.acquire(blocking=False):
            try:
                self._keep_left()
                self._release(self._allowed())
            finally:
                self._lock.release()

    def _allowed(self) -> int:
        limit = taken = 0
        for budget in self._budgets:
            now = budget.for_images()
            limit += now.limit + now.limit // SLACK
            taken += now.taken
        return limit - max(self._used, taken)

    def _keep_left(self) -> None:
        while self._left:
            extent = self._left.popleft()
            self._used -= extent.nbytes
            self._kept.add(extent.start, extent.nbytes)

    def _release(self, limit: int) -> None:
        """Give kept memory to the system, the smallest extents first, until no more than `limit` bytes are kept."""
        while self._kept and self._kept.nbytes > limit:
            start, nbytes = self._kept.pop_smallest()
            number = start // SPAN
            region = self._regions[number]
            if number in self._in_huge_pages:  # else the system may fill the gap again to join it with its neighbours
                self._in_huge_pages.remove(number)
                region.madvise(mmap.MADV_NOHUGEPAGE)
            region.madvise(mmap.MADV_DONTNEED, start % SPAN, nbytes)
            self._clean.add(start, nbytes)

    def _clean_extent(self, nbytes: int) -> int | None:
        start = self._clean.take(nbytes)
        if start is not None:
            return start
        size = max(nbytes, REGION)
        try:
            region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError:  # the address space may be limited: the heap may still have some
            return None
        self._numbers += 1
        self._regions[self._numbers] = region
        with suppress(OSError):  # a system without huge pages
            region.madvise(mmap.MADV_HUGEPAGE)
            self._in_huge_pages.add(self._numbers)
        self._clean.add(self._numbers * SPAN, size)
        return self._clean.take(nbytes)


class _Buffer(np.ndarray):
    """The base of all views of an extent. It puts the extent back when the last of them is gone."""

    __slots__ = ("extent",)
    extent: Extent

    def __del__(self) -> None:
        self.extent.pool.put(self.extent)


enabled = sys.platform == "linux"  # elsewhere the C library gives large blocks back by itself
_pool = Pool()


def _begin_anew() -> None:
    """Begin anew in a forked child: the lock may be held by a thread that stayed behind."""
    global _pool
    _pool = Pool()


os.register_at_fork(after_in_child=_begin_anew)


def take(nbytes: int) -> np.ndarray:
    """Return `nbytes` of memory (uint8, not zeroed) for an image. It is free again when its last view is gone."""
    memory = _pool.take(nbytes) if enabled and nbytes >= LEAST else None
    return memory if memory is not None else np.empty(nbytes, np.uint8)


def keep_within(budget: HasImages) -> None:
    """Keep freed memory up to this budget's free bytes, beside those of other budgets, as long as it lives."""
    _pool.keep_within(budget)


def kept_bytes() -> int:
    return _pool.kept_bytes


def release_kept() -> None:
    """Give the system the memory that is kept for the next images."""
    _pool.release_kept()
