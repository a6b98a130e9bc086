"""What a store adds: which blocks of a prompt are new, and whose codes their rows are taken over from.

The work goes in batches of blocks, each in steps: planned under the lock (what is missing, sources pinned); sized outside
it, where codes differ in length; RAM reserved under it; made outside it (`image_maker`), begun on the caller's thread;
published under it. What a block decodes to depends on the rows that were first stored of that very block, the same tokens
from the prompt's start on, and on the codec, never on another text that begins alike. Rows that were fetched, and rows that
a live cache has coded, are copied as codes, never encoded again. Where rows go back into the live cache, a block that stands
below RAM alone is encoded again rather than read: decision 0028.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from prefixcache.blocks.budget import Reservation
from prefixcache.blocks.lookup import required_images
from prefixcache.blocks.node import BLOCK_BYTES, RAM, SHARED, TURN, Node, Slot, Walk
from prefixcache.blocks.superseded import is_beside_whole, superseded_tails
from prefixcache.blocks.window_masks import extra_of, held_mask, mask_of, window_key
from prefixcache.image_format import ROWS, SNAPSHOT, WINDOW, Image, Spec
from prefixcache.keys import BLOCK, TOKEN_BYTES, chain
from prefixcache.layers.finite import NotFinite
from prefixcache.store_fetch_remove.image_maker import BATCH, Maker
from prefixcache.store_fetch_remove.jobs import NO_SOURCE, CodeSource, ImageJob
from prefixcache.tiers.prompt import Prompt, note_use
from prefixcache.tiers.state import Namespace
from prefixcache.tiers.storage import Storage


class Stored(NamedTuple):
    """What `PrefixCache.store` did.

    `tokens`: how many of the prompt's tokens can be found now; `new_tokens`, `new_bytes`: what this call added, the
    bytes with headers; `snapshot`: whether a state that can't be cut by token was kept for this boundary (False for
    models that have none); `raw_layers`: the layers whose rows the codec left as they are.
    """

    tokens: int
    new_tokens: int
    new_bytes: int
    snapshot: bool
    raw_layers: tuple[int, ...]


Masks = tuple[int, ...]  # of each window of the namespace


class KnownBlock(NamedTuple):
    """A block of the prompt in the graph: the `node` that has all of its tokens, or None; and the `source` of its codes."""

    node: Node | None = None
    source: CodeSource = NO_SOURCE


class ReservedJobs(NamedTuple):
    """The first of a batch's jobs, and the room that is reserved for them."""

    jobs: list[ImageJob]
    reservation: Reservation


class BegunBatch(NamedTuple):
    """Jobs whose images are being made, in the room that is reserved for them: `images` waits for them, on any thread."""

    jobs: list[ImageJob]
    reservation: Reservation
    images: Callable[[], list[Image]]


class StoreCall:
    """One store of the first `limit` tokens of a prompt, whose images `maker` makes."""

    def __init__(
        self, storage: Storage, namespace: Namespace, prompt: Prompt, limit: int, maker: Maker, label: str = ""
    ):
        self._storage, self._namespace, self.plan, self._maker = storage, namespace, namespace.plan, maker
        self.prompt = prompt
        self._label = label
        self._limit = limit
        self._pinned: list[Slot] = []
        self._known_blocks: list[Node] = []  # whole ones that stood already: decoded into the live cache
        self._known_snapshot: Image | None = None  # the same of the state at the end
        wait = storage.settings.spill_wait if storage.settings.spill == "wait" else 0.0
        self._deadline = time.monotonic() + wait  # of all waiting of this store
        self._parent = namespace.tree.root  # the last whole block of what is planned that the graph has
        self._key = self._parent.key  # of the last block that is planned
        self._grown: dict[int, Node] = {}  # the blocks of this call that the graph has got, by end
        self._at = 0  # the first token that isn't planned
        self._key_at: dict[int, bytes] = {}  # the key before the last block planned
        self._new_tokens = self._new_bytes = 0
        self._unconfirmed = 0  # images that are made again, and not known to be the same

    @property
    def not_finite(self) -> NotFinite | None:
        """Return where the state was found to hold NaN or infinity."""
        return self._maker.not_finite

    def run(self) -> Stored:
        """Store, on this thread. Returns what is new, and how deep the prompt can be hit now."""
        try:
            self._begin_batches(self._publish_batch)
        finally:
            stored = self._finish()
        return stored

    def begin(self) -> Callable[[], Stored]:
        """Do what reads and changes the live cache, on this thread. Return what does the rest, on any thread: call it."""
        begun: list[BegunBatch] = []

        def end() -> Stored:
            try:
                while begun and self._publish_batch(begun.pop(0)):
                    pass
            finally:
                for batch in begun:
                    batch.reservation.release()
                stored = self._finish()
            return stored

        def keep(batch: BegunBatch) -> bool:
            begun.append(batch)
            return True

        try:
            self._begin_batches(keep)
        except BaseException:
            end()  # what was begun well is kept
            raise
        return end

    def _begin_batches(self, publish: Callable[[BegunBatch], bool]) -> None:
        """Begin to make all images, and pass them on, batch by batch, until `publish` says that one isn't kept."""
        with self._storage.lock:
            self._mark_tails()
            self._skip_known()
        while self._begin_batch(publish) and self._at < self._limit:
            pass
        self._maker.decode_known(self._known_blocks, self._known_snapshot)

    def _begin_batch(self, publish: Callable[[BegunBatch], bool]) -> bool:
        """Begin to make the images of the next blocks. False where not all of them are kept."""
        with self._storage.lock:
            jobs = self._next_jobs()
        jobs = self._maker.encoded(jobs)
        with self._storage.lock:
            reserved = self._reserve(jobs)
        kept = not jobs
        if reserved is not None:
            try:
                images = self._maker.make(reserved.jobs)
            except BaseException:
                reserved.reservation.release()
                raise
            kept = publish(BegunBatch(*reserved, images)) and len(reserved.jobs) == len(jobs)
            self._maker.put_back()  # here, not at the end: decoded rows of a long prompt are large
        elif jobs:
            self._warn_if_too_large(jobs[0])
        wrong = self._maker.not_finite
        return kept and (wrong is None or wrong.token is None)

    def _publish_batch(self, batch: BegunBatch) -> bool:
        with batch.reservation:
            images = batch.images()
            with self._storage.lock:
                return self._publish(batch, images) and len(images) == len(batch.jobs)

    # -- planning, under the lock -------------------------------------------------------------------------------------

    def _skip_known(self) -> None:
        """Begin behind the leading whole blocks that stand already and whose windows can gain nothing."""
        first = self._limit
        for w, window in enumerate(self.plan.windows):
            first = min([first, *(max(a, window.keep) for a, b in self._maker.held(w) if b > window.keep)])
        path = self.prompt.walk(self._namespace).path[: first // BLOCK]
        known = path[:-1] if path and not path[-1].is_whole else path
        unskipped = (i for i, node in enumerate(known) if node.rows is None or self._is_made_again(node))
        known = known[: next(unskipped, len(known))]
        self._decode_at_end(known)
        self._claim = self._storage.ram.claim(known, partial(self.prompt.keys, self._namespace))
        if known:
            self._parent, self._at, self._key = known[-1], known[-1].end, known[-1].key
            assert known[-1].parent is not None
            self._key_at = {known[-1].start: known[-1].parent.key, known[-1].end: known[-1].key}
            self._pin(known[-1].rows)  # keeps those before it, too

    def _decode_at_end(self, nodes: Iterable[Node]) -> None:
        """Pin those blocks whose rows go back into the live cache: at the end it gets what RAM has of them then."""
        for node in filter(self._goes_back, nodes):
            self._pin(node.rows, *node.windows)
            self._known_blocks.append(node)

    def _goes_back(self, node: Node) -> bool:
        """Tell whether a block's rows go back into the live cache, as they are stored. One that goes on beyond the prompt was
        not whole when this was computed: its tail stays as it is.
        """
        return self._maker.since is not None and node.is_whole and self._maker.since < node.end <= self._limit

    def _is_made_again(self, node: Node) -> bool:
        """Tell whether a block's rows go back into the live cache, and RAM has not all of its images."""
        return self._goes_back(node) and any(
            slot is not None and slot.image is None for slot in (node.rows, *node.windows)
        )

    def _next_jobs(self) -> list[ImageJob]:
        """Return the jobs for the next blocks, and behind the last one for the snapshot."""
        jobs: list[ImageJob] = []
        expected = self._parent if self._parent.end == self._at else None  # None once blocks are new
        key = self._key
        for _ in range(BATCH):
            start, end = self._at, min(self._at + BLOCK, self._limit)
            if start == end:
                break
            tokens = self.prompt.token_bytes[start * TOKEN_BYTES : end * TOKEN_BYTES]
            node, source = self._known(expected, tokens) if expected is not None else KnownBlock()
            again = False
            if node is not None and node.rows is not None:
                self._pin(node.rows)
                self._decode_at_end([node])
                block_key = node.key
                again = node.rows.image is None and self._goes_back(node)
            if node is None or node.rows is None or again:
                jobs.append(self._rows_job(node, tokens, key, source)._replace(again=again))
                block_key = jobs[-1].key
            if (window := self._window_job(node, tokens, key, source)) is not None:
                jobs.append(window)
            self._at, self._key_at = end, {start: key}
            key = self._key = block_key
            if node is not None and len(node.tokens) == len(tokens) == BLOCK_BYTES:
                self._parent = expected = node
            else:
                expected = None
        if self._at == self._limit and self._maker.state is not None:
            jobs += self._snapshot_job()
        self._unconfirmed += sum(job.again for job in jobs)
        return jobs

    def _known(self, parent: Node, tokens: bytes) -> KnownBlock:
        """Return the block that has all of these tokens; else the block in RAM that begins with most of them."""
        graph = self._storage.graph
        exact = graph.child(parent, tokens)
        if exact is not None:
            return KnownBlock(exact)
        nearest, shared = graph.nearest(parent, tokens)
        if nearest is None or nearest.rows is None:
            return KnownBlock()
        if shared * TOKEN_BYTES == len(tokens):
            return KnownBlock() if self._parts_within(nearest) else KnownBlock(nearest)
        coded = self._is_coded(tokens)
        if nearest.rows.image is None:
            # A tail on SSD has its rows as they are; the live cache, too.
            if coded and len(nearest.tokens) == BLOCK_BYTES and not self._maker.has_codes:
                self._storage.counters.recoded_tokens += shared
            return KnownBlock()
        whole = len(nearest.tokens) == BLOCK_BYTES
        # Whether they are the live cache's rows, the maker finds out. A tail has codes where a live cache had coded it.
        usable = (whole and coded) or (not whole and self.plan.is_coded(nearest.rows.image.tensors()))
        rows = nearest.rows if usable and not self.plan.lossless else None
        window = _most_rows(nearest, mask_of(0, shared))
        self._pin(rows, window)
        mask = tuple(m & mask_of(0, shared) for m in window.mask) if window is not None else ()
        images = (rows.image if rows is not None else None, window.image if window is not None else None)
        return KnownBlock(source=CodeSource(shared if rows is not None else 0, *images, mask, shared, whole))

    def _parts_within(self, known: Node) -> bool:
        """Tell whether the block at `self._at`, of which a `known` one has all tokens, is a tail to be kept beside it: this
        store ends within it, with rows that were computed. A hit that is no deeper has none of a coded block.
        """
        ends = known.end > self._limit and (known.is_whole or self._limit in self.prompt.kept_ends)
        is_computed = self.prompt.terms.whole_blocks and self.prompt.given_rows.tokens < self._limit
        return ends and is_computed and not self._maker.has_codes and self._namespace.tree.keeps_tails

    def _is_coded(self, tokens: bytes) -> bool:
        """Tell whether a block's rows are coded: once it is whole, or where a live cache has coded them."""
        return len(tokens) == BLOCK_BYTES or self._maker.has_codes

    def _rows_job(self, node: Node | None, tokens: bytes, parent_key: bytes, source: CodeSource) -> ImageJob:
        start, count, coded = self._at, len(tokens) // TOKEN_BYTES, self._is_coded(tokens)
        if self._maker.has_codes and source.rows is not None:
            source = self._unless_coded_otherwise(start, count, source)
        coded = coded or source.rows is not None
        key, specs = chain(parent_key, tokens), self.plan.rows_specs(start, count, coded)
        blueprint = self._maker.blueprint(ROWS, key, parent_key, start, specs)
        return ImageJob(ROWS, self._parent, node, start, tokens, key, blueprint, source, coded)

    def _unless_coded_otherwise(self, start: int, count: int, source: CodeSource) -> CodeSource:
        """Return the source, unless live codes have other levels than it: then the live codes are copied instead."""
        assert source.rows is not None
        if self._maker.coded_otherwise(start + source.tokens, start + count, source.rows.tensors()):
            return source._replace(tokens=0, rows=None, known=0)
        return source

    def _window_job(self, node: Node | None, tokens: bytes, parent_key: bytes, source: CodeSource) -> ImageJob | None:
        """Return the job for the window of the block at `self._at`, with the rows that the live cache still holds and no
        image has yet, or none in RAM where they go back into the live cache; None when there are none.
        """
        windows, start, limit = self.plan.windows, self._at, self._at + len(tokens) // TOKEN_BYTES
        if not windows:
            return None
        live = tuple(held_mask(self._maker.held(w), start, window.keep, limit) for w, window in enumerate(windows))
        again = False
        if node is not None:
            tokens = node.tokens
            stored_window = _most_rows(node, mask_of(0, BLOCK))  # those on SSD only stay beside the new one
            if not any(_unknown(live, node.windows)):
                again = self._goes_back(node) and any(_unknown(live, [s for s in node.windows if s.image is not None]))
                if not again:
                    return None
            elif stored_window is not None:
                self._pin(stored_window)
                source = CodeSource(BLOCK, window=stored_window.image, mask=stored_window.mask, coded=node.is_whole)
        coded = len(tokens) == BLOCK_BYTES
        stored = source.mask if source.window is not None else (0,) * len(windows)
        forgotten, new, adds_rows = _without(stored, live), live, False
        if coded and source.coded and not self.plan.lossless:
            # Codes have the levels of their image. So rows that the live cache has forgotten stay with those of the same
            # block only, whose rows they are; the codes of a block that begins alike are a lookup's to find there.
            adds_rows, new = node is not None and any(forgotten), _without(live, stored)
            forgotten = forgotten if adds_rows else (0,) * len(windows)
        mask = tuple(m | h for m, h in zip(forgotten, live, strict=True))
        if not any(mask):
            return None
        block_key = node.key if node is not None else chain(parent_key, tokens)
        key, specs = window_key(block_key, mask), self.plan.window_specs(mask, start, coded)
        blueprint = self._maker.blueprint(WINDOW, key, block_key, start, specs, extra_of(mask))
        moved = ImageJob(WINDOW, self._parent, node, start, tokens, key, blueprint, source, coded, mask, new, adds_rows)
        return moved._replace(again=again)

    def _snapshot_job(self) -> list[ImageJob]:
        """Return the job for the state at the end, unless it is kept (in RAM, if it goes back into the live cache). It hangs
        on the last whole block before the boundary.
        """
        assert self._maker.state is not None
        above, parent = (self._limit - 1) // BLOCK * BLOCK, self._parent
        while parent.end > above and parent.parent is not None:
            parent = parent.parent
        parent_key = self._key_at[above]
        suffix = self.prompt.token_bytes[above * TOKEN_BYTES : self._limit * TOKEN_BYTES]
        key = chain(parent_key, suffix)
        if (known := self._storage.graph.slots.get((SNAPSHOT, key))) is not None:
            self._pin(known)
            if known.image is not None or self._maker.since is None:
                self._known_snapshot = known.image
                return []
        specs = [*self._maker.state.specs(), Spec("tokens", "I64", (len(suffix) // TOKEN_BYTES,))]
        blueprint = self._maker.blueprint(SNAPSHOT, key, parent_key, above, specs, self._maker.state.extra)
        again = known is not None
        return [ImageJob(SNAPSHOT, parent, None, above, suffix, key, blueprint, NO_SOURCE, again=again)]

    def _pin(self, *slots: Slot | None) -> None:
        self._pinned += self._storage.graph.pin(slot for slot in slots if slot is not None)

    def _reserve(self, jobs: list[ImageJob]) -> ReservedJobs | None:
        """Reserve room for the jobs, or for as many of the first of them as there is. None where there is none."""
        slot_bytes = self._storage.graph.slot_bytes
        while jobs:
            cost = sum(job.cost(slot_bytes) for job in jobs)
            claim = self._claim if self._claim.is_begun or len(jobs) > 1 else None
            reservation = self._storage.ram.reserve(cost, self._deadline - time.monotonic(), claim=claim)
            if reservation is not None:
                self._claim.add(cost)
                return ReservedJobs(jobs, reservation)
            # Half a batch, and less, before giving up: the leading blocks are the ones worth most.
            jobs = jobs[: len(jobs) // 2]
        return None

    def _warn_if_too_large(self, refused: ImageJob) -> None:
        cost = refused.cost(self._storage.graph.slot_bytes)
        self._storage.ram.warn_if_too_small(refused.length, cost, self._namespace.row.model)

    # -- publishing, under the lock -----------------------------------------------------------------------------------

    def _publish(self, batch: BegunBatch, images: list[Image]) -> bool:
        """Give the images their places in the graph. False where one has none any more: the others behind it neither."""
        graph = self._storage.graph
        if self._storage.namespaces.get(self._namespace.row.root) is not self._namespace:
            return False  # the namespace held nothing and was dropped meanwhile
        for job, image in zip(batch.jobs, images, strict=False):  # those behind NaN have none
            node: Node | None = self._grown.get(job.start, job.parent)
            if job.kind == WINDOW:
                node = self._grown.get(job.end, job.known)
            if node is None or not graph.is_known(node):
                return False  # removed meanwhile
            if job.kind == ROWS:
                assert node.end == job.start
                node = graph.grow(node, job.tokens, batch.reservation, job.key, self._label)
                if node is None:
                    return False
                self._grown[node.end] = node
                if job.length == BLOCK and node.end > self._parent.end:  # else blocks after it were known
                    self._parent = node
            if self._enter(job, node, image, batch.reservation):
                self._new_bytes += image.nbytes
                if job.kind == ROWS:
                    self._new_tokens += job.length - job.source.known
        return True

    def _enter(self, job: ImageJob, node: Node, image: Image, reservation: Reservation) -> bool:
        """Give the image its place in the tree. False when another thread was first, or when it stood already: then it is in
        RAM again if it is, bit for bit, the one that stood.
        """
        storage, graph = self._storage, self._storage.graph
        known = graph.slots.get((job.kind, job.key))
        if known is not None and known.checksum == image.checksum:
            self._unconfirmed -= job.again
            if known.image is None:
                graph.place(known, RAM, image=image, reservation=reservation)
        if known is not None or (job.again and job.kind == WINDOW):
            return False
        slot = Slot(job.kind, node, job.key, image.nbytes, job.tokens if job.kind == SNAPSHOT else b"", job.mask)
        slot.checksum, slot.created, slot.tick = image.checksum, time.time(), graph.recency.clock
        slot.session = self.prompt.terms.session
        if not graph.attach(slot, reservation):
            return False
        graph.place(slot, RAM, image=image, reservation=reservation)
        self._pin(slot)
        storage.drop_superseded(slot)
        storage.spilling.write_through([slot])
        if storage.remote is not None:
            storage.remote.offer_stored(slot)
        return True

    def _finish(self) -> Stored:
        """Touch the path, unpin it, write ahead. Returns what is new, and how deep the prompt can be hit now."""
        storage = self._storage
        with storage.lock:
            graph, counters = storage.graph, storage.counters
            walk = self.prompt.walk(self._namespace)
            depth = self.prompt.hit_depth(walk, graph.last, self._limit)
            self._mark_tails()
            if depth and depth == self.prompt.terms.ends.turn:
                self._end_earlier_turns(walk)
            required = required_images(walk, depth, graph.last)
            graph.recency.request_ended(required)
            note_use(required, self.prompt.terms.session)
            storage.unpin(self._pinned)
            counters.stores += 1
            counters.stored_tokens += self._new_tokens
            counters.stored_bytes += self._new_bytes
            counters.shared_tokens += max(depth - self._new_tokens, 0)
            counters.unkept_tokens += self._limit - depth
            counters.recoded_tokens += self._maker.recoded
            counters.not_finite += self._maker.not_finite is not None
            storage.spilling.ahead(self._new_bytes)
        given, since = self.prompt.given_rows, self._maker.since
        has_snapshot = self._maker.state is not None and depth == self._limit
        if since is not None and self._maker.is_written_back and not self._unconfirmed and since <= given.tokens:
            given.tokens = depth // BLOCK * BLOCK
            given.state = depth if has_snapshot else 0
        return Stored(depth, self._new_tokens, self._new_bytes, has_snapshot, tuple(self.plan.raw))

    def _mark_tails(self) -> None:
        """Keep the tails at the prompt's ends beside whole blocks, and one at this store's end that stands beside one: there
        the prompt parts from others.
        """
        for end, what in self.prompt.kept_ends.items() if self._namespace.tree.keeps_tails else ():
            if (tail := self._tail_at(end)) is not None and tail.ends != SHARED:
                tail.ends = what
        tail = self._tail_at(self._limit) if self.prompt.terms.whole_blocks else None
        if tail is not None and not tail.ends and is_beside_whole(tail):
            tail.ends = SHARED

    def _tail_at(self, end: int) -> Node | None:
        """Return the tail of the prompt's tokens up to there, if there is one."""
        start, above = end - end % BLOCK, self.prompt.walk(self._namespace).path[: end // BLOCK]
        parent = above[-1] if above else self._namespace.tree.root
        if parent.end != start or start == end or end > len(self.prompt):
            return None
        return self._storage.graph.child(parent, self.prompt.token_bytes[start * TOKEN_BYTES : end * TOKEN_BYTES])

    def _end_earlier_turns(self, walk: Walk) -> None:
        """Keep tails of earlier turns on the way to this one's end no longer."""
        earlier = (tail for node in walk.nodes for tail in superseded_tails(node) if tail.end < self._limit)
        for tail in [tail for tail in earlier if tail.ends == TURN]:
            tail.ends = ""
            for slot in (*tail.windows, tail.rows):
                if slot is not None:
                    self._storage.drop_superseded(slot)


def _most_rows(node: Node, wanted: int) -> Slot | None:
    """Return the one of a block's windows in RAM that has most rows of the `wanted` tokens (a bit each)."""
    in_ram = (slot for slot in node.windows if slot.image is not None)
    return max(in_ram, key=lambda slot: sum((m & wanted).bit_count() for m in slot.mask), default=None)


def _unknown(live: Masks, slots: Iterable[Slot]) -> Masks:
    """Return the tokens of each mask that none of these windows has."""
    for slot in slots:
        live = _without(live, slot.mask)
    return live


def _without(masks: Masks, others: Masks) -> Masks:
    """Return the tokens of each mask that the other doesn't have."""
    return tuple(mask & ~other for mask, other in zip(masks, others, strict=True))
