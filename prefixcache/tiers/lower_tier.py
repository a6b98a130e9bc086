"""A tier below RAM and the graph: its index read into the graph, its room, what is written to it and deleted from it."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from prefixcache.blocks.budget import Reservation
from prefixcache.blocks.eviction import eviction_victim, victims_for
from prefixcache.blocks.graph import NODE_BYTES
from prefixcache.blocks.masks import mask_from, window_key
from prefixcache.blocks.node import Node, Slot, dependencies
from prefixcache.blocks.superseded import may_be_superseded
from prefixcache.byte_sizes import size
from prefixcache.image_format import ROWS, WINDOW, Image
from prefixcache.memory import collector_at_rest
from prefixcache.ssd import Address, Cancelled, Entry
from prefixcache.ssd.loading import parent_of, place_entry
from prefixcache.tiers.admission import Claim
from prefixcache.tiers.ram import GRAPH_SHARE
from prefixcache.tiers.tier import Tier

if TYPE_CHECKING:
    from prefixcache.tiers.namespace import Namespace
    from prefixcache.tiers.storage import Storage

log = logging.getLogger("prefixcache")


class LowerTier:
    """Keeps a tier and the graph consistent: a slot is in tier `number` exactly when the tier has its image durably.

    Called under the storage's lock, but for `written` and `recreated`, which take it on the tier's thread.
    """

    tier: Tier

    def __init__(self, storage: Storage, number: int):
        self._storage = storage
        self.number = number
        # Images that are there, not in the graph for want of RAM, or beside a slot that was stored again; oldest first.
        self.unindexed: dict[Address, Entry] = {}

    # -- opening ------------------------------------------------------------------------------------------------------

    def open(self, tier: Tier, namespaces: Iterable[Namespace]) -> None:
        """Read the tier's index into the graph: as many of the newest entries as the nodes' share of the budget holds. From
        now on images are spilled to the tier. RAM may hold images already, which are newer than all that the tier has.

        The collector of cycles rests meanwhile: what is made here lives on, and visiting it again and again took half of
        the time at 100k blocks.
        """
        with self._storage.lock, collector_at_rest():
            self.tier = tier
            self._storage.lower.append(self)
            try:
                self._load(namespaces)
            except BaseException:
                self._storage.lower.remove(self)  # another attempt takes its place
                raise

    def _load(self, namespaces: Iterable[Namespace]) -> None:
        storage, graph, tier = self._storage, self._storage.graph, self.tier
        there = set()
        for namespace in namespaces:
            known = storage.namespaces.setdefault(namespace.row.root, namespace)
            if known.row.stated == namespace.row.stated:  # else it was forged: the first write to it deletes its images
                there.add(namespace.row.root)
        entries = [entry for entry in tier.entries() if entry.namespace in there]
        held = storage.budget.held()
        share = max(0, storage.budget.limit // GRAPH_SHARE - held.nodes)
        if (
            held.images
            and (room := storage.ram.reserve(min(share, sum(_costs(entries, graph.slot_bytes))))) is not None
        ):
            share = room.release()  # the coldest images have left for it
        else:
            share = min(share, storage.budget.room)
        oldest = _oldest_within(entries, share, graph.slot_bytes)
        reservation = storage.budget.reserve(share, pooled=True)
        assert reservation is not None
        with reservation:
            newest = tier.max_tick()
            for slot in graph.slots.values():
                slot.tick += newest
            graph.recency.clock += newest
            for entry in entries:
                if entry.used < oldest or not self._add(entry, reservation):
                    self.unindexed[entry.address] = entry._replace(tokens=b"", extra="")
            graph.recency.sort_below_ram(graph.slots.values())
            graph.recency.times.load(((entry.used, entry.used_at) for entry in entries), shift=newest)
            for slot in [slot for slot in graph.slots.values() if may_be_superseded(slot.node)]:
                storage.drop_superseded(slot)  # what a crash left beside its successor
        storage.budget.peak = storage.budget.held().total
        if self.unindexed:
            self.unindexed = dict(sorted(self.unindexed.items(), key=lambda item: (item[1].used, -item[1].start)))
        self._enforce_limit()
        if self.unindexed:
            log.warning(
                "%s: %d of %d images are not indexed: ram is too small, or their parents are gone",
                tier.name,
                len(self.unindexed),
                len(entries),
            )

    def _add(self, entry: Entry, reservation: Reservation) -> bool:
        """Give the image of an entry its place in the graph. False when it has none."""
        graph, namespace = self._storage.graph, self._storage.namespaces[entry.namespace]
        known = graph.slots.get(entry.address)
        if known is not None:  # RAM has it
            if known.image is None or known.image.checksum != entry.checksum:
                return False
            graph.place(known, self.number, disk=entry.disk)
            return True
        parent = parent_of(graph, entry)
        if parent is None:
            return False
        mask: tuple[int, ...] = ()
        if entry.kind == WINDOW:
            try:
                mask = mask_from(entry.extra)
            except ValueError:
                return False
            if len(mask) != len(namespace.plan.windows) or window_key(parent.key, mask) != entry.key:
                return False
        return place_entry(graph, entry, parent, self.number, reservation, mask) is not None

    # -- room ---------------------------------------------------------------------------------------------------------

    def resize(self, nbytes: int) -> None:
        """The limit becomes `nbytes`: the least recent images are deleted for it."""
        with self._storage.lock:
            self.tier.resize(nbytes)
            self._enforce_limit()

    def return_to_limit(self) -> None:
        if self.tier.used > self.tier.limit:
            self._make_room(0)

    def shrunk(self) -> bool:
        """The limit in force fell, or a write found the disk full: the least recent images are deleted for it. Whether any
        could be, or none had to. On the tier's thread.
        """
        with self._storage.lock:
            before = self.tier.used
            fits = self._make_room(0)
            self._storage.changed.notify_all()
            return fits or self.tier.used < before

    def _enforce_limit(self) -> None:
        tier, before = self.tier, self.tier.used
        with self._storage.lock:
            fits, left = self._make_room(0), self._storage.graph.images[self.number]
        if tier.used < before:
            log.warning(
                "%s: the limit is %s, and it held %s: the least recent images were deleted",
                tier.name,
                size(tier.limit),
                size(before),
            )
        if not fits and left:
            log.warning(
                "%s: the limit is %s, and it holds %s: images that are pinned or being written are deleted "
                "when they are not",
                tier.name,
                size(tier.limit),
                size(tier.used),
            )
        elif not fits:
            log.warning(
                "%s=%s is less than the %s that the directory takes without an image: nothing will be "
                "kept there; give it more",
                tier.name,
                size(tier.limit),
                size(tier.used),
            )

    def _make_room(self, nbytes: int, slot: Slot | None = None, spilled: Slot | None = None) -> bool:
        """Delete the least recent images for `nbytes`. For a `slot` to be written, which `spilled` depends on or is: only
        what is less recent than both, and nothing that is indexed unless it makes enough.
        """
        tier, graph = self.tier, self._storage.graph
        while (missing := tier.used + nbytes - tier.limit) > 0:
            if self.unindexed:
                address, entry = next(iter(self.unindexed.items()))
                del self.unindexed[address]
                known = graph.slots.get(address)
                if known is None or not self._has(known):  # else it is being written again
                    tier.delete([entry])
                continue
            if slot is None or spilled is None:
                victim = eviction_victim(graph, self.number)
                victims = [victim] if victim is not None else []
            else:
                victims = victims_for(graph, self.number, missing, slot, spilled)
                if not slot.hits and self._spares(victims, slot, nbytes):
                    return False
            if not victims:
                return False
            for victim in victims:
                self.delete(victim)
                self._storage.counters.ssd_evicted += 1
        return True

    def _spares(self, victims: list[Slot], slot: Slot, nbytes: int) -> bool:
        """Whether one of the victims must not be lost for an image that nobody has hit."""
        hit = next((victim for victim in victims if victim.hits), None)
        if hit is None:
            return False
        path: list[Node] = []
        node: Node | None = slot.node
        while node is not None and node.parent is not None:
            path.append(node)
            node = node.parent
        path.reverse()
        long_prompts = self._storage.long_prompts
        claim = Claim(
            long_prompts, self.number, self.tier.limit, path[:-1], lambda: [n.key for n in path if n.is_whole]
        )
        return claim.spares(hit, nbytes)

    # -- written and deleted ------------------------------------------------------------------------------------------

    def spill(self, slot: Slot) -> bool:
        """Queue an image, what it depends on first. False when the queue or the tier has no room for all."""
        chain = self._with_parents(slot)
        pinned = self._storage.graph.pin(chain)
        try:
            return all(self._has(required) or self._write(required, slot) for required in chain)
        finally:
            self._storage.graph.unpin(pinned)

    def missing(self, slot: Slot) -> list[Slot]:
        """What must be written for the tier to have a slot's image, what it depends on first."""
        return [required for required in self._with_parents(slot) if not self._has(required)]

    def delete(self, slot: Slot) -> None:
        """A slot's image is deleted from the tier, or its write is cancelled."""
        self.unindexed.pop((slot.kind, slot.key), None)
        self.tier.delete([entry_of(slot)])
        self._storage.graph.drop(slot, self.number)

    def delete_unindexed(self, addresses: Iterable[Address] | None = None) -> int:
        """Delete images that are not indexed: those of these addresses that there are, or all. Returns their bytes."""
        chosen = list(self.unindexed) if addresses is None else addresses
        entries = [entry for address in chosen if (entry := self.unindexed.pop(address, None)) is not None]
        self.tier.delete(entries)
        return sum(entry.nbytes for entry in entries)

    def unindex(self, slot: Slot) -> None:
        """An image leaves the graph for want of RAM: it stays in the tier, and is indexed again at the next opening."""
        entry = entry_of(slot)._replace(tokens=b"", extra="")
        self.unindexed.pop(entry.address, None)  # it may stand there from before, as an older one
        self.unindexed[entry.address] = entry
        self._storage.graph.drop(slot, self.number)
        self._storage.graph.drop(slot, 0)

    def invalidate(self, slot: Slot) -> None:
        """Its file went bad and was quarantined: it is no longer in the tier."""
        self._storage.counters.corrupt += 1
        self._storage.graph.drop(slot, self.number)

    def written(self, entry: Entry, error: Exception | None) -> None:
        """A write has ended, durable and indexed, or not. On the tier's thread."""
        storage, graph = self._storage, self._storage.graph
        with storage.lock:
            detached = graph.release(entry.kind, entry.key)
            if detached is not None:
                storage.budget.queue(-detached.nbytes)
                storage.changed.notify_all()
                return
            slot = graph.slots.get(entry.address)
            if slot is None or not slot.pending >> self.number & 1:
                return
            used_since = slot.tick != entry.used
            graph.write_finished(slot, self.number, used_since)
            if error is None:
                slot.checksum = entry.checksum
                self.unindexed.pop(entry.address, None)
                graph.place(slot, self.number, disk=entry.disk)
                if used_since:
                    graph.recency.unflushed.setdefault(slot, 0)
                storage.drop_superseded(slot)
                storage.spilling.spill_onward(slot, self)
                if storage.remote is not None:
                    storage.remote.offer_written(slot)
            elif not isinstance(error, Cancelled):
                storage.counters.write_errors += 1
                storage.spilling.write_through([slot])
            storage.spilling.drain_backlog()
            storage.return_to_limits()
            storage.changed.notify_all()

    def recreated(self, kept: set[Address]) -> None:
        """The tier's directory was gone, and has only the `kept` images now: what RAM holds is to be written anew. On the
        tier's thread.
        """
        storage, graph = self._storage, self._storage.graph
        with storage.lock:
            for slot in list(graph.slots.values()):
                if slot.is_in(self.number) and (slot.kind, slot.key) not in kept:
                    graph.drop(slot, self.number)
            self.unindexed = {address: entry for address, entry in self.unindexed.items() if address in kept}
            storage.spilling.write_through(graph.orders[0])
            storage.changed.notify_all()

    def check_integrity(self) -> None:
        """AssertionError when an image is indexed and not. Called under the storage's lock."""
        for address in self.unindexed:
            slot = self._storage.graph.slots.get(address)
            assert slot is None or not slot.is_in(self.number), "an image stands in the graph and in `unindexed`"

    def _has(self, slot: Slot) -> bool:
        return (slot.tiers | slot.pending) >> self.number & 1 == 1

    def _with_parents(self, slot: Slot) -> list[Slot]:
        """The slot and the rows that it depends on, the first block first, from the last one that is there."""
        chain = [slot]
        for rows in dependencies(slot):
            chain.append(rows)
            if self._has(rows):
                break
        return chain[::-1]

    def _write(self, slot: Slot, spilled: Slot) -> bool:
        """Queue one image, for the sake of `spilled`, which may be another that depends on it."""
        tier = self.tier
        if slot.image is None or not tier.takes(slot.nbytes):
            return False
        if not self._make_room(tier.footprint(slot.nbytes), slot, spilled):
            return False
        entry = entry_of(slot)
        if not tier.write(entry, self._storage.namespaces[entry.namespace].row, slot.image):
            return False
        self._storage.graph.begin_write(slot, self.number)
        return True


def entry_of(slot: Slot) -> Entry:
    """What an index is to know of a slot."""
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


def _costs(entries: list[Entry], slot_bytes: int) -> list[int]:
    """Bytes of RAM that each entry's place in the graph takes."""
    return [slot_bytes + len(e.tokens) + (NODE_BYTES if e.kind == ROWS else 0) for e in entries]


def _oldest_within(entries: list[Entry], room: int, slot_bytes: int) -> int:
    """The tick from which on the newest entries fit into `room` bytes of nodes."""
    costs = _costs(entries, slot_bytes)
    if sum(costs) <= room:
        return 0
    for used, cost in sorted(zip((e.used for e in entries), costs, strict=True), reverse=True):
        room -= cost
        if room < 0:
            return used + 1
    return 0
