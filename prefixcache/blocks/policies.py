"""Who leaves a tier first: each policy is an order of a tier's slots, and `POLICIES` names them. And who is let onto the SSD.

The tree tells an order what comes, is used and goes, and asks it who is to leave; that nothing leaves which something
hangs on is the tree's affair. An order does no I/O, reads no image, and is guarded by whoever guards the tree.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from heapq import merge
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from prefixcache.blocks.tree import Slot


class Order(Protocol):
    """A tier's slots. Iterating gives all of them but those `aside`, the coldest first, and changes nothing."""

    leaf_first: bool
    """Whether a slot may be colder than what hangs on it: a leaf below then leaves in its place."""

    def __iter__(self) -> Iterator[Slot]: ...
    def __reversed__(self) -> Iterator[Slot]: ...
    def __len__(self) -> int: ...
    def __contains__(self, slot: object, /) -> bool: ...

    def add(self, slot: Slot, /) -> None:
        """A slot that was not here: for now among the hottest."""

    def touch(self, slot: Slot, /) -> None:
        """It is the newest now. Any number of times by one request; `used` counts."""

    def used(self, slots: list[Slot], ended: bool, /) -> None:
        """A fetch used these, the tail first, or (`ended`) a request ended that used or brought them. Not all are here."""

    def remove(self, slot: Slot, /) -> None:
        """It was here, and left."""

    def aside(self, slot: Slot, /) -> None:
        """It stands outside, and is not the next to leave, until it is taken `back` or `forget`."""

    def back(self, slot: Slot, used: bool, /) -> None:
        """It was aside, and was `used` meanwhile or not: if not, it leaves before its like."""

    def forget(self, slot: Slot, /) -> None:
        """It left, and may have been here, aside, or neither."""

    def demote(self, slot: Slot, /) -> None:
        """It is the next to leave, until it is touched."""

    def rebuild(self, cold_first: Iterable[Slot], /) -> None:
        """Only these from now on, the least recently used first; used so often as their `hits` say."""

    def colder(self, slot: Slot, wanted: Slot, /) -> Iterator[Slot]:
        """Those that are colder than both, the coldest first: what may be deleted to make room for `slot`, which `wanted`
        hangs on, or is.
        """

    def check_integrity(self) -> None:
        """AssertionError when an invariant of the order does not hold."""


class Policy(NamedTuple):
    """`make` gives a tier's order, whose own memory takes `fixed` bytes of RAM at most.

    A slot takes `slot_bytes` of RAM over both tiers, beside `tree.SLOT_BYTES`.
    """

    make: Callable[[int], Order]
    slot_bytes: int = 0
    most_fixed: int = 0

    def fixed(self, limit: int) -> int:
        """Bytes for a tier's order where the budget is `limit`: a 32nd of it at most."""
        return min(self.most_fixed, limit // 32)


class Lru:
    """The least recently used first. A path is touched tail first, so that leaves leave first without asking.

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
        if not used:  # it was among the coldest when it was set aside, and parents are written first
            self._slots.move_to_end(slot, last=False)

    def forget(self, slot: Slot) -> None:
        self._slots.pop(slot, None)

    def demote(self, slot: Slot) -> None:
        self._slots.move_to_end(slot, last=False)

    def rebuild(self, cold_first: Iterable[Slot]) -> None:
        self._slots.clear()
        self._slots.update(dict.fromkeys(cold_first))

    def colder(self, slot: Slot, wanted: Slot) -> Iterator[Slot]:
        """By ticks; of one prompt the later blocks are the colder."""
        rank = (min(slot.tick, wanted.tick), -slot.node.start)
        for one in self._slots:
            if not one.spare and (one.tick, -one.node.start) >= rank:
                return
            yield one

    def check_integrity(self) -> None:
        """It has nothing beside the slots, and the tree knows which must stand here."""


class Ghosts:
    """Keys that left not long ago: of the last `times` x `held` that left, nearly all. Eight bytes each.

    A table with one place a key, half a key and the number of its leaving in each; whoever comes later to a place has it.
    """

    __slots__ = ("_left", "_table", "_times")

    LEAST = 64  # places

    def __init__(self, times: int):
        self._times = times
        self._left = 0  # keys so far
        self._table = array("Q", bytes(8 * self.LEAST))

    def add(self, key: bytes, held: int) -> None:
        """A key left, and `held` stay."""
        self._fit(self._times * held)
        self._left += 1
        word = int.from_bytes(key[:8], "little")
        self._table[word % len(self._table)] = word >> 32 << 32 | self._left & 0xFFFFFFFF

    def take(self, key: bytes, held: int) -> bool:
        """Whether a key that comes left not long ago. It is forgotten then."""
        word = int.from_bytes(key[:8], "little")
        place = word % len(self._table)
        found = self._table[place]
        if not found or found >> 32 != word >> 32:
            return False
        self._table[place] = 0
        return (self._left - found) & 0xFFFFFFFF < self._times * max(held, self.LEAST // self._times)

    def _fit(self, wanted: int) -> None:
        size = len(self._table)
        if wanted > size:
            self._table += self._table  # one of each two is never asked for, and overwritten in time
        elif size > self.LEAST and wanted * 4 <= size:
            low, high = self._table[: size // 2], self._table[size // 2 :]
            self._table = array("Q", (h or l for l, h in zip(low, high, strict=True)))  # noqa: E741

    @property
    def nbytes(self) -> int:
        return self._table.itemsize * len(self._table)


class _Place(NamedTuple):
    """Where a slot stood that is aside or demoted."""

    again: bool
    state: int


class Adaptive:
    """LRU, or with a share of the bytes for what was asked for once: whichever would have hit more of late.

    With a share, who was asked for once leaves first while such take more than it, else the least recently used of the
    others. Who comes back soon after leaving was asked for again, and with a block all before it. The three are weighed in
    shadows: keys only, of a sample of the blocks.

    `_once` has what was asked for once, `_again` what was asked for again; what was demoted leaves before both.
    Invariants: a slot is in one of `_once`, `_again`, `_demoted` and `_aside`; `_once_bytes` and `_again_bytes` are the sums
    over the two queues.
    """

    leaf_first = True
    NEW = -2  # it came, and the request that brought it has not ended
    FETCHED = -1  # as NEW, and a fetch has used it
    SEEN = 0
    TIMES = 4  # of three to eight times what is held, the best on the traces that there are

    def __init__(self, fixed: int = 1 << 20) -> None:
        self._once: OrderedDict[Slot, int] = OrderedDict()
        self._again: OrderedDict[Slot, int] = OrderedDict()
        self._demoted: OrderedDict[Slot, _Place] = OrderedDict()
        self._aside: dict[Slot, _Place] = {}
        self._once_bytes = self._again_bytes = 0
        self._ghosts = Ghosts(self.TIMES)
        self._duel = Duel(fixed)

    @property
    def share(self) -> float | None:
        """Of the bytes, for what was asked for once; None for LRU."""
        return self._duel.best

    def __iter__(self) -> Iterator[Slot]:
        yield from self._demoted
        if self.share is None:
            yield from merge(self._once, self._again, key=_recency)
            return
        once, again = iter(self._once), iter(self._again)
        lately, others = self._once_bytes, self._again_bytes
        for _ in range(len(self._once) + len(self._again)):
            if lately > self.share * (lately + others) or not others:
                slot = next(once)
                lately -= slot.nbytes
            else:
                slot = next(again)
                others -= slot.nbytes
            yield slot

    def __reversed__(self) -> Iterator[Slot]:
        return reversed(list(self))

    def __len__(self) -> int:
        return len(self._once) + len(self._again) + len(self._demoted)

    def __contains__(self, slot: object) -> bool:
        return slot in self._once or slot in self._again or slot in self._demoted

    @property
    def _held(self) -> int:
        return len(self) + len(self._aside)

    def add(self, slot: Slot) -> None:
        self._put(slot, _Place(self._ghosts.take(slot.key, self._held), self.NEW))

    def touch(self, slot: Slot) -> None:
        if slot in self._again:
            self._again.move_to_end(slot)
        elif slot in self._once:
            self._once.move_to_end(slot)
        elif slot in self._demoted:
            self._put(slot, self._demoted.pop(slot))

    def used(self, slots: list[Slot], ended: bool) -> None:
        again = False
        for slot in slots:
            state = self._once.get(slot)
            if state is None:
                if slot in self._again:
                    again = True
                    if ended:  # after those that follow it and were asked for again just now
                        self._again.move_to_end(slot)
                elif (place := self._aside.get(slot)) is not None:
                    again = again or place.again or self._asked_again(place.state, ended)
                    self._aside[slot] = _Place(again, self._after(ended))
            elif again or self._asked_again(state, ended):
                again = True
                self._pull(slot)
                self._put(slot, _Place(True, self.SEEN))
            else:
                self._once[slot] = self._after(ended)
        if ended:
            self._duel.request([slot.key for slot in slots], self._held)

    def _asked_again(self, state: int, ended: bool) -> bool:
        """A fetch and the end of the same request are one use."""
        return state == self.SEEN or (state == self.FETCHED and not ended)

    def _after(self, ended: bool) -> int:
        return self.SEEN if ended else self.FETCHED

    def remove(self, slot: Slot) -> None:
        self._pull(slot)
        self._ghosts.add(slot.key, self._held)

    def aside(self, slot: Slot) -> None:
        self._aside[slot] = self._pull(slot)

    def back(self, slot: Slot, used: bool) -> None:
        self._put(slot, self._aside.pop(slot), first=not used)

    def forget(self, slot: Slot) -> None:
        if self._aside.pop(slot, None) is not None:
            self._ghosts.add(slot.key, self._held)
        elif slot in self:
            self.remove(slot)

    def demote(self, slot: Slot) -> None:
        self._demoted[slot] = self._pull(slot)
        self._demoted.move_to_end(slot, last=False)

    def rebuild(self, cold_first: Iterable[Slot]) -> None:
        for queue in (self._once, self._again, self._demoted, self._aside):
            queue.clear()
        self._once_bytes = self._again_bytes = 0
        for slot in cold_first:
            self._put(slot, _Place(slot.hits > 0, self.SEEN))

    def colder(self, slot: Slot, wanted: Slot) -> Iterator[Slot]:
        return takewhile(lambda other: other is not slot and other is not wanted, self)

    def _put(self, slot: Slot, place: _Place, first: bool = False) -> None:
        queue = self._again if place.again else self._once
        queue[slot] = place.state
        if first:
            queue.move_to_end(slot, last=False)
        if place.again:
            self._again_bytes += slot.nbytes
        else:
            self._once_bytes += slot.nbytes

    def _pull(self, slot: Slot) -> _Place:
        if slot in self._once:
            self._once_bytes -= slot.nbytes
            return _Place(False, self._once.pop(slot))
        if slot in self._again:
            self._again_bytes -= slot.nbytes
            return _Place(True, self._again.pop(slot))
        return self._demoted.pop(slot)

    def check_integrity(self) -> None:
        parts = (self._once, self._again, self._demoted, self._aside)
        assert len(set().union(*parts)) == sum(len(part) for part in parts), "a slot in two queues"
        assert self._once_bytes == sum(slot.nbytes for slot in self._once)
        assert self._again_bytes == sum(slot.nbytes for slot in self._again)
        order = list(self)
        assert len(order) == len(set(order)) == len(self)
        assert set(order) == set().union(self._once, self._again, self._demoted)


_KINDS = {"snapshot": 0, "window": 1, "rows": 2}


def _recency(slot: Slot) -> tuple[int, int, int]:
    return slot.tick, -slot.end_of_block, _KINDS[slot.kind]


class Duel:
    """What LRU and some shares would have hit, a sample of the keys taken: one of 1, 2, 4 ... of them, so that each shadow
    has some hundreds. The latest requests count most.
    """

    SHARES = (0.05, 0.5)
    MOST = 512  # keys in a shadow
    DECAY = 0.999  # a request
    ENTRY = 640  # bytes of RAM a sampled key, over all shadows; tests/blocks/test_policies.py measures it

    def __init__(self, fixed: int):
        self._most = min(self.MOST, fixed // self.ENTRY)
        self._shadows = [_Shadow(share) for share in (None, *self.SHARES)]
        self._hits = [0.0] * len(self._shadows)
        self._bits = 0  # one of 2**bits keys is taken
        self.best: float | None = None

    def request(self, keys: list[bytes], held: int) -> None:
        """A request that asked for these, the tail first, and `held` slots in the tier."""
        while held >> self._bits > self._most:
            self._bits += 1
            for shadow in self._shadows:
                shadow.keep(self._taken)
        while self._bits and held >> self._bits < self._most // 4:
            self._bits -= 1
        room = held >> self._bits
        sample = [key for key in keys if self._taken(key)]
        for i, shadow in enumerate(self._shadows):
            self._hits[i] = self._hits[i] * self.DECAY + shadow.request(sample, room)
        self.best = self._shadows[self._hits.index(max(self._hits))].share

    def _taken(self, key: bytes) -> bool:
        return not int.from_bytes(key[8:12], "little") & ((1 << self._bits) - 1)


class _Shadow:
    """What a tier would hold with a share, as `Adaptive` has it, or (None) with LRU: keys only, all of a size."""

    __slots__ = ("_again", "_ghosts", "_once", "share")

    def __init__(self, share: float | None):
        self.share = share
        self._once: OrderedDict[bytes, None] = OrderedDict()
        self._again: OrderedDict[bytes, None] = OrderedDict()  # with LRU, none
        self._ghosts = Ghosts(Adaptive.TIMES)

    def request(self, keys: list[bytes], room: int) -> int:
        """How many of these, the tail first, were there. They are the newest then, and `room` stay."""
        once, again, hits, asked_again = self._once, self._again, 0, False
        for key in keys:
            if key in again:
                again.move_to_end(key)
                hits, asked_again = hits + 1, True
            elif key in once:
                hits, asked_again = hits + 1, True
                self._hit_once(key)
            else:
                asked_again = (self.share is not None and self._ghosts.take(key, room)) or asked_again
                (again if asked_again and self.share is not None else once)[key] = None
        self._shrink(room)
        return hits

    def _hit_once(self, key: bytes) -> None:
        if self.share is None:
            self._once.move_to_end(key)
        else:
            del self._once[key]
            self._again[key] = None

    def _shrink(self, room: int) -> None:
        while len(self._once) + len(self._again) > room:
            first = not self._again or (bool(self._once) and len(self._once) > (self.share or 0) * room)
            key, _ = (self._once if first else self._again).popitem(last=False)
            if self.share is not None:
                self._ghosts.add(key, room)

    def keep(self, taken: Callable[[bytes], bool]) -> None:
        for queue in (self._once, self._again):
            for key in [key for key in queue if not taken(key)]:
                del queue[key]


class Doorkeeper:
    """Remembers keys that came once, in a fixed number of bytes: two generations of a Bloom filter (Bloom, CACM 1970) with
    four bits a key. When the younger is full, the older is forgotten. A key that never came is taken for one that did in 2 %
    of cases at most.
    """

    BITS = 12  # of a generation, a key

    def __init__(self, nbytes: int):
        self._young, self._old = bytearray(max(nbytes // 2, 8)), bytearray(max(nbytes // 2, 8))
        self._room = self._full = len(self._young) * 8 // self.BITS  # keys

    def __contains__(self, key: bytes) -> bool:
        return any(all(bits[at >> 3] >> (at & 7) & 1 for at in self._places(key)) for bits in (self._young, self._old))

    def add(self, key: bytes) -> None:
        if not self._room:
            self._young, self._old = bytearray(len(self._young)), self._young
            self._room = self._full
        self._room -= 1
        for at in self._places(key):
            self._young[at >> 3] |= 1 << (at & 7)

    def _places(self, key: bytes) -> list[int]:
        bits = len(self._young) * 8
        return [int.from_bytes(key[i : i + 4], "little") % bits for i in range(0, 16, 4)]


POLICIES: dict[str, Policy] = {
    "lru": Policy(Lru),
    "adaptive": Policy(Adaptive, slot_bytes=256, most_fixed=Duel.MOST * Duel.ENTRY),
}
