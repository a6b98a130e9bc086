"""The block tree: which tokens are known, how deep a prompt can be hit in each tier, and who leaves first.

It knows keys, tokens, sizes and recency. It does no I/O and never looks into an image, so a planner can run it on a
trace with anything in an image's place. It is not thread-safe: the cache calls it under its lock.

A `Node` is a block's place, a `Slot` an image's. Nodes hang by their tokens: children are sorted by raw token bytes,
so one bisection finds the child with the longest common prefix. A node may be *hollow* (its rows are in no tier,
after a file went bad): lookups end there, what is below waits for the rows to be stored again.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from math import lcm
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from prefixcache.blocks.policies import POLICIES, Order
from prefixcache.keys import BLOCK, TOKEN_BYTES, chain

if TYPE_CHECKING:
    from prefixcache.tiers.budget import Budget, Reservation

RAM, SSD = 0, 1
TIERS = (RAM, SSD)

BLOCK_BYTES = BLOCK * TOKEN_BYTES
_NONE: list[Any] = []  # what a node without children or snapshots has; shared, and never changed
_EMPTY: dict[Any, Any] = {}
_NOUGHT = array("l", (0, 0))  # copied: that is quicker than making one
_LAST = ("snapshot", "window", "rows")  # of one block and one touch: who leaves first
NODE_BYTES = 728  # of RAM a node, beside its tokens; measured by tools/bench/memory.py
SLOT_BYTES = 888  # of RAM a slot, beside its image and its suffix; measured there too
NEAR = 64  # kids that are looked at for one that leaves in a block's place, or takes its place


class Window(NamedTuple):
    """What a windowed layer must have to go on at a boundary: rotating over `size` tokens, or chunks of `size`."""

    size: int
    keep: int = 0
    chunked: bool = False

    def first(self, boundary: int) -> int:
        """The first token whose row is needed at `boundary`; the `keep` first tokens, kept elsewhere, not counted."""
        if self.chunked:
            start = boundary // self.size * self.size
            return start - start % BLOCK
        if boundary <= self.size:
            return min(self.keep, boundary)
        return boundary - self.size + self.keep + 1


class Slot:
    """One image's place: what is known of it, in RAM (`image`) and on SSD (`disk` bytes, 0 for none)."""

    __slots__ = (
        "checksum", "created", "disk", "hits", "image", "key", "kind", "loading", "mask", "nbytes", "node",
        "pins", "saving", "spare", "suffix", "tick",
    )  # fmt: skip

    def __init__(self, kind: str, node: Node, key: bytes, nbytes: int, suffix: bytes = b"", mask: tuple[int, ...] = ()):
        self.kind = kind
        self.node = node  # of rows and windows their block, of a snapshot the block before its suffix
        self.key = key
        self.nbytes = nbytes
        self.suffix = suffix  # of a snapshot: the tokens between its node's end and its boundary
        self.mask = mask  # of a window: for each window of the space, the tokens whose rows it has, a bit each
        self.image: Any = None
        self.disk = 0
        self.checksum = ""
        self.saving = False  # waits for the SSD
        self.spare = False  # no boundary on SSD needs it any more: it stands among the coldest there, whatever its tick
        self.loading: Any = None  # a Future while it comes from the SSD
        self.pins = 0
        self.tick = 0
        self.hits = 0
        self.created = 0.0

    @property
    def end(self) -> int:
        """The boundary that a snapshot serves; the end of the block otherwise."""
        return self.node.end + len(self.suffix) // TOKEN_BYTES

    @property
    def end_of_block(self) -> int:
        """The end of the block that it hangs on: of a snapshot, the one that its suffix begins, were it whole."""
        return self.node.end + BLOCK if self.kind == "snapshot" else self.node.start + BLOCK

    def within(self, tier: int) -> bool:
        return (self.image is not None) if tier == RAM else self.disk > 0


class Node:
    """A block's place in the tree: `tokens` (raw int64 bytes) after `start` others."""

    __slots__ = ("end", "hanging", "key", "kid_tokens", "kids", "label", "live", "parent", "rows", "sizes", "snapshots",
                 "space", "start", "tokens", "windows")  # fmt: skip

    def __init__(self, space: Space | None, parent: Node | None, tokens: bytes, key: bytes, label: str = ""):
        self.space = space
        self.parent = parent
        self.tokens = tokens
        self.key = key
        self.label = label  # of the store that brought it; only counted by
        self.start: int = parent.end if parent else 0
        self.end: int = self.start + len(tokens) // TOKEN_BYTES
        self.kids: list[Node] = _NONE  # sorted by tokens
        self.kid_tokens: list[bytes] = _NONE
        self.rows: Slot | None = None
        self.windows: tuple[Slot, ...] = ()  # more than one while none has all of their rows
        self.snapshots: dict[bytes, Slot] = _EMPTY  # by suffix
        self.sizes: dict[int, int] = _EMPTY  # how many snapshots have a suffix of so many bytes
        # By tier. No lists: the collector of cycles would visit them, and with 100k nodes that is most of its work.
        # What is there, or on its way to the SSD, that hangs on it: kids' rows, its own window and snapshots.
        self.hanging = _NOUGHT[:]
        self.live = _NOUGHT[:]  # windows and snapshots there, of this node and all below

    @property
    def cost(self) -> int:
        return NODE_BYTES + len(self.tokens)

    @property
    def is_whole(self) -> bool:
        """Whether it has as many tokens as a block can have; else it is a tail."""
        return len(self.tokens) == BLOCK_BYTES

    def snapshots_of(self, tokens: bytes) -> Iterator[Slot]:
        """The snapshots here whose suffix begins `tokens`, the longest first."""
        for size in sorted(self.sizes, reverse=True):
            if size <= len(tokens) and (slot := self.snapshots.get(tokens[:size])) is not None:
                yield slot


class Space(NamedTuple):
    """A namespace's tree: its root (whose key is the root key) and what a boundary needs beside rows."""

    root: Node
    windows: tuple[Window, ...]
    snapshots: bool


class Walk(NamedTuple):
    """How far a prompt's tokens are known: whole nodes, then `shared` tokens of `partial`. Valid until the tree
    changes.
    """

    space: Space
    path: list[Node]
    partial: Node | None
    shared: int
    raw: bytes

    @property
    def depth(self) -> int:
        return (self.path[-1].end if self.path else 0) + self.shared

    @property
    def nodes(self) -> list[Node]:
        return [*self.path, self.partial] if self.partial else self.path


def common_tokens(a: bytes, b: bytes) -> int:
    """The number of leading tokens that `a` and `b` share."""
    if a[:TOKEN_BYTES] != b[:TOKEN_BYTES]:
        return 0
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n // TOKEN_BYTES
    differ = np.frombuffer(a, "<i8", n // TOKEN_BYTES) != np.frombuffer(b, "<i8", n // TOKEN_BYTES)
    return int(differ.argmax())


class Tree:
    """All namespaces' nodes and slots, and each tier's order of leaving.

    Invariants, tested by `check_integrity`: `order[RAM]` holds exactly the slots in RAM that don't wait for the SSD, and
    `order[SSD]` all slots, coldest first (an image that reaches the SSD late has its place in the order already); a
    path is touched tail first, so that a block is never colder than what hangs on it; the budget's images and nodes
    are the sums over slots and nodes.
    """

    def __init__(self, budget: Budget, policy: str = "lru"):
        self.budget = budget
        self.policy = policy
        self.spaces: dict[bytes, Space] = {}
        self.slots: dict[tuple[str, bytes], Slot] = {}
        self.parting: dict[tuple[str, bytes], list[Slot]] = {}
        rule = POLICIES[policy]
        fixed = rule.fixed(budget.limit)
        self._fixed = budget.reserve(len(TIERS) * fixed)  # held as long as the tree is
        self.order: tuple[Order, Order] = (rule.make(fixed), rule.make(fixed))
        self.slot_bytes = SLOT_BYTES + rule.slot_bytes  # of RAM a slot, beside its image and its suffix
        self.clock = 0
        self.touched: dict[Slot, int] = {}  # on SSD, used since the index last heard of it -> hits among those uses
        self.visits = 0  # nodes looked at by walks, for tests of complexity
        self.nodes = 0
        self.disk = 0
        self.on_ssd = 0  # slots
        self.pinned = 0  # slots
        self.leaves: Counter[str] = Counter()  # nodes that no other goes on from, by label: the sequences that are kept
        self.ram_by_label: Counter[str] = Counter()  # bytes of images

    # -- namespaces and lookups ---------------------------------------------------------------------------------------

    def space(self, root_key: bytes, windows: tuple[Window, ...] = (), snapshots: bool = False) -> Space:
        """The namespace of this root key, made when it isn't there."""
        if root_key not in self.spaces:
            root = Node(None, None, b"", root_key)
            root.space = self.spaces[root_key] = Space(root, windows, snapshots)
        return self.spaces[root_key]

    def walk(self, space: Space, raw: bytes, known: Sequence[Node] = ()) -> Walk:
        """Follow tokens (raw int64 bytes) as far as they are known, in whichever tier. Changes nothing.

        `known`: whole blocks that these tokens begin with and that are there for sure, to go on from.
        """
        path = list(known)
        node = path[-1] if path else space.root
        at, visits, goes_on = node.end * TOKEN_BYTES, 0, raw.startswith
        partial, shared = None, 0
        while at < len(raw) and (kids := node.kids):
            visits += 1
            first = node.kid_tokens[0]
            if len(kids) == 1 and goes_on(first, at) and len(first) == BLOCK_BYTES:
                node = kids[0]  # as below, without a copy
                path.append(node)
                at += BLOCK_BYTES
                continue
            chunk = raw[at : at + BLOCK_BYTES]
            i = bisect_left(node.kid_tokens, chunk)
            if i < len(kids) and node.kid_tokens[i] == chunk and len(chunk) == BLOCK_BYTES:
                node = kids[i]
                path.append(node)
                at += len(chunk)
                continue
            partial, shared = self._nearest(node, chunk, i)
            if partial is not None and shared * TOKEN_BYTES == len(partial.tokens):
                path.append(partial)  # a whole tail; nothing hangs on a tail
                partial, shared = None, 0
            break
        self.visits += visits
        return Walk(space, path, partial, shared, raw)

    def standing(self, path: Sequence[Node]) -> Sequence[Node]:
        """The whole blocks of a path walked earlier, if the last of them is still in the tree, and so those before it."""
        whole = path[:-1] if path and len(path[-1].tokens) < BLOCK_BYTES else path
        rows = whole[-1].rows if whole else None
        return whole if rows is not None and self.slots.get(("rows", rows.key)) is rows else ()

    def nearest(self, parent: Node, tokens: bytes) -> tuple[Node | None, int]:
        """The child that shares most leading tokens with these, and how many; of equals one whose rows are in RAM."""
        return self._nearest(parent, tokens, bisect_left(parent.kid_tokens, tokens))

    def _nearest(self, node: Node, chunk: bytes, place: int) -> tuple[Node | None, int]:
        """The child that shares most tokens with `chunk`, and how many; of equals one whose rows are in RAM.

        The longest common prefix with a sorted list is with a neighbour of the chunk's place. One further on either
        side shares no more, but may be a tail's twin that is in RAM.
        """
        best, shared, in_ram = None, 0, False
        for i in (place - 1, place, place - 2, place + 1):
            if not 0 <= i < len(node.kids):
                continue
            if in_ram and i not in (place - 1, place):
                break
            self.visits += 1
            kid, common = node.kids[i], common_tokens(node.kid_tokens[i], chunk)
            if kid.rows is None:
                continue  # hollow
            kid_in_ram = kid.rows.image is not None
            if common and (common, kid_in_ram) > (shared, in_ram):
                best, shared, in_ram = kid, common, kid_in_ram
        return best, shared

    def reach(self, walk: Walk, tier: int, limit: int) -> int:
        """The deepest boundary <= `limit` that can be hit, with RAM alone or (`tier` SSD) with RAM and SSD together."""
        depth = 0
        for node in walk.path:
            rows = node.rows
            if rows is None or (rows.image is None and (tier == RAM or not rows.disk)):
                break
            depth = node.end
        else:
            if walk.partial is not None and _has(walk.partial.rows, tier):
                depth += walk.shared
        depth = min(depth, limit)
        if walk.space.snapshots:
            for boundary, _ in self._boundaries(walk, tier, depth):
                if self._covered(walk, tier, boundary) == boundary:
                    return boundary
            return 0
        return self._covered(walk, tier, depth)

    def _boundaries(self, walk: Walk, tier: int, depth: int) -> Iterator[tuple[int, Slot]]:
        """Stored boundaries of snapshots on the walk, at or before `depth`, deepest first."""
        parents = [walk.space.root, *walk.path]
        for parent in reversed(parents):
            if parent.snapshots and parent.end < depth:
                rest = walk.raw[
                    parent.end * TOKEN_BYTES : min(depth * TOKEN_BYTES, parent.end * TOKEN_BYTES + BLOCK_BYTES)
                ]
                for slot in parent.snapshots_of(rest):
                    if _has(slot, tier):
                        yield slot.end, slot

    def _covered(self, walk: Walk, tier: int, boundary: int) -> int:
        """The deepest boundary <= `boundary` at which every window has its rows."""
        nodes = walk.nodes
        moved = True
        while moved and boundary > 0:
            moved = False
            for index, window in enumerate(walk.space.windows):
                hole = self._first_hole(nodes, tier, index, window.first(boundary), boundary)
                if hole < boundary:  # a boundary between the hole and here would need the hole's row, too
                    boundary, moved = hole, True
        return boundary

    def _first_hole(self, nodes: list[Node], tier: int, index: int, low: int, high: int) -> int:
        """The first token in [low, high) whose row of this window is missing, `high` when there is none."""
        for i in range(low // BLOCK, -(-high // BLOCK)):  # every node on a path but the last is a whole block
            node = nodes[i]
            missing = _bits(low - node.start, high - node.start)
            for _, _, rows in self._window_rows(node, tier, index, missing):
                missing &= ~rows
            if missing:
                return node.start + (missing & -missing).bit_length() - 1
        return high

    def _window_rows(self, node: Node, tier: int, index: int, needed: int) -> Iterator[tuple[Slot, int, int]]:
        """Window images in a tier that have some of the rows `needed` of a block (a bit a token), until none is missing: the
        image, how many of the block's tokens it is good for, and the rows that it adds.

        A row depends on the tokens up to its own and on nothing after: so images of siblings that begin with the same tokens
        are as good as the block's own. Its own come first, and those in RAM before the others.
        """
        own = node.windows if len(node.windows) < 2 else sorted(node.windows, key=lambda slot: slot.image is None)
        for slot in own:
            if (rows := slot.mask[index] & needed) and _has(slot, tier):
                needed &= ~rows
                yield slot, BLOCK, rows
        if not needed or node.parent is None or len(node.parent.kids) == 1:
            return
        prefix = node.tokens[: (needed & -needed).bit_length() * TOKEN_BYTES]
        kids, kid_tokens = node.parent.kids, node.parent.kid_tokens
        i = bisect_left(kid_tokens, prefix)
        while needed and i < len(kids) and kid_tokens[i].startswith(prefix):
            for slot in kids[i].windows if kids[i] is not node else ():
                if slot.mask[index] & needed and _has(slot, tier):
                    shared = common_tokens(kid_tokens[i], node.tokens)
                    if rows := slot.mask[index] & needed & _bits(0, shared):
                        needed &= ~rows
                        yield slot, shared, rows
            i += 1

    def windows(self, node: Node, boundary: int, tier: int) -> dict[Slot, int]:
        """The window images in a tier that a hit at `boundary` reads for one of its blocks: how many of the block's first
        tokens each is good for.
        """
        found: dict[Slot, int] = {}
        for index, window in enumerate(node.space.windows if node.space is not None else ()):
            missing = _bits(window.first(boundary) - node.start, boundary - node.start)
            for slot, shared in found.items():
                missing &= ~(slot.mask[index] & _bits(0, shared))
            if missing:
                found.update((slot, shared) for slot, shared, _ in self._window_rows(node, tier, index, missing))
        return found

    def serving(self, walk: Walk, boundary: int, tier: int = SSD) -> list[Slot]:
        """The slots that a hit at `boundary` reads in a tier (as in `reach`), tail first: the order to touch them in."""
        found: list[Slot] = []
        if walk.space.snapshots:
            found += [slot for end, slot in self._boundaries(walk, tier, boundary) if end == boundary]
        for node in reversed(walk.nodes):
            if node.start < boundary:
                found += self.windows(node, boundary, tier)
                if node.rows is not None:
                    found.append(node.rows)
        return found

    # -- recency ------------------------------------------------------------------------------------------------------

    def touch(self, slots: Iterable[Slot], hit: bool = False) -> None:
        """Make a path the newest in each tier that it stands in. `slots` tail first, as `serving` gives them. `hit`: a fetch
        used it.
        """
        self.clock += 1
        ram, ssd = (order.touch for order in self.order)
        slots = list(slots)
        for slot in slots:
            slot.tick = self.clock
            slot.spare = False
            slot.hits += hit
            ssd(slot)
            if slot.image is not None and not slot.saving:
                ram(slot)
            if slot.disk:
                self.touched[slot] = self.touched.get(slot, 0) + hit
        if hit:
            for order in self.order:
                order.used(slots, False)

    def stored(self, slots: Iterable[Slot]) -> None:
        """A request ended that used or brought this path, `slots` tail first: it is the newest now."""
        slots = list(slots)
        self.touch(slots)
        for order in self.order:
            order.used(slots, True)

    def coldest(self, tier: int) -> Slot | None:
        """Who leaves `tier` next: the coldest slot that nothing hangs on, not pinned and not waiting for the
        SSD.
        """
        order = self.order[tier]
        for slot in order.leaving():
            if slot.within(tier) and not slot.pins and not slot.saving:
                if not self.needed(slot, tier):
                    return slot
                if order.leaf_first and (leaf := self._leaf_below(slot, tier)) is not None:
                    return leaf
        return None

    def colder(self, slot: Slot, wanted: Slot) -> Iterator[Slot]:
        """What may leave the SSD to make room for `slot`, which `wanted` hangs on, or is: the coldest first."""
        for one in self.order[SSD].colder(slot, wanted):
            if one.disk and not one.pins and not one.saving:
                yield one

    def making_room(self, nbytes: int, slot: Slot, wanted: Slot) -> list[Slot]:
        """Of what is `colder`, those that may leave the SSD one after the other and make so much room; none where that is not
        enough.
        """
        found: list[Slot] = []
        off: Counter[Node] = Counter()  # how many leave of those that hang on a block
        kept: set[Slot] = set()  # colder than what hangs on them
        for one in self.colder(slot, wanted):
            leaving: Slot | None = one
            while leaving is not None:
                node = leaving.node
                if leaving.kind == "rows":
                    if node.hanging[SSD] > off[node] or (leaving.image is None and node.hanging[RAM]):
                        kept.add(leaving)
                        break
                    assert node.parent is not None
                    node = node.parent
                found.append(leaving)
                off[node] += 1
                nbytes -= leaving.disk
                if nbytes <= 0:
                    return found
                leaving = node.rows if node.rows in kept else None
        return []

    def _leaf_below(self, slot: Slot, tier: int) -> Slot | None:
        """Of what hangs on a block, and on that, the least recently used that may leave. None when none is near."""
        node = slot.node
        while True:
            own = [one for one in (*node.windows, *node.snapshots.values()) if one.within(tier)]
            if own:
                leaf = min(own, key=lambda one: one.tick)
                return None if leaf.pins or leaf.saving else leaf
            rows = (kid.rows for kid in islice(node.kids, NEAR) if kid.rows is not None and kid.rows.within(tier))
            below = min(rows, key=lambda one: one.tick, default=None)
            if below is None or below.pins or below.saving:
                return None
            if not self.needed(below, tier):
                return below
            node = below.node

    def coldest_of_all(self, on_ssd: bool = False) -> Slot | None:
        """The coldest slot, wherever its image is, or of those on SSD, that nothing hangs on in any tier."""
        for slot in self.order[SSD]:
            if on_ssd and not slot.disk:
                continue
            if not slot.pins and not slot.saving and not self.needed(slot, RAM) and not self.needed(slot, SSD):
                return slot
        return None

    def save(self, slot: Slot) -> None:
        """A slot's image begins to wait for the SSD: until `saved`, it can't leave RAM and stands in no order there."""
        slot.saving = True
        self._hang(slot, SSD, 1)  # what it hangs on must not leave the SSD meanwhile
        self.order[RAM].aside(slot)
        self.budget.queue(slot.nbytes)

    def saved(self, slot: Slot, used_since: bool) -> None:
        """The writer is done with a slot's image, well or not."""
        slot.saving = False
        self._hang(slot, SSD, -1)
        self.budget.queue(-slot.nbytes)
        self.order[RAM].back(slot, used_since)

    def needed(self, slot: Slot, tier: int) -> bool:
        """Whether something else in the tier is of no use without this slot."""
        if slot.kind != "rows":
            return False
        if tier == SSD and slot.image is None and self.needed(slot, RAM):
            return True  # the block's last image, and something in RAM hangs on it
        return slot.node.hanging[tier] > 0

    def pin(self, slots: Iterable[Slot]) -> list[Slot]:
        """Keep slots from leaving any tier, until `unpin` is called with what this returns."""
        held = list(slots)
        for slot in held:
            self.pinned += not slot.pins
            slot.pins += 1
        return held

    @staticmethod
    def anchors(serving: Iterable[Slot]) -> list[Slot]:
        """Of a path's slots, tail first, those whose pins keep all of it: a block stays while something hangs on it."""
        found, below = [], False
        for slot in serving:
            if slot.kind != "rows" or not below:
                found.append(slot)
            below |= slot.kind == "rows"
        return found

    def unpin(self, held: Iterable[Slot]) -> None:
        for slot in held:
            slot.pins -= 1
            self.pinned -= not slot.pins

    # -- nodes and slots ----------------------------------------------------------------------------------------------

    def child(self, parent: Node, tokens: bytes) -> Node | None:
        """The child of exactly these tokens."""
        i = bisect_left(parent.kid_tokens, tokens)
        return parent.kids[i] if i < len(parent.kids) and parent.kid_tokens[i] == tokens else None

    def grow(
        self, parent: Node, tokens: bytes, reservation: Reservation, key: bytes | None = None, label: str = ""
    ) -> Node | None:
        """The child of these tokens, made when it isn't there. None when another block has the same key (a
        collision).
        """
        i = bisect_left(parent.kid_tokens, tokens)
        if i < len(parent.kids) and parent.kid_tokens[i] == tokens:
            return parent.kids[i]
        key = chain(parent.key, tokens) if key is None else key
        if ("rows", key) in self.slots:
            return None
        node = Node(parent.space, parent, tokens, key, label)
        reservation.spend(nodes=node.cost)
        if not parent.kids:
            parent.kids, parent.kid_tokens = [], []
            self.leaves[parent.label] -= parent.parent is not None
        self.leaves[label] += 1
        parent.kids.insert(i, node)
        parent.kid_tokens.insert(i, tokens)
        self.nodes += 1
        return node

    def cost(self, slot: Slot) -> int:
        """Bytes of RAM that a slot takes, beside its image."""
        return self.slot_bytes + len(slot.suffix)

    def attach(self, slot: Slot, reservation: Reservation) -> bool:
        """Give a new slot its place. False, and nothing done, when its key or its place is taken: that of a window by another
        with the same rows.
        """
        node = slot.node
        if slot.kind == "snapshot":
            taken = slot.suffix in node.snapshots
        elif slot.kind == "window":
            taken = any(window.mask == slot.mask for window in node.windows)
        else:
            taken = node.rows is not None
        if taken or (slot.kind, slot.key) in self.slots:
            return False
        reservation.spend(nodes=self.cost(slot))
        if slot.kind == "snapshot":
            if not node.snapshots:
                node.snapshots, node.sizes = {}, {}
            node.snapshots[slot.suffix] = slot
            node.sizes[len(slot.suffix)] = node.sizes.get(len(slot.suffix), 0) + 1
        elif slot.kind == "window":
            node.windows += (slot,)
        else:
            node.rows = slot
        self.slots[slot.kind, slot.key] = slot
        self.order[SSD].add(slot)
        return True

    def enter(
        self, slot: Slot, tier: int, *, image: Any = None, reservation: Reservation | None = None, disk: int = 0
    ) -> None:
        """An attached slot's image is now in RAM (paid from `reservation`) or on SSD (`disk` bytes)."""
        if tier == RAM:
            assert reservation is not None
            reservation.spend(images=slot.nbytes)
            slot.image = image
            self.ram_by_label[slot.node.label] += slot.nbytes
            self.order[RAM].add(slot)
        else:
            slot.disk = disk
            self.disk += disk
            self.on_ssd += 1
        self._count(slot, tier, 1)

    def leave(self, slot: Slot, tier: int) -> None:
        """A slot's image leaves a tier. In no tier any more, the slot goes, and nodes that hold nothing with it."""
        if not slot.within(tier):
            return
        if tier == RAM:
            self._free(slot)
            self.order[RAM].remove(slot)
        else:
            self.disk -= slot.disk
            self.on_ssd -= 1
            slot.disk = 0
            self.touched.pop(slot, None)
        self._count(slot, tier, -1)
        if slot.kind != "rows":
            self._demote_unserved(slot, tier)
        if slot.image is None and not slot.disk:
            self._detach(slot)

    def _count(self, slot: Slot, tier: int, by: int) -> None:
        self._hang(slot, tier, by)
        node: Node | None = slot.node if slot.kind != "rows" else None
        while node is not None:
            node.live[tier] += by
            node = node.parent

    @staticmethod
    def _hang(slot: Slot, tier: int, by: int) -> None:
        node = slot.node if slot.kind != "rows" else slot.node.parent
        if node is not None:
            node.hanging[tier] += by

    def _detach(self, slot: Slot) -> None:
        node = slot.node
        if slot.kind == "snapshot":
            if node.snapshots.pop(slot.suffix, None) is not None:
                node.sizes[len(slot.suffix)] -= 1
                if not node.sizes[len(slot.suffix)]:
                    del node.sizes[len(slot.suffix)]
        elif slot.kind == "window":
            node.windows = tuple(window for window in node.windows if window is not slot)
        elif node.rows is slot:
            node.rows = None
        if self.slots.get((slot.kind, slot.key)) is slot:
            del self.slots[slot.kind, slot.key]
            self.order[SSD].remove(slot)
            self.budget.free_node(self.cost(slot))
        self.prune(node)

    def part(self, slot: Slot) -> None:
        """A slot that waits for the SSD goes from sight at once; its bytes stay counted until `let_go`."""
        self.order[RAM].forget(slot)
        self._count(slot, RAM, -1)
        self._hang(slot, SSD, -1)
        self.parting.setdefault((slot.kind, slot.key), []).append(slot)
        self._detach(slot)

    def let_go(self, kind: str, key: bytes) -> Slot | None:
        """The writer is done with a parted slot: its bytes are free."""
        waiting = self.parting.get((kind, key))
        if not waiting:
            return None
        slot = waiting.pop(0)
        if not waiting:
            del self.parting[kind, key]
        self._free(slot)
        return slot

    def _free(self, slot: Slot) -> None:
        """A slot's image is no longer in RAM."""
        slot.image = None
        self.ram_by_label[slot.node.label] -= slot.nbytes
        self.budget.free_image(slot.nbytes)

    def prune(self, node: Node | None) -> None:
        """Take a node that holds nothing out of the tree, and those above that held only it."""
        while node is not None and node.parent is not None:
            if node.kids or node.snapshots or node.rows is not None or node.windows:
                return
            parent = node.parent
            i = bisect_left(parent.kid_tokens, node.tokens)
            if i == len(parent.kids) or parent.kids[i] is not node:
                return  # out already
            del parent.kids[i], parent.kid_tokens[i]
            self.nodes -= 1
            self.leaves[node.label] -= 1
            if not parent.kids:
                self.leaves[parent.label] += parent.parent is not None
            self.budget.free_node(node.cost)
            node = parent

    def outgrown(self, node: Node) -> list[Node]:
        """Siblings whose tokens are a proper prefix of `node`'s: its shorter twins."""
        parent, found, tokens = node.parent, [], node.tokens
        assert parent is not None
        i = bisect_left(parent.kid_tokens, tokens) - 1
        while i >= 0:
            shared = common_tokens(parent.kid_tokens[i], tokens) * TOKEN_BYTES
            if not shared:
                break
            if shared == len(parent.kid_tokens[i]):
                found.append(parent.kids[i])
                i -= 1
            else:
                i = bisect_right(parent.kid_tokens, tokens[:shared], 0, i) - 1
        return found

    def longer(self, node: Node) -> list[Node]:
        """Siblings whose tokens go on where `node`'s, a tail's, end: the first `NEAR` of them."""
        parent, found = node.parent, []
        assert parent is not None
        i = bisect_right(parent.kid_tokens, node.tokens)
        last = min(i + NEAR, len(parent.kids)) if len(node.tokens) < BLOCK_BYTES else i
        while i < last and parent.kid_tokens[i].startswith(node.tokens):
            found.append(parent.kids[i])
            i += 1
        return found

    def is_superseded(self, slot: Slot, successor: Node, tier: int) -> bool:
        """The rule for what makes place: whether all that `slot` is good for in `tier` can be had there from `successor`.

        `successor` is the slot's own block, or a sibling whose tokens begin with all of that block's. It takes the place of

        - a window, when its window images, together, have every row that this one has;
        - rows of a superseded tail, when it has rows, and no image needs the tail's own block any more.

        Only what is in the same tier counts: durable for what is durable. So no boundary that could be hit is lost, whether
        the image that it was hit by was in RAM, on SSD only, or had rows that the successor's live cache no longer held.
        """
        if successor.rows is None or not successor.rows.within(tier):
            return False
        if slot.kind == "rows":
            return successor is not slot.node and not self.needed(slot, tier)
        others = [window.mask for window in successor.windows if window is not slot and window.within(tier)]
        return slot.kind == "window" and bool(others) and _has_all(slot.mask, *others)

    def successions(self, node: Node) -> Iterator[tuple[Slot, Node]]:
        """Slots that a block may have taken the place of, or given it to, windows before rows, and the successor of each:
        to be judged by `is_superseded`.
        """
        pairs = [(node, node)] if len(node.windows) > 1 else []
        if node.parent is not None and len(node.parent.kids) > 1:
            pairs += [(twin, node) for twin in self.outgrown(node)]
            pairs += [(node, twin) for twin in self.longer(node)]
        for old, successor in pairs:
            for slot in (*old.windows, old.rows):
                if slot is not None:
                    yield slot, successor

    def _served(self, node: Node, tier: int) -> bool:
        """Whether a boundary that can be hit in `tier` needs this node's rows."""
        if node.live[tier]:
            return True
        assert node.parent is not None
        return any(slot.within(tier) for slot in node.parent.snapshots_of(node.tokens))

    def _demote_unserved(self, slot: Slot, tier: int) -> None:
        """After a window or snapshot left: rows that no boundary needs any more go next, not last."""
        top, node = None, slot.node
        whole = _whole_chunks(node)  # hit without a window's rows, so the blocks before it are still of use
        while node.parent is not None and node.start >= whole and not self._served(node, tier):
            top, node = node, node.parent
        tops = [top] if top is not None else []
        if slot.suffix:
            tops += [k for k in slot.node.kids if k.tokens.startswith(slot.suffix) and not self._served(k, tier)]
        stack = tops
        while stack:  # parents before children: who is moved last leaves first
            node = stack.pop()
            if node.rows is not None and node.rows.within(tier) and node.rows in self.order[tier]:
                self.order[tier].demote(node.rows)
                node.rows.spare |= tier == SSD
            stack.extend(node.kids)

    # -- the SSD's index, read back -----------------------------------------------------------------------------------

    def load_rows(
        self, parent: Node, tokens: bytes, key: bytes, nbytes: int, disk: int, reservation: Reservation
    ) -> Slot | None:
        """Rows that the SSD has, and their block: `grow`, `attach` and `enter` in one; `settle` then makes the order.
        None, and nothing done, when the block is there or its key is another's; ValueError when the reservation is spent.
        """
        i = bisect_left(parent.kid_tokens, tokens)
        if ("rows", key) in self.slots or (i < len(parent.kids) and parent.kid_tokens[i] == tokens):
            return None
        reservation.spend(nodes=NODE_BYTES + len(tokens) + self.slot_bytes)
        node = Node(parent.space, parent, tokens, key)
        slot = self.slots["rows", key] = node.rows = Slot("rows", node, key, nbytes)
        slot.disk = disk
        if parent.kids:
            parent.kids.insert(i, node)
            parent.kid_tokens.insert(i, tokens)
            self.leaves[""] += 1
        else:
            parent.kids, parent.kid_tokens = [node], [tokens]
            if parent.parent is None:
                self.leaves[""] += 1
            elif parent.label:
                self.leaves[parent.label] -= 1
                self.leaves[""] += 1
        parent.hanging[SSD] += 1
        self.nodes += 1
        self.disk += disk
        self.on_ssd += 1
        return slot

    def settle(self) -> None:
        """After slots were entered in any order: sort the SSD's order by their ticks, at equal ticks the deeper
        colder.
        """
        rank = {kind: number for number, kind in enumerate(_LAST)}
        # Of a block the start, of a snapshot that of the block that its suffix begins.
        cold_first = sorted(
            self.slots.values(),
            key=lambda s: (s.tick, -(s.node.end if s.kind == "snapshot" else s.node.start), rank[s.kind]),
        )
        self.order[SSD].rebuild(cold_first)
        self.clock = max([self.clock, *(slot.tick for slot in cold_first[-1:])])

    # -- integrity ----------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """AssertionError when an invariant does not hold. Visits every node."""
        nodes = slots = cost = disk = 0
        parting = [slot for waiting in self.parting.values() for slot in waiting]
        images = sum(slot.nbytes for slot in parting)
        leaves, by_label = Counter[str](), Counter[str]()
        for slot in parting:
            by_label[slot.node.label] += slot.nbytes
        within: tuple[set[Slot], set[Slot]] = (set(), set())
        stack = [space.root for space in self.spaces.values()]
        while stack:
            node = stack.pop()
            assert node.kid_tokens == [kid.tokens for kid in node.kids] == sorted(node.kid_tokens)
            assert len(set(node.kid_tokens)) == len(node.kids)
            if node.parent is not None:
                nodes += 1
                cost += node.cost
                leaves[node.label] += not node.kids
                assert node.key == chain(node.parent.key, node.tokens)
                assert 0 < len(node.tokens) <= BLOCK_BYTES
                assert node.kids or node.rows or node.windows or node.snapshots, "a node that holds nothing"
                assert len(node.parent.tokens) == BLOCK_BYTES or node.parent.parent is None, "a tail with a child"
            held = [s for s in (node.rows, *node.windows, *node.snapshots.values()) if s is not None]
            for slot in held:
                slots += 1
                cost += self.cost(slot)
                assert slot.node is node
                assert self.slots[slot.kind, slot.key] is slot
                assert slot.image is not None or slot.disk, "a slot that holds nothing"
                assert slot.pins >= 0
                images += slot.nbytes if slot.image is not None else 0
                by_label[node.label] += slot.nbytes if slot.image is not None else 0
                disk += slot.disk
                for tier in TIERS:
                    if slot.within(tier):
                        within[tier].add(slot)
            for tier in TIERS:
                below = [s for s in held if s.kind != "rows"] + [k.rows for k in node.kids if k.rows is not None]
                coming = sum(s.saving for s in below) if tier == SSD else 0
                assert node.hanging[tier] == sum(s.within(tier) for s in below) + coming
                own = sum(s.within(tier) for s in held if s.kind != "rows")
                assert node.live[tier] == own + sum(kid.live[tier] for kid in node.kids)
            stack.extend(node.kids)
        assert nodes == self.nodes
        assert slots == len(self.slots)
        assert disk == self.disk
        assert +leaves == +self.leaves, (leaves, self.leaves)
        assert min(self.leaves.values(), default=0) >= 0, self.leaves
        assert +by_label == +self.ram_by_label, (by_label, self.ram_by_label)
        assert self.on_ssd == len(within[SSD])
        assert set(self.order[RAM]) == {slot for slot in within[RAM] if not slot.saving}
        assert set(self.order[SSD]) == set(self.slots.values())
        for order in self.order:
            order.check_integrity()
        assert self.touched.keys() <= within[SSD]
        self.budget.check_integrity()
        held_now = self.budget.held()
        assert held_now.images == images, (held_now, images)
        assert held_now.nodes == cost, (held_now, cost)


def _whole_chunks(node: Node) -> int:
    """The last boundary at or before the node's end that needs rows only: where all windows are chunks that end
    there.
    """
    space = node.space
    if space is None or space.snapshots or not all(window.chunked for window in space.windows):
        return 0
    step = lcm(BLOCK, *(window.size for window in space.windows))
    return node.end // step * step


def _has(slot: Slot | None, tier: int) -> bool:
    return slot is not None and (slot.image is not None or (tier == SSD and slot.disk > 0))


def _bits(first: int, last: int) -> int:
    """Of a block's tokens, `first` to `last` (not included), a bit each."""
    first, last = max(first, 0), min(last, BLOCK)
    return (1 << last) - (1 << first) if last > first else 0


def _has_all(mask: tuple[int, ...], *others: tuple[int, ...]) -> bool:
    """Whether a window's rows are all among those of others, together."""
    for index, rows in enumerate(mask):
        for other in others:
            rows &= ~other[index]
        if rows:
            return False
    return True
