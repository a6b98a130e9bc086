"""`Storage`: the graph, the RAM budget and the tiers below, under one lock; what is deleted from all of them at once.

Which image RAM evicts is `ram`'s, what a tier below is given `spilling`'s, its room and its index `lower_tier`'s, what comes
back `promotion`'s. What an image means is not known here, and nothing here runs MLX. Nothing on the request path waits for a
tier, unless the setting `spill="wait"` says so, and then no longer than `spill_wait`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prefixcache import image_memory
from prefixcache.blocks.budget import Budget
from prefixcache.blocks.eviction import least_recent_leaf
from prefixcache.blocks.graph import Graph
from prefixcache.blocks.node import RAM, Node, Slot
from prefixcache.blocks.superseded import is_superseded, successions
from prefixcache.image_format import SNAPSHOT, WINDOW
from prefixcache.metrics.stats import Counters
from prefixcache.settings import Settings
from prefixcache.tiers.admission import LongPrompts
from prefixcache.tiers.lower_tier import LowerTier
from prefixcache.tiers.ram import Ram
from prefixcache.tiers.spilling import Spilling

if TYPE_CHECKING:
    from prefixcache.tiers.namespace import Namespace
    from prefixcache.tiers.remote_tier import RemoteTier


class Storage:
    """`lock` guards the graph, the namespaces and the counters; the budget and a tier's queue have locks of their own, taken
    inside it and never around it. `changed` is notified when an image was deleted from RAM, became durable, or came back.
    """

    def __init__(self, settings: Settings, ram: int, tiers: int):
        """`tiers`: how many there are at most, RAM included."""
        self.settings = settings
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.budget = Budget(ram)
        image_memory.keep_within(self.budget)
        self.graph = Graph(self.budget, settings.policy, tiers)
        self.namespaces: dict[bytes, Namespace] = {}  # by root key
        self.counters = Counters()
        self.long_prompts = LongPrompts()
        self.ram = Ram(self)
        self.lower: list[LowerTier] = []  # the tiers below RAM, in order of speed
        self.spilling = Spilling(self)
        self.remote: RemoteTier | None = None  # what other machines share; no slot is taken for being there

    @property
    def spill_tier(self) -> LowerTier | None:
        """The tier that RAM spills to."""
        return self.lower[0] if self.lower else None

    def add_tier(self) -> LowerTier:
        """A tier below those that there are. It is one of them once it is opened."""
        return LowerTier(self, len(self.lower) + 1)

    def tiers_of(self, slot: Slot) -> Iterator[LowerTier]:
        """The tiers below RAM that have a slot's image, the fastest first."""
        return (tier for tier in self.lower if slot.is_in(tier.number))

    # -- deleted everywhere -------------------------------------------------------------------------------------------

    def discard(self, slot: Slot) -> int:
        """An image is deleted from every tier. Returns its bytes. They are free when a write that waits has ended."""
        for tier in self.lower:
            if slot.is_in(tier.number) or slot.pending >> tier.number & 1:
                tier.delete(slot)
            else:
                tier.delete_unindexed([(slot.kind, slot.key)])
        if slot.pending:
            self.graph.detach(slot)
            return slot.nbytes
        self.graph.drop(slot, RAM)
        self.changed.notify_all()
        return slot.nbytes

    def clear(self) -> None:
        """Every image is deleted from every tier; pins end."""
        for tier in self.lower:
            tier.delete_unindexed()
        for slot in list(self.graph.slots.values()):
            self.discard(slot)
        self.spilling.clear()

    def keep(self, sequences: int) -> int:
        """Delete the least recent images until no more than so many sequences are left. Returns how many are."""
        with self.lock:
            if self.graph.leaves.total() >= sequences:
                for tier in self.lower:
                    tier.delete_unindexed()  # less recent than all that is indexed
            while (kept := self.graph.leaves.total()) > sequences and (
                slot := least_recent_leaf(self.graph)
            ) is not None:
                self.discard(slot)
            return kept

    def delete_namespace(self, namespace: Namespace) -> None:
        """A namespace that the index described falsely: its images are deleted, and it is no longer known."""
        for slot in list(self.graph.slots.values()):
            if root_of(slot) is namespace.tree.root:
                self.discard(slot)
        self._forget(namespace)

    def forget_empty_namespaces(self) -> None:
        """Whoever may choose a salt may make any number of them."""
        for namespace in list(self.namespaces.values()):
            if not namespace.tree.root.children and not namespace.tree.root.snapshots:
                self._forget(namespace)

    def _forget(self, namespace: Namespace) -> None:
        del self.namespaces[namespace.row.root], self.graph.trees[namespace.row.root]

    def release(self) -> None:
        """RAM is given back; the tiers below keep what they have."""
        with self.lock:
            for slot in list(self.graph.slots.values()):
                slot.image, slot.tiers, slot.pins = None, 0, 0  # whoever is still at work finds nothing
            self.namespaces.clear()
            self.spilling.clear()
            self.budget = Budget(self.budget.limit)
            version = self.graph.version
            self.graph = Graph(self.budget, self.graph.policy, len(self.graph.tiers))
            self.graph.version = version + 1  # what prompts walked was the old graph

    # -- superseded images --------------------------------------------------------------------------------------------

    def drop_superseded(self, changed: Slot) -> None:
        """An image came into a tier, or is no longer pinned: delete what it supersedes there, or itself if it is superseded.

        `superseded.is_superseded` has the rule. Pinned images stay, and those that wait for a write, until they don't. An
        image that stays in RAM stays below it, too: it would only be written again.
        """
        if changed.kind == SNAPSHOT:
            return
        graph = self.graph
        for slot, successor in list(successions(changed.node)):
            if slot.pins or slot.pending:
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
        """What could not be evicted when a limit was lowered, pinned or being written, is as soon as it can."""
        self.ram.return_to_limit()
        for tier in self.lower:
            tier.return_to_limit()


def root_of(slot: Slot) -> Node:
    tree = slot.node.tree
    assert tree is not None
    return tree.root
