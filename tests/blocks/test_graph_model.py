"""The tree and the budget against a plain model, step by step.

The model is written from the design and knows no tree: a dict of what is stored, keyed by kind and by *all* tokens up to
its end, and for each tier a list of those keys, the coldest first. Depths are found by comparing with everything stored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from prefixcache.blocks.eviction import eviction_victim
from prefixcache.blocks.lookup import required_images
from prefixcache.blocks.node import BLOCK_BYTES, RAM, Node, Slot, Window
from prefixcache.keys import BLOCK, TOKEN_BYTES
from tests.blocks.planting import SSD, TIERS, Planting, raw, restarted, runs

SPACES = {
    "rows": ((), False),
    "rotating": ((Window(300),), False),
    "narrow": ((Window(30),), False),
    "rotating and keep": ((Window(200, keep=4), Window(520)), False),
    "chunked": ((Window(512, chunked=True),), False),
    "chunked and rotating": ((Window(300, chunked=True), Window(100)), False),
    "snapshots": ((), True),
    "windows and snapshots": ((Window(300),), True),
}

# Kind (of a window with its masks), and the raw tokens from the prompt's first to the end of the block or boundary.
Key = tuple[str, bytes]


@dataclass(eq=False)
class Kept:
    """One image, as the model knows it."""

    key: Key
    slot: Slot
    tiers: set[int] = field(default_factory=set)
    mask: tuple[int, ...] = ()

    @property
    def kind(self) -> str:
        return self.key[0].split()[0]

    @property
    def prefix(self) -> bytes:
        return self.key[1]

    @property
    def hangs_on(self) -> bytes:
        """The block that must be there for it: its own for a window, the one before for rows and snapshots."""
        if self.kind == "window":
            return self.prefix
        return self.prefix[: (len(self.prefix) - 1) // BLOCK_BYTES * BLOCK_BYTES]


def key_of(slot: Slot) -> Key:
    kind = f"{slot.kind} {slot.mask}" if slot.kind == "window" else slot.kind
    return kind, prefix_of(slot.node) + slot.suffix


@lru_cache(1000)
def prefix_of(node: Node) -> bytes:
    return b"" if node.parent is None else prefix_of(node.parent) + node.tokens


def common(a: bytes, b: bytes) -> int:
    low, high = 0, min(len(a), len(b)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if a[: middle * TOKEN_BYTES] == b[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low


def ones(first: int, last: int) -> int:
    return sum(1 << i for i in range(first, last)) if last - first < 2 else (1 << last) - (1 << first)


def needed(window: Window, boundary: int) -> int:
    """The tokens whose rows a windowed layer needs at a boundary, a bit each; the `keep` first are kept elsewhere."""
    if window.chunked:
        start = boundary - boundary % window.size
        return ones(start - start % BLOCK, boundary)
    if boundary <= window.size:
        return ones(min(window.keep, boundary), boundary)
    return ones(min(boundary - window.size + window.keep + 1, boundary), boundary)


LONGEST = 900


class Prompt(list):
    """Tokens that a failing example can print."""

    def __repr__(self) -> str:
        return f"Prompt(runs{tuple((token, len(list(same))) for token, same in groupby(self))})"


prompts = st.lists(
    st.tuples(st.sampled_from([0, 1, 2]), st.sampled_from([1, 44, 100, 200, 255, 256, 257, 300])),
    min_size=1,
    max_size=4,
).map(lambda pairs: Prompt(runs(*pairs)[:LONGEST]))


class TreeMachine(RuleBasedStateMachine):
    windows: tuple[Window, ...] = ()
    snapshots = False
    lossy = False

    def __init__(self) -> None:
        super().__init__()
        self.planting = Planting(self.windows, self.snapshots)
        self.kept: dict[Key, Kept] = {}
        self.order: tuple[list[Kept], list[Kept]] = ([], [])
        self.pinned: list[list[Slot]] = []
        self.stored: list[list[int]] = []
        # What was durable, and how deep; nothing left the SSD since.
        self.promised: dict[bytes, tuple[list[int], int]] = {}

    # -- the model ----------------------------------------------------------------------------------------------------

    def is_in(self, tier: int, union: bool = True) -> dict[Key, Kept]:
        """What is in a tier; with `union` the SSD's includes what is in RAM."""
        wanted = {RAM, SSD} if tier == SSD and union else {tier}
        return {key: kept for key, kept in self.kept.items() if kept.tiers & wanted}

    def depths(self, tokens: bytes, tier: int) -> list[int]:
        """How many leading tokens each stored sequence of blocks, complete in the tier, shares with these."""
        here = self.is_in(tier)
        found = [0]
        for kind, prefix in here:
            above = range(BLOCK_BYTES, len(prefix), BLOCK_BYTES)
            if kind == "rows" and all(("rows", prefix[:n]) in here for n in above):
                found.append(common(prefix, tokens))
        return found

    def window_rows(self, tokens: bytes, kept: Kept) -> list[int]:
        """Of a window image the rows that these tokens may use, a bit a token: of those that it shares with them."""
        start, shared = (len(kept.prefix) - 1) // BLOCK_BYTES * BLOCK, common(kept.prefix, tokens)
        return [(mask << start) & ones(0, shared) for mask in kept.mask]

    def boundaries(self, tokens: bytes, tier: int, depth: int) -> int:
        """The deepest boundary at or before `depth` that can be hit."""
        here = self.is_in(tier)
        have = [0] * len(self.windows)
        for window in here.values():
            if window.kind == "window":
                have = [h | rows for h, rows in zip(have, self.window_rows(tokens, window), strict=True)]
        candidates = list(range(depth, 0, -1))
        if self.snapshots:
            candidates = [b for b in candidates if ("snapshot", tokens[: b * TOKEN_BYTES]) in here]
        for boundary in candidates:
            if not any(needed(w, boundary) & ~h for w, h in zip(self.windows, have, strict=True)):
                return boundary
        return 0

    def warm(self, tier: int, slots: list[Slot]) -> None:
        for slot in slots:
            kept = self.kept[key_of(slot)]
            if kept in self.order[tier]:
                self.order[tier].remove(kept)
                self.order[tier].append(kept)

    def touched(self, slots: list[Slot]) -> None:
        self.warm(RAM, slots)
        self.warm(SSD, slots)

    def entered(self, slots: list[Slot], tier: int) -> None:
        for slot in slots:
            kept = self.kept.setdefault(key_of(slot), Kept(key_of(slot), slot, mask=slot.mask))
            kept.tiers.add(tier)
            if kept not in self.order[SSD]:
                self.order[SSD].append(kept)
            if tier == RAM:
                self.order[RAM].append(kept)

    def boundary_served(self, row: Kept, tier: int) -> bool:
        """Whether the rows lie on the way to, or under, a window or snapshot of the tier."""
        whole = len(row.prefix) % BLOCK_BYTES == 0  # nothing hangs on a tail
        for other in self.is_in(tier, union=False).values():
            if other.kind == "rows":
                continue
            if other.hangs_on == row.prefix or (whole and other.hangs_on.startswith(row.prefix)):
                return True
            if other.kind == "snapshot" and other.hangs_on == row.hangs_on and row.prefix.startswith(other.prefix):
                return True
        return False

    def leave(self, slot: Slot, tier: int) -> None:
        """An image leaves a tier; checks that only rows which lost their last boundary are moved, and to the front."""
        kept = self.kept[key_of(slot)]
        before = {k: self.boundary_served(k, tier) for k in self.order[tier] if k.kind == "rows"}
        self.planting.graph.drop(slot, tier)
        self._forget(kept, tier)
        if kept.kind == "rows":
            return
        unserved = {k for k in before if tier in k.tiers and not self.boundary_served(k, tier)}
        lost = {k for k in unserved if before[k]}
        now = [self.kept[key_of(s)] for s in self.planting.graph.orders[tier]]
        moved = _moved(self.order[tier], now)
        assert moved <= unserved, "rows that a boundary needs went to the front"
        chunks = [w.size for w in self.windows if w.chunked]
        if len(chunks) < len(self.windows) or self.snapshots:
            assert lost <= set(now[: len(unserved)]), "rows that served nothing else stay behind"
        for i, one in enumerate(now[: len(moved)]):
            assert not any(later.hangs_on == one.prefix for later in now[i + 1 : len(moved)] if later.kind == "rows")
        self.order[tier][:] = now

    def _forget(self, kept: Kept, tier: int) -> None:
        kept.tiers.discard(tier)
        if tier == RAM and kept in self.order[RAM]:
            self.order[RAM].remove(kept)
        if not kept.tiers:
            self.order[SSD].remove(kept)
            del self.kept[kept.key]

    def learn(self, change) -> list[Slot]:
        """Run a change of several steps that the tree itself does; take over what left by it."""
        graph = self.planting.graph
        drop = graph.drop

        def watched(slot: Slot, tier: int) -> None:
            if slot.is_in(tier):
                graph.drop = drop
                try:
                    self.leave(slot, tier)
                finally:
                    graph.drop = watched

        place = graph.place

        def entered(slot: Slot, tier: int, **how) -> None:
            place(slot, tier, **how)
            self.entered([slot], tier)

        touch = graph.recency.touch

        def touched(slots, hit: bool = False) -> None:
            slots = list(slots)
            touch(slots, hit)
            self.touched(slots)

        graph.drop, graph.place, graph.recency.touch = watched, entered, touched
        try:
            return change()
        finally:
            del graph.drop, graph.place, graph.recency.touch

    # -- steps --------------------------------------------------------------------------------------------------------

    @initialize(first=prompts)
    def begin(self, first: list[int]) -> None:
        self.store(first, 0, True)

    @rule(tokens=prompts, held=st.sampled_from([0, 0, 100, 300, 512, 700]), snapshot=st.booleans())
    def store(self, tokens: list[int], held: int, snapshot: bool) -> None:
        self.learn(lambda: self.planting.store(tokens, held=min(held, len(tokens) - 1), snapshot=snapshot))
        self.stored.append(tokens)
        if not self.windows and not self.snapshots:
            assert self.planting.reach(tokens, SSD) == len(tokens)

    @rule(data=st.data(), cut=st.integers(0, LONGEST), more=prompts)
    def go_on(self, data, cut: int, more: list[int]) -> None:
        """A prompt that shares some tokens with one stored before."""
        old = data.draw(st.sampled_from(self.stored))
        self.store(Prompt([*old[: cut or len(old)], *more][:LONGEST]), max(len(old) - 50, 0), True)

    @rule(tokens=prompts)
    def hit(self, tokens: list[int]) -> None:
        self.learn(lambda: self.planting.touch(tokens))

    @rule(data=st.data())
    def hit_again(self, data) -> None:
        self.hit(data.draw(st.sampled_from(self.stored)))

    @rule(tokens=prompts, limit=st.integers(0, LONGEST))
    def match(self, tokens: list[int], limit: int) -> None:
        self.check_depths(tokens, limit)

    @rule(data=st.data(), tail=st.lists(st.sampled_from([0, 1, 2, 3]), max_size=3), cut=st.integers(0, LONGEST))
    def match_again(self, data, tail: list[int], cut: int) -> None:
        known = data.draw(st.sampled_from(self.stored))
        self.check_depths([*known[: cut or len(known)], *tail], LONGEST)

    @rule(n=st.integers(1, 6))
    def spill(self, n: int) -> None:
        dirty = [s for s in self.planting.graph.orders[RAM] if not s.disk][:n]
        self.learn(lambda: self.planting.spill(*dirty))

    @rule(to_ssd=st.booleans())
    def flush(self, to_ssd: bool) -> None:
        """All is durable, and, where it goes `to_ssd`, no longer in RAM: what is stored next finds it on SSD only."""
        self.learn(self.planting.spill_all)
        while to_ssd and (slot := eviction_victim(self.planting.graph, RAM)) is not None:
            self.leave(slot, RAM)
        self.what_was_durable_is_had_as_deep()
        self.promised = {raw(tokens): (tokens, self.planting.reach(tokens, SSD)) for tokens in self.stored}

    @rule(data=st.data(), cut=st.sampled_from([0, 1, 50]), more=prompts, held=st.sampled_from([30, 100, 300, 512]))
    def go_on_from_ssd(self, data, cut: int, more: list[int], held: int) -> None:
        """A longer prompt, or one that parts from another shortly before its end, whose windows hold their last rows only."""
        old = data.draw(st.sampled_from(self.stored))
        self.flush(True)
        longer = Prompt([*old[: max(len(old) - cut, 1)], *more][:LONGEST])
        self.store(longer, max(len(longer) - held, 0), True)

    @rule(tier=st.sampled_from(TIERS), n=st.sampled_from([1, 2, 3, 4, 9]))
    def evict(self, tier: int, n: int) -> None:
        if tier == SSD:
            self.promised.clear()
        for _ in range(n):
            slot = eviction_victim(self.planting.graph, tier)
            assert slot is self.coldest(tier)
            if slot is None:
                return
            if tier == RAM and not slot.disk and n % 2:
                self.learn(lambda slot=slot: self.planting.spill(slot))
            self.leave(slot, tier)

    def coldest(self, tier: int) -> Slot | None:
        for kept in self.order[tier]:
            here = self.is_in(tier, union=RAM not in kept.tiers).values()
            hanging = any(k is not kept and k.hangs_on == kept.prefix for k in here)
            whole = len(kept.prefix) % BLOCK_BYTES == 0
            window = any(k.kind == "window" and k.prefix == kept.prefix for k in here)
            if (
                tier in kept.tiers
                and not kept.slot.pins
                and not (kept.kind == "rows" and ((hanging and whole) or window))
            ):
                return kept.slot
        return None

    @rule(data=st.data())
    def promote(self, data) -> None:
        tokens = data.draw(st.sampled_from(self.stored))
        deepest = self.planting.reach(tokens, SSD)
        self.learn(lambda: self.planting.promote(tokens))
        assert self.planting.reach(tokens, RAM) == deepest

    @rule(data=st.data())
    def pin(self, data) -> None:
        tokens = data.draw(st.sampled_from(self.stored))
        self.pinned.append(self.planting.graph.pin(self.planting.serving(tokens, SSD)))

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data) -> None:
        self.planting.graph.unpin(self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1))))

    @precondition(lambda self: self.lossy and self.kept)
    @rule(data=st.data())
    def lose(self, data) -> None:
        """A file went bad, or an image was removed."""
        self.promised.clear()
        kept = data.draw(st.sampled_from(sorted(self.kept.values(), key=lambda k: k.key)))
        for tier in data.draw(st.sampled_from([(SSD,), (SSD, RAM)])):
            if tier in kept.tiers:
                self.leave(kept.slot, tier)

    @rule()
    def restart(self) -> None:
        old = self.planting
        if self.lossy and any(
            k.hangs_on and ("rows", k.hangs_on) not in self.is_in(SSD, False) for k in self.is_in(SSD, False).values()
        ):
            return  # tiers leave out what has nothing to hang on
        self.planting = restarted(old, list(old.graph.orders[SSD]))
        self.pinned.clear()
        ticks = [slot.tick for slot in self.planting.graph.orders[SSD]]
        assert ticks == sorted(ticks)
        slots = {key_of(slot): slot for slot in self.planting.graph.slots.values()}
        assert slots.keys() == self.is_in(SSD, union=False).keys()
        self.kept = {key: Kept(key, slot, {SSD}, slot.mask) for key, slot in slots.items()}
        self.order = [], [self.kept[key_of(slot)] for slot in self.planting.graph.orders[SSD]]
        for i, one in enumerate(self.order[SSD]):
            for later in self.order[SSD][i + 1 :]:
                if one.slot.tick == later.slot.tick:
                    assert later.hangs_on != one.prefix or one.kind != "rows", "the block left before what hangs on it"

    # -- checks -------------------------------------------------------------------------------------------------------

    def check_depths(self, tokens: list[int], limit: int) -> None:
        data, planting = raw(tokens), self.planting
        planting.graph.visits = 0
        walk = planting.walk(tokens)
        assert planting.graph.visits <= len(walk.path) + 1 + 4
        path = [key_of(Slot("rows", node, b"", 0))[1] for node in walk.nodes]
        for tier in TIERS:
            ideal = max(self.depths(data, tier))
            rows = 0
            here = self.is_in(tier)
            for node, prefix in zip(walk.nodes, path, strict=True):
                if ("rows", prefix) not in here:
                    break
                rows = min(node.end, walk.depth)
            assert rows <= ideal
            if not self.lossy:
                siblings = walk.nodes[-1].parent.children if walk.nodes else planting.tree.root.children
                if tier == SSD or rows == walk.depth or (len(siblings) <= 2 and ideal == walk.depth):
                    assert rows == ideal
                assert rows >= ideal // BLOCK * BLOCK
            boundary = self.boundaries(data, tier, min(rows, limit))
            assert planting.reach(tokens, tier, limit) == boundary
            self.check_serving(walk, path, boundary, tier)

    def check_serving(self, walk, path: list[bytes], boundary: int, tier: int) -> None:
        """It reads the rows of every block, and windows that have all that is needed, each of them some that no other has."""
        serving = [key_of(slot) for slot in required_images(walk, boundary, tier)]
        wanted = {
            ("rows", p) for p in path if (len(p) - 1) // BLOCK_BYTES * BLOCK < boundary and ("rows", p) in self.kept
        }
        if boundary and self.snapshots:
            wanted.add(("snapshot", walk.token_bytes[: boundary * TOKEN_BYTES]))
        windows = [self.kept[key] for key in serving if self.kept[key].kind == "window"]
        missing = [needed(w, boundary) for w in self.windows]
        for window in windows:
            assert window.key in self.is_in(tier)
            rows = self.window_rows(walk.token_bytes, window)
            assert any(m & r for m, r in zip(missing, rows, strict=True)), "read for nothing"
            missing = [m & ~r for m, r in zip(missing, rows, strict=True)]
        assert not any(missing)
        assert {key for key in serving if self.kept[key].kind != "window"} == wanted & self.kept.keys()
        assert len(serving) == len(set(serving))
        places = {key: i for i, key in enumerate(serving)}
        for key, place in places.items():
            assert places.get(("rows", self.kept[key].hangs_on), place) >= place, "not tail first"

    @invariant()
    def the_tree_is_sound(self) -> None:
        self.planting.graph.check_integrity()

    @invariant()
    def the_tree_holds_what_the_model_holds(self) -> None:
        graph = self.planting.graph
        assert {key_of(slot) for slot in graph.slots.values()} == self.kept.keys()
        for kept in self.kept.values():
            assert {tier for tier in TIERS if kept.slot.is_in(tier)} == kept.tiers
        for tier in TIERS:
            assert [key_of(slot) for slot in graph.orders[tier]] == [kept.key for kept in self.order[tier]]

    @invariant()
    def what_was_durable_is_had_as_deep(self) -> None:
        if self.lossy:  # a lookup may end at a block whose rows went bad, although a sibling has them
            return
        for tokens, depth in self.promised.values():
            assert self.planting.reach(tokens, SSD) >= depth

    @invariant()
    def nothing_hangs_on_what_left(self) -> None:
        if self.lossy:
            return
        for tier in TIERS:
            here = self.is_in(tier, union=False)
            for kept in here.values():
                # What is stored below blocks that are on SSD only stands alone in RAM until they are promoted.
                assert not kept.hangs_on or ("rows", kept.hangs_on) in (self.kept if tier == RAM else here)

    @invariant()
    def a_block_is_never_colder_than_what_hangs_on_it(self) -> None:
        if self.lossy or self.windows or self.snapshots:
            return
        for tier in TIERS:
            place = {kept.key: i for i, kept in enumerate(self.order[tier]) if tier in kept.tiers}
            for kept in self.order[tier]:
                if tier in kept.tiers and ("rows", kept.hangs_on) in place:
                    assert place["rows", kept.hangs_on] > place[kept.key]


def _moved(before: list[Kept], now: list[Kept]) -> set[Kept]:
    """Who went to the front, given that the others keep their order."""
    assert set(before) == set(now)
    rest = len(now)
    while rest > 0 and _in_order(before, now[rest - 1 :]):
        rest -= 1
    return set(now[:rest])


def _in_order(whole: list[Kept], part: list[Kept]) -> bool:
    places = [whole.index(kept) for kept in part]
    return places == sorted(places)


@pytest.mark.parametrize("lossy", [False, True], ids=["sound", "lossy"])
@pytest.mark.parametrize("space", SPACES)
def test_the_tree_does_what_the_model_does(space: str, lossy: bool) -> None:
    windows, snapshots = SPACES[space]
    machine = type("Machine", (TreeMachine,), {"windows": windows, "snapshots": snapshots, "lossy": lossy})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=40, stateful_step_count=25, suppress_health_check=list(HealthCheck), database=None
        ),
    )
