"""When images were used: a clock, each tier's order of eviction by a policy, and what the index has not heard yet."""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable

from prefixcache.blocks.budget import Budget
from prefixcache.blocks.leased_last import LeasedLast
from prefixcache.blocks.node import RAM, Slot, rank
from prefixcache.blocks.policies import POLICIES
from prefixcache.image_format import SNAPSHOT

STEP = 60.0  # seconds between two times that are kept
MOST = 2048  # times that are kept: 32 kB


class Recency:
    """The orders of eviction, least recent first: RAM's of what RAM has, those below of all slots."""

    def __init__(self, policy: str, budget: Budget, tiers: int):
        rule = POLICIES[policy]
        fixed = rule.fixed(budget.limit)
        budget.reserve(tiers * fixed)  # for good
        self.orders = tuple(LeasedLast(rule.make(fixed), tier) for tier in range(tiers))
        self.snapshots: OrderedDict[Slot, None] = OrderedDict()  # those in RAM, the least recently used first
        self.slot_bytes = rule.slot_bytes
        self.clock = 0
        self.times = UseTimes()
        # Below RAM and used since the index last heard of it: the hits among these uses.
        self.unflushed: dict[Slot, int] = {}

    def enter_ram(self, slot: Slot) -> None:
        self.orders[RAM].add(slot)
        if slot.kind == SNAPSHOT:
            self.snapshots[slot] = None

    def leave_ram(self, slot: Slot) -> None:
        self.orders[RAM].remove(slot)
        self.snapshots.pop(slot, None)

    def attach(self, slot: Slot) -> None:
        for order in self.orders[1:]:
            order.add(slot)

    def remove(self, slot: Slot) -> None:
        for order in self.orders[1:]:
            order.remove(slot)

    def touch(self, slots: Iterable[Slot], hit: bool = False) -> None:
        """Make a path the newest in each tier that it is in. `slots` tail first, as `required_images` gives them. `hit`: a
        fetch used it.
        """
        self.clock += 1
        slots = list(slots)
        clock, unflushed = self.clock, self.unflushed
        self.times.note(clock)
        for slot in slots:
            slot.tick = clock
            slot.evict_first = False
            if hit:
                slot.hits += 1
            if slot.kind == SNAPSHOT and slot in self.snapshots:
                self.snapshots.move_to_end(slot)
            if slot.tiers > 1:
                unflushed[slot] = unflushed.get(slot, 0) + hit
        for order in self.orders:
            order.touch(slots)
            if hit:
                order.used(slots, False)

    def refile(self, slot: Slot) -> None:
        """Give a slot its place anew, whose leases or tiers have changed."""
        for order in self.orders:
            order.refile(slot)

    def unblock(self, slot: Slot) -> None:
        """Give a slot as a candidate again: it may have become one that can be evicted."""
        if slot.maybe_blocked:
            for order in self.orders:
                order.unblock(slot)

    def request_ended(self, slots: Iterable[Slot]) -> None:
        """Make this path, `slots` tail first, the newest: a request that used or brought it has ended."""
        slots = list(slots)
        self.touch(slots)
        for order in self.orders:
            order.used(slots, True)

    def sort_below_ram(self, slots: Iterable[Slot]) -> None:
        """Sort all of these, which were placed in any order, by their ticks; at equal ticks the deeper come first."""
        least_recent_first = sorted(slots, key=rank)
        for order in self.orders[1:]:
            order.rebuild(least_recent_first)
        self.clock = max([self.clock, *(slot.tick for slot in least_recent_first[-1:])])

    def check_integrity(self, present: list[set[Slot]], slots: set[Slot]) -> None:
        """Raise AssertionError unless the orders have what they should, of what is `present` in each tier."""
        assert set(self.orders[RAM]) == present[RAM]
        assert self.snapshots.keys() == {slot for slot in present[RAM] if slot.kind == SNAPSHOT}
        for order in self.orders[1:]:
            assert set(order) == slots
        for order in self.orders:
            order.check_integrity()
        assert self.unflushed.keys() <= set().union(*present[1:])


class UseTimes:
    """Tells when each tick of the clock was, to about a minute: slots keep the tick of their last use and no time. It has
    ticks and their Unix times, both ascending. Guarded by whoever guards the graph.
    """

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._ticks, self._times = array("q"), array("d")
        self._last = 0, 0.0

    def load(self, uses: Iterable[tuple[int, float]], shift: int = 0) -> None:
        """Note what an index says: ticks and Unix times in any order. A time to come counts as now. The ticks that were noted
        before, which are of later uses, grow by `shift`.
        """
        newer = [*zip(self._ticks, self._times, strict=True), self._last]
        self._clear()
        latest: dict[int, float] = {}
        for tick, at in uses:
            if at > latest.get(tick, 0.0):
                latest[tick] = at
        now = time.time()
        for tick, at in sorted(latest.items()):
            self.note(tick, min(at, now))
        for tick, at in newer:
            if at:
                self.note(tick + shift, at)

    def note(self, tick: int, at: float | None = None) -> None:
        """Note that a tick was used at a Unix time, now if None. Ticks come in ascending order."""
        before, at = self._last, max(time.time() if at is None else at, self._last[1])
        self._last = tick, at
        if not self._times or at >= self._times[-1] + STEP:
            if self._times and before[0] > self._ticks[-1]:
                self._keep(*before)  # the last use before a pause
            self._keep(tick, at)

    def last_before(self, at: float) -> int:
        """Return the newest tick that was surely used before a Unix time, 0 where none was. Those of the minute before it may
        be missed.
        """
        tick, last = self._last
        if last < at:
            return tick
        place = bisect_left(self._times, at)
        return self._ticks[place - 1] if place else 0

    def _keep(self, tick: int, at: float) -> None:
        if len(self._times) >= MOST:  # of the older half every second one is enough
            del self._ticks[1 : MOST // 2 : 2], self._times[1 : MOST // 2 : 2]
        self._ticks.append(tick)
        self._times.append(at)
