"""Threads that share out one call on bytes: for the C kernels, which let go of the interpreter, and for NumPy's copies."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from threading import Lock

MOST_THREADS = 8
CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
WORTH_A_THREAD = 1 << 19  # bytes of rows; waking a thread costs as long as some 200 kB take
SHARE = 1 << 18  # bytes of rows, about, that a thread takes at a time


def threads() -> int:
    """Return how many threads may work on one call, the calling one among them."""
    return _threads


def set_threads(number: int) -> None:
    """Change `threads`. At first it is one a CPU, at most 8."""
    global _threads, _helpers
    if type(number) is not int or number < 1:
        raise ValueError(f"threads={number!r}: not a number of threads; choose 1 or more")
    # A pool starts its threads when there is work for them, and they end when nobody has the pool any more.
    _threads, _helpers = number, ThreadPoolExecutor(max(1, number - 1), thread_name_prefix="prefixcache-codecs")


_threads: int
_helpers: ThreadPoolExecutor  # all but the calling threads
set_threads(min(CPUS, MOST_THREADS))
os.register_at_fork(after_in_child=lambda: set_threads(_threads))  # a child has none of its parent's threads


def share_out(size: int, share: int, worth: int, work: Callable[[int, int], None]) -> None:
    """Do `work(first, last)` on all of [0, size): `share` at a time by each of up to `worth` threads, or all at once by the
    calling one alone.
    """
    helpers = min(_threads, worth) - 1
    if helpers < 1:
        if size:
            work(0, size)
        return
    starts = count(0, share)

    def take() -> None:
        # `next` of a count is one step for the interpreter. Were it not, two threads would write the same rows twice.
        while (first := next(starts)) < size:
            work(first, min(first + share, size))

    # Who has a turn first: the thread that helps, until it is done, or the calling one, which then waits for nobody. Futures
    # wouldn't do: a pool that refuses work for want of a thread has queued it, and one that it has already may do it.
    turns = [Lock() for _ in range(helpers)]
    failed: list[BaseException] = []

    def help_out(turn: Lock) -> None:
        if turn.acquire(blocking=False):
            try:
                take()
            except BaseException as error:
                failed.append(error)
            finally:
                turn.release()

    try:
        with suppress(RuntimeError):  # no thread can be started: the calling one does the work alone
            for turn in turns:
                _helpers.submit(help_out, turn)
        take()
    finally:  # also where a share failed: the memory that others still work on may be another's next
        for turn in turns:
            turn.acquire()
    if failed:
        raise failed[0]
