"""Writing while nobody asks: what RAM alone has goes to the tier below it, so that a kill or a power cut loses little.

What eviction or `close` would write later is written earlier, and not again. What would never have been written, because it
is removed or superseded in RAM, costs bytes: so there is a limit for each day.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

from prefixcache.metrics.periodic import Periodic
from prefixcache.tiers.storage import Storage

PERIOD = 1.0  # seconds between two looks
LOOKS = 3  # so many in a row that find nothing asked and nothing stored: nobody asks
DAY = 86_400.0  # seconds


class Idle(Periodic):
    """Writes what RAM alone has while nobody asks, until the storage is gone.

    A day is one of UTC, and its bytes are counted from the opening on. Of `look` and `write` one call runs at a time.
    """

    def __init__(self, storage: Storage, clock: Callable[[], float] = time.time):
        super().__init__("idle", PERIOD, "spill_idle: what RAM alone has could not be written")
        self._storage = weakref.ref(storage)
        self._clock = clock
        self._seen: tuple[int, ...] = ()  # what had happened at the look before
        self._quiet = 0  # looks since then
        self._day = self._spent = 0
        # After this, on this day, with this limit of the tier, there was nothing to write, or no room for it.
        self._done: tuple[tuple[int, ...], int] | None = None
        self._done_limit = 0

    def look(self) -> bool:
        """Write, if nobody has asked for a while and something may be left to write. Returns whether the storage is there."""
        storage = self._storage()
        if storage is None:
            return False
        counters = storage.counters
        seen = counters.fetches, counters.stores, counters.promoted_bytes, counters.write_errors
        if seen != self._seen:
            self._seen, self._quiet = seen, 0
        else:
            self._quiet += 1
        now, tier = (seen, self._today()), storage.lower.spill_tier
        limit = tier.tier.limit if tier is not None else 0
        if self._quiet < LOOKS or (now == self._done and limit <= self._done_limit):
            return True
        if not self.write() and not storage.budget.queued and tier is not None and tier.tier.has_room(1):
            self._done, self._done_limit = now, limit
        return True

    def write(self) -> int:
        """Queue what RAM alone has, as much as the day's limit and the queue take. Returns the bytes queued."""
        storage = self._storage()
        if storage is None or storage.lower.spill_tier is None:
            return 0
        with storage.lock:
            if self._stop.is_set():
                return 0
            today = self._today()
            if today != self._day:
                self._day, self._spent = today, 0
            limit = storage.settings.idle_bytes(storage.lower.spill_tier.tier.limit)
            queued = storage.spilling.write_idle(limit - self._spent)
            self._spent += queued
            storage.counters.idle_bytes += queued
        return queued

    def _today(self) -> int:
        return int(self._clock() // DAY)
