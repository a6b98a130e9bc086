"""Eviction policies: each is an order of a tier's slots, and `POLICIES` names them.

The graph tells an order which slots are added, used and deleted; `eviction` asks it who is evicted first, and sees to it that
nothing is evicted which something else depends on. An order does no I/O and is guarded by whoever guards the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol

from prefixcache.blocks.adaptive import Adaptive, Duel
from prefixcache.blocks.lru import Lru
from prefixcache.blocks.node import Slot


class Order(Protocol):
    """A tier's slots. Iterating gives all of them but those `aside`, in the order of eviction, and changes nothing."""

    def __iter__(self) -> Iterator[Slot]: ...
    def __reversed__(self) -> Iterator[Slot]: ...
    def __len__(self) -> int: ...
    def __contains__(self, slot: object, /) -> bool: ...

    def add(self, slot: Slot, /) -> None:
        """Take in a new slot: for now it is among the most recent."""

    def touch(self, slots: Iterable[Slot], /) -> None:
        """Make those of these that are here the newest, one after the other. A request may do so often; `used` counts."""

    def used(self, slots: list[Slot], ended: bool, /) -> None:
        """Note that a fetch used these, the tail first, or (`ended`) that a request ended which used or brought them. Not all
        are here.
        """

    def remove(self, slot: Slot, /) -> None:
        """Delete a slot that is here."""

    def demote(self, slot: Slot, /) -> None:
        """Let a slot be evicted next, unless it is touched before."""

    def rebuild(self, least_recent_first: Iterable[Slot], /) -> None:
        """Have only these from now on, the least recently used first; used so often as their `hits` say."""

    def less_recent(self, slot: Slot, spilled: Slot, /) -> Iterator[Slot]:
        """Yield those that come before both, in the order of eviction: what may be evicted to make room for `slot`, which
        `spilled` depends on, or is.
        """

    def candidates(self) -> Iterator[Slot]:
        """Yield who may be evicted, in the order of eviction. One that is passed over can't be: it isn't given again before
        `unblock` is called for it.
        """

    def unblock(self, slot: Slot, /) -> None:
        """Give a slot as a candidate again. It need not be here. Called for a slot that is `blocked`."""

    def waiting(self) -> Iterator[Slot]:
        """Yield those that are not given as candidates before they are unblocked."""

    def check_integrity(self) -> None:
        """Raise AssertionError when an invariant of the order does not hold."""


class Policy(NamedTuple):
    """`make` gives a tier's order, whose own memory takes `fixed` bytes of RAM at most.

    A slot takes `slot_bytes` of RAM over all tiers, beside `graph.SLOT_BYTES`.
    """

    make: Callable[[int], Order]
    slot_bytes: int = 0
    most_fixed: int = 0

    def fixed(self, limit: int) -> int:
        """Return the bytes for a tier's order where the budget is `limit`: a 32nd of it at most."""
        return min(self.most_fixed, limit // 32)


POLICIES: dict[str, Policy] = {
    "lru": Policy(Lru),
    "adaptive": Policy(Adaptive, slot_bytes=320, most_fixed=Duel.MOST * Duel.ENTRY),
}
