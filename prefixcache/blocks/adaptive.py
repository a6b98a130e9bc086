"""The policy "adaptive": LRU, or a share of the bytes for what was asked for once, by which would have hit more.
Decision 0011 compares it with others.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from heapq import merge
from itertools import chain, takewhile

from prefixcache.blocks.lru import Lru
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
        """Note that a key is evicted, and `held` stay."""
        self._fit(self._times * held)
        self._evictions += 1
        word = int.from_bytes(key[:8], "little")
        self._table[word % len(self._table)] = word >> 32 << 32 | self._evictions & 0xFFFFFFFF

    def take(self, key: bytes, held: int) -> bool:
        """Tell whether a key was evicted not long ago. It is forgotten then."""
        word = int.from_bytes(key[:8], "little")
        place = word % len(self._table)
        entry = self._table[place]
        if not entry or entry >> 32 != word >> 32:
            return False
        self._table[place] = 0
        return (self._evictions - entry) & 0xFFFFFFFF < self._times * max(held, self.LEAST // self._times)

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


class Adaptive:
    """LRU, or with a share of the bytes for what was asked for once: whichever would have hit more of late.

    With a share, what was asked for once is evicted first while it takes more than that, else the least recently used of
    the others. What comes back soon after its eviction was asked for again, and with a block all before it. The three are
    weighed in shadows: keys only, of a sample of the blocks.

    `_once` has what was asked for once, `_again` what was asked for again; what was demoted is evicted before both.
    Invariants: a slot is in one of `_once`, `_again` and `_demoted`; `_asked_again` has those that are demoted; `_once_bytes`
    and `_again_bytes` are the sums over the two queues.
    """

    NEW = -2  # it came, and the request that brought it has not ended
    FETCHED = -1  # as NEW, and a fetch has used it
    SEEN = 0
    TIMES = 4  # measured on two traces: the best of 3 to 8

    def __init__(self, fixed: int = 1 << 20) -> None:
        self._once, self._again, self._demoted = Lru(), Lru(), Lru()
        self._asked_again: dict[Slot, bool] = {}  # whether they go back to `_again`
        self._states: dict[Slot, int] = {}  # of what was asked for once; those not here are SEEN
        self._once_bytes = self._again_bytes = 0
        self._ghosts = Ghosts(self.TIMES)
        self._duel = Duel(fixed)

    @property
    def share(self) -> float | None:
        """Return the share of the bytes for what was asked for once; None for LRU."""
        return self._duel.best

    @property
    def _queues(self) -> tuple[Lru, Lru, Lru]:
        return self._demoted, self._once, self._again

    def __iter__(self) -> Iterator[Slot]:
        yield from self._demoted
        if self.share is None:
            yield from merge(self._once, self._again, key=rank)
            return
        once, again = iter(self._once), iter(self._again)
        once_bytes, again_bytes = self._once_bytes, self._again_bytes
        for _ in range(len(self._once) + len(self._again)):
            if _takes_more(once_bytes, again_bytes, self.share):
                slot = next(once)
                once_bytes -= slot.nbytes
            else:
                slot = next(again)
                again_bytes -= slot.nbytes
            yield slot

    def candidates(self) -> Iterator[Slot]:
        """Yield what was demoted, then the queue that the bytes held now put first, then the other."""
        yield from self._demoted.candidates()
        if self.share is None:
            yield from merge(self._once.candidates(), self._again.candidates(), key=rank)
        elif _takes_more(self._once_bytes, self._again_bytes, self.share):
            yield from chain(self._once.candidates(), self._again.candidates())
        else:
            yield from chain(self._again.candidates(), self._once.candidates())

    def unblock(self, slot: Slot) -> None:
        for queue in self._queues:
            queue.unblock(slot)

    def waiting(self) -> Iterator[Slot]:
        return chain.from_iterable(queue.waiting() for queue in self._queues)

    def __reversed__(self) -> Iterator[Slot]:
        return reversed(list(self))

    def __len__(self) -> int:
        return sum(map(len, self._queues))

    def __contains__(self, slot: object) -> bool:
        return any(slot in queue for queue in self._queues)

    @property
    def _held(self) -> int:
        return len(self._once) + len(self._again) + len(self._asked_again)

    def add(self, slot: Slot) -> None:
        again = self._ghosts.take(slot.key, self._held)
        self._put(slot, again)
        if not again:
            self._states[slot] = self.NEW

    def touch(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            if slot in self._again:
                self._again.touch((slot,))
            elif slot in self._once:
                self._once.touch((slot,))
            elif slot in self._demoted:
                self._put(slot, self._pull(slot))

    def used(self, slots: list[Slot], ended: bool) -> None:
        again = False
        for slot in slots:
            if slot in self._again:
                again = True
                if ended:  # after those that follow it and were asked for again just now
                    self._again.touch((slot,))
            elif slot in self._once:
                again = again or self._is_second_use(slot, ended)
                if again:
                    self._pull(slot)
                    self._put(slot, True)
                self._note_use(slot, again or ended)
        if ended:
            self._duel.request([slot.key for slot in slots], self._held)

    def _is_second_use(self, slot: Slot, ended: bool) -> bool:
        """Tell whether this is one more use than the one before: a fetch and the end of the same request are one."""
        state = self._states.get(slot, self.SEEN)
        return state == self.SEEN or (state == self.FETCHED and not ended)

    def _note_use(self, slot: Slot, seen: bool) -> None:
        if seen:
            self._states.pop(slot, None)
        else:
            self._states[slot] = self.FETCHED

    def remove(self, slot: Slot) -> None:
        self._pull(slot)
        self._states.pop(slot, None)
        self._ghosts.add(slot.key, self._held)

    def demote(self, slot: Slot) -> None:
        self._asked_again[slot] = self._pull(slot)
        self._demoted.add(slot)
        self._demoted.demote(slot)

    def rebuild(self, least_recent_first: Iterable[Slot]) -> None:
        for queue in self._queues:
            queue.rebuild(())
        self._asked_again.clear()
        self._states.clear()
        self._once_bytes = self._again_bytes = 0
        for slot in least_recent_first:
            self._put(slot, slot.hits > 0)

    def less_recent(self, slot: Slot, spilled: Slot) -> Iterator[Slot]:
        return takewhile(lambda other: other is not slot and other is not spilled, self)

    def _put(self, slot: Slot, again: bool) -> None:
        if again:
            self._again.add(slot)
            self._again_bytes += slot.nbytes
        else:
            self._once.add(slot)
            self._once_bytes += slot.nbytes

    def _pull(self, slot: Slot) -> bool:
        """Take a slot out of its queue. Returns whether it was asked for again."""
        if slot in self._once:
            self._once.remove(slot)
            self._once_bytes -= slot.nbytes
            return False
        if slot in self._again:
            self._again.remove(slot)
            self._again_bytes -= slot.nbytes
            return True
        self._demoted.remove(slot)
        return self._asked_again.pop(slot)

    def check_integrity(self) -> None:
        for queue in self._queues:
            queue.check_integrity()
        demoted, once, again = map(set, self._queues)
        assert len(demoted | once | again) == len(self), "a slot in two queues"
        assert not (once | again) & self._asked_again.keys(), "a slot both in a queue and demoted"
        assert demoted == self._asked_again.keys()
        assert self._states.keys() <= once | self._asked_again.keys()
        assert self._once_bytes == sum(slot.nbytes for slot in once)
        assert self._again_bytes == sum(slot.nbytes for slot in again)
        order = list(self)
        assert len(order) == len(self)
        assert set(order) == demoted | once | again


def _takes_more(once_bytes: int, again_bytes: int, share: float) -> bool:
    """Tell whether what was asked for once takes more than its share, or is all there is."""
    return once_bytes > share * (once_bytes + again_bytes) or not again_bytes


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
        """Count a request that asked for these, the tail first, while the tier has `held` slots."""
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
        """Return how many of these, the tail first, were there. They are the newest then, and `room` stay."""
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
