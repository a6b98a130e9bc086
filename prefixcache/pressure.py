"""Memory pressure: while the machine has less memory free than the setting `memory_reserve`, the RAM budget is lowered;
when there is enough again, it grows back, step by step. One thread, which looks once a second.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from prefixcache.memory import available_memory, give_back
from prefixcache.tiers import MIRROR_SHARE, Tiers

log = logging.getLogger("prefixcache")

PERIOD = 1.0  # seconds between two looks
LEAST = 16  # the budget never falls below a 16th of what was asked for
STEPS = 8  # it grows by an 8th of what was asked for at a time
EASE = 2  # and only while so many times the reserve are free


class Pressure:
    """`look` is one look, on any thread; `start` has a thread do it until `stop`."""

    def __init__(self, tiers: Tiers, reserve: int, available: Callable[[], int] = available_memory):
        self._tiers = tiers
        self._reserve = reserve
        self._available = available
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefixcache-memory", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(PERIOD):
            try:
                self.look()
            except Exception:
                log.exception("memory_reserve=%d: could not look at the machine's memory", self._reserve)

    def look(self) -> None:
        """Lower the budget by what is missing, or raise it by a step. Images that leave go to the SSD where there is one."""
        budget, full = self._tiers.budget, self._tiers.full
        missing = self._reserve - self._available()
        before = budget.limit
        if missing > 0:
            held = budget.held()
            # Nodes are not let go for this: what is on the SSD would leave with them.
            least = max(full // LEAST, MIRROR_SHARE * held.nodes)
            self._to(max(min(before, held.total - missing), least))
        elif before < full and -missing >= (EASE - 1) * self._reserve:
            self._to(min(full, before + max(full // STEPS, 1)))
        elif budget.room < 0:
            self._to(before)
        if before == full > budget.limit:
            log.warning("%d bytes of memory are free, less than memory_reserve=%d: the RAM budget goes from %d to %d until "
                        "there is more", self._reserve - missing, self._reserve, full, budget.limit)  # fmt: skip
        elif before < full == budget.limit:
            log.info("the RAM budget is back at %d bytes", full)

    def _to(self, limit: int) -> None:
        held = self._tiers.budget.held().total
        if self._tiers.resize(min(limit, self._tiers.full)) < held:
            give_back()
