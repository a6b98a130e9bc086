"""Memory pressure: while the machine has less memory free than the setting `memory_reserve`, the RAM budget is lowered;
when there is enough again, it grows back, step by step. One thread, which looks once a second.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable

from prefixcache import image_memory
from prefixcache.byte_sizes import size
from prefixcache.memory import available_memory, give_back
from prefixcache.tiers.ram import GRAPH_SHARE
from prefixcache.tiers.storage import Storage

log = logging.getLogger("prefixcache")

PERIOD = 1.0  # seconds between two looks
LEAST = 16  # the budget never falls below a 16th of what was asked for
STEPS = 8  # it grows by an 8th of what was asked for at a time
EASE = 2  # and only while so many times the reserve are free


class Pressure:
    """`look` is one look, on any thread; `start` has a thread do it until `stop`, or until the storage is gone."""

    def __init__(self, storage: Storage, reserve: int, available: Callable[[], int] = available_memory):
        self._storage = weakref.ref(storage)
        self._reserve = reserve
        self._available = available
        self._stop = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="prefixcache-memory", daemon=True).start()

    def stop(self) -> None:
        """Does not wait: whoever calls it may hold what the thread waits for."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(PERIOD) and self._storage() is not None:
            try:
                self.look()
            except Exception:
                log.exception("memory_reserve=%d: could not look at the machine's memory", self._reserve)

    def look(self) -> None:
        """Lower the budget by what is missing, or raise it by a step. What leaves goes to the SSD, as far as its queue takes
        it.
        """
        storage = self._storage()
        if storage is None:
            return
        missing = self._reserve - self._available()
        with storage.lock:
            budget, full = storage.budget, storage.ram.configured
            before, held = budget.limit, budget.held()
            limit = before
            if missing > 0:
                # Nodes are not let go for this: what is on the SSD would leave with them.
                least = max(full // LEAST, GRAPH_SHARE * held.nodes if storage.lower else 0)
                limit = min(before, max(held.total - missing, least))
            elif before < full and -missing >= (EASE - 1) * self._reserve:
                limit = min(full, before + max(full // STEPS, 1))
            less = (limit != before or budget.room < 0) and storage.ram.resize(limit) < held.total
        if less or (missing > 0 and image_memory.kept_bytes()):
            give_back()
        if before == full > limit:
            free, reserve = size(self._reserve - missing), size(self._reserve)
            log.warning(
                "%s of memory are free, less than memory_reserve=%s: the RAM budget goes from %s to %s until there "
                "is more",
                free,
                reserve,
                size(full),
                size(limit),
            )
        elif before < full == limit:
            log.info("the RAM budget is back at %s", size(full))
