"""Who leaves a tier first: each policy is an order of a tier's slots, and `POLICIES` names them.

The tree tells an order what comes, is used and goes, and asks it who is to leave; that nothing leaves which something hangs on
is the tree's affair. An order does no I/O, reads no image, and is guarded by whoever guards the tree.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from prefixcache.tree import Slot


class Order(Protocol):
    """A tier's slots. Iterating gives all of them, the coldest first, and changes nothing."""

    slot_bytes: int
    """RAM that the policy takes a slot that the tree knows, over both tiers and beside `tree.SLOT_BYTES`."""

    leaf_first: bool
    """Whether a slot may be colder than what hangs on it: a leaf below then leaves in its place."""

    def __iter__(self) -> Iterator[Slot]: ...
    def __reversed__(self) -> Iterator[Slot]: ...
    def __len__(self) -> int: ...
    def __contains__(self, slot: object, /) -> bool: ...

    def add(self, slot: Slot, /) -> None:
        """A slot that was not here: for now the hottest."""

    def touch(self, slot: Slot, /) -> None:
        """It was used. Any number of times by one request."""

    def remove(self, slot: Slot, /) -> None:
        """It left, and was here; not `aside`."""

    def aside(self, slot: Slot, /) -> None:
        """It stands outside until it is taken `back` or `forget`: not iterated, and never the next to leave."""

    def back(self, slot: Slot, used: bool, /) -> None:
        """It was aside, and was `used` meanwhile or not. If not, it is the next to leave."""

    def forget(self, slot: Slot, /) -> None:
        """It left, and may have been here, aside, or neither."""

    def demote(self, slot: Slot, /) -> None:
        """It is the next to leave now."""

    def rebuild(self, cold_first: Iterable[Slot], /) -> None:
        """Only these from now on, in this order; used so often as their `hits` say."""

    def leaving(self) -> Iterator[Slot]:
        """Those who are to leave, the next one first. Asking may give others a second chance, so ask in earnest only. Valid until
        the order changes.
        """

    def colder(self, slot: Slot, wanted: Slot, /) -> Iterator[Slot]:
        """Those that are colder than both, the coldest first: what may be deleted to make room for `slot`, which `wanted`
        hangs on, or is.
        """

    def check_integrity(self) -> None:
        """AssertionError when an invariant of the order does not hold."""


class Lru(OrderedDict["Slot", None]):
    """The least recently used first. A path is touched tail first, so that leaves leave first without asking."""

    slot_bytes = 0
    leaf_first = False

    # Methods of the C class, because a hit touches hundreds of slots.
    touch = OrderedDict.move_to_end
    remove = aside = OrderedDict.__delitem__
    leaving = OrderedDict.__iter__

    def add(self, slot: Slot) -> None:
        self[slot] = None

    def back(self, slot: Slot, used: bool) -> None:
        self[slot] = None
        if not used:  # it was among the coldest when it was set aside, and parents are written first
            self.move_to_end(slot, last=False)

    def forget(self, slot: Slot) -> None:
        self.pop(slot, None)

    def demote(self, slot: Slot) -> None:
        self.move_to_end(slot, last=False)

    def rebuild(self, cold_first: Iterable[Slot]) -> None:
        self.clear()
        self.update(dict.fromkeys(cold_first))

    def colder(self, slot: Slot, wanted: Slot) -> Iterator[Slot]:
        """By ticks; of one prompt the later blocks are the colder."""
        rank = (min(slot.tick, wanted.tick), -slot.node.start)
        for one in self:
            if not one.spare and (one.tick, -one.node.start) >= rank:
                return
            yield one

    def check_integrity(self) -> None:
        """An order of its own is all that it has; the tree knows who must stand in it."""


POLICIES: dict[str, type[Order]] = {"lru": Lru}
