"""What the graph of blocks is made of: trees, nodes, slots, and the walk of a prompt. `graph` keeps them consistent.

A `Node` is a block's place, a `Slot` an image's. A node may be *hollow* (no tier has its rows, after a file went bad):
lookups end there, and what is below waits for the rows to be stored again.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from prefixcache.image_format import ROWS, SNAPSHOT, WINDOW, ImageKind
from prefixcache.keys import BLOCK, TOKEN_BYTES

RAM = 0  # the fastest tier, whose images are at hand; the tiers below it are 1, 2, ... in order of speed
BLOCK_BYTES = BLOCK * TOKEN_BYTES
_NONE: list[Any] = []  # what a node without children or snapshots has; shared, and never changed
_EMPTY: dict[Any, Any] = {}
_ZEROS = array("l", [0] * 8)  # of as many tiers as there may be; a copy is quicker than a new one
_EVICTION_RANK = {SNAPSHOT: 0, WINDOW: 1, ROWS: 2}  # of one block and one touch


class Window(NamedTuple):
    """What a windowed layer must have to go on at a boundary: rotating over `size` tokens, or chunks of `size`."""

    size: int
    keep: int = 0
    chunked: bool = False

    def first(self, boundary: int) -> int:
        """Return the first token whose row is needed at `boundary`; the `keep` first tokens, kept elsewhere, not counted."""
        if self.chunked:
            start = boundary // self.size * self.size
            return start - start % BLOCK
        if boundary <= self.size:
            return min(self.keep, boundary)
        return boundary - self.size + self.keep + 1


SHARED, TURN = "shared", "turn"  # what a tail may end: a beginning that prompts share, the prompt of a turn


class Slot:
    """One image's place, and what is known of the image. `tiers` says where it is: a bit a tier, RAM's the lowest."""

    __slots__ = (
        "checksum",
        "created",
        "disk",
        "evict_first",
        "hits",
        "image",
        "key",
        "kind",
        "leases",
        "mask",
        "maybe_blocked",
        "nbytes",
        "node",
        "pending",
        "pins",
        "reading",
        "remote_at",
        "session",
        "suffix",
        "tick",
        "tiers",
    )

    def __init__(
        self, kind: ImageKind, node: Node, key: bytes, nbytes: int, suffix: bytes = b"", mask: tuple[int, ...] = ()
    ):
        self.kind = kind
        self.node = node  # of rows and windows their block, of a snapshot the block before its suffix
        self.key = key
        self.nbytes = nbytes
        self.suffix = suffix  # of a snapshot: the tokens between its node's end and its boundary
        self.mask = mask  # of a window: for each window of the tree, the tokens whose rows it has, a bit each
        self.tiers = 0
        self.image: Any = None  # while RAM has it
        self.remote_at = 0.0  # when the remote tier was known to have it, by time.monotonic(); see `RemoteTier`
        self.disk = 0  # bytes that its file takes in the first tier below RAM; others keep their own account
        self.checksum = ""
        self.pending = 0  # the tiers that it waits to be written to, a bit each
        self.evict_first = False  # below RAM no boundary needs it: it is evicted before others, whatever its tick
        self.reading: Any = None  # while a promotion reads it from a tier below
        self.maybe_blocked = False  # an order has passed it over as one that can't be evicted
        self.pins = 0
        self.leases = 0  # while it is leased, it is the last to be evicted
        self.session = ""  # of the requests that alone stored and used it; "" where others did, or none was named
        self.tick = 0
        self.hits = 0
        self.created = 0.0

    @property
    def end(self) -> int:
        """Return the boundary that a snapshot serves; the end of the block otherwise."""
        return self.node.end + len(self.suffix) // TOKEN_BYTES

    def is_in(self, tier: int) -> bool:
        return self.tiers >> tier & 1 == 1


def rank(slot: Slot) -> tuple[int, int, int]:
    """Return what slots are sorted by for eviction: their last use; of one use the deeper first."""
    node, kind = slot.node, slot.kind
    return slot.tick, -(node.end if kind == SNAPSHOT else node.start), _EVICTION_RANK[kind]


class Node:
    """A block's place in a tree: `tokens` (raw int64 bytes) after `start` others."""

    __slots__ = (
        "boundaries",
        "child_tokens",
        "children",
        "dependents",
        "end",
        "ends",
        "key",
        "label",
        "parent",
        "rows",
        "sizes",
        "snapshots",
        "start",
        "tokens",
        "tree",
        "windows",
    )

    def __init__(
        self, tree: Tree | None, parent: Node | None, tokens: bytes, key: bytes, label: str = "", tiers: int = 2
    ):
        self.tree = tree
        self.parent = parent
        self.tokens = tokens
        self.key = key
        self.label = label  # of the store that brought it; for statistics
        self.ends = ""  # what ends with it, a tail that stays beside whole blocks: SHARED, a TURN, or nothing
        self.start: int = parent.end if parent else 0
        self.end: int = self.start + len(tokens) // TOKEN_BYTES
        self.children: list[Node] = _NONE  # sorted by tokens
        self.child_tokens: list[bytes] = _NONE
        self.rows: Slot | None = None
        self.windows: tuple[Slot, ...] = ()  # more than one while none has all of their rows
        self.snapshots: dict[bytes, Slot] = _EMPTY  # by suffix
        self.sizes: dict[int, int] = _EMPTY  # how many snapshots have a suffix of so many bytes
        # By tier. No lists: the collector of cycles would visit them, and with 100k nodes that is most of its work.
        # What is in the tier, or waits to be written to it, and depends on the node: children's rows, its windows, snapshots.
        self.dependents = _ZEROS[:tiers]
        self.boundaries = _ZEROS[:tiers]  # windows and snapshots in it, here and below

    @property
    def is_whole(self) -> bool:
        """Tell whether it has as many tokens as a block can have; else it is a tail."""
        return len(self.tokens) == BLOCK_BYTES

    @property
    def slots(self) -> Iterator[Slot]:
        """Yield its window and snapshot images, then its rows."""
        yield from self.windows
        yield from self.snapshots.values()
        if self.rows is not None:
            yield self.rows

    def children_beginning(self, tokens: bytes) -> Iterator[Node]:
        """Yield the children whose tokens begin with these."""
        for i in range(bisect_left(self.child_tokens, tokens), len(self.children)):
            if not self.child_tokens[i].startswith(tokens):
                return
            yield self.children[i]

    def snapshots_of(self, tokens: bytes) -> Iterator[Slot]:
        """Yield the snapshots here whose suffix begins `tokens`, the longest first."""
        for size in sorted(self.sizes, reverse=True):
            if size <= len(tokens) and (slot := self.snapshots.get(tokens[:size])) is not None:
                yield slot


class Tree(NamedTuple):
    """A namespace's blocks: their root (whose key is the root key), what a boundary needs beside rows, and whether tails may
    stay where prompts part: they have rows as they were computed, whole blocks coded ones, and hits need no snapshot.
    """

    root: Node
    windows: tuple[Window, ...]
    snapshots: bool
    keeps_tails: bool = False


class Walk(NamedTuple):
    """How far a prompt's tokens (raw int64 bytes) are known: whole nodes, then `shared` tokens of `partial`.

    Valid until the graph's `version` is another.
    """

    tree: Tree
    path: list[Node]
    partial: Node | None
    shared: int
    token_bytes: bytes
    version: int

    @property
    def depth(self) -> int:
        return (self.path[-1].end if self.path else 0) + self.shared

    @property
    def nodes(self) -> list[Node]:
        return [*self.path, self.partial] if self.partial else self.path


def dependencies(slot: Slot) -> Iterator[Slot]:
    """Yield the rows that an image is of no use without, whatever tier they are in: of a snapshot those that reach its
    boundary; then its blocks, the last one first, up to one without rows.
    """
    node = slot.node.parent if slot.kind == ROWS else slot.node
    if slot.kind == SNAPSHOT and (covering := covering_rows(slot)) is not None:
        yield covering
    while node is not None and node.rows is not None:
        yield node.rows
        node = node.parent


def covering_rows(snapshot: Slot) -> Slot | None:
    """Return the rows that go on from a snapshot's block up to its boundary; of several the most recent."""
    rows = (child.rows for child in snapshot.node.children_beginning(snapshot.suffix) if child.rows is not None)
    return max(rows, key=lambda slot: slot.tick, default=None)


def common_tokens(a: bytes, b: bytes) -> int:
    if a[:TOKEN_BYTES] != b[:TOKEN_BYTES]:
        return 0
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n // TOKEN_BYTES
    differ = np.frombuffer(a, "<i8", n // TOKEN_BYTES) != np.frombuffer(b, "<i8", n // TOKEN_BYTES)
    return int(differ.argmax())
