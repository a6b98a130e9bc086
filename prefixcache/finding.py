"""Which of the prompts that are kept serves a request: the namespace that gives most tokens, the images that a hit reads.

Nothing here runs MLX or reads a file: a planner asks in the same way. All of it is called under the tiers' lock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from prefixcache.tiers import Home, Tiers
from prefixcache.tree import RAM, Slot, Tree, Walk


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


def deepest(tree: Tree, raw: bytes, homes: Iterable[Home], tier: int, limit: int) -> Deepest | None:
    """The namespace that gives most of these tokens (raw int64 bytes), at most `limit` of them; None of no namespace."""
    best: Deepest | None = None
    for home in homes:
        walk = tree.walk(home.space, raw)
        depth = tree.reach(walk, tier, limit)
        if best is None or depth > best.depth:
            best = Deepest(depth, home, walk)
    return best


def hit(
    tiers: Tiers, raw: bytes, homes: Iterable[Home], limit: int, asked: int, whole_blocks: bool = False
) -> Hit | None:
    """What RAM has of a prompt of `asked` tokens is counted, becomes the newest, and is pinned. None on a miss.

    `whole_blocks`: see `PrefixCache.fetch`.
    """
    tree, counters = tiers.tree, tiers.counters
    counters.fetches += 1
    counters.asked_tokens += asked
    best = deepest(tree, raw, homes, RAM, limit)
    if best is not None and whole_blocks:
        best = _at_whole_blocks(tree, best, limit)
    if best is None or best.depth <= 0:
        return None
    serving = tree.serving(best.walk, best.depth, RAM)
    tree.touch(serving, hit=True)
    counters.hit_tokens += best.depth
    counters.count_tiers(serving, best.depth)
    return Hit(*best, tree.pin(tree.anchors(serving)))


def _at_whole_blocks(tree: Tree, found: Deepest, limit: int) -> Deepest:
    """The deepest boundary where a whole block ends, or the prompt itself in a tail that is its own, kept as it is."""
    depth, home, walk = found
    while depth > 0 and not home.plan.snapshots and not home.plan.lossless:
        node = next(node for node in walk.nodes if node.end >= depth)
        assert node.rows is not None
        if node.end == depth and (
            node.is_whole or (depth == limit and not home.plan.is_coded(node.rows.image.tensors()))
        ):
            break
        depth = tree.reach(walk, RAM, node.start)
    return Deepest(depth, home, walk)
