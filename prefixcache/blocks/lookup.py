"""How deep a prompt can be hit, and which images a hit there reads. Nothing here changes the graph.

`tier` always means that tier and the faster ones together: RAM alone, or with it what a promotion could bring.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator

from prefixcache.blocks.node import Node, Slot, Walk, common_tokens
from prefixcache.blocks.window_masks import mask_of
from prefixcache.image_format import ROWS
from prefixcache.keys import BLOCK, TOKEN_BYTES


def rows_depth(walk: Walk, tier: int) -> int:
    """Return how many leading tokens have their rows, those of layers that keep every token."""
    tiers, last = tiers_to(tier), walk.tree.root
    for node in walk.path:
        rows = node.rows
        if rows is None or not rows.tiers & tiers:
            break
        last = node
    depth, partial = last.end, walk.partial
    if partial is not None and partial.parent is last and partial.rows is not None and partial.rows.tiers & tiers:
        depth += walk.shared
    return depth


def image_depth(walk: Walk, tier: int, limit: int) -> int:
    """Return the deepest boundary <= `limit` that has all images of a hit. `Prompt.hit_depth` minds media, too."""
    depth = min(rows_depth(walk, tier), limit)
    if walk.tree.snapshots:
        for boundary, _ in _snapshots(walk, tier, depth):
            if _covered(walk, tier, boundary) == boundary:
                return boundary
        return 0
    return _covered(walk, tier, depth)


def required_images(walk: Walk, boundary: int, tier: int) -> list[Slot]:
    """Return the images that a hit at `boundary` reads, tail first: the order to touch them in."""
    required: list[Slot] = []
    if walk.tree.snapshots:
        required += [slot for end, slot in _snapshots(walk, tier, boundary) if end == boundary]
    windows = bool(walk.tree.windows)
    for node in reversed(walk.nodes):
        if node.start < boundary:
            if windows:
                required += windows_read(node, boundary, tier)
            if node.rows is not None:
                required.append(node.rows)
    return required


def windows_read(node: Node, boundary: int, tier: int) -> dict[Slot, int]:
    """Return the window images that a hit at `boundary` reads for one of its blocks: how many of the block's first tokens
    each is good for.
    """
    required: dict[Slot, int] = {}
    for index, window in enumerate(node.tree.windows if node.tree is not None else ()):
        missing = mask_of(window.first(boundary) - node.start, boundary - node.start)
        for slot, shared in required.items():
            missing &= ~(slot.mask[index] & mask_of(0, shared))
        if missing:
            required.update((slot, shared) for slot, shared, _ in _window_rows(node, tier, index, missing))
    return required


def pin_leaves(required: Iterable[Slot]) -> list[Slot]:
    """Return those of the required images, tail first, whose pins keep all: a block stays while something depends on it."""
    roots, below = [], False
    for slot in required:
        if slot.kind != ROWS or not below:
            roots.append(slot)
        below |= slot.kind == ROWS
    return roots


def tiers_to(tier: int) -> int:
    """Return the bits of a tier and the faster ones."""
    return (2 << tier) - 1


def _snapshots(walk: Walk, tier: int, depth: int) -> Iterator[tuple[int, Slot]]:
    """Yield the stored boundaries of snapshots on the walk, at or before `depth`, deepest first."""
    tiers = tiers_to(tier)
    for parent in reversed([walk.tree.root, *walk.path]):
        if parent.snapshots and parent.end < depth:
            first = parent.end * TOKEN_BYTES
            for slot in parent.snapshots_of(walk.token_bytes[first : min(depth, parent.end + BLOCK) * TOKEN_BYTES]):
                if slot.tiers & tiers:
                    yield slot.end, slot


def _covered(walk: Walk, tier: int, boundary: int) -> int:
    """Return the deepest boundary <= `boundary` at which every window has its rows."""
    nodes = walk.nodes
    moved = True
    while moved and boundary > 0:
        moved = False
        for index, window in enumerate(walk.tree.windows):
            hole = _first_hole(nodes, tier, index, window.first(boundary), boundary)
            if hole < boundary:  # a boundary between the hole and here would need the hole's row, too
                boundary, moved = hole, True
    return boundary


def _first_hole(nodes: list[Node], tier: int, index: int, low: int, high: int) -> int:
    """Return the first token in [low, high) whose row of this window is missing, `high` when there is none."""
    for i in range(low // BLOCK, -(-high // BLOCK)):  # every node on a path but the last is a whole block
        node = nodes[i]
        missing = mask_of(low - node.start, high - node.start)
        for _, _, rows in _window_rows(node, tier, index, missing):
            missing &= ~rows
        if missing:
            return node.start + (missing & -missing).bit_length() - 1
    return high


def _window_rows(node: Node, tier: int, index: int, needed: int) -> Iterator[tuple[Slot, int, int]]:
    """Yield window images that have some of the rows `needed` of a block (a bit a token), until none is missing: the image,
    how many of the block's tokens it is good for, and the rows that it adds.

    A row depends on the tokens up to its own and on nothing after: so images of siblings that begin with the same tokens
    are as good as the block's own. The block's come first, and those in RAM before the others.
    """
    tiers = tiers_to(tier)
    windows = node.windows if len(node.windows) < 2 else sorted(node.windows, key=lambda slot: slot.image is None)
    for slot in windows:
        if (rows := slot.mask[index] & needed) and slot.tiers & tiers:
            needed &= ~rows
            yield slot, BLOCK, rows
    if not needed or node.parent is None or len(node.parent.children) == 1:
        return
    prefix = node.tokens[: (needed & -needed).bit_length() * TOKEN_BYTES]
    siblings, tokens = node.parent.children, node.parent.child_tokens
    i = bisect_left(tokens, prefix)
    while needed and i < len(siblings) and tokens[i].startswith(prefix):
        for slot in siblings[i].windows if siblings[i] is not node else ():
            if slot.mask[index] & needed and slot.tiers & tiers:
                shared = common_tokens(tokens[i], node.tokens)
                if rows := slot.mask[index] & needed & mask_of(0, shared):
                    needed &= ~rows
                    yield slot, shared, rows
        i += 1
