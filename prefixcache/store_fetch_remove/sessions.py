"""The end of a session: what requests stored that named it, and nobody else used since, is deleted.

A slot knows its session (`tiers.prompt.note_use`): as long as all requests that stored or used it named the same one.
"""

from __future__ import annotations

from collections.abc import Collection

from prefixcache.blocks.node import Slot, rank
from prefixcache.image_format import ROWS
from prefixcache.store_fetch_remove.pruning import Deleted
from prefixcache.tiers.storage import Storage, root_of


def end_session(storage: Storage, roots: Collection[bytes], session: str) -> Deleted:
    """Delete what is a session's alone in these namespaces from every tier. What is pinned or leased stays, and what others
    depend on.
    """
    images = nbytes = held = 0
    with storage.lock:
        meant = [
            slot for slot in storage.graph.slots.values() if slot.session == session and root_of(slot).key in roots
        ]
        for slot in sorted(meant, key=lambda slot: rank(slot)[1:]):  # what depends on others first
            if slot.pins or slot.leases or _is_needed(storage, slot):
                held += 1
            else:
                images, nbytes = images + 1, nbytes + storage.discard(slot)
    return Deleted(images, nbytes, held)


def _is_needed(storage: Storage, slot: Slot) -> bool:
    """Tell whether an image that stays is of no use without this one."""
    node = slot.node
    if slot.kind != ROWS or node.parent is None:
        return False
    unindexed = (entry.parent for tier in storage.lower for entry in tier.unindexed.values())
    return any(node.dependents) or any(node.parent.snapshots_of(node.tokens)) or node.key in unindexed
