"""What callers keep for a time with `PrefixCache.lease`: the images of a prompt are the last to be evicted from the last tier
that has them (`blocks.leased_last`), until the lease ends. A lease ends with its time, with the first image that it
stands for, or as the oldest where a tenant has no more room for leases. Decision 0048 says why.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from prefixcache.blocks.lookup import required_images
from prefixcache.blocks.node import Slot, dependencies, rank
from prefixcache.image_format import KINDS, ROWS
from prefixcache.ssd import Ssd
from prefixcache.tiers.prompt import Prompt
from prefixcache.tiers.storage import Storage, root_of

LONGEST = 86_400.0  # seconds
ALL_SHARE = 0.5  # of the budget: for the leases of all tenants together
MOST = 1024  # leases of all tenants together
NOTED = 16_384  # characters of the note that a cache leaves for the next one


class Leased(NamedTuple):
    """A prompt that is leased: its model and namespace, its tokens, the bytes of its images, the seconds that are left, and
    the session that asked for it.
    """

    model: str
    namespace: str
    tokens: int
    nbytes: int
    seconds: float
    session: str


class LeaseTotals(NamedTuple):
    """How many leases there are, and the bytes of the images that they keep."""

    leases: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class Lease:
    """`slots` are what a hit of so many `tokens` reads, tail first; `ends` are the slots that no other of them depends on.
    `until` is a time of the clock.
    """

    root: bytes
    tokens: int
    until: float
    session: str
    slots: list[Slot]
    ends: list[Slot]


class Leases:
    """The leases, the oldest first. The storage's lock guards them, and each call takes it.

    Invariants, which `check_integrity` tests: a slot's `leases` are the leases here that have the slot; `_nbytes` are
    the bytes of all slots in a namespace's leases.
    """

    clock: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(self, storage: Storage):
        self._storage = storage
        self._leases: dict[Lease, None] = {}
        self._nbytes: Counter[bytes] = Counter()  # by root key
        self._leave_note: Callable[[str], None] | None = None

    def add(self, prompt: Prompt, seconds: float) -> int:
        """Lease what any tier has of a prompt, and have it written to the tier below RAM. Return how many tokens that is, 0
        where it is nothing, or more than one tenant's leases may take.
        """
        storage = self._storage
        with storage.lock:
            self._end_over()
            deepest = prompt.deepest(storage.graph.last)
            if deepest is None or deepest.depth == 0:
                return 0
            slots = required_images(deepest.walk, deepest.depth, storage.graph.last)
            if not self._may_take(slots):
                return 0
            root, until = deepest.namespace.row.root, self.clock() + min(seconds, LONGEST)
            lease = Lease(root, deepest.depth, until, prompt.terms.session, slots, _ends(slots))
            covered = [other for other in self._leases if _covers(lease, other)]
            self._begin(lease)
            self._end(covered)
            self._keep_within_share(lease.root)
            storage.spilling.write_through(reversed(slots))
            self._note_change()
            return lease.tokens

    def listed(self) -> list[Leased]:
        with self._storage.lock:
            self._end_over()
            now = self.clock()
            return [
                Leased(
                    self._storage.namespaces[lease.root].row.model,
                    lease.root.hex(),
                    lease.tokens,
                    sum(slot.nbytes for slot in lease.slots),
                    lease.until - now,
                    lease.session,
                )
                for lease in self._leases
                if lease.root in self._storage.namespaces
            ]

    def totals(self) -> LeaseTotals:
        with self._storage.lock:
            self._end_over()
            return LeaseTotals(len(self._leases), self._nbytes.total())

    def end_session(self, roots: Collection[bytes], session: str) -> None:
        """End the leases that a session of these namespaces asked for."""
        with self._storage.lock:
            if ended := [lease for lease in self._leases if lease.root in roots and lease.session == session]:
                self._end(ended)
                self._note_change()

    def release(self) -> None:
        """Forget all, with the graph that they are of."""
        with self._storage.lock:
            self._leases.clear()
            self._nbytes.clear()

    # -- called under the lock ----------------------------------------------------------------------------------------

    def _begin(self, lease: Lease) -> None:
        self._leases[lease] = None
        self._nbytes[lease.root] += self._storage.graph.lease(lease.slots)

    def _end(self, leases: Iterable[Lease]) -> None:
        storage = self._storage
        for lease in leases:
            del self._leases[lease]
            self._nbytes[lease.root] -= storage.graph.end_lease(lease.slots)
            for slot in lease.slots:  # what was superseded meanwhile is deleted now
                if slot.kind != ROWS or not slot.node.is_whole:
                    storage.drop_superseded(slot)
        self._nbytes = +self._nbytes

    def _end_over(self) -> None:
        now, is_attached = self.clock(), self._storage.graph.is_attached
        self._end([lease for lease in self._leases if lease.until <= now or not is_attached(lease.slots[0])])

    def _may_take(self, slots: Iterable[Slot]) -> bool:
        """Tell whether a tenant's share has room for these where nothing else is leased; else all would end for them."""
        return sum(slot.nbytes for slot in slots) <= _budget(self._storage) * self._storage.settings.lease_share

    def _keep_within_share(self, root: bytes) -> None:
        """End the oldest leases of a tenant that has more than its share, and of all tenants where all have too much."""
        budget, share = _budget(self._storage), self._storage.settings.lease_share
        while self._nbytes[root] > budget * share:
            self._end([next(lease for lease in self._leases if lease.root == root)])
        while len(self._leases) > MOST or self._nbytes.total() > budget * max(ALL_SHARE, share):
            self._end([next(iter(self._leases))])

    def _note_change(self) -> None:
        if self._leave_note is not None:
            self._leave_note(self.note())

    def check_integrity(self) -> None:
        """Raise AssertionError when an invariant does not hold."""
        counted = Counter(slot for lease in self._leases for slot in lease.slots)
        for slot in self._storage.graph.slots.values():
            assert slot.leases == counted[slot], "a slot counts other leases than there are"
        nbytes: Counter[bytes] = Counter()
        for root, slot in {(lease.root, slot) for lease in self._leases for slot in lease.slots}:
            nbytes[root] += slot.nbytes
        assert +nbytes == self._nbytes, (nbytes, self._nbytes)
        assert len(self._leases) <= MOST

    # -- over a restart and a crash -----------------------------------------------------------------------------------

    def outlast(self, ssd: Ssd) -> None:
        """Begin the leases that an SSD's note tells of, and from now on leave it a note of each change. A lease that ends
        with its time or its last image changes no note: `restore` passes over it.
        """
        with self._storage.lock:
            is_new = bool(self._leases)  # given while the disk was awaited
            self.restore(ssd.note)
            self._leave_note = ssd.leave_note
            if is_new:
                self._note_change()

    def note(self) -> str:
        """Return the newest leases as a text for `restore`: when they end, and the images that nothing else of them depends
        on.
        """
        with self._storage.lock:
            self._end_over()
            ahead, noted, length = time.time() - self.clock(), [], 0
            for lease in reversed(self._leases):
                entry = {"until": lease.until + ahead, "tokens": lease.tokens, "session": lease.session}
                entry["ends"] = [[slot.kind, slot.key.hex()] for slot in lease.ends]
                length += len(json.dumps(entry)) + 2
                if length > NOTED - 2:
                    break
                noted.append(entry)
            return json.dumps(noted[::-1])

    def restore(self, note: str) -> None:
        """Begin the leases of a note whose images are there. What `note` didn't write is passed over."""
        with self._storage.lock:
            ahead = time.time() - self.clock()
            for entry in _entries_of(note):
                ends = [self._storage.graph.slots.get((kind, bytes.fromhex(key))) for kind, key in entry["ends"]]
                kept = {slot: None for end in ends if end is not None for slot in (end, *dependencies(end))}
                if (
                    not kept
                    or None in ends
                    or len({root_of(slot).key for slot in kept}) > 1
                    or not self._may_take(kept)
                ):
                    continue
                slots = sorted(kept, key=lambda slot: rank(slot)[1:])
                until = min(entry["until"] - ahead, self.clock() + LONGEST)
                lease = Lease(root_of(slots[0]).key, entry["tokens"], until, entry["session"], slots, _ends(slots))
                self._begin(lease)
                self._keep_within_share(lease.root)
            self._end_over()


def _budget(storage: Storage) -> int:
    """Return the bytes of the last tier: leases keep images there."""
    return storage.lower[-1].tier.limit if storage.lower else storage.budget.limit


def _covers(lease: Lease, other: Lease) -> bool:
    """Tell whether a lease keeps all that another does, as long: that of the next turn does, where a hit may end anywhere."""
    if other.root != lease.root or other.until > lease.until:
        return False
    slots = set(lease.slots)
    beyond = [slot for slot in other.slots if slot not in slots]
    return not beyond or (len(beyond) == 1 and any(_begins_with(slot, beyond[0]) for slot in lease.slots))


def _begins_with(slot: Slot, other: Slot) -> bool:
    """Tell whether the rows of a block are those of another and more."""
    if slot.kind != ROWS or other.kind != ROWS or slot.node.parent is not other.node.parent:
        return False
    tree = slot.node.tree
    is_sliceable = tree is not None and not (tree.windows or tree.snapshots)
    return is_sliceable and slot.node.tokens.startswith(other.node.tokens)


def _ends(slots: list[Slot]) -> list[Slot]:
    """Return those of a lease's slots, tail first, that no other of them depends on."""
    ends, needed = [], set[Slot]()
    for slot in slots:
        if slot not in needed:
            ends.append(slot)
            needed.update(dependencies(slot))
    return [slot for slot in ends if slot not in needed]


def _entries_of(note: str) -> list[dict[str, Any]]:
    """Return the leases of a note that are as `note` writes them."""
    try:
        entries = json.loads(note)
    except (ValueError, RecursionError):
        return []
    return [lease for lease in entries if _is_lease(lease)][:MOST] if isinstance(entries, list) else []


def _is_lease(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(ends := entry.get("ends"), list) or not ends:
        return False
    until, tokens, session = (entry.get(name) for name in ("until", "tokens", "session"))
    return (
        isinstance(until, float)
        and math.isfinite(until)
        and type(tokens) is int
        and isinstance(session, str)
        and all(isinstance(end, list) and len(end) == 2 and end[0] in KINDS and _is_key(end[1]) for end in ends)
    )


def _is_key(text: Any) -> bool:
    try:
        return bool(bytes.fromhex(text))
    except (TypeError, ValueError):
        return False
