"""Who is evicted from a tier: the first of its order that nothing there depends on. The orders are `policies`'.

RAM's snapshots are compared with each other: decision 0046.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from prefixcache.blocks.graph import Graph
from prefixcache.blocks.node import RAM, Node, Slot, dependencies
from prefixcache.image_format import ROWS, SNAPSHOT

COMPARED = 8  # snapshots
LAST_COUNTS = 10  # times: so much more often than others a prompt's last snapshot is hit


def eviction_victim(graph: Graph, tier: int) -> Slot | None:
    """Return the victim: not pinned, not waiting for a write, and nothing in the tier depends on it."""
    return next((slot for slot in graph.orders[tier].candidates() if _is_free(graph, slot, tier)), None)


def victim_in_ram(graph: Graph) -> Slot | None:
    """Return the victim in RAM. In the place of a snapshot it is the one of least value a byte, among the less recently used
    half of RAM's, `COMPARED` at most: so the one that was used last is spared while another can go.
    """
    victim, snapshots, order = eviction_victim(graph, RAM), graph.recency.snapshots, graph.orders[RAM]
    if victim is None or victim.kind != SNAPSHOT or order.is_last(victim):
        return victim
    compared = islice(snapshots, min(COMPARED, (len(snapshots) + 1) // 2))
    free = [slot for slot in compared if _is_free(graph, slot, RAM) and not order.is_last(slot)]
    return min(free, key=lambda slot: _value(slot) / (graph.recency.clock - slot.tick + 1), default=victim)


def _is_free(graph: Graph, slot: Slot, tier: int) -> bool:
    return slot.is_in(tier) and not slot.pins and not slot.pending and not graph.has_dependents(slot, tier)


def _value(snapshot: Slot) -> float:
    """Return the tokens that a hit at this snapshot saves beside one at the snapshot before it in RAM, over the bytes that
    are free without it: its own, and those of rows that no other needs. A prompt's last one counts `LAST_COUNTS` times.
    """
    node, tokens, before, nbytes = snapshot.node, snapshot.suffix, 0, snapshot.nbytes
    while not before and node.parent is not None:
        before = _deepest_end(node, tokens, snapshot)
        if node.rows is not None and node.boundaries[RAM] == 1:
            nbytes += node.rows.nbytes
        node, tokens = node.parent, node.tokens
    before = before or _deepest_end(node, tokens, snapshot)
    return (snapshot.end - before) * (1 if _goes_on(snapshot) else LAST_COUNTS) / nbytes


def _deepest_end(node: Node, tokens: bytes, but: Slot) -> int:
    """Return the deepest boundary of the snapshots in RAM that go on from a block with these tokens; 0 where none does."""
    slots = node.snapshots_of(tokens) if node.snapshots else ()
    return next((slot.end for slot in slots if slot is not but and slot.image is not None), 0)


def _goes_on(snapshot: Slot) -> bool:
    """Tell whether RAM has another boundary (a window's counts, too) behind a snapshot."""
    node, suffix = snapshot.node, snapshot.suffix
    others = (slot for slot in node.snapshots.values() if slot is not snapshot and slot.image is not None)
    if any(slot.suffix.startswith(suffix) for slot in others):
        return True
    return any(child.boundaries[RAM] for child in node.children_beginning(suffix))


def least_recent_leaf(graph: Graph, only_below_ram: bool = False) -> Slot | None:
    """Return the least recent slot without dependents in any tier; with `only_below_ram` of those that a lower tier has."""
    for slot in graph.orders[graph.last]:
        if only_below_ram and slot.tiers < 2:
            continue
        if not slot.pins and not slot.pending and not any(graph.has_dependents(slot, tier) for tier in graph.tiers):
            return slot
    return None


def leaf_depending_on(graph: Graph, tier: int) -> Slot | None:
    """Return the least recent slot that RAM alone has, nothing depends on, and of whose beginning `tier` alone has a part."""
    for slot in graph.orders[RAM]:
        alone = slot.tiers == 1 << RAM and _is_free(graph, slot, RAM)
        if alone and any(rows.tiers == 1 << tier for rows in dependencies(slot)):
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
