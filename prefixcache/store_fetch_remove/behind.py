"""What stores leave to a thread of the cache, so that whoever generates doesn't wait for it. Decision 0044."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")


class StoresBehind:
    """One thread, which ends stores in the order of the calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._last: Future[object] | None = None

    def submit(self, end: Callable[[], T]) -> Future[T]:
        """Have the thread call `end` after all that was submitted before."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="prefixcache-store")
            future = self._pool.submit(end)
            self._last = future  # type: ignore[assignment]
        return future

    def wait(self) -> None:
        """Wait until all that was submitted has ended, well or not."""
        last = self._last
        if last is not None:
            wait([last])

    def close(self) -> None:
        """Wait, and let the thread go."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)
