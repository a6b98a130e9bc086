"""Memory pressure: while the machine has less memory free than the setting `memory_reserve`, the RAM budget is lowered;
when there is enough again, it grows back, step by step. One thread, which looks once a second.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable

from prefixcache import image_memory
from prefixcache.byte_sizes import size
from prefixcache.memory import available_memory, trim_process_memory
from prefixcache.metrics.periodic import Periodic
from prefixcache.tiers.ram import GRAPH_SHARE
from prefixcache.tiers.storage import Storage

log = logging.getLogger("prefixcache")

PERIOD = 1.0  # seconds between two looks
LEAST = 16  # the budget never falls below a 16th of what was asked for
STEPS = 8  # it grows by an 8th of what was asked for at a time
EASE = 2  # and only while so many times the reserve are free


class Pressure(Periodic):
    """Keeps the RAM budget to what the machine can spare, until the storage is gone."""

    def __init__(self, storage: Storage, reserve: int, available: Callable[[], int] = available_memory):
        super().__init__("memory", PERIOD, f"memory_reserve={reserve}: could not look at the machine's memory")
        self._storage = weakref.ref(storage)
        self._reserve = reserve
        self._available = available

    def look(self) -> bool:
        """Lower the budget by what is missing, or raise it by a step. What leaves goes to the SSD, as far as its queue takes
        it. Returns whether the storage is there.
        """
        storage = self._storage()
        if storage is None:
            return False
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
            trim_process_memory()
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
        return True
