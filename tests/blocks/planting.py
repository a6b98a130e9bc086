"""A graph to test on, and what stores and tiers do with it, without images, files or MLX.

Blocks are real ones of 256 tokens. An image is any object; its size is `IMAGE` bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prefixcache.blocks.budget import Budget
from prefixcache.blocks.eviction import eviction_victim
from prefixcache.blocks.graph import Graph
from prefixcache.blocks.lookup import image_depth, required_images
from prefixcache.blocks.node import BLOCK_BYTES, RAM, Node, Slot, Tree, Walk, Window, dependencies
from prefixcache.blocks.superseded import is_superseded, successions
from prefixcache.blocks.window_masks import mask_of
from prefixcache.keys import BLOCK, TOKEN_BYTES, as_tokens, chain

SSD = 1  # the tier below RAM
TIERS = (RAM, SSD)
IMAGE = 1000
ROOT = bytes(32)


def raw(tokens: Sequence[int]) -> bytes:
    return as_tokens(tokens).tobytes()


def runs(*pairs: tuple[int, int]) -> list[int]:
    """Tokens from (id, how often)."""
    return [token for token, times in pairs for _ in range(times)]


def blocks(*ids: int) -> list[int]:
    """Whole blocks, each of one token id."""
    return runs(*((token, BLOCK) for token in ids))


class Planting:
    """A graph with one namespace. Nothing is evicted unless a test asks for it."""

    def __init__(self, windows: tuple[Window, ...] = (), snapshots: bool = False, limit: int = 1 << 40):
        self.budget = Budget(limit)
        self.graph = Graph(self.budget)
        self.tree: Tree = self.graph.tree(ROOT, windows, snapshots)

    # -- what a store does   --------------------------------------------------------------------------------------------

    def store(
        self, tokens: Sequence[int], *, held: int = 0, snapshot: bool = True, touch: bool = True, settle: bool = True
    ) -> list[Slot]:
        """Store a prompt; its window layers still hold the rows from `held` on. The new slots."""
        data, made, grown, parent = raw(tokens), [], [], self.tree.root
        for at in range(0, len(data), BLOCK_BYTES):
            chunk = data[at : at + BLOCK_BYTES]
            node, source = self._known(parent, chunk)
            if node is None or node.rows is None:
                node = self.grow(parent, chunk)
                made.append(self.enter(Slot("rows", node, node.key, IMAGE)))
            made += self._window(node, len(chunk) // TOKEN_BYTES, held, source)
            grown.append(node)
            parent = node
        if self.tree.snapshots and snapshot and data:
            made += self.snapshot(tokens)
        if touch:
            self.touch(tokens, tier=SSD)
        for node in grown if settle else ():
            self.drop_superseded(node)
        return made

    def _known(self, parent: Node, chunk: bytes) -> tuple[Node | None, tuple[int, ...]]:
        """The block that has all of these tokens; else the window rows that a block in RAM has for the first of them."""
        none = (0,) * len(self.tree.windows)
        exact = self.graph.child(parent, chunk)
        if exact is not None:
            return exact, none
        nearest, shared = self.graph.nearest(parent, chunk)
        if nearest is None or nearest.rows is None or shared * TOKEN_BYTES == len(chunk):
            return nearest, none
        window = self._in_ram(nearest, mask_of(0, shared))
        if nearest.rows.image is None or window is None:
            return None, none
        return None, tuple(mask & mask_of(0, shared) for mask in window.mask)

    @staticmethod
    def _in_ram(node: Node, wanted: int) -> Slot | None:
        here = [slot for slot in node.windows if slot.image is not None]
        return max(here, key=lambda slot: sum((m & wanted).bit_count() for m in slot.mask), default=None)

    def _window(self, node: Node, count: int, held: int, source: tuple[int, ...]) -> list[Slot]:
        mask = tuple(
            mask_of(max(held, w.keep) - node.start, count) | m for w, m in zip(self.tree.windows, source, strict=True)
        )
        if not any(mask):
            return []
        new = list(mask)
        for old in node.windows:
            new = [m & ~o for m, o in zip(new, old.mask, strict=True)]
        if not any(new):
            return []
        if (held_already := self._in_ram(node, mask_of(0, BLOCK))) is not None:
            mask = tuple(m | o for m, o in zip(mask, held_already.mask, strict=True))
        return [self.enter(Slot("window", node, chain(node.key, repr(mask).encode()), IMAGE, b"", mask))]

    def snapshot(self, tokens: Sequence[int]) -> list[Slot]:
        """The state after `tokens`, on the last whole block before that boundary; nothing when it is there already."""
        data = raw(tokens)
        above = (len(tokens) - 1) // BLOCK * BLOCK_BYTES
        parent = self.node(tokens[: above // TOKEN_BYTES]) if above else self.tree.root
        assert parent is not None
        key = chain(parent.key, data[above:])
        if ("snapshot", key) in self.graph.slots:
            return []
        return [self.enter(Slot("snapshot", parent, key, IMAGE, data[above:]))]

    def grow(self, parent: Node, chunk: bytes) -> Node:
        with self.reserve(1 << 16) as reservation:
            node = self.graph.grow(parent, chunk, reservation)
        assert node is not None
        return node

    def enter(self, slot: Slot) -> Slot:
        """Attach a new slot; its image is in RAM."""
        with self.reserve(1 << 16) as reservation:
            assert self.graph.attach(slot, reservation)
            slot.tick = self.graph.recency.clock
            self.graph.place(slot, RAM, image=object(), reservation=reservation)
        return slot

    def reserve(self, nbytes: int):
        reservation = self.budget.reserve(nbytes)
        assert reservation is not None, "the test's budget is too small"
        return reservation

    def drop_superseded(self, node: Node) -> None:
        """As `tiers` does, by the same rule."""
        for slot, successor in list(successions(node)):
            if not slot.pins and slot.image is not None and is_superseded(self.graph, slot, successor, RAM):
                self.graph.drop(slot, RAM)
            if not slot.pins and slot.image is None and is_superseded(self.graph, slot, successor, SSD):
                self.graph.drop(slot, SSD)

    # -- what tiers and promotions do ----------------------------------------------------------------------------------

    def spill(self, *slots: Slot) -> list[Slot]:
        """Write images to the SSD, in each case what they depend on first."""
        written = []
        for slot in slots:
            for one in reversed([slot, *dependencies(slot)]):
                if not one.disk:
                    self.graph.place(one, SSD, disk=4096)
                    written.append(one)
        for slot in written:
            self.drop_superseded(slot.node)
        return written

    def spill_all(self) -> None:
        self.spill(*list(self.graph.slots.values()))

    def evict(self, tier: int) -> Slot | None:
        slot = eviction_victim(self.graph, tier)
        if slot is not None:
            self.graph.drop(slot, tier)
        return slot

    def empty_ram(self) -> None:
        """Write everything, then evict all that may be."""
        self.spill_all()
        while self.evict(RAM):
            pass

    def promote(self, tokens: Sequence[int]) -> list[Slot]:
        walk = self.walk(tokens)
        brought = [s for s in reversed(required_images(walk, self.reach(tokens, SSD), SSD)) if s.image is None]
        for slot in brought:
            with self.reserve(IMAGE) as reservation:
                self.graph.place(slot, RAM, image=object(), reservation=reservation)
        self.touch(tokens)
        return brought

    # -- what a cache asks --------------------------------------------------------------------------------------------

    def walk(self, tokens: Sequence[int]) -> Walk:
        return self.graph.walk(self.tree, raw(tokens))

    def reach(self, tokens: Sequence[int], tier: int = RAM, limit: int | None = None) -> int:
        return image_depth(self.walk(tokens), tier, len(tokens) if limit is None else limit)

    def serving(self, tokens: Sequence[int], tier: int = RAM) -> list[Slot]:
        return required_images(self.walk(tokens), self.reach(tokens, tier), tier)

    def touch(self, tokens: Sequence[int], tier: int = RAM) -> list[Slot]:
        serving = self.serving(tokens, tier)
        self.graph.recency.touch(serving, hit=True)
        return serving

    def node(self, tokens: Sequence[int]) -> Node | None:
        path = self.walk(tokens).path
        return path[-1] if path and path[-1].end == len(tokens) else None

    def rows(self, tokens: Sequence[int]) -> Slot:
        node = self.node(tokens)
        assert node is not None
        assert node.rows is not None
        return node.rows


def restarted(old: Planting, order: Iterable[Slot] | None = None) -> Planting:
    """A new graph from what the SSD holds, placed parents first (or in `order`), as at open."""
    new = Planting(old.tree.windows, old.tree.snapshots, old.budget.limit)
    kept = [s for s in (old.graph.slots.values() if order is None else order) if s.disk]
    made: dict[bytes, Node] = {old.tree.root.key: new.tree.root}
    for slot in sorted(kept, key=lambda s: (s.kind != "rows", s.node.start if s.kind == "rows" else 0)):
        if slot.kind == "rows":
            assert slot.node.parent is not None
            made[slot.key] = new.grow(made[slot.node.parent.key], slot.node.tokens)
        node = made[slot.node.key]
        again = Slot(slot.kind, node, slot.key, slot.nbytes, slot.suffix, slot.mask)
        again.tick, again.hits = slot.tick, slot.hits
        with new.reserve(1 << 16) as reservation:
            assert new.graph.attach(again, reservation)
        new.graph.place(again, SSD, disk=slot.disk)
    new.graph.recency.sort_below_ram(new.graph.slots.values())
    return new


def order(planting: Planting, tier: int) -> list[tuple[str, int]]:
    """Who leaves a tier next: kind and end, the coldest first."""
    return [(slot.kind, slot.end) for slot in planting.graph.orders[tier]]


def leaving(planting: Planting, tier: int) -> list[tuple[str, int]]:
    """All that leave a tier, in their order."""
    found = []
    while (slot := planting.evict(tier)) is not None:
        found.append((slot.kind, slot.end))
        planting.graph.check_integrity()
    return found
