"""Deletes many images of a running cache: those of a model, a tenant or a namespace, those that were not used since a time,
those of a session alone, or the least recent on the SSD until it takes no more than a size. `prune_directory` does the same
in a directory that nobody has open.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import NamedTuple

from prefixcache.blocks.node import Slot, rank
from prefixcache.image_format import ROWS
from prefixcache.keys import root_key
from prefixcache.ssd import Address
from prefixcache.store_fetch_remove.selection import Selection, selected_namespaces
from prefixcache.tiers.storage import Storage, root_of
from prefixcache.tiers.tier_in_graph import TierInGraph

AT_ONCE = 256  # images that are deleted while the lock is held


class Deleted(NamedTuple):
    """What was deleted: images, and their bytes, those in RAM and on SSD counted once. `held`: images that were meant and
    stay, since they are pinned or others depend on them.
    """

    images: int
    nbytes: int
    held: int = 0


def roots_meant(storage: Storage, selection: Selection, salt: bytes | None) -> set[bytes]:
    """Return the root keys of the namespaces that are meant: by model and root key as `selection` says, and of one salt.
    NoSuchNamespace where a name stands for none, or for several.
    """
    with storage.lock:
        rows = [namespace.row for namespace in storage.namespaces.values()]
    meant = selected_namespaces(rows, selection)
    if salt is None:
        return set(meant)
    return {
        row.root
        for row in meant.values()
        if root_key(row.model, json.loads(row.codec), json.loads(row.layout), salt) == row.root
    }


def clear_all(storage: Storage) -> Deleted:
    """Delete every image from every tier, pinned ones, too."""
    with storage.lock:
        nbytes = {entry.address: entry.nbytes for tier in storage.lower for entry in tier.unindexed.values()}
        nbytes |= {address: slot.nbytes for address, slot in storage.graph.slots.items()}
        storage.clear()
    return Deleted(len(nbytes), sum(nbytes.values()))


def clear_namespaces(storage: Storage, roots: Collection[bytes]) -> Deleted:
    """Delete every image of these namespaces from every tier, pinned ones, too."""
    images = nbytes = 0
    for slots in _portions(_least_recent(storage, roots)):
        with storage.lock:
            for slot in filter(storage.graph.is_attached, slots):
                images, nbytes = images + 1, nbytes + storage.lower.discard(slot)
    unindexed = _delete_unindexed(storage, roots, None)
    return Deleted(images + unindexed.images, nbytes + unindexed.nbytes)


def prune_namespaces(storage: Storage, roots: Collection[bytes], used_before: float | None) -> Deleted:
    """Delete the images of these namespaces that were last used before a Unix time, or all, from every tier. Pinned images
    stay, and those that an image which stays depends on.
    """
    images, nbytes, held = _delete_unindexed(storage, roots, used_before)
    newest = _newest_tick(storage, used_before)
    for slots in _portions(_least_recent(storage, roots, newest)):
        with storage.lock:
            for slot in filter(storage.graph.is_attached, slots):
                needed = slot.pins or any(storage.graph.has_dependents(slot, tier) for tier in storage.graph.tiers)
                if needed or (newest is not None and slot.tick > newest):
                    held += 1
                else:
                    images, nbytes = images + 1, nbytes + storage.lower.discard(slot)
    return Deleted(images, nbytes, held)


def prune_tier(
    storage: Storage, lower: TierInGraph, roots: Collection[bytes], used_before: float | None, to_size: int
) -> Deleted:
    """Delete from a tier below RAM the least recent of these images, until it takes at most `to_size` bytes. What RAM has
    stays there.
    """
    images = nbytes = held = 0
    newest = _newest_tick(storage, used_before)
    with storage.lock:
        for address in _unindexed(storage, lower, roots, used_before):
            if lower.tier.stored <= to_size:
                return Deleted(images, nbytes, held)
            images, nbytes = images + 1, nbytes + lower.delete_unindexed([address])
    for slots in _portions(_least_recent(storage, roots, newest)):
        with storage.lock:
            for slot in filter(storage.graph.is_attached, slots):
                if lower.tier.stored <= to_size:
                    return Deleted(images, nbytes, held)
                if not slot.is_in(lower.number):
                    continue
                needed = slot.pins or slot.pending or storage.graph.has_dependents(slot, lower.number)
                if needed or (newest is not None and slot.tick > newest):
                    held += 1
                else:
                    images, nbytes = images + 1, nbytes + slot.nbytes
                    lower.delete(slot)
    return Deleted(images, nbytes, held)


def end_session(storage: Storage, roots: Collection[bytes], session: str) -> Deleted:
    """Delete a session's own images in these namespaces from every tier: those that no other request has stored or used
    (`tiers.prompt.note_use`). Images that are pinned or leased stay, and those that others need.
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
                images, nbytes = images + 1, nbytes + storage.lower.discard(slot)
    return Deleted(images, nbytes, held)


def _is_needed(storage: Storage, slot: Slot) -> bool:
    """Tell whether an image that stays is of no use without this one."""
    node = slot.node
    if slot.kind != ROWS or node.parent is None:
        return False
    unindexed = (entry.parent for tier in storage.lower for entry in tier.unindexed.values())
    return any(node.dependents) or any(node.parent.snapshots_of(node.tokens)) or node.key in unindexed


def _newest_tick(storage: Storage, used_before: float | None) -> int | None:
    with storage.lock:
        return None if used_before is None else storage.graph.recency.times.last_before(used_before)


def _least_recent(storage: Storage, roots: Collection[bytes], newest: int | None = None) -> list[Slot]:
    """Return the slots of these namespaces whose tick is no newer, in the order in which they can be deleted. Sorted without
    the lock: some may be used or deleted meanwhile.
    """
    with storage.lock:
        slots = list(storage.graph.slots.values())
    meant = [slot for slot in slots if root_of(slot).key in roots and (newest is None or slot.tick <= newest)]
    return [slot for _, slot in sorted(((rank(slot), slot) for slot in meant), key=lambda ranked: ranked[0])]


def _portions(slots: list[Slot]) -> Iterator[list[Slot]]:
    for first in range(0, len(slots), AT_ONCE):
        yield slots[first : first + AT_ONCE]


def _delete_unindexed(storage: Storage, roots: Collection[bytes], used_before: float | None) -> Deleted:
    """Delete what tiers have of these and RAM has no room to index: it is the least recent of all."""
    images = nbytes = 0
    with storage.lock:
        for lower in storage.lower:
            addresses = _unindexed(storage, lower, roots, used_before)
            images, nbytes = images + len(addresses), nbytes + lower.delete_unindexed(addresses)
    return Deleted(images, nbytes)


def _unindexed(
    storage: Storage, lower: TierInGraph, roots: Collection[bytes], used_before: float | None
) -> list[Address]:
    """Return the images of these namespaces that a tier has and the graph doesn't, last used before a Unix time."""
    return [
        entry.address
        for entry in lower.unindexed.values()
        if entry.namespace in roots and (used_before is None or entry.used_at < used_before)
        if entry.address not in storage.graph.slots  # it was stored again, and is deleted with its slot
    ]
