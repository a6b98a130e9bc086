"""The images of a store's jobs, made from a live prompt cache: rows that are taken over as codes, and rows that are encoded.

What is new, and what becomes of the images, is `store`'s. Nothing here needs the storage's lock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple, Protocol, cast

import numpy as np

from prefixcache.blocks.masks import held_mask, mask_from, mask_of, runs_of
from prefixcache.blocks.node import BLOCK_BYTES, Node
from prefixcache.codecs import RawRows
from prefixcache.codecs.threads import WORTH_A_THREAD, share_out
from prefixcache.codecs.transform.coding import Codes
from prefixcache.image_format import DTYPES, ROWS, SNAPSHOT, WINDOW, Blueprint, Draft, Image, Kind, Meta, Spec
from prefixcache.keys import BLOCK, TOKEN_BYTES
from prefixcache.layers import levels, live_codes
from prefixcache.layers.adapters import Leaf
from prefixcache.layers.decoded import Decoded
from prefixcache.layers.encode import Target, encode
from prefixcache.layers.finite import NotFinite, first_not_finite, state_not_finite
from prefixcache.layers.image_layout import Section
from prefixcache.layers.joined import (
    CodedBlocks,
    DamagedBlock,
    Wanted,
    codes_of,
    decode_joined,
    encode_joined,
    write_joined,
)
from prefixcache.layers.recode import copy_stored, decode_stored, encode_stored
from prefixcache.layers.snapshots import State, write_state
from prefixcache.layers.taken_over import leading_rows, leading_window
from prefixcache.store_fetch_remove.jobs import Job
from prefixcache.tiers.namespace import Namespace

BATCH = 16  # blocks that are planned, made and published at once


class Maker(Protocol):
    """What a store makes images from: a live prompt cache, or the planner's sizes."""

    state: State | None
    """The recurrent state to keep, if any."""
    has_codes: bool
    """Whether rows are coded already; a tail's too are then left so: to decode them would be to code them twice."""
    since: int | None
    """The token from whose block on decoded rows go back into the live cache; None: none do."""
    recoded: int
    """Tokens so far whose codes were not taken over, because their levels were others."""
    not_finite: NotFinite | None
    """Where the state was found to hold NaN or infinity: no block from there on is kept."""

    def held(self, window: int) -> tuple[tuple[int, int], ...]:
        """The runs of tokens whose rows are there in every layer of this window."""

    def coded_otherwise(self, first: int, last: int, tensors: dict[str, np.ndarray]) -> int:
        """How many of these tokens are coded with other levels than a rows image has."""

    def blueprint(
        self, kind: Kind, key: bytes, parent: bytes, start: int, specs: list[Spec], extra: str = "{}"
    ) -> Blueprint:
        """What an image is to be like: its size is known then."""

    def encoded(self, jobs: list[Job]) -> list[Job]:
        """The jobs as they will be made: those before the first row that isn't finite, with codes taken over where that is
        right, and with blueprints of the right size, as how long some codes are is known once they are made.
        """

    def make(self, jobs: list[Job]) -> list[Image]:
        """The images of these jobs, in their order."""

    def put_back(self) -> None:
        """Put what was decoded so far into the live cache."""

    def decode_known(self, nodes: Sequence[Node]) -> None:
        """Put the rows of blocks that stood already into the live cache."""


class GrownWindow(NamedTuple):
    """The window image of a block that was a tail and is full now. `rows` are its rows as they are, in the layout of
    `plan.window_tails[window]`: to be coded into `tensors`, with levels that are measured from `measured` of them.
    """

    window: int
    measured: list[slice]
    rows: dict[str, np.ndarray]
    tensors: dict[str, np.ndarray]


class LiveMaker:
    """A `Maker` that reads a live prompt cache, whose leaves are evaluated. For one store, on its thread."""

    def __init__(
        self,
        namespace: Namespace,
        leaves: list[Leaf],
        limit: int,
        with_snapshot: bool = False,
        back: Decoded | None = None,
    ):
        """`limit`: the tokens to store. `back` gets what a fetch would give of whole blocks. CacheError for codes of another
        codec.
        """
        self._namespace, self._plan = namespace, namespace.plan
        self._leaves, self._limit, self._back = leaves, limit, back
        live_codes.check(namespace.plan, leaves)
        self.not_finite = state_not_finite(leaves) if with_snapshot else None
        self.state = namespace.plan.describe_state(leaves) if with_snapshot and self.not_finite is None else None
        self.has_codes = any(leaf.codes is not None for leaf in leaves)
        self.since = back.since if back is not None else None
        self.recoded = 0
        self._codes: dict[bytes, list[Codes]] = {}  # of joined layers, by image; from `encoded` to `make`

    def put_back(self) -> None:
        if self._back is not None:
            self._back.apply(self._leaves)

    def decode_known(self, nodes: Sequence[Node]) -> None:
        back = self._back
        if back is None:
            return
        for at in range(0, len(nodes), BATCH):  # others computed them, or this cache did before it was asked for
            rows = []
            for node in nodes[at : at + BATCH]:
                if node.rows is not None and node.rows.image is not None:
                    rows.append((node.start, node.rows.image.tensors()))
                    self._decode_rows(back, *rows[-1])
                for window in node.windows:
                    if window.image is not None:
                        self._decode_window(back, node.start, window.image.tensors(), window.mask)
            self._decode_joined(
                back,
                [
                    [(start, codes_of(joined, tensors, BLOCK)) for start, tensors in rows]
                    for joined in self._plan.joined
                ],
            )
            self.put_back()

    def _decode_rows(self, back: Decoded, start: int, tensors: dict[str, np.ndarray]) -> None:
        """All that the rows image of a whole block has."""
        for section, count in self._plan.in_rows(start, BLOCK, coded=True):
            self._decode(back, section, start, tensors, slice(0, count))

    def _decode_joined(self, back: Decoded, groups: Sequence[Sequence[tuple[int, Codes]]]) -> None:
        """Whole blocks of each group of transformed layers, each from a token on."""
        coded = [
            CodedBlocks(joined, [(start, codes) for start, codes in blocks if start + BLOCK > back.since])
            for joined, blocks in zip(self._plan.joined, groups, strict=True)
        ]
        if not coded:
            return
        with contextlib.suppress(DamagedBlock):  # the live cache keeps its own rows; a fetch deletes the image
            rows, unchecked = [], []
            for joined, decoded in zip(self._plan.joined, decode_joined(coded), strict=True):
                for stretch in decoded.stretches:
                    for number, (leaf, stream) in enumerate(joined.streams):
                        _, member = self._plan.tail_places[leaf][stream]
                        rows.append((member, stretch.first, stretch.rows(number, joined.coder.dtype)))
                unchecked.append(decoded._replace(stretches=[]))
            for decoded in unchecked:  # of all groups, before any is put back
                decoded.check()
            for member, first, of_stream in rows:
                back.add(member, first, of_stream, self._plan.sink_tokens)

    def _decode_window(self, back: Decoded, start: int, tensors: dict[str, np.ndarray], mask: tuple[int, ...]) -> None:
        plan, sunk = self._plan, self._plan.sunk(start)
        for w, section in enumerate(plan.windowed):
            here = mask[w] & held_mask(self.held(w), start, plan.windows[w].keep, self._limit)
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

    def coded_otherwise(self, first: int, last: int, tensors: dict[str, np.ndarray]) -> int:
        wanted = [levels.read(group, tensors) for group in self._plan.rows.groups]
        return live_codes.differing(self._plan, self._leaves, first, last, wanted)

    def blueprint(
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

    def held(self, window: int) -> tuple[tuple[int, int], ...]:
        runs: tuple[tuple[int, int], ...] | None = None
        for leaf, layout in zip(self._leaves, self._plan.leaves, strict=True):
            if layout.get("streams") and layout.get("window") == list(self._plan.windows[window]):
                runs = leaf.held if runs is None else _intersect(runs, leaf.held)
        return runs or ()

    def encoded(self, jobs: list[Job]) -> list[Job]:
        plan = self._plan
        jobs = [self._taking_over(job) for job in self._finite(jobs)]
        coded = [job for job in jobs if plan.joined and job.kind == ROWS and job.coded]
        self._codes = {job.key: [] for job in coded}
        wanted = [self._wanted(job) for job in coded]
        for made in encode_joined(plan.joined, self._leaves, wanted, plan.sink_tokens):
            for job, codes in zip(coded, made, strict=True):
                self._codes[job.key].append(codes)
        return [self._sized(job) if job.kind == ROWS and job.key in self._codes else job for job in jobs]

    def _finite(self, jobs: list[Job]) -> list[Job]:
        """The jobs for the blocks before that of the first row that isn't finite."""
        ends = [job.start + len(job.tokens) // TOKEN_BYTES for job in jobs if job.kind != SNAPSHOT]
        if not ends:
            return jobs
        first = min(job.start for job in jobs if job.kind != SNAPSHOT)
        wrong = first_not_finite(self._leaves, first, min(max(ends), self._limit))
        if wrong is None or wrong.token is None:
            return jobs
        self.not_finite, self.state = wrong, None
        end = wrong.token - wrong.token % BLOCK
        return [job for job in jobs if job.start < end and job.kind != SNAPSHOT]

    def _taking_over(self, job: Job) -> Job:
        """The job with codes of its source for those leading rows only that the live cache holds as they decode."""
        source, plan = job.source, self._plan
        if job.kind == ROWS and source.rows is not None:
            alike = leading_rows(plan, self._leaves, job.start, source.rows.tensors(), source.tokens)
            if alike:
                return job._replace(source=source._replace(tokens=alike))
            return self._without_source(job)
        if job.kind != WINDOW or source.window is None or not (source.coded and job.coded) or job.adds_rows:
            return job
        if plan.lossless:  # what is shared are rows that the live cache has forgotten
            return job
        shared = [mask & ~new for mask, new in zip(job.mask, job.encoded, strict=True)]
        alike = leading_window(plan, self._leaves, job.start, source.window.tensors(), source.mask, shared)
        taken = tuple(mask & mask_of(0, alike) for mask in shared)
        if not any(taken):
            source, taken = source._replace(window=None, mask=()), (0,) * len(shared)
        return job._replace(source=source, encoded=tuple(m & ~t for m, t in zip(job.mask, taken, strict=True)))

    def _without_source(self, job: Job) -> Job:
        """A rows image of live rows alone: of a tail these are kept as they are, unless the live cache has codes."""
        count = len(job.tokens) // TOKEN_BYTES
        coded = count == BLOCK or self.has_codes
        specs = self._plan.rows_specs(job.start, count, coded)
        source = job.source._replace(tokens=0, rows=None)
        return job._replace(source=source, coded=coded, blueprint=Blueprint(job.blueprint.meta, specs))

    def _wanted(self, job: Job) -> Wanted:
        count, source = len(job.tokens) // TOKEN_BYTES, job.source.rows
        known = (source.tensors(), min(job.source.tokens, count)) if source is not None else None
        return Wanted(job.start, job.start + count, known)

    def _sized(self, job: Job) -> Job:
        words = [len(codes.words) for codes in self._codes[job.key]]
        specs = self._plan.rows_specs(job.start, len(job.tokens) // TOKEN_BYTES, True, words)
        return job._replace(blueprint=Blueprint(job.blueprint.meta, specs))

    def make(self, jobs: list[Job]) -> list[Image]:
        drafts = [job.blueprint.draft() for job in jobs]
        plan = self._plan
        windows = (*plan.windowed, *plan.window_tails, *plan.window_sinks)
        sections = (plan.rows, plan.tails, *plan.kept, plan.sinks, *windows)
        targets: dict[int, tuple[Section, list[Target]]] = {id(section): (section, []) for section in sections}
        grown: list[GrownWindow] = []
        for job, draft in zip(jobs, drafts, strict=True):
            if job.kind == SNAPSHOT:
                assert self.state is not None
                write_state(self.state, draft.tensors)
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
        self._write_joined(jobs, drafts)
        for section, own in targets.values():
            encode(section, self._leaves, own, self._back)
        for w, measured, rows, tensors in grown:
            encode_stored(plan.windowed[w], plan.window_tails[w], rows, tensors, measured)
        if self.has_codes:
            self.recoded += sum(
                self.coded_otherwise(
                    job.start + job.source.tokens, job.start + len(job.tokens) // TOKEN_BYTES, draft.tensors
                )
                for job, draft in zip(jobs, drafts, strict=True)
                if job.kind == ROWS
            )
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

    def _write_joined(self, jobs: list[Job], drafts: list[Draft]) -> None:
        """What `encoded` made; and what a fetch would give of whole blocks."""
        whole: list[list[tuple[int, Codes]]] = [[] for _ in self._plan.joined]
        for job, draft in zip(jobs, drafts, strict=True):
            for j, codes in enumerate(self._codes.get(job.key, ()) if job.kind == ROWS else ()):
                write_joined(self._plan.joined[j], codes, draft.tensors)
                if len(job.tokens) == BLOCK_BYTES:
                    whole[j].append((job.start, codes))
        if self._back is not None:
            self._decode_joined(self._back, whole)
        self._codes.clear()

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

        Those of a tail's are coded once the block is whole, together with the live ones, and with the levels of these.
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
                levelled = (new & ~sunk) or (mask & ~sunk) or mask
                grown.append(GrownWindow(w, [into for into, _ in _places_of(levelled, mask, mask)], rows, tensors))
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


def _places_of(rows: int, into: int, out: int) -> list[tuple[slice, slice]]:
    """Where the tokens in mask `rows` stand among those in `into`, and among those in `out`."""
    pairs = []
    for first, last in runs_of(rows):
        a, b = (mask & mask_of(0, first) for mask in (into, out))
        a, b = a.bit_count(), b.bit_count()
        pairs.append((slice(a, a + last - first), slice(b, b + last - first)))
    return pairs


def _intersect(a: tuple[tuple[int, int], ...], b: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    pairs = ((max(x[0], y[0]), min(x[1], y[1])) for x in a for y in b)
    return tuple((first, last) for first, last in pairs if first < last)
