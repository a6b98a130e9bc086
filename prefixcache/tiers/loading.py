"""The entries of a tier's index get their places in the graph of blocks. What becomes of an entry that gets none is the
caller's decision.
"""

from __future__ import annotations

from prefixcache.blocks.budget import Reservation
from prefixcache.blocks.graph import Graph
from prefixcache.blocks.node import RAM, Node, Slot
from prefixcache.image_format import ROWS, SNAPSHOT
from prefixcache.ssd.entries import Entry


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
