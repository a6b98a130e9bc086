"""The rows of one layer that live caches keep as codes: appended, levelled, coded, and cut.

`CodedLayer` holds B sequences of left-padded rows; `live.turboquant` puts mlx-lm's protocol on it, `live.batching` makes one
of several, `live.state` one of saved arrays. `live.decoding` and `live.attention` read it. Its arrays are `live.buffers`'s.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import mlx.core as mx

from prefixcache.codecs.interchange import name_of
from prefixcache.codecs.turboquant.coding import PLAIN, Choice, LayerLevels, LayerRows, Run
from prefixcache.codecs.turboquant.live import Encoder, encode, encoder
from prefixcache.codecs.turboquant.measure_levels import LEAST_ROWS
from prefixcache.live.buffers import Alignment, CodeBuffer, FirstRows, RecentRows, RowNumbers
from prefixcache.live.layer_state import NO_ROWS, LayerState
from prefixcache.live.levels import LEAST_MEASURED, SharedLevels, measured_from
from prefixcache.live.ragged import Pair


class Steps(NamedTuple):
    """The shapes, dtype and encoder that steps of a generation share up to row `until`, looked up once for all of them."""

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


class CodedLayer(LayerState):
    """Guards the rows of one layer: only here rows come, are coded, and are cut off. A layer is of one thread at a time."""

    _steps: Steps | None = None

    @classmethod
    def empty(
        cls, choice: Choice, shared: SharedLevels | None = None, number: int = 0, pads: Sequence[int] = ()
    ) -> CodedLayer:
        """Return a layer without rows; of so many sequences as `pads` has, or of any number."""
        recent = RecentRows(choice.recent_tokens, (0,) * len(pads))
        waiting = NO_ROWS if choice.levelling else None
        alignment = Alignment(0, tuple(pads))
        return cls(choice, shared, number, alignment, FirstRows(choice.sink_tokens), recent, waiting=waiting)

    @classmethod
    def of_codes(
        cls, choice: Choice, kind: LayerRows, runs: Sequence[Run], codes: Pair, rows: int, sinks: Pair | None
    ) -> CodedLayer:
        """Take codes and scales that are there already, `rows` in use, of equally long sequences with the same levels."""
        batch = codes[0].shape[0]
        layer = cls.empty(choice, pads=[0] * batch)
        layer.alignment, layer.kind, layer.waiting = layer.alignment.grown(rows), kind, None
        layer.codes, layer.sinks = CodeBuffer(codes), FirstRows(choice.sink_tokens, sinks)
        layer.recent, layer.runs = RecentRows(choice.recent_tokens, (rows,) * batch), (tuple(runs),) * batch
        return layer

    def copy(self) -> CodedLayer:
        """Return another layer of the same rows. No change to one of the two shows in the other."""
        return self.changed(_stacks=self._stacks.copy() if self._stacks is not None else None)

    def changed(self, **parts: Any) -> CodedLayer:
        """Return another layer, the same but for these fields."""
        other = CodedLayer.__new__(CodedLayer)
        other.__dict__.update(self.__dict__, numbers=RowNumbers(), _steps=None, **parts)
        return other

    # -- appending ----------------------------------------------------------------------------------------------------

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Append L rows to each sequence: keys and values (B, heads, L, width)."""
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
            self.code_when_ready()
            return
        if not self.runs:
            self.runs = ((Run(0, PLAIN),),) * self.batch
        self._code(keys, values)
        self.alignment = self.alignment.grown(count)
        if count == 1:
            self._expect_steps(keys, values)

    def _expect_steps(self, keys: mx.array, values: mx.array) -> None:
        """Prepare for more single rows: one came."""
        rows, pads = self.rows, self.pads
        if all(rows >= pad + self.choice.sink_tokens for pad in pads):
            cuts = [pad + run.first for pad, runs in zip(pads, self.runs, strict=True) for run in runs]
            until = min((cut for cut in cuts if cut > rows), default=1 << 62)
            encode_step = encoder(*self.stacks_at(rows), keys.dtype)
            self._steps = Steps(tuple(keys.shape), tuple(values.shape), keys.dtype, until, encode_step)

    def _check(self, keys: mx.array, values: mx.array) -> None:
        """Raise ValueError for rows that don't belong here, before anything but `kind` is changed."""
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

    def code_when_ready(self) -> None:
        """Code the rows that wait, if levels are known or there are rows enough to measure them from."""
        levels = self._shared_levels()
        if levels is None:
            ends, most = self.alignment.all_ends(), self.choice.sink_tokens
            ranges = [(min(pad + most, end), end) for pad, end in zip(self.pads, ends, strict=True)]
            rows = sum(max(end - pad, 0) for end, pad in zip(ends, self.pads, strict=True))
            if rows < LEAST_MEASURED or sum(last - first for first, last in ranges) < LEAST_ROWS:
                return
            assert self.waiting is not None
            assert self.waiting.arrays is not None
            levels = measured_from(self.waiting.arrays, ranges)
            if self.shared is not None:
                levels = self.shared.keep_first(self.number, levels)
        self.code_waiting(levels)

    def code_waiting(self, levels: LayerLevels) -> None:
        """Code the rows that wait with these levels, and all rows to come."""
        waiting, alignment = self.waiting, self.alignment
        self.waiting, self.alignment = None, alignment._replace(rows=0)
        self.runs = ((Run(0, levels),),) * self.batch
        self.recent = self.recent._replace(floors=alignment.pads)
        if waiting is not None and alignment.rows:
            self._code(*waiting.cut_out(slice(alignment.rows)))
        self.alignment = alignment

    # -- coding -------------------------------------------------------------------------------------------------------

    def _code(self, keys: mx.array, values: mx.array) -> None:
        """Encode rows, the first of which is row `rows`, and keep what stays uncoded beside its codes."""
        at, end = self.rows, self.rows + keys.shape[2]
        if at == end:
            return
        cuts = {pad + run.first for pad, runs in zip(self.pads, self.runs, strict=True) for run in runs}
        for low, high in pairwise([at, *sorted(cut for cut in cuts if at < cut < end), end]):
            some = slice(low - at, high - at)
            self._hold(*encode(keys[:, :, some], values[:, :, some], *self.stacks_at(low)), low)
        self.sinks = self.sinks.put(keys, values, at, self.pads)
        self.recent = self.recent.put(keys, values, at, self.alignment.grown(end - at).all_ends())

    def _hold(self, codes: mx.array, scales: mx.array, at: int) -> None:
        before = self.codes.capacity
        self.codes = self.codes.put(codes, scales, at)
        if self.codes.capacity > before:
            self.codes.release_outgrown()

    # -- cuts ---------------------------------------------------------------------------------------------------------

    def cut(self, n: int) -> None:
        """Forget the last `n` rows. ValueError where there are fewer."""
        if isinstance(n, bool) or not hasattr(n, "__index__") or not 0 <= n <= self.rows:
            raise ValueError(f"trim({n!r}): {self.rows} tokens are held; give a number from 0 to that")
        ends, rows = self.alignment.all_ends(), self.rows - operator.index(n)
        self.recent = self.recent.cut(ends, rows)
        self.alignment = self.alignment._replace(rows=rows)
        self._steps = None  # what comes may be sinks again, or of another run
