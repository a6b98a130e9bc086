"""Eviction policies: each is an order of a tier's slots, and `POLICIES` names them.

The graph tells an order which slots are added, used and deleted; `eviction` asks it who is evicted first, and sees to it that
nothing is evicted which something else depends on. An order does no I/O and is guarded by whoever guards the graph.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
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

    def touch(self, slot: Slot, /) -> None:
        """It is the newest now. Any number of times by one request; `used` counts."""

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

    def less_recent(self, slot: Slot, wanted: Slot, /) -> Iterator[Slot]:
        """Those that come before both, in the order of eviction: what may be evicted to make room for `slot`, which `wanted`
        depends on, or is.
        """

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

    `touch`, `remove` and `aside` are an OrderedDict's own methods, because a hit touches hundreds of slots. (In a subclass of
    it each takes a third longer.)
    """

    leaf_first = False

    def __init__(self, fixed: int = 0) -> None:
        self._slots: OrderedDict[Slot, None] = OrderedDict()
        self.touch = self._slots.move_to_end
        self.remove = self.aside = self._slots.__delitem__

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def __reversed__(self) -> Iterator[Slot]:
        return reversed(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, slot: object) -> bool:
        return slot in self._slots

    def add(self, slot: Slot) -> None:
        self._slots[slot] = None

    def used(self, slots: list[Slot], ended: bool) -> None:
        """When it was is all that counts, and `touch` has said it."""

    def back(self, slot: Slot, used: bool) -> None:
        self._slots[slot] = None
        if not used:  # it was among the least recent when its write began, and parents are written first
            self._slots.move_to_end(slot, last=False)

    def forget(self, slot: Slot) -> None:
        self._slots.pop(slot, None)

    def demote(self, slot: Slot) -> None:
        self._slots.move_to_end(slot, last=False)

    def rebuild(self, least_recent_first: Iterable[Slot]) -> None:
        self._slots.clear()
        self._slots.update(dict.fromkeys(least_recent_first))

    def less_recent(self, slot: Slot, wanted: Slot) -> Iterator[Slot]:
        """By ticks; of one prompt the later blocks come first."""
        limit = (min(slot.tick, wanted.tick), -slot.node.start)
        for other in self._slots:
            if not other.evict_first and (other.tick, -other.node.start) >= limit:
                return
            yield other

    def check_integrity(self) -> None:
        """It has nothing beside the slots, and the graph knows which must stand here."""


POLICIES: dict[str, Policy] = {
    "lru": Policy(Lru),
    "adaptive": Policy(Adaptive, slot_bytes=256, most_fixed=Duel.MOST * Duel.ENTRY),
}
