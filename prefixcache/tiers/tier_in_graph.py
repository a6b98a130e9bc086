"""A tier below RAM and the graph: reads the tier's index into the graph, and keeps both alike while images come and go."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from prefixcache.blocks.budget import Reservation
from prefixcache.blocks.eviction import eviction_victim, leaf_depending_on, victims_for
from prefixcache.blocks.graph import NODE_BYTES, Graph
from prefixcache.blocks.node import RAM, Node, Slot, dependencies
from prefixcache.blocks.window_masks import mask_from, window_key
from prefixcache.byte_sizes import size
from prefixcache.image_format import ROWS, SNAPSHOT, WINDOW, Image
from prefixcache.ssd import Address, Cancelled, Entry
from prefixcache.tiers.admission import Claim
from prefixcache.tiers.state import StorageState
from prefixcache.tiers.tier import PendingRead, Tier

log = logging.getLogger("prefixcache")

HOLDS_MORE = (
    "%s: the limit is %s, and it holds %s: images that are pinned or being written are deleted when they are not"
)
TOO_SMALL = (
    "%s=%s is less than the %s that the directory takes without an image: nothing will be kept there; give it more"
)


class TierInGraph:
    """Keeps a tier and the graph consistent: a slot is in tier `number` exactly when the tier has its image durably.

    Called under the storage's lock, but for `resize` and `shrunk`, which take it.
    """

    tier: Tier

    def __init__(self, state: StorageState, number: int):
        self._state = state
        self.number = number
        # Images that are there, not in the graph for want of RAM, or beside a slot that was stored again; oldest first.
        self.unindexed: dict[Address, Entry] = {}

    # -- opening ------------------------------------------------------------------------------------------------------

    def load(self, entries: list[Entry], reservation: Reservation) -> None:
        """Read entries of the tier's index into the graph: as many of the newest as the reservation holds. Images that are
        in RAM already are newer than all of them.
        """
        graph, newest = self._state.graph, self.tier.max_tick()
        oldest = _oldest_within(entries, reservation.left, graph.slot_bytes)
        for slot in graph.slots.values():
            slot.tick += newest
        graph.recency.clock += newest
        for entry in entries:
            if entry.used >= oldest:
                self._add(entry, reservation)
        graph.recency.sort_below_ram(graph.slots.values())
        graph.recency.times.load(((entry.used, entry.used_at) for entry in entries), shift=newest)

    def note_unindexed(self, entries: Iterable[Entry]) -> None:
        """Note which of all the tier's images the graph doesn't have in it, the least recent first."""
        slots = self._state.graph.slots
        left = [e for e in entries if (slot := slots.get(e.address)) is None or not slot.is_in(self.number)]
        left.sort(key=lambda entry: (entry.used, -entry.start))
        self.unindexed = {entry.address: entry._replace(tokens=b"", extra="") for entry in left}

    def finish_load(self, loaded: int) -> None:
        """Delete images beyond the limit after `load` of so many entries, and log how many are not indexed."""
        self._enforce_limit()
        if self.unindexed:
            log.warning(
                "%s: %d of %d images are not indexed: ram is too small, their parents are gone, or their model's caches "
                "are unknown here",
                self.tier.name,
                len(self.unindexed),
                loaded,
            )

    def _add(self, entry: Entry, reservation: Reservation) -> None:
        """Give the image of an entry its place in the graph, where it has one."""
        graph, namespace = self._state.graph, self._state.namespaces[entry.namespace]
        known = graph.slots.get(entry.address)
        if known is not None:  # RAM has it
            if known.image is not None and known.image.checksum == entry.checksum:
                graph.place(known, self.number, disk=entry.disk)
            return
        parent = parent_of(graph, entry)
        if parent is None:
            return
        mask: tuple[int, ...] = ()
        if entry.kind == WINDOW:
            try:
                mask = mask_from(entry.extra)
            except ValueError:
                return
            if len(mask) != len(namespace.plan.windows) or window_key(parent.key, mask) != entry.key:
                return
        place_entry(graph, entry, parent, self.number, reservation, mask)

    # -- room ---------------------------------------------------------------------------------------------------------

    def resize(self, nbytes: int) -> None:
        """Set the limit to `nbytes`, and delete the least recent images for it."""
        with self._state.lock:
            self.tier.resize(nbytes)
            self._enforce_limit()

    def return_to_limit(self) -> None:
        if self.tier.used > self.tier.limit:
            self._make_room(0)

    def shrunk(self) -> bool:
        """Delete the least recent images, since the limit in force fell or a write found the disk full. Returns whether any
        could be, or none had to. Called on the tier's thread.
        """
        with self._state.lock:
            before = self.tier.used
            fits = self._make_room(0)
            self._state.changed.notify_all()
            return fits or self.tier.used < before

    def _enforce_limit(self) -> None:
        tier, before = self.tier, self.tier.used
        with self._state.lock:
            fits, left = self._make_room(0), self._state.graph.images[self.number]
        if tier.used < before:
            self._warn("%s: the limit is %s, and it held %s: the least recent images were deleted", before)
        if not fits:
            self._warn(HOLDS_MORE if left else TOO_SMALL, tier.used)

    def _warn(self, text: str, nbytes: int) -> None:
        log.warning(text, self.tier.name, size(self.tier.limit), size(nbytes))

    def _make_room(self, nbytes: int, slot: Slot | None = None, spilled: Slot | None = None) -> bool:
        """Delete the least recent images for `nbytes`, at last those that RAM goes on from. For a `slot` to be written, which
        `spilled` depends on or is: only images less recent than both, and no indexed ones unless that makes room enough.
        """
        tier, graph = self.tier, self._state.graph
        while (missing := tier.used + nbytes - tier.limit) > 0:
            if self.unindexed:
                address, entry = next(iter(self.unindexed.items()))
                del self.unindexed[address]
                known = graph.slots.get(address)
                if known is None or not self.has(known):  # else it is being written again
                    tier.delete([entry])
                continue
            if slot is None or spilled is None:
                victim = eviction_victim(graph, self.number)
                victims = [victim] if victim is not None else []
            else:
                victims = victims_for(graph, self.number, missing, slot, spilled)
                if not slot.hits and not slot.leases and self._spares(victims, slot, nbytes):
                    return False
            if not victims:
                leaf = (
                    None if slot is not None or not graph.images[self.number] else leaf_depending_on(graph, self.number)
                )
                if leaf is None:
                    return False
                self._state.drop_from_ram(leaf)
            for victim in victims:
                self.delete(victim)
                self._state.note_evicted(victim)
                self._state.counters.ssd_evicted += 1
        return True

    def _spares(self, victims: list[Slot], slot: Slot, nbytes: int) -> bool:
        """Tell whether one of the victims must not be lost for an image that nobody has hit."""
        hit = next((victim for victim in victims if victim.hits), None)
        if hit is None:
            return False
        path: list[Node] = []
        node: Node | None = slot.node
        while node is not None and node.parent is not None:
            path.append(node)
            node = node.parent
        path.reverse()
        long_prompts = self._state.long_prompts
        claim = Claim(
            long_prompts, self.number, self.tier.limit, path[:-1], lambda: [n.key for n in path if n.is_whole]
        )
        return claim.is_begun and claim.spares(hit, nbytes)

    # -- written and deleted ------------------------------------------------------------------------------------------

    def spill(self, slot: Slot) -> bool:
        """Queue an image, those that it depends on first. False when the queue or the tier has no room for all."""
        chain = self._with_parents(slot)
        pinned = self._state.graph.pin(chain)
        try:
            return all(self.has(required) or self._write(required, slot) for required in chain)
        finally:
            self._state.graph.unpin(pinned)

    def missing(self, slot: Slot) -> list[Slot]:
        """Return the slots to write for the tier to have a slot's image, those that it depends on first."""
        return [required for required in self._with_parents(slot) if not self.has(required)]

    def delete(self, slot: Slot) -> None:
        """Delete a slot's image from the tier, or cancel its write."""
        self.unindexed.pop((slot.kind, slot.key), None)
        self.tier.delete([entry_of(slot)])
        self._state.graph.drop(slot, self.number)

    def delete_unindexed(self, addresses: Iterable[Address] | None = None) -> int:
        """Delete images that are not indexed: all of them, or those at these addresses. Returns their bytes."""
        chosen = list(self.unindexed) if addresses is None else addresses
        entries = [entry for address in chosen if (entry := self.unindexed.pop(address, None)) is not None]
        self.tier.delete(entries)
        return sum(entry.nbytes for entry in entries)

    def unindex(self, slot: Slot) -> None:
        """Take an image out of the graph for want of RAM: it stays in the tier, and is indexed again at the next opening."""
        entry = entry_of(slot)._replace(tokens=b"", extra="")
        self.unindexed.pop(entry.address, None)  # it may stand there from before, as an older one
        self.unindexed[entry.address] = entry
        self._state.graph.drop(slot, self.number)
        self._state.graph.drop(slot, 0)

    def read(self, slot: Slot) -> PendingRead:
        return self.tier.read(entry_of(slot))

    def invalidate(self, slot: Slot) -> None:
        """Note that a slot's file went bad and was quarantined: it is no longer in the tier."""
        self._state.counters.corrupt += 1
        self._state.graph.drop(slot, self.number)

    def end_write(self, entry: Entry, error: Exception | None) -> Slot | None:
        """Note that a write has ended, durable and indexed, or not. Returns the slot, or None when nobody waited for it."""
        state, graph = self._state, self._state.graph
        detached = graph.release(entry.kind, entry.key)
        if detached is not None:
            state.budget.queue(-detached.nbytes)
            return None
        slot = graph.slots.get(entry.address)
        if slot is None or not slot.pending >> self.number & 1:
            return None
        used_since = slot.tick != entry.used
        graph.write_finished(slot, self.number)
        if error is None:
            slot.checksum = entry.checksum
            self.unindexed.pop(entry.address, None)
            graph.place(slot, self.number, disk=entry.disk)
            if used_since:
                graph.recency.unflushed.setdefault(slot, 0)
        elif not isinstance(error, Cancelled):
            state.counters.write_errors += 1
        return slot

    def lose_all_but(self, entries: list[Entry]) -> None:
        """Note that the tier has these images now, and no other. Those that the graph doesn't know stay out of it."""
        graph, kept = self._state.graph, {entry.address for entry in entries}
        for slot in list(graph.slots.values()):
            if slot.is_in(self.number) and (slot.kind, slot.key) not in kept:
                graph.drop(slot, self.number)
        self.note_unindexed(entries)

    def check_integrity(self) -> None:
        """Raise AssertionError when an image is indexed and not. Called under the storage's lock."""
        for address in self.unindexed:
            slot = self._state.graph.slots.get(address)
            assert slot is None or not slot.is_in(self.number), "an image stands in the graph and in `unindexed`"

    def has(self, slot: Slot) -> bool:
        """Tell whether the tier has a slot's image, or is being given it."""
        return (slot.tiers | slot.pending) >> self.number & 1 == 1

    def _with_parents(self, slot: Slot) -> list[Slot]:
        """Return the slot and the rows that it depends on, the first block first, from the last one that is there."""
        chain = [slot]
        for rows in dependencies(slot):
            chain.append(rows)
            if self.has(rows):
                break
        return chain[::-1]

    def _write(self, slot: Slot, spilled: Slot) -> bool:
        """Queue one image, for the sake of `spilled`, which may be another that depends on it."""
        tier = self.tier
        if slot.image is None:
            return False
        if tier.has_room(slot.nbytes) and not self._make_room(tier.footprint(slot.nbytes), slot, spilled):
            return False  # a tier without room in its queue refuses below, and counts that
        entry = entry_of(slot)
        if not tier.write(entry, self._state.namespaces[entry.namespace].row, slot.image):
            return False
        self._state.graph.begin_write(slot, self.number)
        return True


class LowerTiers(list[TierInGraph]):
    """The tiers below RAM, the fastest first. Called under the storage's lock."""

    def __init__(self, state: StorageState):
        super().__init__()
        self._state = state

    @property
    def spill_tier(self) -> TierInGraph | None:
        return self[0] if self else None

    def having(self, slot: Slot) -> Iterator[TierInGraph]:
        return (tier for tier in self if slot.is_in(tier.number))

    def discard(self, slot: Slot) -> int:
        """Delete an image from every tier, RAM too. Returns its bytes, which are free when a write that waits has ended."""
        state = self._state
        for tier in self:
            if tier.has(slot):
                tier.delete(slot)
            else:
                tier.delete_unindexed([(slot.kind, slot.key)])
        if slot.pending:
            state.graph.detach(slot)
        else:
            state.graph.drop(slot, RAM)
            state.changed.notify_all()
        return slot.nbytes


# -- a slot and its entry in a tier's index ----------------------------------------------------------------------------


def parent_of(graph: Graph, entry: Entry) -> Node | None:
    """Return the block that an entry depends on: of rows the one before, of a window its own. None when it is not there."""
    if entry.parent == entry.namespace:
        return graph.tree(entry.namespace).root
    rows = graph.slots.get((ROWS, entry.parent))
    return rows.node if rows is not None else None


def place_entry(
    graph: Graph, entry: Entry, parent: Node, tier: int, reservation: Reservation, mask: tuple[int, ...] = ()
) -> Slot | None:
    """Note that a tier has the image of an entry, and return its slot; `mask` is a window's. None, and nothing done, when it
    has no place: its key or its place is taken, or the reservation is spent.
    """
    try:
        if entry.kind == ROWS:
            slot = graph.load_rows(parent, entry.tokens, entry.key, entry.nbytes, tier, reservation)
        else:
            suffix = entry.tokens if entry.kind == SNAPSHOT else b""
            slot = Slot(entry.kind, parent, entry.key, entry.nbytes, suffix, mask)
            if not graph.attach(slot, reservation):
                return None
            graph.place(slot, tier, disk=entry.disk)
    except ValueError:  # the reservation is spent
        return None
    if slot is not None:
        slot.disk = entry.disk if tier == RAM + 1 else 0
        slot.checksum, slot.tick, slot.hits, slot.created = entry.checksum, entry.used, entry.hits, entry.created
    return slot


def entry_of(slot: Slot) -> Entry:
    """Return a slot's entry for an index."""
    node, parent = slot.node, slot.node.parent
    assert node.tree is not None
    tokens, start, above = slot.suffix, node.end, node.key
    if slot.kind == ROWS:
        assert parent is not None
        tokens, start, above = node.tokens, node.start, parent.key
    elif slot.kind == WINDOW:
        start = node.start
    image: Image | None = slot.image
    checksum = slot.checksum or (image.checksum if image is not None else "")
    extra = "{}"
    if slot.kind == WINDOW and image is not None:
        extra = image.header()[0].extra
    return Entry(
        slot.kind,
        slot.key,
        node.tree.root.key,
        above,
        start,
        tokens,
        slot.nbytes,
        checksum,
        slot.disk,
        slot.tick,
        slot.created,
        slot.hits,
        extra,
    )


def index_costs(entries: list[Entry], slot_bytes: int) -> list[int]:
    """Return the bytes of RAM that each entry's place in the graph takes."""
    return [slot_bytes + len(e.tokens) + (NODE_BYTES if e.kind == ROWS else 0) for e in entries]


def _oldest_within(entries: list[Entry], nbytes: int, slot_bytes: int) -> int:
    """Return the tick from which on the newest entries fit into `nbytes` of nodes."""
    costs = index_costs(entries, slot_bytes)
    if sum(costs) <= nbytes:
        return 0
    for used, cost in sorted(zip((e.used for e in entries), costs, strict=True), reverse=True):
        nbytes -= cost
        if nbytes < 0:
            return used + 1
    return 0
