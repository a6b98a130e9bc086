"""`Storage`: the graph, the RAM budget and the tiers below, under one lock; and what is deleted from all of them at once.

`ram` makes room, by evicting what `blocks.eviction` names; `spilling` decides what is written to the tier below;
`tier_in_graph` keeps a tier's index and its limit, `promotion` reads images back. Nothing here knows what an image means,
or runs MLX. Nothing on the request path waits for a tier, unless the setting `spill="wait"` says so, and then no longer
than `spill_wait`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prefixcache.blocks.eviction import least_recent_leaf
from prefixcache.blocks.node import RAM, SHARED, Node, Slot
from prefixcache.blocks.superseded import is_beside_whole, is_superseded, may_be_superseded, successions
from prefixcache.image_format import SNAPSHOT, WINDOW
from prefixcache.memory import collector_at_rest
from prefixcache.settings import Settings
from prefixcache.ssd import Cancelled, Entry
from prefixcache.tiers.ram import GRAPH_SHARE, Ram
from prefixcache.tiers.spilling import Spilling
from prefixcache.tiers.state import Namespace, StorageState
from prefixcache.tiers.tier import SharedTier, Tier
from prefixcache.tiers.tier_in_graph import LowerTiers, TierInGraph, index_costs


class Storage(StorageState):
    """The state, and the parts that work on it. What concerns several parts, such as the end of a write, is acted on here."""

    def __init__(self, settings: Settings, ram: int, tiers: int):
        """`ram`: the budget's bytes. `tiers`: how many there are at most, RAM included."""
        super().__init__(ram, settings.hot_bytes(ram), settings.policy, tiers)
        self.settings = settings
        self.lower = LowerTiers(self)
        self.ram = Ram(self, self.lower, settings.ssd_admission)
        self.spilling = Spilling(self, self.lower, self.ram, through=settings.spill == "through")
        self.remote: SharedTier | None = None

    # -- a tier below -------------------------------------------------------------------------------------------------

    def add_tier(self) -> TierInGraph:
        """Return the place of a new tier, below all others. It counts as one of them once `open_tier` has opened it."""
        return TierInGraph(self, len(self.lower) + 1)

    def open_tier(
        self,
        lower: TierInGraph,
        tier: Tier,
        namespaces: Iterable[Namespace],
        *,
        loaded: Callable[[], None] = lambda: None,
    ) -> None:
        """Read the tier's index into the graph: as many of the newest entries as the nodes' share of the budget holds. From
        now on images are spilled to the tier. RAM may hold images already, which are newer than all that the tier has.
        `loaded` is called under the lock, before the first of these images is deleted.

        The collector of cycles rests meanwhile: what is made here lives on, and visiting it again and again took half of
        the time at 100k blocks.
        """
        with self.lock, collector_at_rest():
            lower.tier = tier
            self.lower.append(lower)
            try:
                self._load(lower, namespaces, loaded)
            except BaseException:
                self.lower.remove(lower)  # another attempt takes its place
                raise

    def _load(self, lower: TierInGraph, namespaces: Iterable[Namespace], loaded: Callable[[], None]) -> None:
        usable = self._add_namespaces(namespaces)
        entries = list(lower.tier.entries())
        placed = [entry for entry in entries if entry.namespace in usable]
        room = self._room_for_nodes(sum(index_costs(placed, self.graph.slot_bytes)))
        reservation = self.budget.reserve(room, pooled=True)
        assert reservation is not None
        with reservation:
            lower.load(placed, reservation)
            lower.note_unindexed(entries)
            loaded()
            slots = [slot for slot in self.graph.slots.values() if may_be_superseded(slot.node)]
            for slot in slots:
                if not slot.node.ends and is_beside_whole(slot.node):
                    slot.node.ends = SHARED  # else it would have been deleted when the whole block came
            for slot in slots:
                self.drop_superseded(slot)  # what a crash left beside its successor
        self.budget.peak = self.budget.held().total
        lower.finish_load(len(entries))

    def _room_for_nodes(self, nbytes: int) -> int:
        """Evict images for `nbytes` of nodes, up to the nodes' share of the budget. Return how many bytes they may take."""
        held = self.budget.held()
        share = max(0, self.budget.limit // GRAPH_SHARE - held.nodes)
        if held.images and (reservation := self.ram.reserve(min(share, nbytes))) is not None:
            return reservation.release()  # the coldest images have left for it
        return min(share, self.budget.room)

    def written(self, lower: TierInGraph, entry: Entry, error: Exception | None) -> None:
        """Act on the end of a write to a tier: durable and indexed, or failed by `error`. Called on the tier's thread."""
        with self.lock:
            slot = lower.end_write(entry, error)
            if slot is not None:
                if error is None:
                    self.drop_superseded(slot)
                    self.spilling.spill_onward(slot, lower)
                    if self.remote is not None:
                        self.remote.offer_written(slot)
                elif not isinstance(error, Cancelled):
                    self.spilling.write_through([slot])
                self.spilling.drain_backlog()
                self.return_to_limits()
            self.changed.notify_all()

    def _add_namespaces(self, namespaces: Iterable[Namespace]) -> set[bytes]:
        """Note the namespaces that a tier's index names, and return the root keys of those whose images are believed."""
        believed = set()
        for namespace in namespaces:
            known = self.namespaces.setdefault(namespace.row.root, namespace)
            if known.row.stated == namespace.row.stated:  # else it was forged: the first write to it deletes its images
                believed.add(namespace.row.root)
        return believed

    def reopened(self, lower: TierInGraph, namespaces: Iterable[Namespace], entries: list[Entry]) -> None:
        """Note that a tier's directory was opened anew and has these images now; write what RAM holds and it lacks. Called on
        the tier's thread.
        """
        with self.lock:
            self._add_namespaces(namespaces)
            lower.lose_all_but(entries)
            self.spilling.write_through(self.graph.orders[RAM])
            self.changed.notify_all()

    # -- deleted everywhere -------------------------------------------------------------------------------------------

    def reject(self, slot: Slot) -> int:
        """Delete an image that can't be decoded from every tier, and return its bytes. The shared tier is not asked for it
        for a while.
        """
        if self.remote is not None:
            self.remote.refuse(slot)
        return self.lower.discard(slot)

    def clear(self) -> None:
        """Delete every image from every tier; pins end."""
        for tier in self.lower:
            tier.delete_unindexed()
        for slot in list(self.graph.slots.values()):
            self.lower.discard(slot)
        self.spilling.clear()

    def keep(self, sequences: int) -> int:
        """Delete the least recent images until no more than so many sequences are left, and return how many are."""
        with self.lock:
            if self.graph.leaves.total() >= sequences:
                for tier in self.lower:
                    tier.delete_unindexed()  # less recent than all that is indexed
            while self.graph.leaves.total() > sequences and (slot := least_recent_leaf(self.graph)) is not None:
                self.lower.discard(slot)
            return self.graph.leaves.total()

    def delete_namespace(self, namespace: Namespace) -> None:
        """Delete the images of a namespace that the index described falsely, and forget it."""
        for slot in list(self.graph.slots.values()):
            if root_of(slot) is namespace.tree.root:
                self.lower.discard(slot)
        self._forget(namespace)

    def forget_empty_namespaces(self) -> None:
        """Forget namespaces without images, of which whoever chooses salts can make any number."""
        unindexed = {entry.namespace for tier in self.lower for entry in tier.unindexed.values()}
        for root, namespace in list(self.namespaces.items()):
            if not (namespace.tree.root.children or namespace.tree.root.snapshots or root in unindexed):
                self._forget(namespace)

    def _forget(self, namespace: Namespace) -> None:
        del self.namespaces[namespace.row.root], self.graph.trees[namespace.row.root]

    def release(self) -> None:
        """Give RAM back; the tiers below keep what they have."""
        with self.lock:
            self.spilling.clear()
            self.forget_all()

    # -- superseded images --------------------------------------------------------------------------------------------

    def drop_superseded(self, changed: Slot) -> None:
        """Delete what an image supersedes that came into a tier or is unpinned; delete the image itself if it is superseded.

        `superseded.is_superseded` has the rule. Images stay while they are pinned, leased or wait for a write. An image that
        stays in RAM stays below it, too: it would only be written again.
        """
        if changed.kind == SNAPSHOT:
            return
        graph = self.graph
        for slot, successor in list(successions(changed.node)):
            if slot.pins or slot.leases or slot.pending:
                continue
            if slot.image is not None and is_superseded(graph, slot, successor, RAM):
                graph.drop(slot, RAM)
            for tier in self.lower if slot.image is None else ():
                if slot.is_in(tier.number) and is_superseded(graph, slot, successor, tier.number):
                    tier.delete(slot)

    def unpin(self, pinned: list[Slot]) -> None:
        """Unpin slots; what was superseded meanwhile is deleted now."""
        with self.lock:
            self.graph.unpin(pinned)
            for slot in pinned:
                if slot.kind == WINDOW or not slot.node.is_whole:  # nothing supersedes rows that are whole
                    self.drop_superseded(slot)
            self.return_to_limits()
            self.changed.notify_all()

    def return_to_limits(self) -> None:
        """Evict what could not be when a limit was lowered, since it was pinned or being written."""
        self.ram.return_to_limit()
        for tier in self.lower:
            tier.return_to_limit()


def root_of(slot: Slot) -> Node:
    """Return the root of the slot's tree."""
    tree = slot.node.tree
    assert tree is not None
    return tree.root
