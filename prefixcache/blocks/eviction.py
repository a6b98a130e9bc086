"""Who is evicted from a tier: the first of its order that nothing there depends on. The orders are `policies`'."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prefixcache.blocks.graph import Graph
from prefixcache.blocks.node import Node, Slot
from prefixcache.image_format import ROWS


def eviction_victim(graph: Graph, tier: int) -> Slot | None:
    """Return the victim: not pinned, not waiting for a write, and nothing in the tier depends on it."""
    for slot in graph.orders[tier].candidates():
        if slot.is_in(tier) and not slot.pins and not slot.pending and not graph.has_dependents(slot, tier):
            return slot
    return None


def least_recent_leaf(graph: Graph, only_below_ram: bool = False) -> Slot | None:
    """Return the least recent slot without dependents in any tier; with `only_below_ram` of those that a lower tier has."""
    for slot in graph.orders[graph.last]:
        if only_below_ram and slot.tiers < 2:
            continue
        if not slot.pins and not slot.pending and not any(graph.has_dependents(slot, tier) for tier in graph.tiers):
            return slot
    return None


def victims_for(graph: Graph, tier: int, nbytes: int, slot: Slot, spilled: Slot) -> list[Slot]:
    """Return the victims in a tier below RAM, one after the other, that free `nbytes` for `slot`, which `spilled` depends on,
    or is: only what is less recent than both. Empty where all of it is not enough.
    """
    victims: list[Slot] = []
    for victim in eviction_order(graph, tier, graph.orders[tier].less_recent(slot, spilled)):
        victims.append(victim)
        nbytes -= victim.disk or victim.nbytes
        if nbytes <= 0:
            return victims
    return []


def eviction_order(graph: Graph, tier: int, candidates: Iterable[Slot]) -> Iterator[Slot]:
    """Yield those of `candidates`, in eviction order, that can be evicted from a tier below RAM one after the other.
    Evicts none: the graph must not change meanwhile.
    """
    evicted: dict[Node, int] = {}  # how many of a block's dependents
    deferred: set[Slot] = set()  # less recent than what depends on them
    for candidate in candidates:
        if not candidate.is_in(tier) or candidate.pins or candidate.pending:
            continue
        victim: Slot | None = candidate
        while victim is not None:
            node = victim.node
            if victim.kind == ROWS:
                here = node.dependents[tier]
                elsewhere = victim.tiers == 1 << tier and sum(node.dependents) > here  # the block's last image
                if here > evicted.get(node, 0) or elsewhere:
                    deferred.add(victim)
                    break
                assert node.parent is not None
                node = node.parent
            yield victim
            evicted[node] = evicted.get(node, 0) + 1
            victim = node.rows if node.rows in deferred else None
