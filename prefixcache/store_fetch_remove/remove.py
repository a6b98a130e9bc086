"""Deleting one prompt, or all that begins with it: what no other stored prompt shares."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prefixcache.blocks.lookup import required_images
from prefixcache.blocks.node import Node, Slot
from prefixcache.image_format import ROWS, SNAPSHOT, WINDOW
from prefixcache.keys import BLOCK, TOKEN_BYTES, chain
from prefixcache.tiers.prompt import Prompt
from prefixcache.tiers.state import Namespace
from prefixcache.tiers.storage import Storage
from prefixcache.tiers.tier_in_graph import TierInGraph


def remove(storage: Storage, prompt: Prompt) -> int:
    """Delete a prompt's blocks that no other stored prompt shares from every tier. Returns their bytes."""
    freed = 0
    with storage.lock:
        for namespace in prompt.namespaces():
            unindexed = sum(_remove_unindexed(storage, tier, prompt, namespace) for tier in storage.lower)
            walk = prompt.walk(namespace)
            if walk.depth == len(prompt) and walk.nodes:
                for slot in required_images(walk, walk.depth, storage.graph.last):
                    if slot.kind == SNAPSHOT:  # the state of this boundary is the prompt's alone
                        freed += storage.lower.discard(slot)
                # Part of a block is another prompt's, but where only a state makes a boundary.
                if walk.partial is None or walk.tree.snapshots:
                    freed += _remove_blocks(storage, walk.nodes[-1])
                elif (tail := _tail_beside(storage, walk.partial, prompt)) is not None:
                    freed += _remove_blocks(storage, tail)
            elif unindexed and walk.path and walk.partial is None:  # the end of it was not indexed
                freed += _remove_blocks(storage, walk.path[-1])
            freed += unindexed
    return freed


def remove_following(storage: Storage, prompt: Prompt) -> int:
    """Delete all that begins with a prompt from every tier, pinned or not, and its blocks that no other stored prompt shares.
    Returns their bytes.
    """
    freed = remove(storage, prompt)
    with storage.lock:
        for namespace in prompt.namespaces():
            above = (len(prompt) - 1) // BLOCK
            path = prompt.walk(namespace).path[:above]
            if len(path) < above:  # the rest was evicted: nothing goes on from what is left of it
                if path and path[-1].is_whole:  # else another prompt ends there
                    freed += _remove_blocks(storage, path[-1])
                continue
            parent = path[-1] if path else namespace.tree.root
            for slot in list(_beginning_with(parent, prompt.token_bytes[above * BLOCK * TOKEN_BYTES :])):
                if storage.graph.is_attached(slot):
                    freed += storage.lower.discard(slot)
            if parent.parent is not None and storage.graph.is_known(parent):
                freed += _remove_blocks(storage, parent)
    return freed


def _beginning_with(parent: Node, tokens: bytes) -> Iterator[Slot]:
    """Return the slots below a block whose tokens go on with these, what depends on others first."""
    yield from (slot for suffix, slot in parent.snapshots.items() if suffix.startswith(tokens))
    stack = [(child, False) for child in parent.children_beginning(tokens)]
    while stack:
        node, is_below_done = stack.pop()
        if is_below_done:
            yield from node.slots
        else:
            stack += [(node, True), *((child, False) for child in node.children)]


def _remove_blocks(storage: Storage, node: Node) -> int:
    """Delete a block that no stored prompt goes on from or needs, and then those before it."""
    freed = 0
    while node.parent is not None and not node.children and not node.snapshots:
        parent = node.parent
        if any(parent.snapshots_of(node.tokens)):
            break  # a boundary that is stored needs its rows
        if any(entry.parent == node.key for tier in storage.lower for entry in tier.unindexed.values()):
            break  # a prompt that is not indexed does
        freed += sum(storage.lower.discard(slot) for slot in [*node.windows, node.rows] if slot is not None)
        node = parent
    return freed


def _tail_beside(storage: Storage, block: Node, prompt: Prompt) -> Node | None:
    """Return the tail that ends with a prompt, beside a block that begins with the same tokens; None where there is none."""
    assert block.parent is not None
    return storage.graph.child(block.parent, prompt.token_bytes[block.start * TOKEN_BYTES :])


def _remove_unindexed(storage: Storage, tier: TierInGraph, prompt: Prompt, namespace: Namespace) -> int:
    """Remove what a tier has of a prompt and the graph lacks for want of RAM: the state at the prompt's end, and blocks, the
    last one first.
    """
    if not tier.unindexed:
        return 0
    step = BLOCK * TOKEN_BYTES
    blocks = [prompt.token_bytes[at : at + step] for at in range(0, len(prompt.token_bytes), step)]
    keys = [namespace.row.root, *prompt.keys(namespace)]
    keys += [chain(keys[-1], blocks[-1])] if len(keys) <= len(blocks) else []
    removed = [(SNAPSHOT, chain(keys[-2], blocks[-1]))] if blocks else []
    entries = [entry for entry in tier.unindexed.values() if entry.address not in removed]
    dependents = Counter(entry.parent for entry in entries if entry.kind != WINDOW)
    states = {entry.key for entry in entries if entry.kind == SNAPSHOT}
    for block, key, parent in zip(blocks[::-1], keys[:0:-1], keys[-2::-1], strict=True):
        address = ROWS, key
        if address not in tier.unindexed or address in storage.graph.slots or dependents[key]:
            break
        ends = range(TOKEN_BYTES, len(block) + 1, TOKEN_BYTES) if states else ()
        if any(chain(parent, block[:end]) in states for end in ends):
            break  # a boundary that is stored needs its rows
        removed += [address, *(entry.address for entry in entries if entry.kind == WINDOW and entry.parent == key)]
        dependents[parent] -= 1
    return tier.delete_unindexed(removed)
