"""`StorageState`: what the parts of a `Storage` share, its namespaces among it. They are given it, and never the storage,
which owns them.
"""

from __future__ import annotations

import threading
from array import array
from typing import TYPE_CHECKING, NamedTuple

from prefixcache import image_memory
from prefixcache.blocks.budget import Budget
from prefixcache.blocks.graph import Graph
from prefixcache.blocks.node import RAM, Slot, Tree
from prefixcache.image_format import ROWS
from prefixcache.metrics.stats import Counters
from prefixcache.ssd.entries import NamespaceRow
from prefixcache.tiers.admission import LongPrompts
from prefixcache.tiers.hot import HotPrompts

if TYPE_CHECKING:
    from prefixcache.layers.image_layout import Plan


EVICTED_PLACES = 1 << 13  # of 8 bytes each: the whole blocks of some 2 million tokens


class Namespace(NamedTuple):
    """A namespace at work: what the index says of it, where its streams stand in images, and its blocks.

    The tiers ask `plan` which windows a boundary needs, and whether an image fits; what it is needs MLX.
    """

    row: NamespaceRow
    plan: Plan
    tree: Tree


class EvictedKeys:
    """Remembers which blocks have left all tiers lately, so that a miss can be told from a prompt that never came. It has the
    first 8 bytes of their keys, each in a place that they choose, where the next one replaces them: 64 KiB, whatever is
    added. Called under the storage's lock.
    """

    def __init__(self) -> None:
        self._places = array("Q", bytes(8 * EVICTED_PLACES))

    def add(self, key: bytes) -> None:
        beginning = int.from_bytes(key[:8], "little")
        self._places[beginning % EVICTED_PLACES] = beginning

    def __contains__(self, key: bytes) -> bool:
        beginning = int.from_bytes(key[:8], "little")
        return self._places[beginning % EVICTED_PLACES] == beginning


class StorageState:
    """`lock` guards the graph, the namespaces and the counters; the budget and a tier's queue have locks of their own, taken
    inside it and never around it. `changed` is notified when an image was deleted from RAM, became durable, or came back.
    """

    def __init__(self, ram: int, hot: int, policy: str, tiers: int):
        """`hot`: bytes of the RAM that hot prompts may take. `tiers`: how many there are at most, RAM included."""
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.budget = Budget(ram)
        image_memory.keep_within(self.budget)
        self.hot = HotPrompts(self.budget, hot)
        self.graph = Graph(self.budget, policy, tiers)
        self.namespaces: dict[bytes, Namespace] = {}  # by root key
        self.counters = Counters()
        self.long_prompts = LongPrompts()
        self.evicted_keys = EvictedKeys()

    def drop_from_ram(self, slot: Slot) -> None:
        """Drop an image from RAM, and count it as evicted."""
        self.graph.drop(slot, RAM)
        self.note_evicted(slot)
        self.counters.arrivals.left(slot)
        self.counters.arrivals_remote.left(slot)
        self.counters.evicted += 1
        self.changed.notify_all()

    def note_evicted(self, slot: Slot) -> None:
        """Remember a whole block whose rows were evicted, if no tier has them any more."""
        if slot.kind == ROWS and not slot.tiers and slot.node.is_whole:
            self.evicted_keys.add(slot.key)

    def forget_all(self) -> None:
        """Give RAM back: begin with an empty graph and a budget of the same limit. The tiers below keep what they have."""
        for slot in list(self.graph.slots.values()):
            slot.image, slot.tiers, slot.pins = None, 0, 0  # whoever is still at work finds nothing
        self.namespaces.clear()
        self.hot.clear()
        in_ram, self.budget = self.hot.take_room_of(self.budget), Budget(self.budget.limit)
        if in_ram:
            self.hot = HotPrompts(self.budget, self.hot.limit)
        version = self.graph.version
        self.graph = Graph(self.budget, self.graph.policy, len(self.graph.tiers))
        self.graph.version = version + 1  # what prompts walked was the old graph
