"""What a store adds: which blocks of a prompt are new, whose rows come from a twin's codes and whose are encoded.

The work goes in batches of blocks, each in three steps: planned under the lock (what is missing, RAM reserved, sources
pinned), encoded outside it on the caller's thread, published under it. Rows that any known block has already, and rows
that a live cache has coded, are copied as codes, never encoded again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from prefixcache.budget import Reservation
from prefixcache.codecs.interchange import name_of
from prefixcache.image import Blueprint, Draft, Image, Meta, Spec
from prefixcache.keys import BLOCK, TOKEN_BYTES, canonical, chain
from prefixcache.layers import live_codes
from prefixcache.layers.adapters import Leaf
from prefixcache.layers.encode import Target, describe_state, encode, write_state
from prefixcache.layers.levels import LevelSet, measure_all
from prefixcache.layers.live_codes import BlockLevels, all_coded, differing
from prefixcache.layers.plan import Section, extra_of, held_mask, mask_from, mask_of, runs_of, window_key
from prefixcache.tiers import Home, Tiers
from prefixcache.tree import BLOCK_BYTES, NODE_BYTES, RAM, SSD, Node, Slot

BATCH = 16  # blocks planned, encoded and published at once


class Source(NamedTuple):
    """Rows taken over as codes: the first `tokens` of a block whose images are these (a window's with its mask).

    Codes keep the levels that they were made with, so the image that takes them over is made with the same.
    """

    tokens: int
    rows: Image | None
    window: Image | None
    mask: tuple[int, ...]


NOTHING = Source(0, None, None, ())


class Job(NamedTuple):
    """One image to make. `start` and `tokens` are its block's; `known` its node when the block stands already."""

    kind: str
    parent: Node
    known: Node | None
    start: int
    tokens: bytes
    key: bytes
    blueprint: Blueprint
    source: Source
    levels: LevelSet | None = None
    mask: tuple[int, ...] = ()
    encoded: tuple[int, ...] = ()  # of a window: for each window of the namespace, the tokens to encode

    def cost(self, slot_bytes: int) -> int:
        """RAM that the job takes, its place in the tree included, where a slot takes `slot_bytes`."""
        node = NODE_BYTES + len(self.tokens) if self.kind == "rows" else 0  # a known one may have left by then
        return self.blueprint.nbytes + slot_bytes + node + (len(self.tokens) if self.kind == "snapshot" else 0)


class Outcome(NamedTuple):
    """What became of a store: tokens that can now be found, tokens and bytes that are new, and whether state was
    kept.
    """

    tokens: int
    new_tokens: int
    new_bytes: int
    snapshot: bool


class Store:
    """One store of `limit` tokens (raw int64 bytes) of a live prompt cache whose leaves are evaluated."""

    def __init__(self, tiers: Tiers, home: Home, raw: bytes, leaves: list[Leaf], with_snapshot: bool, label: str = ""):
        self._tiers, self._home, self._plan, self._leaves = tiers, home, home.plan, leaves
        self._raw = raw
        self._label = label
        self._limit = len(raw) // TOKEN_BYTES
        live_codes.check(home.plan, leaves)
        self._state = describe_state(home.plan, leaves) if with_snapshot else None
        self._pinned: list[Slot] = []
        self._standing: Sequence[Node] = ()  # the blocks that were there before, the last one's rows pinned
        wait = tiers.settings.spill_wait if tiers.settings.spill == "wait" else 0.0
        self._deadline = time.monotonic() + wait  # of all waiting of this store
        self._key_at: dict[int, bytes] = {}  # the key before the last block planned
        self._levels: LevelSet | None = None  # what new rows are encoded with
        self._of_codes: list[BlockLevels] = []  # what rows that live caches have coded already need
        self._adopted: dict[str, LevelSet] = {}

    def run(self) -> Outcome:
        new_tokens, new_bytes, whole = 0, 0, False
        if not all_coded([self._plan.rows, *self._plan.windowed], self._leaves):
            self._levels = self._tiers.levels_for(self._home, self._raw, self._measure)
        try:
            if any(leaf.codes is not None for leaf in self._leaves):
                root = self._home.row.root
                self._of_codes = live_codes.block_levels(root, self._plan, self._leaves, self._limit, self._levels)
            with self._tiers.lock:
                parent = self._skip_known()
            at = parent.end
            while not whole:
                with self._tiers.lock:
                    jobs, parent, at, whole = self._next_jobs(parent, at)
                    jobs, kept, reservation = self._reserve(jobs)
                if reservation is not None:
                    with reservation:
                        images = self._make(jobs)
                        with self._tiers.lock:
                            tokens, nbytes, last, published = self._publish(jobs, images, reservation)
                    new_tokens, new_bytes = new_tokens + tokens, new_bytes + nbytes
                    if last is not None and last.end > parent.end:  # else blocks after it were known
                        parent = last
                    kept = kept and published
                if not kept:
                    break
        finally:
            for levels in (self._levels, *self._adopted.values()):
                self._tiers.let_go(levels)
            depth = self._finish(new_tokens, new_bytes)
        return Outcome(depth, new_tokens, new_bytes, self._state is not None and depth == self._limit)

    def _measure(self) -> LevelSet | None:
        return measure_all(self._home.row.root, self._plan, self._leaves, self._limit)

    # -- planning, under the lock -------------------------------------------------------------------------------------

    def _skip_known(self) -> Node:
        """Keep the leading whole blocks that stand already and whose windows can gain nothing; the last of them."""
        first = self._limit
        for w, window in enumerate(self._plan.windows):
            first = min([first, *(max(a, window.keep) for a, b in self._held(w) if b > window.keep)])
        tree = self._tiers.tree
        path = tree.walk(self._home.space, self._raw, tree.standing(self._standing)).path[: first // BLOCK]
        whole = len(path) - (len(path[-1].tokens) < BLOCK_BYTES if path else 0)
        whole = next((i for i, node in enumerate(path) if node.rows is None), whole)
        self._standing = path[:whole]
        parent = self._standing[-1] if whole else self._home.space.root
        if parent.parent is not None:
            self._key_at = {parent.start: parent.parent.key, parent.end: parent.key}
            self._pin(parent.rows)  # keeps those before it, too
        return parent

    def _next_jobs(self, parent: Node, at: int) -> tuple[list[Job], Node, int, bool]:
        """Jobs for the next blocks from token `at`, below `parent`: the jobs, where to go on, and whether that was
        all: the prompt ends, or RAM has no room for the levels of the next block.
        """
        jobs: list[Job] = []
        expected: Node | None = parent  # None once blocks are new
        key = parent.key
        for _ in range(BATCH):
            tokens = self._raw[at * TOKEN_BYTES : min(at + BLOCK, self._limit) * TOKEN_BYTES]
            if not tokens:
                break
            node, source = self._known(expected, tokens) if expected is not None else (None, NOTHING)
            if node is None or node.rows is None:
                if not self._adopt(at):
                    return jobs, parent, at, True
                jobs.append(self._rows_job(parent, node, at, tokens, key, source))
                own = jobs[-1].key
            else:
                self._pin(node.rows)
                own = node.key
            if (window := self._window_job(parent, node, at, tokens, key, source)) is not None:
                jobs.append(window)
            at += len(tokens) // TOKEN_BYTES
            self._key_at = {at - len(tokens) // TOKEN_BYTES: key}
            key = own
            if node is not None and len(node.tokens) == len(tokens) == BLOCK_BYTES:
                parent = expected = node
            else:
                expected = None
        done = at >= self._limit
        if done and self._state is not None:
            jobs += self._snapshot_job(parent)
        return jobs, parent, at, done

    def _known(self, parent: Node, tokens: bytes) -> tuple[Node | None, Source]:
        """The block that has all of these tokens; else the codes of the longest stretch of them that a block in RAM
        has.
        """
        tree = self._tiers.tree
        exact = tree.child(parent, tokens)
        if exact is not None:
            return exact, NOTHING
        nearest, shared = tree.nearest(parent, tokens)
        if nearest is None or nearest.rows is None:
            return None, NOTHING
        if shared * TOKEN_BYTES == len(tokens):
            return nearest, NOTHING
        if nearest.rows.image is None:
            if not self._has_codes(parent.end, len(tokens) // TOKEN_BYTES):
                self._tiers.counters.recoded_tokens += shared
            return None, NOTHING
        window = _most_rows(nearest, mask_of(0, shared))
        self._pin(nearest.rows, window)
        mask = tuple(m & mask_of(0, shared) for m in window.mask) if window is not None else ()
        return None, Source(shared, nearest.rows.image, window.image if window is not None else None, mask)

    def _rows_job(self, parent: Node, node: Node | None, start: int, tokens: bytes, key: bytes, source: Source) -> Job:
        own, count = chain(key, tokens), len(tokens) // TOKEN_BYTES
        levels, source = self._levels_and_source(start, count, source)
        blueprint = self._blueprint("rows", own, key, start, self._plan.rows_specs(start, count), levels)
        return Job("rows", parent, node, start, tokens, own, blueprint, source, levels)

    def _levels_and_source(self, start: int, count: int, source: Source) -> tuple[LevelSet | None, Source]:
        """The levels of a block's rows: those that its source's codes have, or its own where there is no source.

        A source whose levels are others than those of live codes is left aside, if these are there of all rows: they go in
        as they are.
        """
        levels = self._own_levels(start) if source.rows is None else self._tiers.level_set(source.rows.statistics)
        if self._of_codes:
            apart = differing(self._plan, self._leaves, start + source.tokens, start + count, levels)
            if apart and source.rows is not None and self._has_codes(start, count):
                levels, source = self._own_levels(start), source._replace(tokens=0, rows=None)
                apart = differing(self._plan, self._leaves, start, start + count, levels)
            self._tiers.counters.recoded_tokens += apart
        return levels, source

    def _own_levels(self, start: int) -> LevelSet | None:
        """What rows of the block that begins at `start` are coded with, where they are not copied from another."""
        if not self._of_codes:
            return self._levels
        own = [levels for first, levels in self._of_codes if first <= start]
        return own[-1] if own else self._levels

    def _has_codes(self, start: int, count: int) -> bool:
        """Whether live caches have codes of all that a rows image would be encoded for."""
        return all_coded([section for section, _ in self._plan.in_rows(start, count)], self._leaves)

    def _adopt(self, start: int) -> bool:
        """Hold the levels of live codes of the block that begins at `start`. False where RAM has no room for them."""
        own = self._own_levels(start)
        if own is None or own is self._levels or own.name in self._adopted:
            return True
        held = self._tiers.adopt_levels(self._home, self._raw, own, self._deadline - time.monotonic())
        if held is not None:
            self._adopted[own.name] = held
        return held is not None

    def _window_job(
        self, parent: Node, node: Node | None, start: int, tokens: bytes, key: bytes, source: Source
    ) -> Job | None:
        """The block's window with the rows that the live cache still holds and no image has yet; None when there are
        none.
        """
        windows, limit = self._plan.windows, start + len(tokens) // TOKEN_BYTES
        if not windows:
            return None
        held = tuple(held_mask(self._held(w), start, window.keep, limit) for w, window in enumerate(windows))
        block_tokens, block_key = tokens, chain(key, tokens)
        if node is not None:
            block_tokens, block_key = node.tokens, node.key
            unknown = held
            for old in node.windows:
                unknown = tuple(h & ~m for h, m in zip(unknown, old.mask, strict=True))
            if not any(unknown):
                return None
            taken = _most_rows(node, mask_of(0, BLOCK))  # those on SSD only stay beside the new one
            if taken is not None:
                self._pin(taken)
                source = Source(BLOCK, None, taken.image, taken.mask)
        before = source.mask if source.window is not None else (0,) * len(windows)
        mask = tuple(m | h for m, h in zip(before, held, strict=True))
        if not any(mask):
            return None
        own = window_key(block_key, mask)
        levels = self._levels if source.window is None else self._tiers.level_set(source.window.statistics)
        specs = self._plan.window_specs(mask)
        blueprint = self._blueprint("window", own, block_key, start, specs, levels, extra_of(mask))
        new = tuple(h & ~m for m, h in zip(before, held, strict=True))
        return Job("window", parent, node, start, block_tokens, own, blueprint, source, levels, mask, new)

    def _snapshot_job(self, parent: Node) -> list[Job]:
        """The state at the end, unless it is kept already. It hangs on the last whole block before the boundary."""
        assert self._state is not None
        above = (self._limit - 1) // BLOCK * BLOCK
        while parent.end > above and parent.parent is not None:
            parent = parent.parent
        key, suffix = self._key_at[above], self._raw[above * TOKEN_BYTES :]
        own = chain(key, suffix)
        if (known := self._tiers.tree.slots.get(("snapshot", own))) is not None:
            self._pin(known)
            return []
        dtypes = [name_of(array.dtype) for array in self._state.arrays]
        extra = canonical({"state": self._state.described, "dtypes": dtypes})
        specs = [*self._state.specs(), Spec("tokens", "I64", (len(suffix) // TOKEN_BYTES,))]
        blueprint = self._blueprint("snapshot", own, key, above, specs, None, extra)
        return [Job("snapshot", parent, None, above, suffix, own, blueprint, NOTHING)]

    def _blueprint(
        self,
        kind: str,
        key: bytes,
        parent: bytes,
        start: int,
        specs: list[Spec],
        levels: LevelSet | None,
        extra: str = "{}",
    ) -> Blueprint:
        row = self._home.row
        named = (key.hex(), parent.hex(), row.root.hex(), row.model, row.codec, row.layout)
        meta = Meta(kind, *named, start, levels.name if levels is not None else "", extra)
        return Blueprint(meta, specs)

    def _held(self, window: int) -> tuple[tuple[int, int], ...]:
        """The runs of tokens that every layer of this window still holds."""
        runs: tuple[tuple[int, int], ...] | None = None
        for leaf, layout in zip(self._leaves, self._plan.leaves, strict=True):
            if layout.get("streams") and layout.get("window") == list(self._plan.windows[window]):
                runs = leaf.held if runs is None else _intersect(runs, leaf.held)
        return runs or ()

    def _pin(self, *slots: Slot | None) -> None:
        self._pinned += self._tiers.tree.pin(slot for slot in slots if slot is not None)

    def _reserve(self, jobs: list[Job]) -> tuple[list[Job], bool, Reservation | None]:
        """Room for the jobs, or for as many of the first of them as there is: those, whether it is all, and the room."""
        first, slot_bytes = jobs, self._tiers.tree.slot_bytes
        while first:
            cost = sum(job.cost(slot_bytes) for job in first)
            reservation = self._tiers.reserve(cost, self._deadline - time.monotonic())
            if reservation is not None:
                return first, len(first) == len(jobs), reservation
            # Half a batch, and less, before giving up: the leading blocks are the ones worth most.
            first = first[: len(first) // 2]
        return [], not jobs, None

    # -- encoding, outside the lock -----------------------------------------------------------------------------------

    def _make(self, jobs: list[Job]) -> list[Image]:
        drafts = [job.blueprint.draft() for job in jobs]
        sections = (self._plan.rows, *self._plan.kept, self._plan.sinks, *self._plan.windowed)
        targets: dict[int, tuple[Section, list[Target]]] = {id(section): (section, []) for section in sections}
        for job, draft in zip(jobs, drafts, strict=True):
            if job.kind == "snapshot":
                assert self._state is not None
                write_state(self._state, draft.tensors)
            if job.kind == "window":
                for w, section in enumerate(self._plan.windowed):
                    self._fill_window(job, draft, w, targets[id(section)][1])
                continue
            draft.tensors["tokens"][:] = np.frombuffer(job.tokens, "<i8")
            if job.kind == "rows":
                count = len(job.tokens) // TOKEN_BYTES
                for section, tokens in self._plan.in_rows(job.start, count):
                    self._fill_rows(job, draft, section, tokens, targets[id(section)][1])
        for section, own in targets.values():
            encode(section, self._leaves, own)
        return [draft.seal() for draft in drafts]

    @staticmethod
    def _fill_rows(job: Job, draft: Draft, section: Section, count: int, targets: list[Target]) -> None:
        """Codes from the source, and a target for what is to be encoded."""
        copied = min(job.source.tokens, count)
        if copied and job.source.rows is not None:
            source = job.source.rows.tensors()
            for group in section.groups:
                for name in group.names:
                    draft.tensors[name][:copied] = source[name][:copied]
        if copied < count:
            targets.append(Target(job.start + copied, job.start + count, draft.tensors, copied, job.levels))

    def _fill_window(self, job: Job, draft: Draft, w: int, targets: list[Target]) -> None:
        mask, new = job.mask[w], job.encoded[w]
        if job.source.window is not None:
            source, old = job.source.window.tensors(), mask & ~new
            stored = mask_from(job.source.window.header()[0].extra)[w]
            for first, last in runs_of(old):
                into = (mask & mask_of(0, first)).bit_count()
                out = (stored & mask_of(0, first)).bit_count()
                for group in self._plan.windowed[w].groups:
                    for name in group.names:
                        draft.tensors[name][into : into + last - first] = source[name][out : out + last - first]
        for first, last in runs_of(new):
            into = (mask & mask_of(0, first)).bit_count()
            targets.append(Target(job.start + first, job.start + last, draft.tensors, into, job.levels))

    # -- publishing, under the lock -----------------------------------------------------------------------------------

    def _publish(
        self, jobs: list[Job], images: list[Image], reservation: Reservation
    ) -> tuple[int, int, Node | None, bool]:
        """New tokens, new bytes, the last whole block of the jobs (None when it stood already), and whether all went
        in.
        """
        tree = self._tiers.tree
        tokens = nbytes = 0
        if self._tiers.homes.get(self._home.row.root) is not self._home:
            return tokens, nbytes, None, False  # the namespace held nothing and was dropped meanwhile
        made: dict[int, Node] = {}  # by end
        last: Node | None = None
        for job, image in zip(jobs, images, strict=True):
            node: Node | None = made.get(job.start, job.parent)
            if job.kind == "window":
                node = made.get(job.start + len(job.tokens) // TOKEN_BYTES, job.known)
            if node is None or not _stands(tree.slots, node):
                return tokens, nbytes, last, False  # removed meanwhile
            if image.statistics and image.statistics not in tree.shared:
                return tokens, nbytes, last, False  # so were the codes that it took over, and their levels
            if job.kind == "rows":
                assert node.end == job.start
                node = tree.grow(node, job.tokens, reservation, job.key, self._label)
                if node is None:
                    self._tiers.counters.collisions += 1
                    return tokens, nbytes, last, False
                made[node.end] = node
                last = node if len(job.tokens) == BLOCK_BYTES else last
            if self._enter(job, node, image, reservation):
                nbytes += image.nbytes
                if job.kind == "rows":
                    tokens += len(job.tokens) // TOKEN_BYTES - job.source.tokens
        return tokens, nbytes, last, True

    def _enter(self, job: Job, node: Node, image: Image, reservation: Reservation) -> bool:
        """Give the image its place in the tree. False when another thread was first."""
        tiers = self._tiers
        slot = Slot(job.kind, node, job.key, image.nbytes, job.tokens if job.kind == "snapshot" else b"", job.mask)
        slot.checksum, slot.created, slot.tick = image.checksum, time.time(), tiers.tree.clock
        slot.needs = image.statistics
        if not tiers.tree.attach(slot, reservation):
            return False
        tiers.tree.enter(slot, RAM, image=image, reservation=reservation)
        self._pin(slot)
        tiers.drop_superseded(slot)
        return True

    def _finish(self, new_tokens: int, new_bytes: int) -> int:
        """Touch the path, let go of it, write ahead. Returns the depth that can be found now."""
        tiers = self._tiers
        with tiers.lock:
            walk = tiers.tree.walk(self._home.space, self._raw, tiers.tree.standing(self._standing))
            depth = tiers.tree.reach(walk, SSD, self._limit)
            tiers.tree.stored(tiers.tree.serving(walk, depth))
            tiers.unpin(self._pinned)
            tiers.counters.stores += 1
            tiers.counters.stored_tokens += new_tokens
            tiers.counters.stored_bytes += new_bytes
            tiers.counters.shared_tokens += max(depth - new_tokens, 0)
            tiers.counters.unkept_tokens += self._limit - depth
            tiers.spill_ahead(new_bytes)
        return depth


def _most_rows(node: Node, wanted: int) -> Slot | None:
    """Of a block's windows in RAM the one that has most rows of the `wanted` tokens (a bit each)."""
    here = (slot for slot in node.windows if slot.image is not None)
    return max(here, key=lambda slot: sum((m & wanted).bit_count() for m in slot.mask), default=None)


def _stands(slots: dict[tuple[str, bytes], Slot], node: Node) -> bool:
    """Whether a node is a root, or still in the tree with its rows."""
    return node.parent is None or (node.rows is not None and slots.get(("rows", node.key)) is node.rows)


def _intersect(a: tuple[tuple[int, int], ...], b: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    pairs = ((max(x[0], y[0]), min(x[1], y[1])) for x in a for y in b)
    return tuple((first, last) for first, last in pairs if first < last)
