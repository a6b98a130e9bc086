"""The images of a store's jobs, made from a live prompt cache: rows that are taken over as codes, and rows that are encoded.

What is new, and what becomes of the images, is `store`'s. Nothing here needs the storage's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Protocol, cast

import mlx.core as mx
import numpy as np

from prefixcache.blocks.node import Node
from prefixcache.blocks.window_masks import extra_of, mask_from, mask_of, window_key
from prefixcache.codecs.interchange import CopyOut, located, on_cpu
from prefixcache.codecs.threads import WORTH_A_THREAD, share_out
from prefixcache.codecs.transform.coding import Codes
from prefixcache.image_format import ROWS, SNAPSHOT, WINDOW, Blueprint, HeaderFields, Image, ImageDraft, ImageKind, Spec
from prefixcache.keys import BLOCK
from prefixcache.layers import live_codes
from prefixcache.layers.adapters import Leaf
from prefixcache.layers.encode import RowTarget, encode, evaluate
from prefixcache.layers.finite import NotFinite, first_not_finite, image_not_finite, state_not_finite
from prefixcache.layers.image_layout import Plan, Section, Tensors, TokenRuns
from prefixcache.layers.recode import EncodeRows, TakeCodes
from prefixcache.layers.snapshots import State, encode_state
from prefixcache.layers.taken_over import leading_rows, leading_window
from prefixcache.layers.transformed import (
    NO_CODES,
    BlockRows,
    DamagedBlock,
    JoinedCodes,
    decoded,
    encode_joined,
    joined_not_finite,
    write_joined,
)
from prefixcache.layers.transformed_windows import CodedWindow, WindowRows, coded_runs, encode_window
from prefixcache.layers.write_back import WriteBack
from prefixcache.store_fetch_remove.jobs import NO_SOURCE, ImageJob
from prefixcache.store_fetch_remove.window_moves import plan_window
from prefixcache.tiers.state import Namespace

BATCH = 16  # blocks that are planned, made and published at once


class Maker(Protocol):
    """What a store makes images from: a live prompt cache, or the planner's sizes."""

    state: State | None
    """The recurrent state to keep, if any."""
    has_codes: bool
    """Whether rows are coded already; those of a tail are then left so, too: to decode them would be to code them twice."""
    since: int | None
    """The token from whose block on decoded rows go back into the live cache, and the state; None: nothing does."""
    is_written_back: bool
    """Whether all rows of whole blocks and all recurrent state that were kept so far went back, as they are kept."""
    recoded: int
    """Tokens so far whose codes were not taken over, because their levels were others."""
    not_finite: NotFinite | None
    """Where the state was found to hold NaN or infinity: no block from there on is kept."""

    def held(self, window: int) -> TokenRuns:
        """Return the runs of tokens whose rows are there in every layer of this window."""

    def coded_otherwise(self, first: int, last: int, tensors: Tensors) -> int:
        """Count those of these tokens that are coded with other levels than a rows image has."""

    def blueprint(
        self, kind: ImageKind, key: bytes, parent: bytes, start: int, specs: list[Spec], extra: str = "{}"
    ) -> Blueprint:
        """Return the header and specs of an image that is to be made, and so its size."""

    def encoded(self, jobs: list[ImageJob]) -> list[ImageJob]:
        """Return the jobs as they will be made: those before the first row that isn't finite, with codes taken over where
        that is right, and with blueprints of the right size, since some codes have a length once they are made.
        """

    def make(self, jobs: list[ImageJob]) -> Callable[[], list[Image]]:
        """Begin to make the images of these jobs, and do what needs the live cache. Return a call that waits for them, on any
        thread, and gives them in their order, up to the first that holds NaN or infinity.
        """

    def put_back(self) -> None:
        """Put what was decoded so far into the live cache."""

    def decode_known(self, nodes: Sequence[Node], snapshot: Image | None) -> None:
        """Put the rows of blocks, and the state, that stood already into the live cache."""


CodesOfImages = dict[tuple[ImageKind, bytes], list[Sequence[Codes | None]]]


class LiveMaker:
    """A `Maker` that reads a live prompt cache, which a GPU may still compute. For one store, on its thread."""

    def __init__(
        self,
        namespace: Namespace,
        leaves: list[Leaf],
        limit: int,
        *,
        with_snapshot: bool,
        since: int | None,
    ):
        """`limit`: the tokens to store. With `since`, rows of whole blocks become what a fetch would give of them, from the
        block of this token on, and so does recurrent state. CacheError for codes of another codec.
        """
        self._namespace, self._plan = namespace, namespace.plan
        self._leaves, self._limit, self.since = leaves, limit, since
        live_codes.check(self._plan, leaves)
        coded = {i: leaf for i, leaf in enumerate(leaves) if leaf.codes is not None}
        # What a transform is to code is decoded batch by batch: decision 0058.
        self._to_decode = {i: leaf for i, leaf in coded.items() if live_codes.is_transformed(self._plan, i)}
        self.has_codes = len(coded) > len(self._to_decode)
        self._copies_later = not on_cpu() and not (coded or self._plan.windows)
        if not self._copies_later:
            evaluate(leaves)
        self._held = [self._plan.held(leaves, window) for window in range(len(self._plan.windows))]
        self._back = WriteBack(self._plan, leaves, since, limit) if since is not None else None
        self.not_finite = state_not_finite(leaves) if with_snapshot else None
        self.state = self._plan.describe_state(leaves) if with_snapshot and self.not_finite is None else None
        self._state_back: list[tuple[mx.array, mx.array]] = []  # live arrays, each with what becomes of it
        self.recoded = 0
        # All rows of whole blocks, as far as they are kept.
        self.is_written_back = since is not None and not self._to_decode
        # Of joined layers, from `encoded` to `make`: by image, for each section of its joined; and of rows images together.
        self._codes: CodesOfImages = {}
        self._joined = NO_CODES

    def held(self, window: int) -> TokenRuns:
        return self._held[window]

    def coded_otherwise(self, first: int, last: int, tensors: Tensors) -> int:
        wanted = [group.levels(tensors) for group in self._plan.rows.groups]
        return live_codes.differing(self._plan, self._leaves, first, last, wanted)

    def blueprint(
        self, kind: ImageKind, key: bytes, parent: bytes, start: int, specs: list[Spec], extra: str = "{}"
    ) -> Blueprint:
        row = self._namespace.row
        named = (key.hex(), parent.hex(), row.root.hex(), row.model, row.codec, row.layout)
        return Blueprint(HeaderFields(kind, *named, start, extra=extra), specs)

    # -- before room is reserved --------------------------------------------------------------------------------------

    def encoded(self, jobs: list[ImageJob]) -> list[ImageJob]:
        plan = self._plan
        self._decode_rows_of(jobs)
        jobs = [self._taking_over(job) for job in (jobs if self._copies_later else self._finite(jobs))]
        jobs = [job if self._is_decodable(job) else self._of_live_rows(job) for job in jobs]
        jobs = [job for job in jobs if job.kind != WINDOW or any(job.mask)]
        coded = [job for job in jobs if plan.rows.joined and job.kind == ROWS and job.coded]
        if coded:
            blocks = list(map(_block_rows, coded))
            self._joined = encode_joined(plan, self._leaves, blocks, decoding=self._back is not None)
            of_blocks = zip(*self._joined.codes, strict=True)
            self._codes |= {(ROWS, job.key): [of] for job, of in zip(coded, of_blocks, strict=True)}
            jobs = self._with_finite_codes(jobs) if self._copies_later else jobs
        windows = [job for job in jobs if job.kind == WINDOW and job.coded]
        of_windows = [
            encode_window(plan, w, self._leaves, [_window_rows(job, w) for job in windows])
            for w in range(len(plan.windows))
        ]
        for number, job in enumerate(windows if any(of_windows) else []):
            self._codes[WINDOW, job.key] = [[of[number] for of in of_groups] for of_groups in of_windows]
        return [self._sized(job) for job in jobs]

    def _decode_rows_of(self, jobs: list[ImageJob]) -> None:
        """Decode the rows of these jobs in live codes that a transform is to code."""
        rows = [job for job in jobs if job.kind == ROWS]
        if rows and self._to_decode:
            first, last = min(job.start for job in rows), min(max(job.end for job in rows), self._limit)
            decoded = {i: live_codes.decoded(leaf, first, last) for i, leaf in self._to_decode.items()}
            self._leaves = [decoded.get(i, leaf) for i, leaf in enumerate(self._leaves)]

    def _finite(self, jobs: list[ImageJob]) -> list[ImageJob]:
        """Return the jobs for the blocks before that of the first row that isn't finite."""
        of_rows = [job for job in jobs if job.kind != SNAPSHOT]
        if not of_rows:
            return jobs
        first, last = min(job.start for job in of_rows), max(job.end for job in of_rows)
        wrong = first_not_finite(self._leaves, first, min(last, self._limit))
        if wrong is None or wrong.token is None:
            return jobs
        self.not_finite, self.state = wrong, None
        return [job for job in of_rows if job.start < wrong.token - wrong.token % BLOCK]

    def _with_finite_codes(self, jobs: list[ImageJob]) -> list[ImageJob]:
        """Return the jobs for the blocks before that of the first row of joined layers that isn't finite."""
        for job in jobs:
            (of_rows,) = self._codes.get((ROWS, job.key), [()])
            for joined, codes in zip(self._plan.rows.joined, of_rows, strict=False):
                wrong = joined_not_finite(joined, job.start, codes) if codes is not None else None
                if wrong is not None:
                    self._note(wrong)
                    return [other for other in jobs if other.kind == ROWS and other.start < job.start]
        return jobs

    def _taking_over(self, job: ImageJob) -> ImageJob:
        """Return the job with codes of its source for those leading rows only that the live cache holds as they decode."""
        source, plan = job.source, self._plan
        if job.kind == ROWS and source.rows is not None:
            alike = leading_rows(plan, self._leaves, job.start, source.rows.tensors(), source.tokens)
            return job._replace(source=source._replace(tokens=alike)) if alike else self._without_source(job)
        if job.kind != WINDOW or source.window is None or not (source.coded and job.coded) or job.adds_rows:
            return job
        if plan.lossless:  # what is shared are rows that the live cache has forgotten
            return job
        shared = [mask & ~new for mask, new in zip(job.mask, job.encoded, strict=True)]
        alike = leading_window(plan, self._leaves, job.start, source.window.tensors(), source.mask, shared)
        taken = tuple(mask & mask_of(0, alike) for mask in shared)
        if not any(taken):
            source = source._replace(window=None, mask=())
        return job._replace(source=source, encoded=tuple(m & ~t for m, t in zip(job.mask, taken, strict=True)))

    def _is_decodable(self, job: ImageJob) -> bool:
        """Tell whether the codes can be decoded that a tail's window takes rows from; if not, a fetch deletes their image."""
        source = job.source
        if job.kind != WINDOW or job.coded or source.window is None or not source.coded:
            return True
        try:
            for w, section in enumerate(self._plan.windowed):
                rows = _window_rows(job, w)
                block = CodedWindow(job.start, rows.tensors, job.mask[w] & ~job.encoded[w], rows.stored)
                for joined in section.joined:
                    for token, codes in coded_runs(joined, block):
                        decoded(joined, token, codes)
        except DamagedBlock:
            return False
        return True

    def _of_live_rows(self, job: ImageJob) -> ImageJob:
        """Return the job for a tail's window image with live rows alone."""
        parent, mask = bytes.fromhex(job.blueprint.fields.parent), job.encoded
        key, specs = window_key(parent, mask), self._plan.window_specs(mask, job.start, False)
        blueprint = self.blueprint(WINDOW, key, parent, job.start, specs, extra_of(mask))
        return job._replace(source=NO_SOURCE, mask=mask, key=key, blueprint=blueprint)

    def _without_source(self, job: ImageJob) -> ImageJob:
        """Return the job for a rows image of live rows alone. Those of a tail are kept as they are, unless the live cache has
        codes.
        """
        coded = job.length == BLOCK or self.has_codes
        specs = self._plan.rows_specs(job.start, job.length, coded)
        source = job.source._replace(tokens=0, rows=None)
        return job._replace(source=source, coded=coded, blueprint=Blueprint(job.blueprint.fields, specs))

    def _sized(self, job: ImageJob) -> ImageJob:
        """Return the job with the size that its image has, where that depends on codes."""
        of_sections = self._codes.get((job.kind, job.key))
        if of_sections is None:
            return job
        words = [[0 if codes is None else len(codes.words) for codes in of_section] for of_section in of_sections]
        if job.kind == ROWS:
            specs = self._plan.rows_specs(job.start, job.length, True, words[0])
        else:
            specs = self._plan.window_specs(job.mask, job.start, True, words)
        return job._replace(blueprint=Blueprint(job.blueprint.fields, specs))

    # -- once it is reserved ------------------------------------------------------------------------------------------

    def make(self, jobs: list[ImageJob]) -> Callable[[], list[Image]]:
        drafts = [job.blueprint.draft() for job in jobs]
        copies: list[CopyOut] = []
        targets: dict[int, tuple[Section, list[RowTarget]]] = {id(each): (each, []) for each in self._plan.sections}
        last_moves: list[EncodeRows] = []
        for job, draft in zip(jobs, drafts, strict=True):
            if job.kind == WINDOW:
                for window in range(len(self._plan.windows)):
                    moves = plan_window(self._plan, job, draft.tensors, window)
                    for move in moves.stored:
                        move.run()
                    for section, rows in moves.live:
                        targets[id(section)][1].extend(rows)
                    last_moves += [moves.last] if moves.last is not None else []
                continue
            if job.kind == SNAPSHOT:
                assert self.state is not None
                coded = encode_state(self.state, draft.tensors, decoded=self.since is not None)
                copies += coded.copies
                self._state_back = coded.decoded
            else:
                for section, count in self._plan.in_rows(job.start, job.length, job.coded):
                    targets[id(section)][1].extend(self._fill_rows(job, draft, section, count))
        codes, joined, is_decoded = self._codes, self._joined, self._joined_goes_back(jobs)
        codes_later = self._copies_later and is_decoded
        if not codes_later:
            _write_codes(self._plan, jobs, drafts, codes, joined)
            self._decode_codes(jobs, drafts, of_rows=not is_decoded)
        self._codes, self._joined = {}, NO_CODES
        for section, rows in targets.values():
            copies += encode(section, self._leaves, rows, self._back)
        if self._copies_later:
            copies = located(copies)
        else:  # windows and codes need both the live cache and what it is encoded to
            _run(copies)
            copies = []
            for last in last_moves:
                last.run()
            self._compare_codes(jobs, drafts)
            self._put_back_windows(jobs, drafts)

        def images() -> list[Image]:
            if codes_later:
                _write_codes(self._plan, jobs, drafts, codes, joined)
            _run(copies)
            return self._sealed(jobs, drafts)

        return images

    def _sealed(self, jobs: list[ImageJob], drafts: list[ImageDraft]) -> list[Image]:
        """Seal the images before the first that holds a row which isn't finite."""
        images: list[Image | None] = [None] * len(drafts)

        def seal(first: int, last: int) -> None:
            for i in range(first, last):
                job, draft = jobs[i], drafts[i]
                if not self._copies_later or self._is_finite(job, draft):
                    if job.kind != WINDOW:
                        draft.tensors["tokens"][:] = np.frombuffer(job.tokens, "<i8")
                    images[i] = draft.seal()

        share_out(len(drafts), 1, sum(job.blueprint.nbytes for job in jobs) // WORTH_A_THREAD, seal)
        sound = list(takewhile(lambda image: image is not None, images))
        return cast(list[Image], sound)

    def _is_finite(self, job: ImageJob, draft: ImageDraft) -> bool:
        """Tell whether all rows of a filled image are finite, and note the first that isn't."""
        if job.kind == ROWS:
            for section, _ in self._plan.in_rows(job.start, job.length, job.coded):
                wrong = image_not_finite(section, draft.tensors, job.start)
                if wrong is not None:
                    self._note(wrong)
                    return False
        return True

    def _note(self, wrong: NotFinite) -> None:
        known = self.not_finite
        if known is None or known.token is None or (wrong.token or 0) < known.token:
            self.not_finite, self.state = wrong, None

    def _compare_codes(self, jobs: list[ImageJob], drafts: list[ImageDraft]) -> None:
        """Count the tokens whose codes are others than the live cache's."""
        if self._to_decode:
            self.recoded += sum(job.length - job.source.tokens for job in jobs if job.kind == ROWS and job.coded)
        elif self.has_codes:
            self.recoded += sum(
                self.coded_otherwise(job.start + job.source.tokens, job.end, draft.tensors)
                for job, draft in zip(jobs, drafts, strict=True)
                if job.kind == ROWS
            )

    def _put_back_windows(self, jobs: list[ImageJob], drafts: list[ImageDraft]) -> None:
        if self._back is not None:
            for job, draft in zip(jobs, drafts, strict=True):
                # Of what was encoded just now the decoded rows are there already; known blocks are decoded at the end.
                if job.kind == WINDOW and job.coded and job.source.window is not None and job.known is None:
                    self._back.decode_window(job.start, draft.tensors, job.mask)

    def _joined_goes_back(self, jobs: Sequence[ImageJob]) -> bool:
        """Add what the rows of joined layers decode to, where a GPU has it. False where codes are to be decoded for that."""
        coded = [job for job in jobs if (ROWS, job.key) in self._codes]
        if self._back is None or not coded:
            return True
        joined = self._joined
        if not joined.decoded or len(joined.codes[0]) > len(coded) or any(job.length < BLOCK for job in coded):
            return False
        for group, stretches in zip(self._plan.rows.joined, joined.decoded, strict=True):
            self._back.add_joined(group, stretches)
        return True

    def _decode_codes(self, jobs: Sequence[ImageJob], drafts: Sequence[ImageDraft], *, of_rows: bool) -> None:
        """Decode the codes of whole blocks, which the drafts have, for the live cache: of windows, and `of_rows`."""
        if self._back is None:
            return
        there = [pair for pair in zip(jobs, drafts, strict=True) if (pair[0].kind, pair[0].key) in self._codes]
        if of_rows:
            whole = [(job, draft) for job, draft in there if job.kind == ROWS and job.length == BLOCK]
            self._back.decode_joined([(job.start, draft.tensors) for job, draft in whole])
        windows = [pair for pair in there if pair[0].kind == WINDOW]
        new = [(job, draft) for job, draft in windows if job.source.window is None or job.known is None]
        self._back.decode_joined_windows([(job.start, draft.tensors, job.mask) for job, draft in new])

    def _fill_rows(self, job: ImageJob, draft: ImageDraft, section: Section, count: int) -> list[RowTarget]:
        """Take over the source's codes; return the target of the rows that are to be encoded behind them, if any."""
        copied, whole = min(job.source.tokens, count), job.length == BLOCK
        if copied and job.source.rows is not None:
            pairs = [(slice(copied), slice(copied))]
            TakeCodes(section, draft.tensors, job.source.rows.tensors(), pairs).run()
            if self._back is not None and whole:
                self._back.decode_section(section, job.start, draft.tensors, slice(0, copied))
        if copied == count:
            return []
        sinks = self._plan.sink_tokens
        exact = sinks if section is self._plan.rows else 0
        first, last = job.start + copied, job.start + count
        return [RowTarget(first, last, draft.tensors, copied, copied > 0, sinks, exact, whole)]

    # -- back into the live cache -------------------------------------------------------------------------------------

    def put_back(self) -> None:
        if self._back is None:
            return
        self._back.apply()
        for live, stored in self._state_back:
            live[...] = stored
        mx.async_eval([live for live, _ in self._state_back])
        self._state_back = []

    def decode_known(self, nodes: Sequence[Node], snapshot: Image | None) -> None:
        if self._back is None:
            return
        for at in range(0, len(nodes), BATCH):  # others computed them, or this cache did before it was asked for
            batch = nodes[at : at + BATCH]
            images = [(node.start, node.rows.image) for node in batch if node.rows is not None]
            self._back.decode_blocks([(start, image) for start, image in images if image is not None])
            windows = [(node, window) for node in batch for window in node.windows]
            coded = [(node.start, of.image.tensors(), of.mask) for node, of in windows if of.image is not None]
            for of_window in coded:
                self._back.decode_window(*of_window)
            self._back.decode_joined_windows(coded)
            self.is_written_back &= len(coded) == len(windows)
            self.put_back()
        if snapshot is not None and self.state is not None:
            self._state_back = self._plan.stored_state(snapshot).beside(self.state)
            self.is_written_back &= bool(self._state_back)
            self.put_back()
        self.is_written_back &= not self._back.is_damaged


def _write_codes(
    plan: Plan, jobs: Sequence[ImageJob], drafts: Sequence[ImageDraft], codes: CodesOfImages, joined: JoinedCodes
) -> None:
    """Write the codes that `encoded` began to make into the images."""
    joined.wait()
    for job, draft in zip(jobs, drafts, strict=True):
        sections = [plan.rows] if job.kind == ROWS else plan.windowed
        for section, of_section in zip(sections, codes.get((job.kind, job.key), ()), strict=False):
            for group, of_group in zip(section.joined, of_section, strict=True):
                if of_group is not None:
                    write_joined(group, of_group, draft.tensors)


def _block_rows(job: ImageJob) -> BlockRows:
    source = job.source.rows
    known = (source.tensors(), min(job.source.tokens, job.length)) if source is not None else None
    return BlockRows(job.start, job.end, known)


def _window_rows(job: ImageJob, window: int) -> WindowRows:
    mask, live = job.mask[window], job.encoded[window]
    if not mask & ~live:
        return WindowRows(job.start, mask, live, {}, 0)
    assert job.source.window is not None
    stored = mask_from(job.source.window.header()[0].extra)[window]
    return WindowRows(job.start, mask, live, job.source.window.tensors(), stored)


def _run(copies: Sequence[CopyOut]) -> None:
    for copy in copies:
        copy.run()
