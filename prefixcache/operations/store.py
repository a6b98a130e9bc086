"""What a store adds: which blocks of a prompt are new, whose rows come from a twin's codes and whose are encoded.

The work goes in batches of blocks, each in three steps: planned under the lock (what is missing, RAM reserved, sources
pinned), encoded outside it on the caller's thread, published under it. Rows that any known block has already, and rows
that a live cache has coded, are copied as codes, never encoded again.
"""

from __future__ import annotations

import time
from typing import NamedTuple, cast

import numpy as np

from prefixcache.blocks.budget import Reservation
from prefixcache.blocks.graph import NODE_BYTES
from prefixcache.blocks.lookup import hit_depth, required_images
from prefixcache.blocks.masks import extra_of, held_mask, mask_from, mask_of, runs_of, window_key
from prefixcache.blocks.node import BLOCK_BYTES, RAM, Node, Slot
from prefixcache.codecs import RawRows
from prefixcache.codecs.interchange import name_of
from prefixcache.codecs.threads import WORTH_A_THREAD, share_out
from prefixcache.image import DTYPES, ROWS, SNAPSHOT, WINDOW, Blueprint, Draft, Image, Kind, Meta, Spec
from prefixcache.keys import BLOCK, TOKEN_BYTES, canonical, chain
from prefixcache.layers import levels, live_codes
from prefixcache.layers.adapters import Leaf
from prefixcache.layers.decoded import Decoded
from prefixcache.layers.encode import Target, encode
from prefixcache.layers.image_layout import Section
from prefixcache.layers.live_codes import differing
from prefixcache.layers.recode import copy_stored, decode_stored, encode_stored
from prefixcache.layers.snapshots import describe_state, write_state
from prefixcache.tiers.namespace import Namespace
from prefixcache.tiers.prompt import Prompt
from prefixcache.tiers.storage import Storage

BATCH = 16  # blocks planned, encoded and published at once


class Source(NamedTuple):
    """Rows taken over as codes: the first `tokens` of a block whose images are these (a window's with its mask).

    Codes keep the levels that they were made with, so the image that takes them over has the same.
    """

    tokens: int
    rows: Image | None
    window: Image | None
    mask: tuple[int, ...]
    known: int = 0  # tokens whose rows stand there, taken over or not
    coded: bool = False  # whether it is a whole block's


NOTHING = Source(0, None, None, ())


class Job(NamedTuple):
    """One image to make. `start` and `tokens` are its block's; `known` its node when the block stands already."""

    kind: Kind
    parent: Node
    known: Node | None
    start: int
    tokens: bytes
    key: bytes
    blueprint: Blueprint
    source: Source
    coded: bool = True  # as a whole block's rows are; else as a tail's
    mask: tuple[int, ...] = ()
    encoded: tuple[int, ...] = ()  # of a window: for each window of the namespace, the tokens to encode

    def cost(self, slot_bytes: int) -> int:
        """RAM that the job takes, its place in the tree included, where a slot takes `slot_bytes`."""
        node = NODE_BYTES + len(self.tokens) if self.kind == ROWS else 0  # a known one may have left by then
        return self.blueprint.nbytes + slot_bytes + node + (len(self.tokens) if self.kind == SNAPSHOT else 0)


class GrownWindow(NamedTuple):
    """A window of a block that is whole now, some of whose rows were a tail's: `rows`, as they are, of
    `plan.window_tails[window]`, to be coded into `tensors`; the first `sinks` say nothing of the levels."""

    window: int
    sinks: int
    rows: dict[str, np.ndarray]
    tensors: dict[str, np.ndarray]


class Outcome(NamedTuple):
    """What became of a store: tokens that can now be found, tokens and bytes that are new, and whether state was
    kept.
    """

    tokens: int
    new_tokens: int
    new_bytes: int
    snapshot: bool


class Store:
    """One store of the first `limit` tokens of a prompt, from a live prompt cache whose leaves are evaluated."""

    def __init__(
        self,
        storage: Storage,
        namespace: Namespace,
        prompt: Prompt,
        limit: int,
        leaves: list[Leaf],
        with_snapshot: bool,
        label: str = "",
        back: Decoded | None = None,
    ):
        """`back` gets what a fetch would give of whole blocks, and puts it into the live cache batch by batch."""
        self._storage, self._namespace, self._plan, self._leaves = storage, namespace, namespace.plan, leaves
        self._prompt = prompt
        self._label = label
        self._limit = limit
        live_codes.check(namespace.plan, leaves)
        self._state = describe_state(namespace.plan, leaves) if with_snapshot else None
        self._pinned: list[Slot] = []
        self._known_blocks: list[Node] = []  # whole ones that stood already: decoded into the live cache
        wait = storage.settings.spill_wait if storage.settings.spill == "wait" else 0.0
        self._deadline = time.monotonic() + wait  # of all waiting of this store
        self._key_at: dict[int, bytes] = {}  # the key before the last block planned
        self._back = back
        # Rows that live caches have coded are left so, a tail's too: to decode them would be to code them twice.
        self._has_codes = any(leaf.codes is not None for leaf in leaves)

    def run(self) -> Outcome:
        new_tokens, new_bytes, whole = 0, 0, False
        try:
            with self._storage.lock:
                parent = self._skip_known()
            at = parent.end
            while not whole:
                with self._storage.lock:
                    jobs, parent, at, whole = self._next_jobs(parent, at)
                    jobs, kept, reservation = self._reserve(jobs)
                if reservation is not None:
                    with reservation:
                        images = self._make(jobs)
                        with self._storage.lock:
                            tokens, nbytes, last, published = self._publish(jobs, images, reservation)
                    new_tokens, new_bytes = new_tokens + tokens, new_bytes + nbytes
                    if self._back is not None:  # here, not at the end: decoded rows of a long prompt are large
                        self._back.apply(self._leaves)
                    if last is not None and last.end > parent.end:  # else blocks after it were known
                        parent = last
                    kept = kept and published
                if not kept:
                    break
            if self._back is not None:
                self._decode_known(self._back)
        finally:
            depth = self._finish(new_tokens, new_bytes)
        return Outcome(depth, new_tokens, new_bytes, self._state is not None and depth == self._limit)

    def _decode_known(self, back: Decoded) -> None:
        """Blocks that stood already: others computed them, or this cache did before it was asked for."""
        for at, node in enumerate(self._known_blocks):
            if at % BATCH == 0:
                back.apply(self._leaves)
            if node.rows is not None and node.rows.image is not None:
                self._decode_rows(back, node.start, node.rows.image.tensors())
            for window in node.windows:
                if window.image is not None:
                    self._decode_window(back, node.start, window.image.tensors(), window.mask)
        back.apply(self._leaves)

    def _decode_rows(self, back: Decoded, start: int, tensors: dict[str, np.ndarray]) -> None:
        """All that the rows image of a whole block has."""
        for section, count in self._plan.in_rows(start, BLOCK, coded=True):
            self._decode(back, section, start, tensors, slice(0, count))

    def _decode_window(self, back: Decoded, start: int, tensors: dict[str, np.ndarray], mask: tuple[int, ...]) -> None:
        plan, sunk = self._plan, self._plan.sunk(start)
        for w, section in enumerate(plan.windowed):
            here = mask[w] & held_mask(self._held(w), start, plan.windows[w].keep, self._limit)
            for rows, at in zip(runs_of(here), _places_of(here, here, mask[w]), strict=True):
                self._decode(back, section, start + rows[0], tensors, at[1])
            for rows, at in zip(runs_of(here & sunk), _places_of(here & sunk, here, mask[w] & sunk), strict=True):
                self._decode(back, plan.window_sinks[w], start + rows[0], tensors, at[1])

    def _decode(self, back: Decoded, section: Section, first: int, tensors: dict[str, np.ndarray], rows: slice) -> None:
        """These rows, of the tokens from `first` on. Of sinks those that stand as they are, not their codes."""
        for group in section.groups:
            raw = 0 if isinstance(group.codec, RawRows) else self._plan.sink_tokens
            for member in group.members:
                if self._leaves[member.leaf].codes is None:
                    back.decode_rows(group, member, first, rows, tensors, raw)

    # -- planning, under the lock -------------------------------------------------------------------------------------

    def _skip_known(self) -> Node:
        """Keep the leading whole blocks that stand already and whose windows can gain nothing; the last of them."""
        first = self._limit
        for w, window in enumerate(self._plan.windows):
            first = min([first, *(max(a, window.keep) for a, b in self._held(w) if b > window.keep)])
        path = self._prompt.walk(self._namespace).path[: first // BLOCK]
        known = path[:-1] if path and not path[-1].is_whole else path
        known = known[: next((i for i, node in enumerate(known) if node.rows is None), len(known))]
        if self._back is not None:
            since = self._back.since
            self._known_blocks += [node for node in known if node.end > since]
            for node in self._known_blocks:
                self._pin(node.rows, *node.windows)
        parent = known[-1] if known else self._namespace.tree.root
        if parent.parent is not None:
            self._key_at = {parent.start: parent.parent.key, parent.end: parent.key}
            self._pin(parent.rows)  # keeps those before it, too
        return parent

    def _next_jobs(self, parent: Node, at: int) -> tuple[list[Job], Node, int, bool]:
        """Jobs for the next blocks from token `at`, below `parent`: the jobs, where to go on, and whether that was all."""
        jobs: list[Job] = []
        expected: Node | None = parent  # None once blocks are new
        key = parent.key
        for _ in range(BATCH):
            tokens = self._prompt.token_bytes[at * TOKEN_BYTES : min(at + BLOCK, self._limit) * TOKEN_BYTES]
            if not tokens:
                break
            node, source = self._known(expected, tokens) if expected is not None else (None, NOTHING)
            if node is None or node.rows is None:
                jobs.append(self._rows_job(parent, node, at, tokens, key, source))
                own = jobs[-1].key
            else:
                self._pin(node.rows)
                own = node.key
                # A block that goes on beyond the prompt was not whole when this was computed: its tail stays as it is.
                if self._back is not None and node.is_whole and node.end <= self._limit:
                    self._pin(*node.windows)
                    self._known_blocks.append(node)
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
        graph = self._storage.graph
        exact = graph.child(parent, tokens)
        if exact is not None:
            return exact, NOTHING
        nearest, shared = graph.nearest(parent, tokens)
        if nearest is None or nearest.rows is None:
            return None, NOTHING
        if shared * TOKEN_BYTES == len(tokens):
            return nearest, NOTHING
        coded = self._is_coded(tokens)
        if nearest.rows.image is None:
            # A tail on SSD has its rows as they are; the live cache, too.
            if coded and len(nearest.tokens) == BLOCK_BYTES and not self._has_codes:
                self._storage.counters.recoded_tokens += shared
            return None, NOTHING
        whole = len(nearest.tokens) == BLOCK_BYTES
        # What a live cache has coded of a tail stays codes when the tail grows.
        usable = whole or self._plan.is_coded(nearest.rows.image.tensors()) if coded else not whole
        # Rows that were computed, not fetched, have no codes yet: coded by themselves, a block depends on its prompt alone.
        computed = self._back is not None and parent.end >= self._back.since
        rows = nearest.rows if (usable and not computed) or self._plan.lossless else None
        window = _most_rows(nearest, mask_of(0, shared))
        self._pin(rows, window)
        mask = tuple(m & mask_of(0, shared) for m in window.mask) if window is not None else ()
        images = (rows.image if rows is not None else None, window.image if window is not None else None)
        return None, Source(shared if rows is not None else 0, *images, mask, shared, whole)

    def _is_coded(self, tokens: bytes) -> bool:
        """Whether a block's rows are coded: once it is whole, or where a live cache has coded them."""
        return len(tokens) == BLOCK_BYTES or self._has_codes

    def _rows_job(self, parent: Node, node: Node | None, start: int, tokens: bytes, key: bytes, source: Source) -> Job:
        own, count, coded = chain(key, tokens), len(tokens) // TOKEN_BYTES, self._is_coded(tokens)
        if self._has_codes and source.rows is not None:
            source = self._own_codes_first(start, count, source)
        if not coded and source.rows is not None:
            coded = self._plan.is_coded(source.rows.tensors())
        blueprint = self._blueprint(ROWS, own, key, start, self._plan.rows_specs(start, count, coded))
        return Job(ROWS, parent, node, start, tokens, own, blueprint, source, coded)

    def _own_codes_first(self, start: int, count: int, source: Source) -> Source:
        """A source whose levels are others than those of live codes is left aside: these go in as they are."""
        assert source.rows is not None
        if self._coded_otherwise(start + source.tokens, start + count, source.rows.tensors()):
            return source._replace(tokens=0, rows=None, known=0)
        return source

    def _coded_otherwise(self, first: int, last: int, tensors: dict[str, np.ndarray]) -> int:
        """How many of these tokens live caches have coded with other levels than a rows image has."""
        wanted = [levels.read(group, tensors) for group in self._plan.rows.groups]
        return differing(self._plan, self._leaves, first, last, wanted)

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
        coded = len(block_tokens) == BLOCK_BYTES
        before = source.mask if source.window is not None else (0,) * len(windows)
        if source.coded and not coded and not self._plan.lossless:  # a tail has the rows of the live cache as they are
            before = tuple(m & ~h for m, h in zip(before, held, strict=True))
        mask = tuple(m | h for m, h in zip(before, held, strict=True))
        if not any(mask):
            return None
        own = window_key(block_key, mask)
        blueprint = self._blueprint(
            WINDOW, own, block_key, start, self._plan.window_specs(mask, start, coded), extra_of(mask)
        )
        new = tuple(h & ~m for m, h in zip(before, held, strict=True))
        return Job(WINDOW, parent, node, start, block_tokens, own, blueprint, source, coded, mask, new)

    def _snapshot_job(self, parent: Node) -> list[Job]:
        """The state at the end, unless it is kept already. It hangs on the last whole block before the boundary."""
        assert self._state is not None
        above = (self._limit - 1) // BLOCK * BLOCK
        while parent.end > above and parent.parent is not None:
            parent = parent.parent
        key, suffix = self._key_at[above], self._prompt.token_bytes[above * TOKEN_BYTES : self._limit * TOKEN_BYTES]
        own = chain(key, suffix)
        if (known := self._storage.graph.slots.get((SNAPSHOT, own))) is not None:
            self._pin(known)
            return []
        dtypes = [name_of(array.dtype) for array in self._state.arrays]
        extra = canonical({"state": self._state.described, "dtypes": dtypes})
        specs = [*self._state.specs(), Spec("tokens", "I64", (len(suffix) // TOKEN_BYTES,))]
        blueprint = self._blueprint(SNAPSHOT, own, key, above, specs, extra)
        return [Job(SNAPSHOT, parent, None, above, suffix, own, blueprint, NOTHING)]

    def _blueprint(
        self,
        kind: Kind,
        key: bytes,
        parent: bytes,
        start: int,
        specs: list[Spec],
        extra: str = "{}",
    ) -> Blueprint:
        row = self._namespace.row
        named = (key.hex(), parent.hex(), row.root.hex(), row.model, row.codec, row.layout)
        meta = Meta(kind, *named, start, extra=extra)
        return Blueprint(meta, specs)

    def _held(self, window: int) -> tuple[tuple[int, int], ...]:
        """The runs of tokens that every layer of this window still holds."""
        runs: tuple[tuple[int, int], ...] | None = None
        for leaf, layout in zip(self._leaves, self._plan.leaves, strict=True):
            if layout.get("streams") and layout.get("window") == list(self._plan.windows[window]):
                runs = leaf.held if runs is None else _intersect(runs, leaf.held)
        return runs or ()

    def _pin(self, *slots: Slot | None) -> None:
        self._pinned += self._storage.graph.pin(slot for slot in slots if slot is not None)

    def _reserve(self, jobs: list[Job]) -> tuple[list[Job], bool, Reservation | None]:
        """Room for the jobs, or for as many of the first of them as there is: those, whether it is all, and the room."""
        first, slot_bytes = jobs, self._storage.graph.slot_bytes
        while first:
            cost = sum(job.cost(slot_bytes) for job in first)
            reservation = self._storage.ram.reserve(cost, self._deadline - time.monotonic())
            if reservation is not None:
                return first, len(first) == len(jobs), reservation
            # Half a batch, and less, before giving up: the leading blocks are the ones worth most.
            first = first[: len(first) // 2]
        return [], not jobs, None

    # -- encoding, outside the lock -----------------------------------------------------------------------------------

    def _make(self, jobs: list[Job]) -> list[Image]:
        drafts = [job.blueprint.draft() for job in jobs]
        plan = self._plan
        windows = (*plan.windowed, *plan.window_tails, *plan.window_sinks)
        sections = (plan.rows, plan.tails, *plan.kept, plan.sinks, *windows)
        targets: dict[int, tuple[Section, list[Target]]] = {id(section): (section, []) for section in sections}
        grown: list[GrownWindow] = []
        for job, draft in zip(jobs, drafts, strict=True):
            if job.kind == SNAPSHOT:
                assert self._state is not None
                write_state(self._state, draft.tensors)
            if job.kind == WINDOW:
                for w in range(len(plan.windows)):
                    for section, own in self._fill_window(job, draft, w, grown):
                        targets[id(section)][1].extend(own)
                continue
            draft.tensors["tokens"][:] = np.frombuffer(job.tokens, "<i8")
            if job.kind == ROWS:
                count = len(job.tokens) // TOKEN_BYTES
                for section, tokens in plan.in_rows(job.start, count, job.coded):
                    self._fill_rows(job, draft, section, tokens, targets[id(section)][1])
        for section, own in targets.values():
            encode(section, self._leaves, own, self._back)
        for w, sinks, rows, tensors in grown:
            encode_stored(plan.windowed[w], plan.window_tails[w], rows, tensors, sinks)
        if self._has_codes:
            recoded = sum(
                self._coded_otherwise(
                    job.start + job.source.tokens, job.start + len(job.tokens) // TOKEN_BYTES, draft.tensors
                )
                for job, draft in zip(jobs, drafts, strict=True)
                if job.kind == ROWS
            )
            with self._storage.lock:
                self._storage.counters.recoded_tokens += recoded
        if self._back is not None:
            for job, draft in zip(jobs, drafts, strict=True):
                # Of what was encoded just now the decoded rows are there already; known blocks are decoded at the end.
                if job.kind == WINDOW and job.coded and job.source.window is not None and job.known is None:
                    self._decode_window(self._back, job.start, draft.tensors, job.mask)
        images: list[Image | None] = [None] * len(drafts)

        def seal(first: int, last: int) -> None:
            images[first:last] = [draft.seal() for draft in drafts[first:last]]

        share_out(len(drafts), 1, sum(job.blueprint.nbytes for job in jobs) // WORTH_A_THREAD, seal)
        return cast(list[Image], images)

    def _fill_rows(self, job: Job, draft: Draft, section: Section, count: int, targets: list[Target]) -> None:
        """Codes from the source, and a target for what is to be encoded."""
        copied = min(job.source.tokens, count)
        if copied and job.source.rows is not None:
            self._take_over(section, job.source.rows.tensors(), draft.tensors, [(slice(copied), slice(copied))])
            if self._back is not None and len(job.tokens) == BLOCK_BYTES:
                self._decode(self._back, section, job.start, draft.tensors, slice(0, copied))
        if copied < count:
            raw = self._plan.sink_tokens if section is self._plan.rows else 0
            whole = len(job.tokens) == BLOCK_BYTES
            first, last = job.start + copied, job.start + count
            targets.append(Target(first, last, draft.tensors, copied, copied > 0, self._plan.sink_tokens, raw, whole))

    def _fill_window(
        self, job: Job, draft: Draft, w: int, grown: list[GrownWindow]
    ) -> list[tuple[Section, list[Target]]]:
        """Rows of an older window of the block, and targets for those to encode: in which sections.

        Those of a tail's are coded once the block is whole, together with the new ones: their levels are of all.
        """
        mask, new, plan = job.mask[w], job.encoded[w], self._plan
        coded, tails, sinks = plan.windowed[w], plan.window_tails[w], plan.window_sinks[w]
        section, tensors = coded if job.coded else tails, draft.tensors
        sunk = plan.sunk(job.start) if sinks.groups else 0
        if old := mask & ~new:
            assert job.source.window is not None
            source = job.source.window.tensors()
            stored = mask_from(job.source.window.header()[0].extra)[w]
            pairs, of_sinks = _places_of(old, mask, stored), _places_of(old & sunk, mask & sunk, stored & sunk)
            was_coded = all(name in source for group in coded.groups for name in group.names)
            if plan.lossless or job.coded is was_coded:
                self._take_over(section, source, tensors, pairs)
                if job.coded:
                    self._take_over(sinks, source, tensors, of_sinks)
            elif job.coded:
                rows = {s.name: np.empty(s.shape, DTYPES[s.dtype]) for s in tails.specs(mask.bit_count())}
                grown.append(GrownWindow(w, (mask & sunk).bit_count(), rows, tensors))
                self._take_over(tails, source, rows, pairs)
                copy_stored(sinks, tensors, tails, source, _places_of(old & sunk, mask & sunk, stored))
                section, tensors = tails, rows
            else:
                decode_stored(coded, tails, source, tensors, pairs)
                copy_stored(tails, tensors, sinks, source, _places_of(old & sunk, mask, stored & sunk))
        targets, settled = [], bool(old)
        whole = section is coded and len(job.tokens) == BLOCK_BYTES and job.source.window is None
        for first, last in runs_of(new):
            into = (mask & mask_of(0, first)).bit_count()
            first, last = job.start + first, job.start + last
            targets.append(Target(first, last, tensors, into, settled, plan.sink_tokens, plan.sink_tokens, whole))
            settled = True
        as_they_are = []
        for first, last in runs_of(new & sunk) if job.coded else ():
            into = (mask & sunk & mask_of(0, first)).bit_count()
            as_they_are.append(Target(job.start + first, job.start + last, draft.tensors, into))
        return [(section, targets), (sinks, as_they_are)]

    @staticmethod
    def _take_over(
        section: Section,
        source: dict[str, np.ndarray],
        tensors: dict[str, np.ndarray],
        pairs: list[tuple[slice, slice]],
    ) -> None:
        """Rows as they are coded, into and out of these, and with them their levels."""
        for group in section.groups:
            for name in group.names:
                for into, out in pairs:
                    tensors[name][into] = source[name][out]
            for name in group.level_names:
                tensors[name][...] = source[name]

    # -- publishing, under the lock -----------------------------------------------------------------------------------

    def _publish(
        self, jobs: list[Job], images: list[Image], reservation: Reservation
    ) -> tuple[int, int, Node | None, bool]:
        """New tokens, new bytes, the last whole block of the jobs (None when it stood already), and whether all went
        in.
        """
        graph = self._storage.graph
        tokens = nbytes = 0
        if self._storage.namespaces.get(self._namespace.row.root) is not self._namespace:
            return tokens, nbytes, None, False  # the namespace held nothing and was dropped meanwhile
        made: dict[int, Node] = {}  # by end
        last: Node | None = None
        for job, image in zip(jobs, images, strict=True):
            node: Node | None = made.get(job.start, job.parent)
            if job.kind == WINDOW:
                node = made.get(job.start + len(job.tokens) // TOKEN_BYTES, job.known)
            if node is None or not graph.is_known(node):
                return tokens, nbytes, last, False  # removed meanwhile
            if job.kind == ROWS:
                assert node.end == job.start
                node = graph.grow(node, job.tokens, reservation, job.key, self._label)
                if node is None:
                    self._storage.counters.collisions += 1
                    return tokens, nbytes, last, False
                made[node.end] = node
                last = node if len(job.tokens) == BLOCK_BYTES else last
            if self._enter(job, node, image, reservation):
                nbytes += image.nbytes
                if job.kind == ROWS:
                    tokens += len(job.tokens) // TOKEN_BYTES - job.source.known
        return tokens, nbytes, last, True

    def _enter(self, job: Job, node: Node, image: Image, reservation: Reservation) -> bool:
        """Give the image its place in the tree. False when another thread was first."""
        storage, graph = self._storage, self._storage.graph
        slot = Slot(job.kind, node, job.key, image.nbytes, job.tokens if job.kind == SNAPSHOT else b"", job.mask)
        slot.checksum, slot.created, slot.tick = image.checksum, time.time(), graph.recency.clock
        if not graph.attach(slot, reservation):
            return False
        graph.place(slot, RAM, image=image, reservation=reservation)
        self._pin(slot)
        storage.drop_superseded(slot)
        storage.spilling.write_through([slot])
        return True

    def _finish(self, new_tokens: int, new_bytes: int) -> int:
        """Touch the path, unpin it, write ahead. Returns the depth that can be hit now."""
        storage = self._storage
        with storage.lock:
            graph, counters = storage.graph, storage.counters
            walk = self._prompt.walk(self._namespace)
            depth = hit_depth(walk, graph.last, self._limit)
            graph.recency.request_ended(required_images(walk, depth, graph.last))
            storage.unpin(self._pinned)
            counters.stores += 1
            counters.stored_tokens += new_tokens
            counters.stored_bytes += new_bytes
            counters.shared_tokens += max(depth - new_tokens, 0)
            counters.unkept_tokens += self._limit - depth
            storage.spilling.ahead(new_bytes)
        return depth


def _places_of(rows: int, into: int, out: int) -> list[tuple[slice, slice]]:
    """Where the tokens in mask `rows` stand among those in `into`, and among those in `out`."""
    pairs = []
    for first, last in runs_of(rows):
        a, b = (mask & mask_of(0, first) for mask in (into, out))
        a, b = a.bit_count(), b.bit_count()
        pairs.append((slice(a, a + last - first), slice(b, b + last - first)))
    return pairs


def _most_rows(node: Node, wanted: int) -> Slot | None:
    """Of a block's windows in RAM the one that has most rows of the `wanted` tokens (a bit each)."""
    here = (slot for slot in node.windows if slot.image is not None)
    return max(here, key=lambda slot: sum((m & wanted).bit_count() for m in slot.mask), default=None)


def _intersect(a: tuple[tuple[int, int], ...], b: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    pairs = ((max(x[0], y[0]), min(x[1], y[1])) for x in a for y in b)
    return tuple((first, last) for first, last in pairs if first < last)
