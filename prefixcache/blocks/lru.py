"""The policy "lru", and the queues of "adaptive"."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import chain

from prefixcache.blocks.node import Slot


class Lru:
    """The least recently used first. A path is touched tail first, so that leaves are evicted first without asking.

    The order is `_blocked`, then `_slots`. The blocked were passed over as `candidates`, or put first; each has a number that
    grows along the order, and those that may be evicted now stand in the heap `_ready` by it. So the search for a victim
    does not pass the same slots again and again: with children that wait for a write their parents, written before them,
    are hundreds.
    """

    def __init__(self, fixed: int = 0) -> None:
        self._slots: OrderedDict[Slot, None] = OrderedDict()
        self._blocked: OrderedDict[Slot, int] = OrderedDict()
        self._ready: list[tuple[int, int, Slot]] = []  # with the slot's id, since slots have no order
        self._numbers: set[int] = set()  # of those in the heap
        self._lowest = self._highest = 0  # numbers given so far, down and up

    def __iter__(self) -> Iterator[Slot]:
        return chain(self._blocked, self._slots)

    def __reversed__(self) -> Iterator[Slot]:
        return chain(reversed(self._slots), reversed(self._blocked))

    def __len__(self) -> int:
        return len(self._slots) + len(self._blocked)

    def __contains__(self, slot: object) -> bool:
        return slot in self._slots or slot in self._blocked

    def add(self, slot: Slot) -> None:
        self._slots[slot] = None

    def touch(self, slots: Iterable[Slot]) -> None:
        move_to_end = self._slots.move_to_end
        for slot in slots:
            try:
                move_to_end(slot)
            except KeyError:
                if slot in self._blocked:
                    self.remove(slot)
                    self._slots[slot] = None

    def used(self, slots: list[Slot], ended: bool) -> None:
        """Do nothing: when it was is all that counts, and `touch` has said it."""

    def remove(self, slot: Slot) -> None:
        if slot in self._slots:
            del self._slots[slot]
        else:
            del self._blocked[slot]
        if len(self._ready) > 2 * len(self._blocked) + 64:
            self._drop_stale()

    def demote(self, slot: Slot) -> None:
        self.remove(slot)
        self._lowest -= 1
        self._blocked[slot] = self._lowest
        slot.maybe_blocked = True
        self._blocked.move_to_end(slot, last=False)
        self.unblock(slot)

    def rebuild(self, least_recent_first: Iterable[Slot]) -> None:
        slots = OrderedDict.fromkeys(least_recent_first)
        for part in (self._blocked, self._ready, self._numbers):
            part.clear()
        self._slots = slots

    def candidates(self) -> Iterator[Slot]:
        blocked, slots = self._blocked, self._slots
        while self._ready:
            number, _, slot = self._ready[0]
            if blocked.get(slot) == number:
                yield slot
            heappop(self._ready)
            self._numbers.discard(number)
        while slots:
            slot = next(iter(slots))
            yield slot
            del slots[slot]
            self._highest += 1
            blocked[slot] = self._highest
            slot.maybe_blocked = True

    def unblock(self, slot: Slot) -> None:
        number = self._blocked.get(slot)
        if number is None or number in self._numbers:
            return
        heappush(self._ready, (number, id(slot), slot))
        self._numbers.add(number)
        if len(self._ready) > 2 * len(self._blocked) + 64:
            self._drop_stale()

    def _drop_stale(self) -> None:
        """Take slots out of the heap that are no longer blocked, or deleted."""
        self._ready = [entry for entry in self._ready if self._blocked.get(entry[2]) == entry[0]]
        self._numbers = {number for number, _, _ in self._ready}
        heapify(self._ready)

    def waiting(self) -> Iterator[Slot]:
        return (slot for slot, number in self._blocked.items() if number not in self._numbers)

    def less_recent(self, slot: Slot, spilled: Slot) -> Iterator[Slot]:
        """Yield slots by their ticks; of one prompt the later blocks come first."""
        limit = (min(slot.tick, spilled.tick), -slot.node.start)
        for other in self:
            if other is slot or other is spilled:
                return
            if not other.evict_first and (other.tick, -other.node.start) >= limit:
                return
            yield other

    def check_integrity(self) -> None:
        numbers = list(self._blocked.values())
        assert numbers == sorted(set(numbers))
        assert not self._slots.keys() & self._blocked.keys()
        assert all(self._lowest <= number <= self._highest for number in numbers)
        assert self._numbers == {number for number, _, _ in self._ready}
        assert len(self._ready) <= 2 * len(self._blocked) + 65
