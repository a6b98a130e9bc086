"""Deleting one prompt: what no other stored prompt shares."""

from __future__ import annotations

from prefixcache.blocks.lookup import required_images
from prefixcache.blocks.node import Node
from prefixcache.image_format import SNAPSHOT
from prefixcache.tiers.prompt import Prompt
from prefixcache.tiers.storage import Storage


def remove(storage: Storage, prompt: Prompt) -> int:
    """Delete a prompt's blocks that no other stored prompt shares from every tier. Returns their bytes."""
    freed = 0
    with storage.lock:
        for namespace in prompt.namespaces():
            walk = prompt.walk(namespace)
            if walk.depth != len(prompt) or not walk.nodes:
                continue
            for slot in required_images(walk, walk.depth, storage.graph.last):
                if slot.kind == SNAPSHOT:  # the state of this boundary is the prompt's alone
                    freed += storage.discard(slot)
            if walk.partial is None:
                freed += _remove_blocks(storage, walk.nodes[-1])
    return freed


def _remove_blocks(storage: Storage, node: Node) -> int:
    """Delete a block that no stored prompt goes on from or needs, and then those before it."""
    freed = 0
    while node.parent is not None and not node.children and not node.snapshots:
        parent = node.parent
        if any(parent.snapshots_of(node.tokens)):
            break  # a boundary that is stored needs its rows
        freed += sum(storage.discard(slot) for slot in [*node.windows, node.rows] if slot is not None)
        node = parent
    return freed
