"""Eviction policies: each is an order of a tier's slots, and `POLICIES` names them.

The graph tells an order which slots are added, used and deleted; `eviction` asks it who is evicted first, and sees to it that
nothing is evicted which something else depends on. An order does no I/O and is guarded by whoever guards the graph.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import NamedTuple, Protocol

from prefixcache.blocks.adaptive import Adaptive, Duel
from prefixcache.blocks.node import Slot


class Order(Protocol):
    """A tier's slots. Iterating gives all of them but those `aside`, in the order of eviction, and changes nothing."""

    leaf_first: bool
    """Whether a slot may come before what depends on it: a leaf below it is then evicted in its place."""

    def __iter__(self) -> Iterator[Slot]: ...
    def __reversed__(self) -> Iterator[Slot]: ...
    def __len__(self) -> int: ...
    def __contains__(self, slot: object, /) -> bool: ...

    def add(self, slot: Slot, /) -> None:
        """A new slot: for now among the most recent."""

    def touch(self, slots: Iterable[Slot], /) -> None:
        """Those of these that are here become the newest, one after the other. Any number of times by one request; `used`
        counts.
        """

    def used(self, slots: list[Slot], ended: bool, /) -> None:
        """A fetch used these, the tail first, or (`ended`) a request ended that used or brought them. Not all are here."""

    def remove(self, slot: Slot, /) -> None:
        """It was here, and is deleted."""

    def aside(self, slot: Slot, /) -> None:
        """It can't be evicted until it is taken `back`, or `forget` is called."""

    def back(self, slot: Slot, used: bool, /) -> None:
        """It was aside, and was `used` meanwhile or not: if not, it is evicted first."""

    def forget(self, slot: Slot, /) -> None:
        """It is deleted, and may have been here, aside, or neither."""

    def demote(self, slot: Slot, /) -> None:
        """It is evicted next, unless it is touched before."""

    def rebuild(self, least_recent_first: Iterable[Slot], /) -> None:
        """Only these from now on, the least recently used first; used so often as their `hits` say."""

    def less_recent(self, slot: Slot, spilled: Slot, /) -> Iterator[Slot]:
        """Those that come before both, in the order of eviction: what may be evicted to make room for `slot`, which `spilled`
        depends on, or is.
        """

    def candidates(self) -> Iterator[Slot]:
        """Who may be evicted, in the order of eviction. One that is passed over can't be: it isn't given again before
        `unblock` is called for it.
        """

    def unblock(self, slot: Slot, /) -> None:
        """It may be evicted now. It need not be here. Called for a slot that is `blocked`."""

    def waiting(self) -> Iterator[Slot]:
        """Those that are not given as candidates before they are unblocked."""

    def check_integrity(self) -> None:
        """AssertionError when an invariant of the order does not hold."""


class Policy(NamedTuple):
    """`make` gives a tier's order, whose own memory takes `fixed` bytes of RAM at most.

    A slot takes `slot_bytes` of RAM over all tiers, beside `graph.SLOT_BYTES`.
    """

    make: Callable[[int], Order]
    slot_bytes: int = 0
    most_fixed: int = 0

    def fixed(self, limit: int) -> int:
        """Bytes for a tier's order where the budget is `limit`: a 32nd of it at most."""
        return min(self.most_fixed, limit // 32)


class Lru:
    """The least recently used first. A path is touched tail first, so that leaves are evicted first without asking.

    The order is `_blocked`, then `_slots`. The blocked were passed over as `candidates`, or put first; each has a number that
    grows along the order, and those that may be evicted now stand in the heap `_ready` by it. So the search for a victim
    does not pass the same slots again and again: with children that wait for a write their parents, written before them,
    are hundreds.
    """

    leaf_first = False

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
        """When it was is all that counts, and `touch` has said it."""

    def remove(self, slot: Slot) -> None:
        if slot in self._slots:
            del self._slots[slot]
        else:
            del self._blocked[slot]
        if len(self._ready) > 2 * len(self._blocked) + 64:
            self._drop_stale()

    aside = remove

    def back(self, slot: Slot, used: bool) -> None:
        self._slots[slot] = None
        if not used:  # it was among the least recent when its write began, and parents are written first
            self.demote(slot)

    def forget(self, slot: Slot) -> None:
        if slot in self:
            self.remove(slot)

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
        """Of slots that are no longer blocked, or deleted."""
        self._ready = [entry for entry in self._ready if self._blocked.get(entry[2]) == entry[0]]
        self._numbers = {number for number, _, _ in self._ready}
        heapify(self._ready)

    def waiting(self) -> Iterator[Slot]:
        return (slot for slot, number in self._blocked.items() if number not in self._numbers)

    def less_recent(self, slot: Slot, spilled: Slot) -> Iterator[Slot]:
        """By ticks; of one prompt the later blocks come first."""
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


POLICIES: dict[str, Policy] = {
    "lru": Policy(Lru),
    "adaptive": Policy(Adaptive, slot_bytes=256, most_fixed=Duel.MOST * Duel.ENTRY),
}
