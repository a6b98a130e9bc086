"""Threads that share out one call on bytes: for the C kernels, which let go of the interpreter, and for NumPy's copies."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count

MOST_THREADS = 8
WORTH_A_THREAD = 1 << 19  # bytes of rows; waking a thread costs as long as some 200 kB take
SHARE = 1 << 18  # bytes of rows, about, that a thread takes at a time


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Threads:
    """How many threads share out one call, and the pool of all but the calling one: made late, anew after a fork."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, work: Callable[[], None]) -> Future[None] | None:
        """Return None where no thread can be had: the caller does the work alone."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(max(1, self.most - 1), thread_name_prefix="prefixcache-codecs")
            pool = self._pool
        try:
            return pool.submit(work)
        except RuntimeError:  # the interpreter is shutting down, or `set_threads` has just closed this pool
            return None

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False)


_threads = _Threads(min(_cpus(), MOST_THREADS))


def threads() -> int:
    """Return how many threads may work on one call, the calling one among them."""
    return _threads.most


def set_threads(number: int) -> None:
    """Change `threads`. At first it is one a CPU, at most 8."""
    global _threads
    if type(number) is not int or number < 1:
        raise ValueError(f"threads={number!r}: not a number of threads; choose 1 or more")
    before, _threads = _threads, _Threads(number)
    before.close()


def _after_fork() -> None:
    """Begin anew in a child, which has none of its parent's threads, and perhaps a lock that nobody will open."""
    global _threads
    _threads = _Threads(_threads.most)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def share_out(size: int, share: int, worth: int, work: Callable[[int, int], None]) -> None:
    """Share out `work` on all of [0, size), `share` at a time by each of up to `worth` threads; at once, where that is
    one alone.
    """
    threads = _threads
    helpers = min(threads.most, worth) - 1
    if helpers < 1:
        if size:
            work(0, size)
        return
    starts = count(0, share)

    def take() -> None:
        # `next` of a count is one step for the interpreter. Were it not, two threads would write the same rows twice.
        while (first := next(starts)) < size:
            work(first, min(first + share, size))

    helping = [threads.submit(take) for _ in range(helpers)]
    take()
    # The shares are all taken now. Who hasn't begun never will; who has is at its last.
    for future in helping:
        if future is not None and not future.cancel():
            future.result()
