"""The one graph of blocks: which tokens are known, and in which tiers their images are.

It knows keys, tokens, sizes and recency. It does no I/O and never looks into an image, so commands and the planner run it
with anything in an image's place. It is not thread-safe: the cache calls it under its lock. How deep a prompt can be hit
says `lookup`, who is evicted `eviction`, what a newer image makes superfluous `superseded`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from math import lcm
from typing import Any, NamedTuple

from prefixcache.blocks.budget import Budget, Reservation
from prefixcache.blocks.leased_last import LeasedLast
from prefixcache.blocks.node import BLOCK_BYTES, RAM, Node, Slot, Tree, Walk, Window, common_tokens
from prefixcache.blocks.recency import Recency
from prefixcache.image_format import ROWS, SNAPSHOT, WINDOW, ImageKind
from prefixcache.keys import BLOCK, TOKEN_BYTES, chain

NODE_BYTES = 736  # of RAM a node, beside its tokens; measured by tools/bench/memory.py
SLOT_BYTES = 904  # of RAM a slot, beside its image and its suffix; measured there too


class Nearest(NamedTuple):
    """The child whose tokens begin most like others, None where none does, and how many tokens they share."""

    child: Node | None
    shared: int


class Graph:
    """All namespaces' trees of nodes, their slots, and which tier has which image.

    Invariants, tested by `check_integrity`: `orders[RAM]` holds exactly the slots in RAM that don't wait for a write, the
    orders of the tiers below hold all slots (an image that arrives there late has its place already); a path is touched
    tail first, so that a block is never less recent than what depends on it; the budget's images and nodes are the sums
    over slots and nodes.
    """

    def __init__(self, budget: Budget, policy: str = "lru", tiers: int = 2):
        """`tiers`: how many there are, RAM included."""
        self.budget = budget
        self.policy = policy
        self.tiers = range(tiers)
        self.last = tiers - 1  # with it, lookups take all tiers together
        self.recency = Recency(policy, budget, tiers)
        self.orders = self.recency.orders
        self.slot_bytes = SLOT_BYTES + self.recency.slot_bytes  # of RAM a slot, beside its image and its suffix
        self.trees: dict[bytes, Tree] = {}
        self.slots: dict[tuple[ImageKind, bytes], Slot] = {}
        self.pending_delete: dict[tuple[ImageKind, bytes], list[Slot]] = {}
        self.version = 0  # grows when a walk could come out differently
        self.walks = self.visits = 0  # walks from the root, and nodes that walks looked at, for tests of complexity
        self.nodes = 0
        self.images = [0] * tiers  # in each tier
        self.pinned = 0  # slots
        self.leaves: Counter[str] = Counter()  # nodes that no other goes on from, by label: the sequences that are kept
        self.ram_by_label: Counter[str] = Counter()  # bytes of images

    # -- trees and walks ----------------------------------------------------------------------------------------------

    def tree(
        self, root_key: bytes, windows: tuple[Window, ...] = (), snapshots: bool = False, keeps_tails: bool = False
    ) -> Tree:
        """Return the tree of this root key; make it when it isn't there."""
        if root_key not in self.trees:
            root = Node(None, None, b"", root_key, tiers=len(self.tiers))
            root.tree = self.trees[root_key] = Tree(root, windows, snapshots, keeps_tails)
        return self.trees[root_key]

    def walk(self, tree: Tree, token_bytes: bytes, known: Sequence[Node] = ()) -> Walk:
        """Follow tokens (raw int64 bytes) as far as they are known, in whichever tier. Changes nothing.

        `known`: whole blocks that these tokens begin with and that are there for sure, to go on from.
        """
        path = list(known)
        node = path[-1] if path else tree.root
        at, end, goes_on = node.end * TOKEN_BYTES, len(token_bytes), token_bytes.startswith
        partial, shared = None, 0
        while at < end and (children := node.children):
            if len(children) == 1:  # as below, without a copy
                child = children[0]
                if goes_on(child.tokens, at) and len(child.tokens) == BLOCK_BYTES:
                    path.append(child)
                    node = child
                    at += BLOCK_BYTES
                    continue
            chunk = token_bytes[at : at + BLOCK_BYTES]
            i = bisect_left(node.child_tokens, chunk)
            if i < len(children) and node.child_tokens[i] == chunk and len(chunk) == BLOCK_BYTES:
                node = children[i]
                path.append(node)
                at += BLOCK_BYTES
                continue
            partial, shared = self.nearest(node, chunk, i)
            if partial is not None and shared * TOKEN_BYTES == len(partial.tokens):
                path.append(partial)  # a whole tail; a tail has no children
                partial, shared = None, 0
            break
        self.visits += len(path) - len(known)
        self.walks += not known
        return Walk(tree, path, partial, shared, token_bytes, self.version)

    def valid_prefix(self, path: Sequence[Node]) -> Sequence[Node]:
        """Return the whole blocks of a path walked earlier, if the last is still in the graph, and so those before it."""
        whole = path[:-1] if path and not path[-1].is_whole else path
        return whole if whole and whole[-1].rows is not None and self.is_known(whole[-1]) else ()

    def is_known(self, node: Node) -> bool:
        """Tell whether a node is a root, or still in the graph with its rows."""
        return node.parent is None or (node.rows is not None and self.slots.get((ROWS, node.key)) is node.rows)

    def nearest(self, parent: Node, tokens: bytes, place: int | None = None) -> Nearest:
        """Return the child that shares most leading tokens with these, and how many; of equals one whose rows are in RAM.
        `place`: where the tokens belong among the children's, if it is known.
        """
        # The longest common prefix with a sorted list is with a neighbour of that place. One further on either side shares no
        # more, but may be an equal that is in RAM.
        place = bisect_left(parent.child_tokens, tokens) if place is None else place
        nearest, shared, in_ram = None, 0, False
        for i in (place - 1, place, place - 2, place + 1):
            if not 0 <= i < len(parent.children):
                continue
            if in_ram and i not in (place - 1, place):
                break
            self.visits += 1
            child, common = parent.children[i], common_tokens(parent.child_tokens[i], tokens)
            if child.rows is None:
                continue  # hollow
            child_in_ram = child.rows.image is not None
            if common and (common, child_in_ram) > (shared, in_ram):
                nearest, shared, in_ram = child, common, child_in_ram
        return Nearest(nearest, shared)

    def is_attached(self, slot: Slot) -> bool:
        return self.slots.get((slot.kind, slot.key)) is slot

    def child(self, parent: Node, tokens: bytes) -> Node | None:
        """Return the child of exactly these tokens."""
        i = bisect_left(parent.child_tokens, tokens)
        return parent.children[i] if i < len(parent.children) and parent.child_tokens[i] == tokens else None

    # -- nodes and slots ----------------------------------------------------------------------------------------------

    def grow(
        self, parent: Node, tokens: bytes, reservation: Reservation, key: bytes | None = None, label: str = ""
    ) -> Node | None:
        """Return the child of these tokens, made when it isn't there; None when another block has its key (a collision)."""
        i = bisect_left(parent.child_tokens, tokens)
        if i < len(parent.children) and parent.child_tokens[i] == tokens:
            return parent.children[i]
        key = chain(parent.key, tokens) if key is None else key
        if (ROWS, key) in self.slots:
            return None
        node = Node(parent.tree, parent, tokens, key, label, len(self.tiers))
        reservation.spend(nodes=NODE_BYTES + len(tokens))
        self._insert(parent, node, i)
        return node

    def _insert(self, parent: Node, node: Node, place: int) -> None:
        if not parent.children:
            parent.children, parent.child_tokens = [], []
            self.leaves[parent.label] -= parent.parent is not None
        self.leaves[node.label] += 1
        parent.children.insert(place, node)
        parent.child_tokens.insert(place, node.tokens)
        self.nodes += 1
        self.version += 1

    def attach(self, slot: Slot, reservation: Reservation) -> bool:
        """Give a new slot its place. False, and nothing done, when its key or its place is taken."""
        node = slot.node
        if slot.kind == SNAPSHOT:
            taken = slot.suffix in node.snapshots
        else:
            taken = slot.kind == ROWS and node.rows is not None  # a window's key says which rows it has
        if taken or (slot.kind, slot.key) in self.slots:
            return False
        reservation.spend(nodes=self.slot_bytes + len(slot.suffix))
        if slot.kind == SNAPSHOT:
            if not node.snapshots:
                node.snapshots, node.sizes = {}, {}
            node.snapshots[slot.suffix] = slot
            node.sizes[len(slot.suffix)] = node.sizes.get(len(slot.suffix), 0) + 1
        elif slot.kind == WINDOW:
            node.windows += (slot,)
        else:
            node.rows = slot
            self.version += 1  # the node may have been hollow
        self.slots[slot.kind, slot.key] = slot
        self.recency.attach(slot)
        return True

    def load_rows(
        self, parent: Node, tokens: bytes, key: bytes, nbytes: int, tier: int, reservation: Reservation
    ) -> Slot | None:
        """Return the slot of rows that a tier below RAM has, and make their block: `grow`, `attach` and `place` in one, for
        an opening. The caller notes `disk`, and calls `recency.sort_below_ram` for the order. None, and nothing done, when
        the block is there or its key is another's.
        """
        i = bisect_left(parent.child_tokens, tokens)
        if (ROWS, key) in self.slots or (i < len(parent.children) and parent.child_tokens[i] == tokens):
            return None
        reservation.spend(nodes=NODE_BYTES + len(tokens) + self.slot_bytes)
        node = Node(parent.tree, parent, tokens, key, tiers=len(self.tiers))
        slot = self.slots[ROWS, key] = node.rows = Slot(ROWS, node, key, nbytes)
        slot.tiers = 1 << tier
        self._insert(parent, node, i)
        parent.dependents[tier] += 1
        self.images[tier] += 1
        return slot

    def place(
        self, slot: Slot, tier: int, *, image: Any = None, reservation: Reservation | None = None, disk: int = 0
    ) -> None:
        """Note that a tier has an attached slot's image: RAM (paid from `reservation`), or one below (`disk` bytes)."""
        if tier == RAM:
            assert reservation is not None
            reservation.spend(images=slot.nbytes)
            slot.image = image
            self.ram_by_label[slot.node.label] += slot.nbytes
            self.recency.enter_ram(slot)
            self.version += _has_siblings(slot)  # of equal ones a walk takes one in RAM
        elif tier == RAM + 1:
            slot.disk = disk
        slot.tiers |= 1 << tier
        if slot.leases:
            self.recency.refile(slot)
        self.images[tier] += 1
        self._count(slot, tier, 1)
        self.recency.unblock(slot)

    def drop(self, slot: Slot, tier: int) -> None:
        """Delete a slot's image from a tier. In no tier any more, the slot goes, and nodes that hold nothing with it."""
        if not slot.is_in(tier):
            return
        slot.tiers ^= 1 << tier
        self.images[tier] -= 1
        if tier == RAM:
            self._free(slot)
            self.recency.leave_ram(slot)
        else:
            if tier == RAM + 1:
                slot.disk = 0
            if slot.tiers < 2:
                self.recency.unflushed.pop(slot, None)
        if slot.leases:
            self.recency.refile(slot)
        self._count(slot, tier, -1)
        if slot.kind != ROWS:
            _demote_unserved(slot, tier, self.orders[tier])
        if not slot.tiers:
            self._remove(slot)

    def begin_write(self, slot: Slot, tier: int) -> None:
        """Let a slot's image wait for a tier: until `write_finished` it stays in RAM, and keeps its place in the order."""
        if not slot.pending:
            self.budget.queue(slot.nbytes)
        slot.pending |= 1 << tier
        self._count_dependent(slot, tier, 1)  # what it depends on must stay in that tier meanwhile

    def write_finished(self, slot: Slot, tier: int) -> None:
        """End the wait of a slot's image for a tier, well or not."""
        slot.pending ^= 1 << tier
        self._count_dependent(slot, tier, -1)
        if not slot.pending:
            self.budget.queue(-slot.nbytes)
        self.recency.unblock(slot)

    def detach(self, slot: Slot) -> None:
        """Take a slot that waits for a write out of sight at once; its bytes stay counted until `release`."""
        if slot.is_in(RAM):
            self.recency.leave_ram(slot)
        self.recency.unflushed.pop(slot, None)
        for tier in self.tiers:
            if slot.is_in(tier):
                self._count(slot, tier, -1)
                self.images[tier] -= 1
            if slot.pending >> tier & 1:
                self._count_dependent(slot, tier, -1)
        slot.tiers = 0
        self.pending_delete.setdefault((slot.kind, slot.key), []).append(slot)
        self._remove(slot)

    def release(self, kind: ImageKind, key: bytes) -> Slot | None:
        """Free the bytes of a detached slot whose write has ended, and return it; None when there is none of this address."""
        waiting = self.pending_delete.get((kind, key))
        if not waiting:
            return None
        slot = waiting.pop(0)
        if not waiting:
            del self.pending_delete[kind, key]
        self._free(slot)
        return slot

    def pin(self, slots: Iterable[Slot]) -> list[Slot]:
        """Keep slots in every tier that they are in, until `unpin` is called with what this returns."""
        pinned = list(slots)
        for slot in pinned:
            self.pinned += not slot.pins
            slot.pins += 1
        return pinned

    def unpin(self, pinned: Iterable[Slot]) -> None:
        for slot in pinned:
            if not slot.pins:  # the cache was closed meanwhile
                continue
            slot.pins -= 1
            if not slot.pins:
                self.pinned -= 1
                self.recency.unblock(slot)

    def lease(self, slots: Iterable[Slot]) -> int:
        """Let slots be the last that are evicted, until `end_lease` is called as often for them. Return the bytes of those
        that were not leased.
        """
        nbytes = 0
        for slot in slots:
            slot.leases += 1
            if slot.leases == 1:
                nbytes += slot.nbytes
                self.recency.refile(slot)
        return nbytes

    def end_lease(self, slots: Iterable[Slot]) -> int:
        """End one lease of each of these, and return the bytes of those that have none now. `slots` tail first: so they are
        evicted.
        """
        nbytes = 0
        for slot in slots:
            slot.leases -= 1
            if not slot.leases:
                nbytes += slot.nbytes
                self.recency.refile(slot)
        return nbytes

    def has_dependents(self, slot: Slot, tier: int) -> bool:
        """Tell whether something else in the tier is of no use without this slot."""
        if slot.kind != ROWS:
            return False
        if tier != RAM and slot.tiers == 1 << tier and any(slot.node.dependents):
            return True  # the block's last image, and something in a faster tier depends on it
        return slot.node.dependents[tier] > 0

    def prune(self, node: Node | None) -> None:
        """Take a node that holds nothing out of the graph, and those above that held only it."""
        while node is not None and node.parent is not None:
            if node.children or node.snapshots or node.rows is not None or node.windows:
                return
            parent = node.parent
            i = bisect_left(parent.child_tokens, node.tokens)
            if i == len(parent.children) or parent.children[i] is not node:
                return  # out already
            del parent.children[i], parent.child_tokens[i]
            self.nodes -= 1
            self.version += 1
            self.leaves[node.label] -= 1
            if not parent.children:
                self.leaves[parent.label] += parent.parent is not None
            self.budget.free_node(NODE_BYTES + len(node.tokens))
            node = parent

    # -- counts and order ---------------------------------------------------------------------------------------------

    def _remove(self, slot: Slot) -> None:
        node = slot.node
        if slot.kind == SNAPSHOT:
            if node.snapshots.pop(slot.suffix, None) is not None:
                node.sizes[len(slot.suffix)] -= 1
                if not node.sizes[len(slot.suffix)]:
                    del node.sizes[len(slot.suffix)]
        elif slot.kind == WINDOW:
            node.windows = tuple(window for window in node.windows if window is not slot)
        elif node.rows is slot:
            node.rows = None
            self.version += 1
        if self.slots.get((slot.kind, slot.key)) is slot:
            del self.slots[slot.kind, slot.key]
            self.recency.remove(slot)
            self.budget.free_node(self.slot_bytes + len(slot.suffix))
        self.prune(node)

    def _free(self, slot: Slot) -> None:
        """Note that a slot's image is no longer in RAM."""
        self.ram_by_label[slot.node.label] -= slot.nbytes
        self.budget.free_image(slot.nbytes)  # first: then its memory can be kept for the next image
        slot.image = None
        self.version += _has_siblings(slot)

    def _count(self, slot: Slot, tier: int, by: int) -> None:
        self._count_dependent(slot, tier, by)
        if slot.kind != ROWS:
            node: Node | None = slot.node
            while node is not None:
                node.boundaries[tier] += by
                node = node.parent

    def _count_dependent(self, slot: Slot, tier: int, by: int) -> None:
        node = slot.node.parent if slot.kind == ROWS else slot.node
        assert node is not None
        dependents = node.dependents
        dependents[tier] += by
        if by < 0 and node.rows is not None and not dependents[tier]:
            self.recency.unblock(node.rows)

    # -- integrity ----------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise AssertionError when an invariant does not hold. Visits every node."""
        nodes = slots = cost = 0
        detached = [slot for waiting in self.pending_delete.values() for slot in waiting]
        images = sum(slot.nbytes for slot in detached)
        leaves, by_label = Counter[str](), Counter[str]()
        for slot in detached:
            by_label[slot.node.label] += slot.nbytes
        present: list[set[Slot]] = [set() for _ in self.tiers]
        stack = [tree.root for tree in self.trees.values()]
        while stack:
            node = stack.pop()
            assert node.child_tokens == [child.tokens for child in node.children] == sorted(node.child_tokens)
            assert len(set(node.child_tokens)) == len(node.children)
            here = list(node.slots)
            if node.parent is not None:
                nodes += 1
                cost += NODE_BYTES + len(node.tokens)
                leaves[node.label] += not node.children
                assert node.key == chain(node.parent.key, node.tokens)
                assert 0 < len(node.tokens) <= BLOCK_BYTES
                assert node.children or here, "a node that holds nothing"
                assert node.parent.is_whole or node.parent.parent is None, "a tail with a child"
            for slot in here:
                slots += 1
                cost += self.slot_bytes + len(slot.suffix)
                assert slot.node is node
                assert self.slots[slot.kind, slot.key] is slot
                assert slot.tiers, "a slot that holds nothing"
                assert slot.is_in(RAM) == (slot.image is not None)
                assert slot.is_in(RAM + 1) == (slot.disk > 0)
                assert slot.is_in(RAM) or not slot.pending
                assert slot.pins >= 0
                images += slot.nbytes if slot.image is not None else 0
                by_label[node.label] += slot.nbytes if slot.image is not None else 0
                for tier in self.tiers:
                    if slot.is_in(tier):
                        present[tier].add(slot)
            below = [s for s in here if s.kind != ROWS] + [k.rows for k in node.children if k.rows is not None]
            for tier in self.tiers:
                pending = sum(s.pending >> tier & 1 for s in below)
                assert node.dependents[tier] == sum(s.is_in(tier) for s in below) + pending
                boundaries = sum(s.is_in(tier) for s in here if s.kind != ROWS)
                assert node.boundaries[tier] == boundaries + sum(child.boundaries[tier] for child in node.children)
            stack.extend(node.children)
        assert nodes == self.nodes
        assert slots == len(self.slots)
        assert +leaves == +self.leaves, (leaves, self.leaves)
        assert min(self.leaves.values(), default=0) >= 0, self.leaves
        assert +by_label == +self.ram_by_label, (by_label, self.ram_by_label)
        assert self.images == [len(there) for there in present]
        self.recency.check_integrity(present, set(self.slots.values()))
        for tier, order in zip(self.tiers, self.orders, strict=True):
            for slot in order.waiting():
                free = slot.is_in(tier) and not slot.pins and not slot.pending
                assert not free or self.has_dependents(slot, tier), "a slot that can be evicted is no candidate"
        self.budget.check_integrity()
        held = self.budget.held()
        assert held.images == images, (held, images)
        assert held.nodes == cost, (held, cost)


def _has_siblings(slot: Slot) -> bool:
    parent = slot.node.parent
    return slot.kind == ROWS and parent is not None and len(parent.children) > 1


def _demote_unserved(slot: Slot, tier: int, order: LeasedLast) -> None:
    """Let rows that no boundary needs any more, now that a window or snapshot was deleted, be evicted next and not last."""
    top, node = None, slot.node
    whole = _whole_chunks(node)  # hit without a window's rows, so the blocks before it are still of use
    while node.parent is not None and node.start >= whole and not _is_needed(node, tier):
        top, node = node, node.parent
    stack = [top] if top is not None else []
    if slot.suffix:
        stack += [child for child in slot.node.children_beginning(slot.suffix) if not _is_needed(child, tier)]
    while stack:  # parents before children: who is moved last is evicted first
        node = stack.pop()
        if node.rows is not None and node.rows.is_in(tier) and node.rows in order:
            order.demote(node.rows)
            node.rows.evict_first |= tier != RAM
        stack.extend(node.children)


def _is_needed(node: Node, tier: int) -> bool:
    """Tell whether a boundary that can be hit in `tier` needs this node's rows."""
    if node.boundaries[tier]:
        return True
    assert node.parent is not None
    return any(slot.is_in(tier) for slot in node.parent.snapshots_of(node.tokens))


def _whole_chunks(node: Node) -> int:
    """Return the last boundary up to the node's end that needs rows only: where all windows are chunks that end there."""
    tree = node.tree
    if tree is None or tree.snapshots or not all(window.chunked for window in tree.windows):
        return 0
    step = lcm(BLOCK, *(window.size for window in tree.windows))
    return node.end // step * step
