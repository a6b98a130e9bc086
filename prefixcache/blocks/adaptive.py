"""The policy "adaptive": LRU, or a share of the bytes for what was asked for once, by which would have hit more.
Decision 0011 compares it with others.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from heapq import merge
from itertools import takewhile
from typing import NamedTuple

from prefixcache.blocks.node import Slot, rank


class Ghosts:
    """The ghost list: keys evicted lately, nearly all of the last `times` x `held`.

    A direct-mapped table of 64-bit words, each half a key and the number of its eviction; a collision overwrites.
    """

    __slots__ = ("_evictions", "_table", "_times")

    LEAST = 64  # places

    def __init__(self, times: int):
        self._times = times
        self._evictions = 0  # so far: the number of the latest
        self._table = array("Q", bytes(8 * self.LEAST))

    def add(self, key: bytes, held: int) -> None:
        """A key is evicted, and `held` stay."""
        self._fit(self._times * held)
        self._evictions += 1
        word = int.from_bytes(key[:8], "little")
        self._table[word % len(self._table)] = word >> 32 << 32 | self._evictions & 0xFFFFFFFF

    def take(self, key: bytes, held: int) -> bool:
        """Whether a key was evicted not long ago. It is forgotten then."""
        word = int.from_bytes(key[:8], "little")
        place = word % len(self._table)
        found = self._table[place]
        if not found or found >> 32 != word >> 32:
            return False
        self._table[place] = 0
        return (self._evictions - found) & 0xFFFFFFFF < self._times * max(held, self.LEAST // self._times)

    def _fit(self, places: int) -> None:
        size = len(self._table)
        if places > size:
            self._table += self._table  # one of each two is never asked for, and overwritten in time
        elif size > self.LEAST and places * 4 <= size:
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

    With a share, what was asked for once is evicted first while it takes more than that, else the least recently used of
    the others. What comes back soon after its eviction was asked for again, and with a block all before it. The three are
    weighed in shadows: keys only, of a sample of the blocks.

    `_once` has what was asked for once, `_again` what was asked for again; what was demoted is evicted before both.
    Invariants: a slot is in one of `_once`, `_again`, `_demoted` and `_aside`; `_once_bytes` and `_again_bytes` are the sums
    over the two queues.
    """

    leaf_first = True
    NEW = -2  # it came, and the request that brought it has not ended
    FETCHED = -1  # as NEW, and a fetch has used it
    SEEN = 0
    TIMES = 4  # measured on two traces: the best of 3 to 8

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
            yield from merge(self._once, self._again, key=rank)
            return
        once, again = iter(self._once), iter(self._again)
        once_bytes, again_bytes = self._once_bytes, self._again_bytes
        for _ in range(len(self._once) + len(self._again)):
            if once_bytes > self.share * (once_bytes + again_bytes) or not again_bytes:
                slot = next(once)
                once_bytes -= slot.nbytes
            else:
                slot = next(again)
                again_bytes -= slot.nbytes
            yield slot

    candidates = __iter__

    def unblock(self, slot: Slot) -> None:
        """Nothing is: a leaf is evicted in the place of a block that can't be."""

    def waiting(self) -> Iterator[Slot]:
        return iter(())

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

    def touch(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
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

    def rebuild(self, least_recent_first: Iterable[Slot]) -> None:
        for queue in (self._once, self._again, self._demoted, self._aside):
            queue.clear()
        self._once_bytes = self._again_bytes = 0
        for slot in least_recent_first:
            self._put(slot, _Place(slot.hits > 0, self.SEEN))

    def less_recent(self, slot: Slot, spilled: Slot) -> Iterator[Slot]:
        return takewhile(lambda other: other is not slot and other is not spilled, self)

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
