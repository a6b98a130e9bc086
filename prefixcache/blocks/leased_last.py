"""An order of eviction in which what is leased comes last: any policy's order for the rest, then the leased, the least
recently used first. A tier puts an image last that is leased and in no tier below it, since there it would be lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from prefixcache.blocks.lru import Lru
from prefixcache.blocks.node import Slot
from prefixcache.blocks.policies import Order


class LeasedLast:
    """`rest` orders the slots that a tier may lose first. Invariant: `_leased` has exactly those for which `is_last` is true.

    Whoever changes what `is_last` depends on (a slot's leases, or the tiers that it is in) calls `refile`.
    """

    def __init__(self, rest: Order, tier: int):
        self.rest, self._tier = rest, tier
        self._leased = Lru()

    def is_last(self, slot: Slot) -> bool:
        """Tell whether a slot is to be evicted after all others: it is leased, and no tier below this one has it."""
        return slot.leases > 0 and not slot.tiers >> self._tier + 1

    def refile(self, slot: Slot) -> None:
        """Move a slot, if it is here, to where `is_last` now says that it belongs."""
        if slot in self._leased:
            if not self.is_last(slot):
                self._leased.remove(slot)
                self.rest.add(slot)
        elif self.is_last(slot) and slot in self.rest:
            self.rest.remove(slot)
            self._leased.add(slot)

    def __iter__(self) -> Iterator[Slot]:
        return chain(self.rest, self._leased)

    def __reversed__(self) -> Iterator[Slot]:
        return chain(reversed(self._leased), reversed(self.rest))

    def __len__(self) -> int:
        return len(self.rest) + len(self._leased)

    def __contains__(self, slot: object) -> bool:
        return slot in self.rest or slot in self._leased

    def _queue_of(self, slot: Slot) -> Order:
        return self._leased if slot in self._leased else self.rest

    def add(self, slot: Slot) -> None:
        (self._leased if self.is_last(slot) else self.rest).add(slot)

    def touch(self, slots: Iterable[Slot]) -> None:
        if len(self._leased):
            slots = list(slots)
            self._leased.touch(slots)
        self.rest.touch(slots)

    def used(self, slots: list[Slot], ended: bool) -> None:
        self.rest.used(slots, ended)

    def remove(self, slot: Slot) -> None:
        self._queue_of(slot).remove(slot)

    def demote(self, slot: Slot) -> None:
        self._queue_of(slot).demote(slot)

    def rebuild(self, least_recent_first: Iterable[Slot]) -> None:
        slots = list(least_recent_first)
        self.rest.rebuild(slot for slot in slots if not self.is_last(slot))
        self._leased.rebuild(slot for slot in slots if self.is_last(slot))

    def less_recent(self, slot: Slot, spilled: Slot) -> Iterator[Slot]:
        if slot in self._leased and spilled in self._leased:
            return chain(self.rest, self._leased.less_recent(slot, spilled))
        return self.rest.less_recent(slot, spilled)

    def candidates(self) -> Iterator[Slot]:
        return chain(self.rest.candidates(), self._leased.candidates())

    def unblock(self, slot: Slot) -> None:
        self.rest.unblock(slot)
        self._leased.unblock(slot)

    def waiting(self) -> Iterator[Slot]:
        return chain(self.rest.waiting(), self._leased.waiting())

    def check_integrity(self) -> None:
        self.rest.check_integrity()
        self._leased.check_integrity()
        assert all(map(self.is_last, self._leased)), "an image that is last to go and not leased"
        assert not any(map(self.is_last, self.rest)), "a leased image that goes before others"
