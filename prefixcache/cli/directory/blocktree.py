"""A namespace's block tree as `inspect --tree` shows it: runs of blocks with one child each, in one line.

Made of the survey's edges alone: keys, places and sizes, no tokens. Nothing is drawn here.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from prefixcache.keys import BLOCK
from prefixcache.ssd import Edge

HEADING = 3  # lines above each tree that is drawn
_OF_TREE = ("blocks", "nbytes", "depth", "fan_out", "forks", "loose", "apart")
_OF_RUN = ("blocks", "tokens", "nbytes", "disk", "windows", "snapshots", "hits", "used_at")


@dataclass(eq=False, slots=True)
class Run:
    """Blocks in a row, each the only child of the one before.

    `nbytes` and `disk` (real bytes) with the windows and snapshots that hang on them; `hits` of the block that was hit
    most, `used_at` (Unix time) of the one used last; the `below_` numbers are of all further runs down; `loose`: what
    it hangs on is not in the index.
    """

    start: int
    blocks: int = 0
    tokens: int = 0
    nbytes: int = 0
    disk: int = 0
    windows: int = 0
    snapshots: int = 0
    hits: int = 0
    used_at: float = 0.0
    loose: bool = False
    depth: int = 0  # runs above
    parent: Run | None = None
    branches: list[Run] = field(default_factory=list)
    below_blocks: int = 0
    below_nbytes: int = 0

    @property
    def total(self) -> int:
        return self.nbytes + self.below_nbytes


@dataclass(eq=False, slots=True)
class BlockTree:
    """`tops` are the runs that begin at token 0, and loose ones; `runs` all, parents before children.

    `depth` is the end of the deepest block, in tokens; `fan_out` the most children of one block (or of the root);
    `forks` the blocks (and the root) with more than one; `apart` the windows and snapshots whose block has left.
    """

    tops: list[Run]
    runs: list[Run]
    blocks: int
    nbytes: int
    depth: int
    fan_out: int
    forks: int
    loose: int
    apart: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values; the runs as a flat list, since a tree of them may be deeper than a JSON parser likes."""
        number = {id(run): i for i, run in enumerate(self.runs)}
        return {
            **{name: getattr(self, name) for name in _OF_TREE},
            "runs": [
                {
                    "id": number[id(run)],
                    "parent": number[id(run.parent)] if run.parent is not None else None,
                    "first_block": run.start // BLOCK,
                    "start": run.start,
                    **{name: getattr(run, name) for name in _OF_RUN},
                    "branches": len(run.branches),
                    "below_blocks": run.below_blocks,
                    "below_nbytes": run.below_nbytes,
                    "loose": run.loose,
                }
                for run in self.runs
            ],
        }  # fmt: skip


class _Node:
    __slots__ = ("disk", "edge", "kids", "loose", "nbytes", "snapshots", "windows")

    def __init__(self, edge: Edge):
        self.edge, self.nbytes, self.disk, self.loose = edge, edge.nbytes, edge.disk, False
        self.windows = self.snapshots = 0
        self.kids: list[_Node] = []


def block_tree(edges: Iterable[Edge], root: bytes) -> BlockTree:
    """The tree below the root key. Edges may come in any order."""
    nodes: dict[bytes, _Node] = {}
    hanging: list[Edge] = []
    for edge in edges:
        if edge.kind == "rows":
            nodes[edge.key] = _Node(edge)
        else:
            hanging.append(edge)
    nbytes = sum(node.nbytes for node in nodes.values())
    apart = 0
    for edge in hanging:
        nbytes += edge.nbytes
        if (holder := nodes.get(edge.parent)) is None:
            apart += edge.parent != root
            continue
        holder.nbytes += edge.nbytes
        holder.disk += edge.disk
        if edge.kind == "window":
            holder.windows += 1
        else:
            holder.snapshots += 1
    tops: list[_Node] = []
    for node in nodes.values():
        above = nodes.get(node.edge.parent)
        if above is not None and above.edge.start < node.edge.start:  # an index gone wrong makes no circle here
            above.kids.append(node)
        else:
            node.loose = node.edge.parent != root
            tops.append(node)
    runs, first = _runs(tops)
    fans = [len(node.kids) for node in nodes.values()] + [sum(not node.loose for node in tops)]
    return BlockTree(
        tops=first, runs=runs, blocks=len(nodes), nbytes=nbytes,
        depth=max((node.edge.start + node.edge.length for node in nodes.values()), default=0),
        fan_out=max(fans), forks=sum(fan > 1 for fan in fans), loose=sum(node.loose for node in tops), apart=apart,
    )  # fmt: skip


def _runs(tops: list[_Node]) -> tuple[list[Run], list[Run]]:
    runs: list[Run] = []
    first: list[Run] = []
    todo: list[tuple[_Node, Run | None]] = [(node, None) for node in tops]
    while todo:
        node, parent = todo.pop()
        run = Run(node.edge.start, loose=node.loose, parent=parent, depth=parent.depth + 1 if parent else 0)
        (first if parent is None else parent.branches).append(run)
        runs.append(run)
        while True:
            run.blocks += 1
            run.tokens += node.edge.length
            run.nbytes += node.nbytes
            run.disk += node.disk
            run.windows += node.windows
            run.snapshots += node.snapshots
            run.hits = max(run.hits, node.edge.hits)
            run.used_at = max(run.used_at, node.edge.used_at)
            if len(node.kids) != 1:
                break
            node = node.kids[0]
        todo += [(kid, run) for kid in node.kids]
    for run in reversed(runs):
        if run.parent is not None:
            run.parent.below_blocks += run.blocks + run.below_blocks
            run.parent.below_nbytes += run.total
    for siblings in (first, *(run.branches for run in runs)):
        siblings.sort(key=_order)
    return runs, first


def _order(run: Run) -> tuple[bool, int, int]:
    """The largest first, what hangs on nothing last."""
    return run.loose, -run.total, run.start


def largest(trees: list[BlockTree], lines: int, levels: int) -> set[int]:
    """Which runs to show when there is room for this many lines and levels: ids of the largest, with all above each.

    A run whose branches are not all shown takes one line more, which says what is left out.
    """
    shown: set[int] = set()
    hidden: dict[int, int] = {}  # of trees and runs that are shown, by id: branches that are not
    queue: list[tuple[int, int, int, Run]] = []  # the largest first, then in the order of coming
    serial, headings = 0, 0
    tops = {id(tree): len(tree.tops) for tree in trees}
    todo = [(id(tree), tree.tops) for tree in trees]
    while True:
        for owner, branches in todo:
            for run in branches:
                if run.depth < levels:
                    serial += 1
                    heapq.heappush(queue, (-run.total, serial, owner, run))
        if not queue or len(shown) + len(hidden) + headings >= lines:
            return shown
        _, _, owner, run = heapq.heappop(queue)
        shown.add(id(run))
        if run.parent is None and owner not in hidden:
            hidden[owner] = tops[owner]
            headings += HEADING
        hidden[owner] -= 1
        if not hidden[owner]:
            del hidden[owner]
        if run.branches:
            hidden[id(run)] = len(run.branches)
        todo = [(id(run), run.branches)]
