"""The rows of one layer that live caches keep as codes: appended, levelled, coded, cut, and read by attention.

`CodedLayer` holds B sequences of left-padded rows; `live.turboquant` puts mlx-lm's protocol on it, `live.batching` makes one
of several, `live.state` one of saved arrays. Its arrays are `live.buffers`'s.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import mlx.core as mx

from prefixcache.codecs.interchange import element, name_of
from prefixcache.codecs.packing import words_of
from prefixcache.codecs.raw_attention_gpu import UncodedRows
from prefixcache.codecs.turboquant.coding import PLAIN, Choice, LayerLevels, LayerRows, Run
from prefixcache.codecs.turboquant.format import CodedRows
from prefixcache.codecs.turboquant.live import Encoder, LevelStack, decode, encode, encoder
from prefixcache.live.buffers import (
    ALL,
    Alignment,
    CodeBuffer,
    FirstRows,
    RecentRows,
    RowBuffer,
    RowNumbers,
    Two,
)
from prefixcache.live.levels import LEAST_MEASURED, LevelStacks, SharedLevels, measured_from, run_at, spans_of

ATTEND = ("codes", "buffer")
NO_ROWS, NO_CODES = RowBuffer(), CodeBuffer()


class Steps(NamedTuple):
    """Rows that come one by one, up to row `until`: what they have in common is found once. Steps are short, and many."""

    keys: tuple[int, ...]
    values: tuple[int, ...]
    dtype: mx.Dtype
    until: int
    encode: Encoder

    def takes(self, keys: mx.array, values: mx.array, at: int) -> bool:
        return (
            keys.shape == self.keys
            and values.shape == self.values
            and keys.dtype == values.dtype == self.dtype
            and at < self.until
        )


@dataclass(eq=False)
class CodedLayer:
    """The rows of B sequences of one layer.

    While `waiting`, rows wait uncoded: until their levels are known, or 256 are there to measure them from. Then all are
    coded, in `codes`. Beside their codes each sequence's `sinks` and `recent` rows stay uncoded, and attention reads those.
    `decoded` is a copy of all rows as attention means them, where attend is "buffer".
    """

    choice: Choice
    attends: str
    shared: SharedLevels | None
    number: int  # of the layer, in `shared`
    alignment: Alignment
    sinks: FirstRows
    recent: RecentRows
    kind: LayerRows | None = None
    runs: tuple[tuple[Run, ...], ...] = ()  # of each sequence; none while rows wait
    waiting: RowBuffer | None = None
    codes: CodeBuffer = NO_CODES
    decoded: RowBuffer = NO_ROWS
    _stacks: LevelStacks | None = None

    def __post_init__(self) -> None:
        if self.attends not in ATTEND:
            raise ValueError(f'attend={self.attends!r}: choose "codes" (no decoded copy is held) or "buffer" (one is)')
        self._numbers = RowNumbers()
        self._steps: Steps | None = None

    @classmethod
    def empty(
        cls, choice: Choice, attend: str, shared: SharedLevels | None = None, number: int = 0, pads: Sequence[int] = ()
    ) -> CodedLayer:
        """No rows yet; of so many sequences as `pads` has, or of any number."""
        recent = RecentRows(choice.recent_tokens, (0,) * len(pads))
        waiting = NO_ROWS if choice.levelling else None
        alignment = Alignment(0, tuple(pads))
        return cls(choice, attend, shared, number, alignment, FirstRows(choice.sink_tokens), recent, waiting=waiting)

    @classmethod
    def of_codes(
        cls, choice: Choice, kind: LayerRows, runs: Sequence[Run], codes: Two, rows: int, sinks: Two | None
    ) -> CodedLayer:
        """Take codes and scales that are there already, `rows` in use, of equally long sequences with the same levels."""
        batch = codes[0].shape[0]
        layer = cls.empty(choice, "codes", pads=[0] * batch)
        layer.alignment, layer.kind, layer.waiting = layer.alignment.grown(rows), kind, None
        layer.codes, layer.sinks = CodeBuffer(codes), FirstRows(choice.sink_tokens, sinks)
        layer.recent, layer.runs = RecentRows(choice.recent_tokens, (rows,) * batch), (tuple(runs),) * batch
        return layer

    def copy(self) -> CodedLayer:
        """The same rows. What becomes of one of the two never shows in the other."""
        return self.changed(_stacks=self._stacks.copy() if self._stacks is not None else None)

    def changed(self, **parts: Any) -> CodedLayer:
        """Another layer, the same but for these fields."""
        made = CodedLayer.__new__(CodedLayer)
        made.__dict__.update(self.__dict__, _numbers=RowNumbers(), _steps=None, **parts)
        return made

    # -- what there is ------------------------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        return self.alignment.rows

    @property
    def pads(self) -> tuple[int, ...]:
        return self.alignment.pads

    @property
    def batch(self) -> int:
        return len(self.alignment.pads)

    def known_kind(self) -> LayerRows:
        if self.kind is None:
            raise ValueError("this cache holds no rows yet")
        return self.kind

    def arrays(self) -> list[mx.array]:
        """Every array of rows."""
        waiting = self.waiting or NO_ROWS
        parts = (self.codes, waiting, self.sinks, self.recent, self.decoded)
        return [array for part in parts for array in part.arrays or ()]

    def levels_in_use(self) -> list[LayerLevels]:
        """Each once."""
        return list({id(run.levels): run.levels for runs in self.runs for run in runs}.values())

    @property
    def nbytes(self) -> int:
        """Of all buffers, slack included, and levels. Nothing is evaluated."""
        levels = [part for levels in self.levels_in_use() for part in levels if part is not None]
        return sum(array.nbytes for array in self.arrays()) + sum(2 * part.mean.nbytes for part in levels)

    # -- appending ----------------------------------------------------------------------------------------------------

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Rows (B, heads, L, width) of each sequence, behind those that are there."""
        at, count, steps = self.alignment.rows, keys.shape[2], self._steps
        if steps is not None and steps.takes(keys, values, at) and self.alignment.ends is None:
            self._hold(*steps.encode(keys, values), at)
            self.recent = self.recent.put_one(keys, values, at)
            self.alignment = self.alignment.grown(1)
            return
        self._check(keys, values)
        if not self.pads:
            self.alignment = self.alignment._replace(pads=(0,) * keys.shape[0])
            self.recent = self.recent._replace(floors=(0,) * keys.shape[0])
        if self.waiting is not None:
            self.waiting = self.waiting.put(keys, values, at)
            self.alignment = self.alignment.grown(count)
            self.settle_when_ready()
            return
        if not self.runs:
            self.runs = ((Run(0, PLAIN),),) * self.batch
        self._code(keys, values)
        self.alignment = self.alignment.grown(count)
        if count == 1:
            self._expect_steps(keys, values)

    def _expect_steps(self, keys: mx.array, values: mx.array) -> None:
        """One row came, so more will."""
        rows, pads = self.rows, self.pads
        if self.attends == "codes" and all(rows >= pad + self.choice.sink_tokens for pad in pads):
            cuts = [pad + run.first for pad, runs in zip(pads, self.runs, strict=True) for run in runs]
            until = min((cut for cut in cuts if cut > rows), default=1 << 62)
            encode_step = encoder(*self._stacks_at(rows), keys.dtype)
            self._steps = Steps(tuple(keys.shape), tuple(values.shape), keys.dtype, until, encode_step)

    def _check(self, keys: mx.array, values: mx.array) -> None:
        """ValueError for rows that don't belong here, before anything but `kind` is changed."""
        if keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3]:
            raise ValueError(
                f"keys {keys.shape} and values {values.shape}: give (batch, heads, tokens, width) with equal first three"
            )
        if keys.dtype != values.dtype:
            raise ValueError(
                f"keys are {name_of(keys.dtype)}, values {name_of(values.dtype)}: cast them to one dtype first"
            )
        kind = LayerRows(keys.shape[1], keys.shape[3], values.shape[3], name_of(keys.dtype))
        if self.pads and self.batch != keys.shape[0]:
            raise ValueError(f"rows of {keys.shape[0]} sequences for a cache of {self.batch}: batch sizes must match")
        if self.kind is None:
            kind.check()
            self.kind = kind
        elif kind != self.kind:
            differs = ", ".join(
                f"{name} {given} where the cache has {here}"
                for name, given, here in zip(LayerRows._fields, kind, self.kind, strict=True)
                if given != here
            )
            raise ValueError(f"rows that don't go with those that are held: {differs}")
        if self.waiting is not None and (known := self._shared_levels()) is not None:
            for levels, width in zip(known, kind.widths, strict=True):
                if levels is not None and levels.mean.shape != (kind.heads, width):
                    heads, other = levels.mean.shape
                    raise ValueError(
                        f"layer {self.number}: SharedLevels measured on {heads} heads of {other}, these rows are "
                        f"{kind.heads} of {width}; use one SharedLevels for each model"
                    )

    # -- levels -------------------------------------------------------------------------------------------------------

    def _shared_levels(self) -> LayerLevels | None:
        return self.shared.get(self.number) if self.shared is not None else None

    def settle_when_ready(self) -> None:
        """Code what waits, when its levels are known or there are rows enough to measure them from."""
        levels = self._shared_levels()
        if levels is None:
            ends, most = self.alignment.all_ends(), self.choice.sink_tokens
            if sum(max(end - pad, 0) for end, pad in zip(ends, self.pads, strict=True)) < LEAST_MEASURED:
                return
            assert self.waiting is not None
            assert self.waiting.arrays is not None
            ranges = [(min(pad + most, end), end) for pad, end in zip(self.pads, ends, strict=True)]
            levels = measured_from(self.waiting.arrays, ranges)
            if self.shared is not None:
                levels = self.shared.settle(self.number, levels)
        self.settle(levels)

    def settle(self, levels: LayerLevels) -> None:
        """Code what waits with these levels, and all that comes."""
        waiting, alignment = self.waiting, self.alignment
        self.waiting, self.alignment = None, alignment._replace(rows=0)
        self.runs = ((Run(0, levels),),) * self.batch
        self.recent = self.recent._replace(floors=alignment.pads)
        if waiting is not None and alignment.rows:
            self._code(*waiting.cut_out(slice(alignment.rows)))
        self.alignment = alignment

    def _stacks_of(self, levels: list[LayerLevels]) -> tuple[LevelStack, LevelStack]:
        if self._stacks is None:
            self._stacks = LevelStacks(self.choice, self.known_kind())
        return self._stacks.of(levels)

    def _stacks_at(self, row: int) -> tuple[LevelStack, LevelStack]:
        """The levels that this row of each sequence is coded with."""
        return self._stacks_of([run_at(runs, row - pad).levels for runs, pad in zip(self.runs, self.pads, strict=True)])

    # -- coding -------------------------------------------------------------------------------------------------------

    def _code(self, keys: mx.array, values: mx.array) -> None:
        """Encode rows, the first of which is row `rows`, and keep what stays uncoded beside its codes."""
        at, end = self.rows, self.rows + keys.shape[2]
        if at == end:
            return
        cuts = {pad + run.first for pad, runs in zip(self.pads, self.runs, strict=True) for run in runs}
        for low, high in pairwise([at, *sorted(cut for cut in cuts if at < cut < end), end]):
            some = slice(low - at, high - at)
            self._hold(*encode(keys[:, :, some], values[:, :, some], *self._stacks_at(low)), low)
        self.sinks = self.sinks.put(keys, values, at, self.pads)
        recent_before = self.recent.firsts(self.alignment.all_ends())
        ends = self.alignment.grown(end - at).all_ends()
        self.recent = self.recent.put(keys, values, at, ends)
        if self.attends == "buffer":
            self._extend_decoded(keys, values, recent_before, ends)

    def _hold(self, codes: mx.array, scales: mx.array, at: int) -> None:
        before = self.codes.capacity
        self.codes = self.codes.put(codes, scales, at)
        if self.codes.capacity > before:
            self.codes.release_outgrown()

    def _extend_decoded(self, keys: mx.array, values: mx.array, recent_before: list[int], ends: list[int]) -> None:
        """Append to the decoded copy: the new rows, and what codes give for those that aren't recent any more."""
        self.decoded = self.decoded.put(keys, values, self.rows)
        for b, pad in enumerate(self.pads):
            low = max(recent_before[b], pad + self.choice.sink_tokens)
            high = self.recent.first(b, ends[b])
            for first, last, levels in spans_of(self.runs[b], pad, low, high):
                rows = self._decoded_codes(b, ALL, first, last, self._stacks_of([levels]))
                self.decoded = self.decoded.overwritten(b, slice(first, last), rows)

    def decode_all(self) -> None:
        """Make the decoded copy anew, where there is one."""
        if self.attends == "buffer" and self.rows and self.waiting is None:
            self.decoded = NO_ROWS.put(*self.decoded_heads(0, self.known_kind().heads), 0)

    # -- what attention reads -----------------------------------------------------------------------------------------

    def _coded_spans(self, b: int) -> list[tuple[int, int, LayerLevels]]:
        """(first row, row behind the last, levels) of each run that has rows attended to by their codes."""
        low = self.pads[b] + self.choice.sink_tokens
        high = min(self.rows, max(self.recent.first(b, self.alignment.end_of(b)), low))
        return spans_of(self.runs[b], self.pads[b], low, high)

    def parts(self) -> list[CodedRows]:
        """What is attended to by its codes: each part one run of every sequence, the last of each in the last.

        Rows behind the last that is attended to so are not among a part's.
        """
        if self.codes.arrays is None:
            return []
        spans = [self._coded_spans(b) for b in range(self.batch)]
        if len(spans) == 1 and len(spans[0]) == 1:  # as most often
            ((low, cut, levels),) = spans[0]
            return [self._part(*self.codes.cut_out(slice(cut)), [levels], self._numbers.of([low], 0), None)]
        cut = max((of_sequence[-1][1] for of_sequence in spans if of_sequence), default=0)
        codes, scales = self.codes.cut_out(slice(cut))
        made = []
        for behind in range(max(map(len, spans), default=0), 0, -1):
            part = [of_sequence[-behind] if len(of_sequence) >= behind else None for of_sequence in spans]
            some = next(span for span in part if span is not None)
            first = self._numbers.of([span[0] if span else cut for span in part], 0)
            last = self._numbers.of([span[1] if span else cut for span in part], cut)
            made.append(self._part(codes, scales, [span[2] if span else some[2] for span in part], first, last))
        return made

    def _part(
        self,
        codes: mx.array,
        scales: mx.array,
        levels: list[LayerLevels],
        first: mx.array | None,
        last: mx.array | None,
    ) -> CodedRows:
        keys, values = self._stacks_of(levels)
        return CodedRows(codes, scales, keys.form, values.form, keys.decoding, values.decoding, first, last)

    @property
    def has_uncoded(self) -> bool:
        """Whether some rows are attended to uncoded."""
        return self.sinks.arrays is not None or self.recent.arrays is not None

    def uncoded_rows(self) -> tuple[Two, list[list[int]]]:
        """What is attended to uncoded, sinks and recent rows: keys and values (B, heads, n, width), and of each sequence
        and each of the n the row that it is, -1 for none."""
        arrays = [part.arrays for part in (self.sinks, self.recent) if part.arrays is not None]
        most = self.choice.sink_tokens
        listed: list[list[int]] = []
        for b, pad in enumerate(self.pads):
            numbers: list[int] = []
            if self.sinks.arrays is not None:
                numbers += [row if row < self.rows else -1 for row in range(pad, pad + most)]
            if self.recent.arrays is not None:
                end = self.alignment.end_of(b)
                numbers += self.recent.numbers(max(self.recent.first(b, end), pad + most), end)
            listed.append(numbers)
        return arrays[0] if len(arrays) == 1 else _joined(arrays, axis=2), listed

    def uncoded_for_kernel(self) -> UncodedRows | None:
        """The same, as the GPU's kernel reads it; None where it can't: no ring, or padding on the right."""
        recent, pads = self.recent, self.pads
        if recent.arrays is None or self.alignment.ends is not None:
            return None
        low = self.rows - recent.size
        whole = all(floor <= max(low, pad) for floor, pad in zip(recent.floors, pads, strict=True))
        floors = None if whole else self._numbers.of(recent.floors, -1)
        return UncodedRows(self.rows, recent.arrays, self.sinks.arrays, self._numbers.of(pads, 0), floors)

    # -- decoding -----------------------------------------------------------------------------------------------------

    def decoded_heads(self, first: int, heads: int) -> Two:
        """Keys and values of some heads as attention means them: (B, `heads`, rows, width), zero where padding is."""
        some = slice(first, first + heads)
        for buffer in (self.waiting, self.decoded):
            if buffer is not None and buffer.arrays is not None:
                return buffer.cut_out(slice(self.rows), some)
        sequences = [self.decoded_sequence(b, some) for b in range(self.batch)]
        return sequences[0] if len(sequences) == 1 else _joined(sequences, axis=0)

    def decoded_sequence(self, b: int, heads: slice) -> Two:
        """Of one sequence, from its parts: (1, heads, rows, width) each."""
        pad, end, count = self.pads[b], self.alignment.end_of(b), heads.stop - heads.start
        pieces: list[Two] = []
        if pad:
            pieces.append(self._nobodys(count, min(pad, self.rows)))
        if self.sinks.arrays is not None and (leading := min(self.choice.sink_tokens, max(end - pad, 0))):
            keys, values = self.sinks.arrays
            pieces.append((keys[b : b + 1, heads, :leading], values[b : b + 1, heads, :leading]))
        for low, high, levels in self._coded_spans(b):
            stacks = [stack.of_heads(heads.start, count) for stack in self._stacks_of([levels])]
            pieces.append(self._decoded_codes(b, heads, low, high, stacks))
        pieces += self.recent.pieces(b, heads, max(self.recent.first(b, end), pad + self.choice.sink_tokens), end)
        if (behind := self.rows - max(end, min(pad, self.rows))) or not pieces:  # padding on the right
            pieces.append(self._nobodys(count, behind))
        return pieces[0] if len(pieces) == 1 else _joined(pieces, axis=2)

    def _nobodys(self, heads: int, rows: int) -> Two:
        """Rows of padding: (1, heads, rows, width) each."""
        kind = self.known_kind()
        shape, dtype = (1, heads, rows), element(kind.dtype).mlx
        return mx.zeros((*shape, kind.key_width), dtype), mx.zeros((*shape, kind.value_width), dtype)

    def _decoded_codes(self, b: int, heads: slice, first: int, last: int, stacks: Sequence[LevelStack]) -> Two:
        """Rows of a sequence by their codes: (1, heads, last - first, width) each."""
        codes, scales = self.codes.cut_out(slice(first, last), heads, slice(b, b + 1))
        (keys, values), dtype = stacks, self.known_kind().dtype
        key_words = words_of(keys.form.width, keys.form.codebook.bits)
        return (
            decode(codes[..., :key_words], scales[..., 0], dtype, keys),
            decode(codes[..., key_words:], scales[..., 1], dtype, values),
        )

    # -- cuts ---------------------------------------------------------------------------------------------------------

    def cut(self, n: int) -> None:
        """Forget the last `n` rows. ValueError where there are fewer."""
        if isinstance(n, bool) or not hasattr(n, "__index__") or not 0 <= n <= self.rows:
            raise ValueError(f"trim({n!r}): {self.rows} tokens are held; give a number from 0 to that")
        ends, rows = self.alignment.all_ends(), self.rows - operator.index(n)
        self.recent = self.recent.cut(ends, rows)
        self.alignment = self.alignment._replace(rows=rows)
        self._steps = None  # what comes may be sinks again, or of another run


def _joined(pieces: list[Two], axis: int) -> Two:
    return mx.concatenate([keys for keys, _ in pieces], axis), mx.concatenate([values for _, values in pieces], axis)
