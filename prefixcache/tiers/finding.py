"""Which of the prompts that are kept serves a request: the namespace that gives most tokens, the images that a hit reads.

Nothing here runs MLX or reads a file: a planner asks in the same way. All of it is called under the tiers' lock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from prefixcache.blocks.tree import RAM, Node, Slot, Tree, Walk
from prefixcache.tiers.tiers import Home, Tiers


class Deepest(NamedTuple):
    """How many leading tokens a namespace gives, and the way there. Valid until the tree changes."""

    depth: int
    home: Home
    walk: Walk


class Hit(NamedTuple):
    """A hit in RAM. What `pinned` holds keeps all of its images there: who has taken them unpins it."""

    depth: int
    home: Home
    walk: Walk
    pinned: list[Slot]


def deepest(
    tree: Tree, raw: bytes, homes: Iterable[Home], tier: int, limit: int, whole_blocks: bool = False
) -> Deepest | None:
    """The namespace that gives most of these tokens (raw int64 bytes), at most `limit` of them; None of no namespace."""
    best: Deepest | None = None
    for home in homes:
        walk = tree.walk(home.space, raw)
        depth = boundary(tree, home, walk, tier, limit, whole_blocks)
        if best is None or depth > best.depth:
            best = Deepest(depth, home, walk)
    return best


def boundary(tree: Tree, home: Home, walk: Walk, tier: int, limit: int, whole_blocks: bool) -> int:
    """The deepest boundary, at most `limit`, that can be hit; with `whole_blocks` one where a whole block ends, or the
    prompt itself in a tail that is its own, kept as it is: see `PrefixCache.fetch`.
    """
    depth = tree.reach(walk, tier, limit)
    if not whole_blocks or home.plan.snapshots or home.plan.lossless:
        return depth
    while depth > 0:
        node = next(node for node in walk.nodes if node.end >= depth)
        if node.end == depth and (node.is_whole or (depth == limit and not _is_coded(home, node))):
            break
        depth = tree.reach(walk, tier, node.start)
    return depth


def _is_coded(home: Home, tail: Node) -> bool:
    """Of one on SSD only it can't be seen here; live caches alone store coded ones."""
    assert tail.rows is not None
    return tail.rows.image is not None and home.plan.is_coded(tail.rows.image.tensors())


def hit(
    tiers: Tiers, raw: bytes, homes: Iterable[Home], limit: int, asked: int, whole_blocks: bool = False
) -> Hit | None:
    """What RAM has of a prompt of `asked` tokens is counted, becomes the newest, and is pinned. None on a miss.

    `whole_blocks`: see `PrefixCache.fetch`.
    """
    tree, counters = tiers.tree, tiers.counters
    counters.fetches += 1
    counters.asked_tokens += asked
    best = deepest(tree, raw, homes, RAM, limit, whole_blocks)
    if best is None or best.depth <= 0:
        return None
    serving = tree.serving(best.walk, best.depth, RAM)
    tree.touch(serving, hit=True)
    counters.hit_tokens += best.depth
    counters.count_tiers(serving, best.depth)
    return Hit(*best, tree.pin(tree.anchors(serving)))
