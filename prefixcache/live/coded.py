"""The rows of one layer that live caches keep as codes: appended, measured, cut, decoded, described. No protocol here.

`Coded` holds B sequences of left-padded rows; `TurboQuantKVCache` and `BatchTurboQuantKVCache` put mlx-lm's protocol on
it. MLX arrays are never changed in place where another cache could see it: a buffer is written through a handle of its
own (`copy.copy`), which costs nothing while nobody else holds it, and a copy of the buffer when somebody does.
"""

from __future__ import annotations

import copy
import json
import operator
import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from prefixcache.codecs.coded_rows import CodedRows
from prefixcache.codecs.interchange import FLOATS, borrow, copy_out, element, name_of, on_cpu
from prefixcache.codecs.packing import words_of
from prefixcache.codecs.raw_attention_gpu import RawRows
from prefixcache.codecs.turboquant.codec import LEAST_WIDTH, TurboQuant
from prefixcache.codecs.turboquant.format import Form, form_of
from prefixcache.codecs.turboquant.levelling import Levels, measure
from prefixcache.codecs.turboquant.live import Encoder, LevelStack, decode, encode, encoder
from prefixcache.memory import give_back

STEP = 256  # rows by which a buffer grows
LARGE = 1 << 22  # bytes of a buffer worth waiting for when it grows
AWAITED = 256  # rows to measure levels from, which are then for all that comes
SAMPLE = 1024  # rows to measure levels from: here it is waited for
RECENT = 64  # last rows that attention sees as they are: most of what codes cost is lost on the nearest ones
MOST_RECENT = 4096
ATTEND = ("codes", "buffer")
VERSION = 1  # of `state`


class Pair(NamedTuple):
    """The levels of a layer's keys and values."""

    keys: Levels | None
    values: Levels | None


PLAIN = Pair(None, None)


class Run(NamedTuple):
    """From token `first` of a sequence on, up to the next run, rows are coded with `levels`."""

    first: int
    levels: Pair


class Kind(NamedTuple):
    """What rows a layer has."""

    heads: int
    key_width: int
    value_width: int
    dtype: str

    def __str__(self) -> str:
        widths = self.key_width if self.key_width == self.value_width else f"{self.key_width} and {self.value_width}"
        return f"{self.heads} heads of {widths} {self.dtype}"


class Choice(NamedTuple):
    """How rows are coded, and which stay as they are beside their codes: what the user chose."""

    key_bits: int = 4
    value_bits: int = 4
    levelling: bool = True
    sink_tokens: int = 4
    seed: int = 0
    recent_tokens: int = RECENT

    def __str__(self) -> str:
        codec = TurboQuant(self.key_bits, self.value_bits, self.levelling, sink_tokens=self.sink_tokens, seed=self.seed)
        return str(codec)


class SharedLevels:
    """Levels of a model's layers, measured once by whichever cache first sees 256 rows, and used by all that share this.

    One for each tenant: levels are means and spreads of the text that they were measured on.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[int, Pair] = {}

    def get(self, layer: int) -> Pair | None:
        return self._of.get(layer)

    def settle(self, layer: int, measured: Pair) -> Pair:
        """The layer's levels: those that came first."""
        with self._lock:
            return self._of.setdefault(layer, measured)


class Steady(NamedTuple):
    """What stays the same from one row a sequence to the next, up to row `until`; lists by their identity."""

    keys: tuple[int, ...]
    values: tuple[int, ...]
    dtype: mx.Dtype
    pads: list[int]
    runs: list[tuple[Run, ...]]
    until: int
    encode: Encoder


class Coded:
    """Codes of B sequences. Row `pads[b] + t` of the buffers is token t of sequence b; `rows` of them are in use.

    Until 256 rows are there to measure levels from, rows wait as they are (`waiting`); then all are coded. After that
    the first `sink_tokens` and the last `recent_tokens` of each sequence stay as they are beside their codes, and
    attention reads those. The recent ones stand in a ring, row r in its place r % recent_tokens; none before `floors[b]`
    is there, after a cut, or where only codes were at hand.
    """

    def __init__(self, choice: Choice, attend: str, shared: SharedLevels | None, layer: int, batch: int | None):
        if attend not in ATTEND:
            raise ValueError(f'attend={attend!r}: choose "codes" (no decoded copy is held) or "buffer" (one is)')
        self.choice, self.attends = choice, attend
        self.kind: Kind | None = None
        self.rows = 0
        self.pads: list[int] = [0] * batch if batch else []
        self.codes: mx.array | None = None  # uint32 (B, heads, capacity, key words + value words)
        self.scales: mx.array | None = None  # uint16 (B, heads, capacity, 2)
        # (B, heads, capacity, width) while they wait; then the sinks, (B, heads, sink_tokens, width).
        self.raw: tuple[mx.array, mx.array] | None = None
        self.recent: tuple[mx.array, mx.array] | None = None  # (B, heads, recent_tokens, width)
        self.floors: list[int] = [0] * batch if batch else []
        self.decoded: tuple[mx.array, mx.array] | None = None  # attend="buffer": (B, heads, capacity, width)
        # The row where a sequence's padding on the right begins, until it is turned left.
        self.ends: list[int] | None = None
        self.runs: list[tuple[Run, ...]] = []
        self.waiting = choice.levelling
        self.shared = shared, layer
        self._stacks: dict[tuple[int, ...], tuple[tuple[Pair, ...], LevelStack, LevelStack]] = {}
        self._bounds: dict[tuple[int, ...], mx.array] = {}
        self._steady: Steady | None = None

    # -- what there is ------------------------------------------------------------------------------------------------

    @property
    def batch(self) -> int:
        return len(self.pads)

    def tokens_of(self, sequence: int) -> int:
        return max(self.rows - self.pads[sequence], 0)

    @property
    def forms(self) -> tuple[Form, Form]:
        kind, choice = self.known_kind(), self.choice
        return (
            form_of(kind.key_width, choice.key_bits, choice.seed),
            form_of(kind.value_width, choice.value_bits, choice.seed),
        )

    def known_kind(self) -> Kind:
        if self.kind is None:
            raise ValueError("this cache holds no rows yet")
        return self.kind

    def arrays(self) -> list[mx.array]:
        """Every array of rows that is held."""
        held = [self.codes, self.scales, *(self.raw or ()), *(self.recent or ()), *(self.decoded or ())]
        return [array for array in held if array is not None]

    def pairs(self) -> list[Pair]:
        """The distinct levels in use."""
        return list({id(run.levels): run.levels for runs in self.runs for run in runs}.values())

    @property
    def held_bytes(self) -> int:
        """Of all buffers, slack included, and levels. Nothing is evaluated."""
        levels = [own for pair in self.pairs() for own in (pair.keys, pair.values) if own is not None]
        return sum(array.nbytes for array in self.arrays()) + sum(2 * own.mean.nbytes for own in levels)

    # -- appending ----------------------------------------------------------------------------------------------------

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Rows (B, heads, L, width) of each sequence, behind those that are there."""
        if self._is_step(keys, values):
            self._step(keys, values)
            return
        self._check(keys, values)
        if not self.pads:
            self.pads, self.floors = [0] * keys.shape[0], [0] * keys.shape[0]
        if not self.runs and not self.waiting:
            self.runs = [(Run(0, PLAIN),)] * self.batch
        if self.waiting:
            self._check_levels()
            at = self.rows
            self.raw = tuple(
                put(own, new, at) for own, new in zip(self.raw or (None, None), (keys, values), strict=True)
            )  # type: ignore[assignment]
            self.rows += keys.shape[2]
            self.settle_when_ready()
        else:
            self._code(keys, values)
            self.rows += keys.shape[2]
            if keys.shape[2] == 1:
                self._begin_steps(keys, values)

    def _begin_steps(self, keys: mx.array, values: mx.array) -> None:
        """One row came; so will more. What they have in common is found once: a step is short, and there are many."""
        cuts = [pad + run.first for pad, runs in zip(self.pads, self.runs, strict=True) for run in runs]
        if self.attends == "codes" and all(self.rows >= pad + self.choice.sink_tokens for pad in self.pads):
            own = [run_at(runs, self.rows - pad).levels for runs, pad in zip(self.runs, self.pads, strict=True)]
            self._steady = Steady(
                tuple(keys.shape), tuple(values.shape), keys.dtype, self.pads, self.runs,
                min((cut for cut in cuts if cut > self.rows), default=1 << 62), encoder(*self._stacks_of(own), keys.dtype),
            )  # fmt: skip

    def _is_step(self, keys: mx.array, values: mx.array) -> bool:
        steady = self._steady
        return (
            steady is not None
            and keys.shape == steady.keys
            and values.shape == steady.values
            and keys.dtype == values.dtype == steady.dtype
            and steady.pads is self.pads
            and steady.runs is self.runs
            and self.rows < steady.until
            and self.ends is None
        )

    def _step(self, keys: mx.array, values: mx.array) -> None:
        assert self._steady is not None
        self._hold(*self._steady.encode(keys, values), self.rows)
        if self.recent is not None:
            place = self.rows % self.choice.recent_tokens
            to = copy.copy(self.recent[0]), copy.copy(self.recent[1])
            to[0][:, :, place : place + 1], to[1][:, :, place : place + 1] = keys, values
            self.recent = to
        self.rows += 1

    def _check(self, keys: mx.array, values: mx.array) -> None:
        if keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3]:
            raise ValueError(
                f"keys {keys.shape} and values {values.shape}: give (batch, heads, tokens, width) with equal first three"
            )
        if keys.dtype != values.dtype:
            raise ValueError(
                f"keys are {name_of(keys.dtype)}, values {name_of(values.dtype)}: cast them to one dtype first"
            )
        kind = Kind(keys.shape[1], keys.shape[3], values.shape[3], name_of(keys.dtype))
        if self.pads and len(self.pads) != keys.shape[0]:
            raise ValueError(
                f"rows of {keys.shape[0]} sequences for a cache of {len(self.pads)}: batch sizes must match"
            )
        if self.kind is None:
            check_kind(kind)
            self.kind = kind
        elif kind != self.kind:
            differs = ", ".join(
                f"{name} {new} where the cache has {own}"
                for name, new, own in zip(Kind._fields, kind, self.kind, strict=True)
                if new != own
            )
            raise ValueError(f"rows that don't go with those that are held: {differs}")

    def _check_levels(self) -> None:
        """ValueError for shared levels of other rows, before anything is changed."""
        shared, layer = self.shared
        known, kind = shared.get(layer) if shared is not None else None, self.known_kind()
        for own, width in zip(known if known is not None else (), (kind.key_width, kind.value_width), strict=False):
            if own is not None and own.mean.shape != (kind.heads, width):
                raise ValueError(
                    f"layer {layer}: SharedLevels measured on {own.mean.shape[0]} heads of {own.mean.shape[1]}, these rows "
                    f"are {kind.heads} of {width}; use one SharedLevels for each model"
                )

    def settle_when_ready(self) -> None:
        """Code what waits, when its levels are known or there are rows enough to measure them from."""
        shared, layer = self.shared
        known = shared.get(layer) if shared is not None else None
        if known is None:
            ends = [self.recent_end(b) for b in range(self.batch)]
            count = sum(max(end - pad, 0) for end, pad in zip(ends, self.pads, strict=True))
            if count < AWAITED:
                return
            known = self._measured(ends)
            if shared is not None:
                known = shared.settle(layer, known)
        self.settle(known)

    def _measured(self, ends: list[int]) -> Pair:
        """Levels of the rows that are waiting, evenly drawn, but for the sinks."""
        assert self.raw is not None
        firsts = [min(pad + self.choice.sink_tokens, end) for pad, end in zip(self.pads, ends, strict=True)]
        count = sum(end - first for first, end in zip(firsts, ends, strict=True))
        drawn = np.linspace(0, count - 1, min(count, SAMPLE)).astype(np.int64)
        at, parts = 0, []
        for b, (first, end) in enumerate(zip(firsts, ends, strict=True)):
            own = drawn[(drawn >= at) & (drawn < at + end - first)] - at + first
            at += end - first
            parts.append((b, mx.array(own)))
        made = []
        for rows, centred in zip(self.raw, (True, False), strict=True):
            some = [mx.take(rows[b], own, axis=1) for b, own in parts if own.size]
            sample = copy_out(mx.swapaxes(mx.concatenate(some, axis=1), 0, 1).astype(mx.float32))
            made.append(measure(sample, centred))
        return Pair(*made)

    def settle(self, levels: Pair) -> None:
        """Code what waits with these levels, and all that comes."""
        raw, rows = self.raw, self.rows
        self.waiting, self.raw, self.rows = False, None, 0
        self.runs = [(Run(0, levels),)] * self.batch
        self.floors = list(self.pads)
        if raw is not None and rows:
            self._code(*(own[..., :rows, :] for own in raw))
        self.rows = rows

    def _code(self, keys: mx.array, values: mx.array) -> None:
        """Encode rows, the first of which is row `rows`."""
        at, count = self.rows, keys.shape[2]
        if count == 0:
            return
        cuts = {pad + run.first for pad, runs in zip(self.pads, self.runs, strict=True) for run in runs}
        borders = [at, *sorted(cut for cut in cuts if at < cut < at + count), at + count]
        for low, high in pairwise(borders):
            own = slice(low - at, high - at)
            self._encode(keys[:, :, own], values[:, :, own], low)
        self._keep_sinks(keys, values)
        before = [self.floor_of(b) for b in range(self.batch)]
        ends = [min(at + count, end) for end in self.ends or [at + count] * self.batch]
        self._keep_recent(keys, values, ends)
        if self.attends == "buffer":
            self._show(keys, values, before, ends)

    def _encode(self, keys: mx.array, values: mx.array, at: int) -> None:
        stacks = self._stacks_of(
            [run_at(runs, at - pad).levels for runs, pad in zip(self.runs, self.pads, strict=True)]
        )
        self._hold(*encode(keys, values, *stacks), at)

    def _hold(self, codes: mx.array, scales: mx.array, at: int) -> None:
        before = self.codes.shape[2] if self.codes is not None else 0
        self.codes, self.scales = put(self.codes, codes, at), put(self.scales, scales, at)
        if self.codes.shape[2] > before and self.codes.nbytes >= LARGE:
            # MLX would keep the outgrown buffer of every layer for reuse, and none is ever long enough to be used again.
            mx.eval(self.codes, self.scales)
            mx.clear_cache()
            if on_cpu():
                give_back()

    def _keep_sinks(self, keys: mx.array, values: mx.array) -> None:
        """Those of the rows, the first of which is row `rows`, that stay as they are."""
        most, at, count = self.choice.sink_tokens, self.rows, keys.shape[2]
        for b, pad in enumerate(self.pads):
            first, last = max(at, pad), min(at + count, pad + most)
            if first >= last:
                continue
            if self.raw is None:
                shape = (self.batch, keys.shape[1], most)
                self.raw = (
                    mx.zeros((*shape, keys.shape[3]), keys.dtype),
                    mx.zeros((*shape, values.shape[3]), keys.dtype),
                )
            to = [copy.copy(array) for array in self.raw]
            for own, rows in zip(to, (keys, values), strict=True):
                own[b, :, first - pad : last - pad] = apart(rows[b, :, first - at : last - at], own)
            self.raw = to[0], to[1]

    def _keep_recent(self, keys: mx.array, values: mx.array, ends: list[int]) -> None:
        """Those of the rows, the first of which is row `rows`, that are each sequence's last: the ones before `ends`."""
        most, at = self.choice.recent_tokens, self.rows
        if not most:
            return
        if self.recent is None:
            shape = (*keys.shape[:2], most)
            self.recent = (
                mx.zeros((*shape, keys.shape[3]), keys.dtype),
                mx.zeros((*shape, values.shape[3]), keys.dtype),
            )
        to = [copy.copy(array) for array in self.recent]
        together = len(set(ends)) == 1  # as always but for padding on the right
        for b, end in [(slice(None), ends[0])] if together else list(enumerate(ends)):
            for low, high, place in places(max(at, end - most), end, most):
                for own, rows in zip(to, (keys, values), strict=True):
                    own[b, :, place : place + high - low] = apart(rows[b, :, low - at : high - at], own)
        self.recent = to[0], to[1]

    def _show(self, keys: mx.array, values: mx.array, before: list[int], ends: list[int]) -> None:
        """Append to the decoded copy: the new rows, and what codes give for those that aren't recent any more."""
        at = self.rows
        own = self.decoded or (None, None)
        self.decoded = put(own[0], keys, at), put(own[1], values, at)
        for b, pad in enumerate(self.pads):
            low = max(before[b], pad + self.choice.sink_tokens)
            for first, last, pair in self._spans(b, low, max(self.floors[b], ends[b] - self.choice.recent_tokens)):
                rows = self._decoded_codes(b, slice(None), first, last, self._stacks_of([pair]))
                shown = [copy.copy(array) for array in self.decoded]
                for to, new in zip(shown, rows, strict=True):
                    to[b : b + 1, :, first:last] = new
                self.decoded = shown[0], shown[1]

    def show_all(self) -> None:
        """Make the decoded copy anew, where one is held."""
        if self.attends == "buffer" and self.rows and not self.waiting:
            keys, values = self.decoded_heads(0, self.known_kind().heads)
            self.decoded = put(None, keys, 0), put(None, values, 0)

    # -- levels of many sequences -------------------------------------------------------------------------------------

    def _stacks_of(self, pairs: list[Pair]) -> tuple[LevelStack, LevelStack]:
        if all(pair is pairs[0] for pair in pairs):
            pairs = pairs[:1]
        key = tuple(map(id, pairs))
        if key not in self._stacks:
            if len(self._stacks) >= 8:
                self._stacks.clear()
            heads, (keys, values) = self.known_kind().heads, self.forms
            made = (
                LevelStack([p.keys for p in pairs], keys, heads),
                LevelStack([p.values for p in pairs], values, heads),
            )
            self._stacks[key] = (tuple(pairs), *made)  # with the pairs, so that their ids stay theirs
        return self._stacks[key][1:]

    def spans_of(self, sequence: int) -> list[tuple[int, int, Pair]]:
        """(first row, row behind the last, levels) of each run that has rows attended to by their codes."""
        low = self.pads[sequence] + self.choice.sink_tokens
        return self._spans(sequence, low, min(self.rows, max(self.floor_of(sequence), low)))

    def _spans(self, sequence: int, low: int, high: int) -> list[tuple[int, int, Pair]]:
        """The rows from `low` to `high` (not included), run by run."""
        pad, runs = self.pads[sequence], self.runs[sequence]
        spans = []
        for run, after in zip(runs, (*runs[1:], None), strict=True):
            first, last = max(pad + run.first, low), high if after is None else min(pad + after.first, high)
            if first < last:
                spans.append((first, last, run.levels))
        return spans

    def parts(self) -> list[CodedRows]:
        """What is attended to by its codes: each part of one run of every sequence, the last of each in the last.

        Rows behind the last that is attended to so are not among a part's.
        """
        if self.codes is None or self.scales is None:
            return []
        spans = [self.spans_of(b) for b in range(self.batch)]
        if len(spans) == 1 and len(spans[0]) == 1:
            low, cut, pair = spans[0][0]
            keys, values = self._stacks_of([pair])
            bound = self._bound([low], 0)
            codes, scales = self.codes[:, :, :cut], self.scales[:, :, :cut]
            return [CodedRows(codes, scales, keys.form, values.form, keys.decoding, values.decoding, bound)]
        cut = max((own[-1][1] for own in spans if own), default=0)
        codes, scales = self.codes[..., :cut, :], self.scales[..., :cut, :]
        made = []
        for behind in range(max(map(len, spans), default=0), 0, -1):
            own = [one[-behind] if len(one) >= behind else None for one in spans]
            some = next(span for span in own if span is not None)
            keys, values = self._stacks_of([span[2] if span else some[2] for span in own])
            first = self._bound([span[0] if span else cut for span in own], 0)
            last = self._bound([span[1] if span else cut for span in own], cut)
            made.append(CodedRows(codes, scales, keys.form, values.form, keys.decoding, values.decoding, first, last))
        return made

    @property
    def has_raw(self) -> bool:
        """Whether some rows are attended to as they are."""
        return self.raw is not None or self.recent is not None

    def raw_rows(self) -> tuple[tuple[mx.array, mx.array], list[list[int]]]:
        """What is attended to as it is, sinks and recent rows: keys and values (B, heads, n, width), and of each sequence
        and each of the n the row that it is, -1 for none."""
        held = [own for own in (self.raw, self.recent) if own is not None]
        most, sinks = self.choice.recent_tokens, self.choice.sink_tokens
        rows: list[list[int]] = []
        for b, pad in enumerate(self.pads):
            own = [pad + t if pad + t < self.rows else -1 for t in range(sinks)] if self.raw is not None else []
            if self.recent is not None:
                floor, end = max(self.floor_of(b), pad + sinks), self.recent_end(b)
                ring = [-1] * most
                for row in range(floor, end):
                    ring[row % most] = row
                own += ring
            rows.append(own)
        if len(held) == 1:
            return held[0], rows
        return (mx.concatenate([own[0] for own in held], 2), mx.concatenate([own[1] for own in held], 2)), rows

    def raw_for_kernel(self) -> RawRows | None:
        """The same, as the GPU's kernel reads it; None where it can't: no ring, or padding on the right."""
        if self.recent is None or self.ends is not None:
            return None
        low = self.rows - self.choice.recent_tokens
        whole = all(floor <= max(low, pad) for floor, pad in zip(self.floors, self.pads, strict=True))
        floors = None if whole else self._bound(self.floors, -1)
        return RawRows(self.rows, self.recent, self.raw, self._bound(self.pads, 0), floors)

    def floor_of(self, sequence: int) -> int:
        """The first row that is recent."""
        return max(self.floors[sequence], self.recent_end(sequence) - self.choice.recent_tokens)

    def recent_end(self, sequence: int) -> int:
        """The row behind the last recent one: the end of the rows, but for padding on the right."""
        return self.rows if self.ends is None else min(self.rows, self.ends[sequence])

    def _bound(self, rows: list[int], default: int) -> mx.array | None:
        if all(row == default for row in rows):
            return None
        key = tuple(rows)
        if key not in self._bounds:
            if len(self._bounds) >= 8:
                self._bounds.clear()
            self._bounds[key] = mx.array(rows, dtype=mx.int32)
            mx.eval(self._bounds[key])
        return self._bounds[key]

    # -- decoding -----------------------------------------------------------------------------------------------------

    def decoded_heads(self, first: int, heads: int) -> tuple[mx.array, mx.array]:
        """Keys and values of some heads as attention means them: (B, `heads`, rows, width), zero where padding is."""
        own = slice(first, first + heads)
        if self.waiting and self.raw is not None:
            return self.raw[0][:, own, : self.rows], self.raw[1][:, own, : self.rows]
        if self.decoded is not None:
            return self.decoded[0][:, own, : self.rows], self.decoded[1][:, own, : self.rows]
        made = [self._decoded_sequence(b, own) for b in range(self.batch)]
        if len(made) == 1:
            return made[0]
        return mx.concatenate([keys for keys, _ in made]), mx.concatenate([values for _, values in made])

    def _decoded_sequence(self, b: int, heads: slice) -> tuple[mx.array, mx.array]:
        pad = self.pads[b]
        count = heads.stop - heads.start
        pieces: list[tuple[mx.array, mx.array]] = []
        if pad:
            pieces.append(self._zeros(count, min(pad, self.rows)))
        if self.raw is not None and (sinks := min(self.choice.sink_tokens, self.tokens_of(b))):
            pieces.append((self.raw[0][b : b + 1, heads, :sinks], self.raw[1][b : b + 1, heads, :sinks]))
        for low, high, pair in self.spans_of(b):
            stacks = [stack.of_heads(heads.start, count) for stack in self._stacks_of([pair])]
            pieces.append(self._decoded_codes(b, heads, low, high, stacks))
        if self.recent is not None:
            low, end = max(self.floor_of(b), pad + self.choice.sink_tokens), self.recent_end(b)
            for first, last, place in places(low, end, self.choice.recent_tokens):
                own = slice(place, place + last - first)
                pieces.append((self.recent[0][b : b + 1, heads, own], self.recent[1][b : b + 1, heads, own]))
        if (behind := self.rows - max(self.recent_end(b), min(pad, self.rows))) or not pieces:  # padding on the right
            pieces.append(self._zeros(count, behind))
        if len(pieces) == 1:
            return pieces[0]
        return mx.concatenate([p[0] for p in pieces], axis=2), mx.concatenate([p[1] for p in pieces], axis=2)

    def _zeros(self, heads: int, rows: int) -> tuple[mx.array, mx.array]:
        """Rows that are nobody's: (1, heads, rows, width) each."""
        kind = self.known_kind()
        shape, dtype = (1, heads, rows), element(kind.dtype).mlx
        return mx.zeros((*shape, kind.key_width), dtype), mx.zeros((*shape, kind.value_width), dtype)

    def _decoded_codes(
        self, b: int, heads: slice, first: int, last: int, stacks: Sequence[LevelStack]
    ) -> tuple[mx.array, mx.array]:
        """Rows of a sequence by their codes: (1, heads, last - first, width) each."""
        assert self.codes is not None
        assert self.scales is not None
        at = (slice(b, b + 1), heads, slice(first, last))
        return decoded_rows(self.codes[at], self.scales[at], self.known_kind().dtype, stacks)

    # -- copies and cuts ----------------------------------------------------------------------------------------------

    def take_over(self, other: Coded) -> None:
        """Hold what another one holds, as it is now; neither shows in the other from here on."""
        for name, value in vars(other).items():
            setattr(self, name, list(value) if isinstance(value, list) else value)
        self._stacks, self._bounds, self._steady = dict(other._stacks), {}, None

    def cut(self, n: int) -> None:
        """Forget the last `n` rows. ValueError where there are fewer."""
        if isinstance(n, bool) or not hasattr(n, "__index__") or not 0 <= n <= self.rows:
            raise ValueError(f"trim({n!r}): {self.rows} tokens are held; give a number from 0 to that")
        floors = [self.floor_of(b) for b in range(self.batch)]
        self.rows -= operator.index(n)
        self.floors = [min(floor, self.rows) for floor in floors]

    # -- as arrays alone ----------------------------------------------------------------------------------------------

    def described(self, **more: Any) -> list[mx.array]:
        """All of it as a list of arrays; the first is JSON (uint8), so that it can be saved like any other state."""
        pairs = self.pairs()
        numbers = {id(pair): i for i, pair in enumerate(pairs)}
        said = {
            "version": VERSION, "choice": list(self.choice), "attends": self.attends, "kind": self.kind, "rows": self.rows,
            "pads": self.pads, "floors": self.floors, "ends": self.ends, "waiting": self.waiting,
            "runs": [[[run.first, numbers[id(run.levels)]] for run in runs] for runs in self.runs],
            "levels": [[own is not None for own in pair] for pair in pairs],
            "held": [array is not None for array in (self.codes, self.raw, self.recent)],
            **more,
        }  # fmt: skip
        text = mx.array(np.frombuffer(json.dumps(said).encode(), np.uint8))
        levels = [own for pair in pairs for own in pair if own is not None]
        rows = [
            array for array in (self.codes, self.scales, *(self.raw or ()), *(self.recent or ())) if array is not None
        ]
        return [text, *rows, *(mx.array(array) for own in levels for array in (own.mean, own.root))]

    def restore(self, state: Sequence[mx.array]) -> dict[str, Any]:
        """The inverse of `described`: gives all that it said. ValueError for what is no such state."""
        try:
            arrays = iter(state)
            said = json.loads(bytes(borrow(next(arrays)).tobytes()))
            if said["version"] != VERSION:
                raise ValueError(f"its version is {said['version']}, this release reads {VERSION}")
            Coded.__init__(self, Choice(*said["choice"]), said["attends"], None, 0, None)
            self.kind = Kind(*said["kind"]) if said["kind"] is not None else None
            self.rows, self.pads, self.waiting = said["rows"], list(said["pads"]), said["waiting"]
            self.floors, self.ends = list(said["floors"]), said["ends"]
            has_codes, has_raw, has_recent = said["held"]
            if has_codes:
                self.codes, self.scales = next(arrays), next(arrays)
            if has_raw:
                self.raw = next(arrays), next(arrays)
            if has_recent:
                self.recent = next(arrays), next(arrays)
            pairs = [
                Pair(*(Levels(copy_out(next(arrays)), copy_out(next(arrays))) if has else None for has in both))
                for both in said["levels"]
            ]
            self.runs = [tuple(Run(first, pairs[i]) for first, i in runs) for runs in said["runs"]]
            self._check_restored()
            checked: dict[str, Any] = said
        except (StopIteration, RuntimeError, KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            raise ValueError(f"no state of a live TurboQuant cache: {error or type(error).__name__}") from None
        self.show_all()
        return checked

    def _check_restored(self) -> None:
        """ValueError where arrays and what is said of them don't go together."""
        check_choice(self.choice)
        batch, most = len(self.pads), self.choice.recent_tokens
        fits = len(self.floors) == batch and len(self.runs) == (0 if self.waiting else batch) and self.rows >= 0
        if self.kind is not None:
            heads, kind = self.kind.heads, element(self.kind.dtype).mlx
            words = sum(words_of(form.width, form.codebook.bits) for form in self.forms)
            wanted: list[tuple[mx.array, tuple[int, ...], mx.Dtype, int]] = []
            if self.codes is not None and self.scales is not None:
                wanted = [(self.codes, (words,), mx.uint32, self.rows), (self.scales, (2,), mx.uint16, self.rows)]
            widths = self.kind.key_width, self.kind.value_width
            for pair, least in (
                (self.raw, self.rows if self.waiting else self.choice.sink_tokens),
                (self.recent, most),
            ):
                wanted += [(own, (w,), kind, least) for own, w in zip(pair or (), widths, strict=False)]
            fits = fits and all(
                own.shape[:2] == (batch, heads)
                and own.shape[3:] == rest
                and own.dtype == dtype
                and own.shape[2] >= least
                for own, rest, dtype, least in wanted
            )
            fits = fits and (self.rows == 0 or bool(wanted))
            for levels, width in ((own, w) for pair in self.pairs() for own, w in zip(pair[:2], widths, strict=True)):
                fits = fits and (levels is None or levels.mean.shape == levels.root.shape == (heads, width))
        if not fits:
            raise ValueError("its arrays are not those that it names")


# -- parts that need no cache ----------------------------------------------------------------------------------------


def put(buffer: mx.array | None, new: mx.array, at: int) -> mx.array:
    """A buffer (B, heads, capacity, ...) with `new` in its rows from `at` on, longer by whole steps where need be."""
    end = at + new.shape[2]
    if buffer is None or end > buffer.shape[2]:
        room = -(-new.shape[2] // STEP) * STEP
        empty = mx.zeros((*new.shape[:2], room, *new.shape[3:]), new.dtype)
        buffer = empty if buffer is None or at == 0 else mx.concatenate([buffer[:, :, :at], empty], axis=2)
    else:
        buffer = copy.copy(buffer)
    buffer[:, :, at:end] = new
    return buffer


def apart(rows: mx.array, into: mx.array) -> mx.array:
    """Rows to be put into another array; a copy of them where they fill it: as a view they would take its place, and keep
    all of a prefill's rows alive."""
    return rows * 1 if rows.shape[-2] == into.shape[-2] else rows


def places(low: int, high: int, size: int) -> list[tuple[int, int, int]]:
    """Where rows `low` to `high` (not included, at most `size`) stand in a ring: (first, behind the last, place)."""
    if low >= high:
        return []
    border = min(high, (low // size + 1) * size)
    return [(low, border, low % size), *([(border, high, 0)] if border < high else [])]


def run_at(runs: tuple[Run, ...], token: int) -> Run:
    """The run of a token; of padding before the first, the first."""
    return next((run for run in reversed(runs) if run.first <= token), runs[0])


def decoded_rows(
    codes: mx.array, scales: mx.array, dtype: str, stacks: Sequence[LevelStack]
) -> tuple[mx.array, mx.array]:
    """Codes (B, heads, T, words), scales (B, heads, T, 2) -> keys and values (B, heads, T, width)."""
    keys, values = stacks
    at = words_of(keys.form.width, keys.form.codebook.bits)
    return (
        decode(codes[..., :at], scales[..., 0], dtype, keys),
        decode(codes[..., at:], scales[..., 1], dtype, values),
    )


def check_kind(kind: Kind) -> None:
    """ValueError for rows that TurboQuant doesn't take."""
    if kind.dtype not in FLOATS:
        raise ValueError(f"rows of {kind.dtype}: TurboQuant takes {', '.join(FLOATS)}; keep this layer as it is")
    for name, width in (("keys", kind.key_width), ("values", kind.value_width)):
        if width < LEAST_WIDTH:
            raise ValueError(f"{name} {width} wide: TurboQuant takes {LEAST_WIDTH} or more; keep this layer as it is")


def check_choice(choice: Choice) -> Choice:
    """ValueError for bits and numbers that TurboQuant doesn't take."""
    TurboQuant(choice.key_bits, choice.value_bits, choice.levelling, sink_tokens=choice.sink_tokens, seed=choice.seed)
    if type(choice.recent_tokens) is not int or not 0 <= choice.recent_tokens <= MOST_RECENT:
        raise ValueError(f"recent_tokens={choice.recent_tokens!r}: give a number of tokens, 0 to {MOST_RECENT}")
    return choice
