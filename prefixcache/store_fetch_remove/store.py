"""What a store adds: which blocks of a prompt are new, and whose codes their rows are taken over from.

The work goes in batches of blocks, each in steps: planned under the lock (what is missing, sources pinned); sized outside
it, where codes differ in length; RAM reserved under it; made outside it on the caller's thread (`image_maker`); published
under it. What a block decodes to depends on the rows that were first stored of that very block, the same tokens from the
prompt's start on, and on the codec, never on another text that begins alike. Rows that were fetched, and rows that a live
cache has coded, are copied as codes, never encoded again.
"""

from __future__ import annotations

import time
from functools import partial
from typing import NamedTuple

from prefixcache.blocks.budget import Reservation
from prefixcache.blocks.lookup import hit_depth, required_images
from prefixcache.blocks.masks import extra_of, held_mask, mask_of, window_key
from prefixcache.blocks.node import BLOCK_BYTES, RAM, Node, Slot
from prefixcache.codecs.interchange import name_of
from prefixcache.image_format import ROWS, SNAPSHOT, WINDOW, Image, Spec
from prefixcache.keys import BLOCK, TOKEN_BYTES, canonical, chain
from prefixcache.store_fetch_remove.image_maker import BATCH, Maker
from prefixcache.store_fetch_remove.jobs import NOTHING, Job, Source
from prefixcache.tiers.namespace import Namespace
from prefixcache.tiers.prompt import Prompt
from prefixcache.tiers.storage import Storage


class Outcome(NamedTuple):
    """What became of a store: tokens that can now be found, tokens and bytes that are new, and whether state was
    kept.
    """

    tokens: int
    new_tokens: int
    new_bytes: int
    snapshot: bool


class Store:
    """One store of the first `limit` tokens of a prompt, whose images `maker` makes."""

    def __init__(
        self, storage: Storage, namespace: Namespace, prompt: Prompt, limit: int, maker: Maker, label: str = ""
    ):
        self._storage, self._namespace, self._plan, self._maker = storage, namespace, namespace.plan, maker
        self._prompt = prompt
        self._label = label
        self._limit = limit
        self._pinned: list[Slot] = []
        self._known_blocks: list[Node] = []  # whole ones that stood already: decoded into the live cache
        wait = storage.settings.spill_wait if storage.settings.spill == "wait" else 0.0
        self._deadline = time.monotonic() + wait  # of all waiting of this store
        self._key_at: dict[int, bytes] = {}  # the key before the last block planned

    def run(self) -> Outcome:
        new_tokens, new_bytes, whole = 0, 0, False
        try:
            with self._storage.lock:
                parent = self._skip_known()
            at = parent.end
            while not whole:
                with self._storage.lock:
                    jobs, parent, at, whole = self._next_jobs(parent, at)
                jobs = self._maker.encoded(jobs)
                first = jobs[:1]
                with self._storage.lock:
                    jobs, kept, reservation = self._reserve(jobs)
                if reservation is None:
                    self._warn_if_too_large(first)
                else:
                    with reservation:
                        images = self._maker.make(jobs)
                        with self._storage.lock:
                            tokens, nbytes, last, published = self._publish(jobs, images, reservation)
                    new_tokens, new_bytes = new_tokens + tokens, new_bytes + nbytes
                    self._maker.put_back()  # here, not at the end: decoded rows of a long prompt are large
                    if last is not None and last.end > parent.end:  # else blocks after it were known
                        parent = last
                    kept = kept and published
                if not kept or self._ends_at_what_is_not_finite():
                    break
            self._maker.decode_known(self._known_blocks)
        finally:
            depth = self._finish(new_tokens, new_bytes)
        return Outcome(depth, new_tokens, new_bytes, self._maker.state is not None and depth == self._limit)

    def _ends_at_what_is_not_finite(self) -> bool:
        wrong = self._maker.not_finite
        return wrong is not None and wrong.token is not None

    # -- planning, under the lock -------------------------------------------------------------------------------------

    def _skip_known(self) -> Node:
        """Keep the leading whole blocks that stand already and whose windows can gain nothing; the last of them."""
        first = self._limit
        for w, window in enumerate(self._plan.windows):
            first = min([first, *(max(a, window.keep) for a, b in self._maker.held(w) if b > window.keep)])
        path = self._prompt.walk(self._namespace).path[: first // BLOCK]
        known = path[:-1] if path and not path[-1].is_whole else path
        known = known[: next((i for i, node in enumerate(known) if node.rows is None), len(known))]
        if (since := self._maker.since) is not None:
            self._known_blocks += [node for node in known if node.end > since]
            for node in self._known_blocks:
                self._pin(node.rows, *node.windows)
        self._claim = self._storage.ram.claim(known, partial(self._prompt.keys, self._namespace))
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
                if self._maker.since is not None and node.is_whole and node.end <= self._limit:
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
        if done and self._maker.state is not None:
            jobs += self._snapshot_job(parent)
        return jobs, parent, at, done

    def _known(self, parent: Node, tokens: bytes) -> tuple[Node | None, Source]:
        """The block that has all of these tokens; else the block in RAM that begins with the longest stretch of them."""
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
            if coded and len(nearest.tokens) == BLOCK_BYTES and not self._maker.has_codes:
                self._storage.counters.recoded_tokens += shared
            return None, NOTHING
        whole = len(nearest.tokens) == BLOCK_BYTES
        # Whether they are the live cache's rows, the maker finds out. A tail has codes where a live cache had coded it.
        usable = (whole and coded) or (not whole and self._plan.is_coded(nearest.rows.image.tensors()))
        rows = nearest.rows if usable and not self._plan.lossless else None
        window = _most_rows(nearest, mask_of(0, shared))
        self._pin(rows, window)
        mask = tuple(m & mask_of(0, shared) for m in window.mask) if window is not None else ()
        images = (rows.image if rows is not None else None, window.image if window is not None else None)
        return None, Source(shared if rows is not None else 0, *images, mask, shared, whole)

    def _is_coded(self, tokens: bytes) -> bool:
        """Whether a block's rows are coded: once it is whole, or where a live cache has coded them."""
        return len(tokens) == BLOCK_BYTES or self._maker.has_codes

    def _rows_job(self, parent: Node, node: Node | None, start: int, tokens: bytes, key: bytes, source: Source) -> Job:
        own, count, coded = chain(key, tokens), len(tokens) // TOKEN_BYTES, self._is_coded(tokens)
        if self._maker.has_codes and source.rows is not None:
            source = self._unless_coded_otherwise(start, count, source)
        coded = coded or source.rows is not None
        blueprint = self._maker.blueprint(ROWS, own, key, start, self._plan.rows_specs(start, count, coded))
        return Job(ROWS, parent, node, start, tokens, own, blueprint, source, coded)

    def _unless_coded_otherwise(self, start: int, count: int, source: Source) -> Source:
        """The source, unless live codes have other levels than it: then the live codes are copied instead."""
        assert source.rows is not None
        if self._maker.coded_otherwise(start + source.tokens, start + count, source.rows.tensors()):
            return source._replace(tokens=0, rows=None, known=0)
        return source

    def _window_job(
        self, parent: Node, node: Node | None, start: int, tokens: bytes, key: bytes, source: Source
    ) -> Job | None:
        """The block's window with the rows that the live cache still holds and no image has yet; None when there are
        none.
        """
        windows, limit = self._plan.windows, start + len(tokens) // TOKEN_BYTES
        if not windows:
            return None
        held = tuple(held_mask(self._maker.held(w), start, window.keep, limit) for w, window in enumerate(windows))
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
                source = Source(BLOCK, None, taken.image, taken.mask, coded=node.is_whole)
        coded = len(block_tokens) == BLOCK_BYTES
        stored = source.mask if source.window is not None else (0,) * len(windows)
        forgotten = tuple(m & ~h for m, h in zip(stored, held, strict=True))
        adds_rows = False
        if coded and source.coded and not self._plan.lossless:
            # Codes have the levels of their image. So rows that the live cache has forgotten stay with those of the same
            # block only, whose rows they are; the codes of a block that begins alike are a lookup's to find there.
            adds_rows = node is not None and any(forgotten)
            mask = tuple(m | h for m, h in zip(forgotten, held, strict=True)) if adds_rows else held
            new = tuple(h & ~m for m, h in zip(stored, held, strict=True))
        else:
            mask, new = tuple(m | h for m, h in zip(forgotten, held, strict=True)), held
        if not any(mask):
            return None
        own = window_key(block_key, mask)
        blueprint = self._maker.blueprint(
            WINDOW, own, block_key, start, self._plan.window_specs(mask, start, coded), extra_of(mask)
        )
        return Job(WINDOW, parent, node, start, block_tokens, own, blueprint, source, coded, mask, new, adds_rows)

    def _snapshot_job(self, parent: Node) -> list[Job]:
        """The state at the end, unless it is kept already. It hangs on the last whole block before the boundary."""
        assert self._maker.state is not None
        above = (self._limit - 1) // BLOCK * BLOCK
        while parent.end > above and parent.parent is not None:
            parent = parent.parent
        key, suffix = self._key_at[above], self._prompt.token_bytes[above * TOKEN_BYTES : self._limit * TOKEN_BYTES]
        own = chain(key, suffix)
        if (known := self._storage.graph.slots.get((SNAPSHOT, own))) is not None:
            self._pin(known)
            return []
        dtypes = [name_of(array.dtype) for array in self._maker.state.arrays]
        extra = canonical({"state": self._maker.state.described, "dtypes": dtypes})
        specs = [*self._maker.state.specs(), Spec("tokens", "I64", (len(suffix) // TOKEN_BYTES,))]
        blueprint = self._maker.blueprint(SNAPSHOT, own, key, above, specs, extra)
        return [Job(SNAPSHOT, parent, None, above, suffix, own, blueprint, NOTHING)]

    def _pin(self, *slots: Slot | None) -> None:
        self._pinned += self._storage.graph.pin(slot for slot in slots if slot is not None)

    def _reserve(self, jobs: list[Job]) -> tuple[list[Job], bool, Reservation | None]:
        """Room for the jobs, or for as many of the first of them as there is: those, whether it is all, and the room."""
        first, slot_bytes = jobs, self._storage.graph.slot_bytes
        while first:
            cost = sum(job.cost(slot_bytes) for job in first)
            reservation = self._storage.ram.reserve(cost, self._deadline - time.monotonic(), claim=self._claim)
            if reservation is not None:
                self._claim.add(cost)
                return first, len(first) == len(jobs), reservation
            # Half a batch, and less, before giving up: the leading blocks are the ones worth most.
            first = first[: len(first) // 2]
        return [], not jobs, None

    def _warn_if_too_large(self, refused: list[Job]) -> None:
        for job in refused:
            cost, tokens = job.cost(self._storage.graph.slot_bytes), len(job.tokens) // TOKEN_BYTES
            self._storage.ram.warn_if_too_small(tokens, cost, self._namespace.row.model)

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
        if storage.remote is not None:
            storage.remote.offer_stored(slot)
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
            counters.recoded_tokens += self._maker.recoded
            counters.not_finite += self._maker.not_finite is not None
            storage.spilling.ahead(new_bytes)
        return depth


def _most_rows(node: Node, wanted: int) -> Slot | None:
    """Of a block's windows in RAM the one that has most rows of the `wanted` tokens (a bit each)."""
    here = (slot for slot in node.windows if slot.image is not None)
    return max(here, key=lambda slot: sum((m & wanted).bit_count() for m in slot.mask), default=None)
