"""The entries of an index get their places in the graph of blocks. What a tier does without a place is its own."""

from __future__ import annotations

from prefixcache.blocks.budget import Reservation
from prefixcache.blocks.graph import Graph
from prefixcache.blocks.node import Node, Slot
from prefixcache.image import ROWS, SNAPSHOT
from prefixcache.ssd.entries import Entry


def parent_of(graph: Graph, entry: Entry) -> Node | None:
    """The block that an entry depends on: of rows the one before, of a window its own. None when the graph lacks it."""
    if entry.parent == entry.namespace:
        return graph.tree(entry.namespace).root
    rows = graph.slots.get((ROWS, entry.parent))
    return rows.node if rows is not None else None


def place_entry(
    graph: Graph, entry: Entry, parent: Node, tier: int, reservation: Reservation, mask: tuple[int, ...] = ()
) -> Slot | None:
    """Note that a tier has the image of an entry; `mask` is a window's. None, and nothing done, when it has no place: its
    key, its place or the reservation is taken.
    """
    node: Node = parent
    suffix = entry.tokens if entry.kind == SNAPSHOT else b""
    try:
        if entry.kind == ROWS:
            grown = graph.grow(parent, entry.tokens, reservation, entry.key)
            if grown is None:
                return None
            node = grown
        slot = Slot(entry.kind, node, entry.key, entry.nbytes, suffix, mask)
        slot.checksum, slot.tick, slot.hits, slot.created = entry.checksum, entry.used, entry.hits, entry.created
        if not graph.attach(slot, reservation):
            return None
    except ValueError:  # the reservation is spent
        graph.prune(node)
        return None
    graph.place(slot, tier, disk=entry.disk)
    return slot
