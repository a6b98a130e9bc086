"""What a newer image makes superfluous: the rule, and which pairs of blocks it is asked of. Decision 0002 says why."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from prefixcache.blocks.graph import Graph
from prefixcache.blocks.node import Node, Slot, common_tokens
from prefixcache.image_format import ROWS, WINDOW
from prefixcache.keys import TOKEN_BYTES

NEARBY = 64  # siblings that are looked at for one that takes a tail's place


def is_superseded(graph: Graph, slot: Slot, successor: Node, tier: int) -> bool:
    """Tell whether all that `slot` is good for in `tier` can be had there from `successor`.

    `successor` is the slot's own block, or a sibling whose tokens begin with all of that block's. It takes the place of

    - a window, when its window images, together, have every row that this one has;
    - rows of a superseded tail, when it has rows, and no image needs the tail's own block any more.

    Only what is in the same tier counts: durable for what is durable. So no boundary that could be hit is lost, whether
    the image that it was hit by was in RAM, below it only, or had rows that the successor's live cache no longer held. Nor is
    the end of a turn or of what prompts share (decision 0050), where others go on: there the tail has the rows as they were
    computed, and a whole block codes.
    """
    if successor.rows is None or not successor.rows.is_in(tier):
        return False
    if slot.node is not successor and slot.node.ends:
        return False
    if slot.kind == ROWS:
        return successor is not slot.node and not graph.has_dependents(slot, tier)
    masks = [window.mask for window in successor.windows if window is not slot and window.is_in(tier)]
    return slot.kind == WINDOW and bool(masks) and _has_all(slot.mask, *masks)


def may_be_superseded(node: Node) -> bool:
    """Tell whether an image of the block can have a successor, or be one."""
    return len(node.windows) > 1 or (node.parent is not None and len(node.parent.children) > 1)


def successions(node: Node) -> Iterator[tuple[Slot, Node]]:
    """Yield slots that a block may have taken the place of, or given it to, windows before rows, and the successor of each.
    `is_superseded` judges them.
    """
    pairs = [(node, node)] if len(node.windows) > 1 else []
    if node.parent is not None and len(node.parent.children) > 1:
        pairs += [(tail, node) for tail in superseded_tails(node)]
        pairs += [(node, successor) for successor in successors(node)]
    for older, successor in pairs:
        for slot in (*older.windows, older.rows):
            if slot is not None:
                yield slot, successor


def superseded_tails(node: Node) -> list[Node]:
    """Return the siblings whose tokens are a proper prefix of `node`'s."""
    parent, tails, tokens = node.parent, [], node.tokens
    assert parent is not None
    i = bisect_left(parent.child_tokens, tokens) - 1
    while i >= 0:
        shared = common_tokens(parent.child_tokens[i], tokens) * TOKEN_BYTES
        if not shared:
            break
        if shared == len(parent.child_tokens[i]):
            tails.append(parent.children[i])
            i -= 1
        else:
            i = bisect_right(parent.child_tokens, tokens[:shared], 0, i) - 1
    return tails


def successors(node: Node) -> list[Node]:
    """Return the siblings whose tokens go on where `node`'s, a tail's, end: the first `NEARBY` of them."""
    parent, longer = node.parent, []
    assert parent is not None
    i = bisect_right(parent.child_tokens, node.tokens)
    last = min(i + NEARBY, len(parent.children)) if not node.is_whole else i
    while i < last and parent.child_tokens[i].startswith(node.tokens):
        longer.append(parent.children[i])
        i += 1
    return longer


def is_beside_whole(tail: Node) -> bool:
    """Tell whether it is a tail with which a whole block begins, in a tree that keeps such tails for those who part there."""
    keeps = tail.tree is not None and tail.tree.keeps_tails and not tail.is_whole
    return keeps and any(node.is_whole and node.rows is not None for node in successors(tail))


def _has_all(mask: tuple[int, ...], *others: tuple[int, ...]) -> bool:
    """Tell whether a window's rows are all among those of others, together."""
    for index, rows in enumerate(mask):
        for other in others:
            rows &= ~other[index]
        if rows:
            return False
    return True
