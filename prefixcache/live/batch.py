"""`BatchTurboQuantKVCache`: mlx-lm's batch-cache protocol on codes, for sequences of any lengths, left-padded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from prefixcache.live.coded import PLAIN, RECENT, Choice, Coded, Pair, Run, SharedLevels, check_choice
from prefixcache.live.ragged import check_alike, check_numbers, chosen, joined, rolled, selected, stacked, without_rows
from prefixcache.live.turboquant import LiveCache, TurboQuantKVCache, hook_for

ALIKE = "caches of one batch are coded alike; convert them with one codec"


class BatchTurboQuantKVCache(LiveCache):
    """Codes of B sequences, token t of sequence b in row `left_padding[b] + t`; see `TurboQuantKVCache`.

    What mlx-lm's BatchKVCache is to KVCache: made by `merge`, or empty with the left padding of what is to come. Rows
    wait as they are until the batch has 256; sequences that join a batch whose levels are known are coded with these.
    """

    def __init__(
        self,
        left_padding: Sequence[int],
        key_bits: int = 4,
        value_bits: int = 4,
        *,
        levelling: bool = True,
        sink_tokens: int = 4,
        seed: int = 0,
        recent_tokens: int = RECENT,
        attend: Literal["codes", "buffer"] = "codes",
        levels: SharedLevels | None = None,
        layer: int = 0,
    ):
        choice = check_choice(Choice(key_bits, value_bits, levelling, sink_tokens, seed, recent_tokens))
        held = Coded(choice, attend, levels, layer, None)
        held.pads = [int(n) for n in left_padding]
        if min(held.pads, default=0) < 0:
            raise ValueError(f"left_padding={held.pads}: give numbers of rows, 0 or more")
        held.floors = [0] * held.batch
        self._adopt(held)

    def _adopt(self, held: Coded) -> None:
        self._held = held
        self._right: list[int] | None = None  # padding on the right, until `finalize`
        self._place()
        hook_for(held)

    def _place(self) -> None:
        """Padding and offsets as arrays, for masks and positions."""
        self.left_padding = mx.array(self._held.pads, dtype=mx.int32)
        self.offset = self._held.rows - self.left_padding

    # -- mlx-lm's protocol --------------------------------------------------------------------------------------------

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Rows (B, heads, L, width) of one float dtype; see `TurboQuantKVCache.update_and_fetch`."""
        if keys.shape[0] != self._held.batch:
            raise ValueError(
                f"rows of {keys.shape[0]} sequences for a cache of {self._held.batch}: batch sizes must match"
            )
        self._held.append(keys, values)
        self.offset = self.offset + keys.shape[2]
        return self.keys_and_values()

    @property
    def _idx(self) -> int:
        return self._held.rows

    def trim(self, n: int) -> int:
        """Forget the last `n` rows of every sequence. ValueError where one has fewer."""
        least = min(range(self._held.batch), key=self._held.tokens_of, default=0)
        if self._held.batch and n > self._held.tokens_of(least):
            raise ValueError(f"trim({n}): sequence {least} has {self._held.tokens_of(least)} tokens")
        self._held.cut(n)
        self.offset = self.offset - n
        return n

    def make_mask(self, N: int, return_array: bool = False, **kwargs: Any) -> mx.array:
        return create_causal_mask(N, offset=self._held.rows, left_padding=self.left_padding, **kwargs)

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Announce padding of what comes: on the left of an empty batch, or on the right, until `finalize`.

        `lengths`: tokens to come of each sequence; with them levels can be measured before the last of the padding.
        """
        held = self._held
        check_numbers((left_padding, lengths, right_padding), held.batch)
        if left_padding is not None:
            if held.kind is not None:
                raise ValueError("left padding can be added to an empty batch only")
            held.pads = [pad + int(more) for pad, more in zip(held.pads, left_padding, strict=True)]
            self._place()
        if right_padding is not None and max(right_padding, default=0) > 0:
            self._right = [int(n) for n in right_padding]
            held.ends = [held.rows + int(n) for n in lengths] if lengths is not None else None

    def finalize(self) -> None:
        """Turn padding on the right into padding on the left."""
        if self._right is None:
            return
        held, shifts = self._held, mx.array(self._right)
        if held.codes is not None and held.scales is not None:
            held.codes, held.scales = rolled((held.codes, held.scales), shifts)
        if held.decoded is not None:
            held.decoded = _two(rolled(held.decoded, shifts))
        if held.waiting and held.raw is not None:
            held.raw = _two(rolled(held.raw, shifts))
        if held.recent is not None:
            held.recent = _two(rolled(held.recent, shifts))
        floors = [held.floor_of(b) for b in range(held.batch)]
        held.pads = [pad + more for pad, more in zip(held.pads, self._right, strict=True)]
        held.floors = [min(floor + more, held.rows) for floor, more in zip(floors, self._right, strict=True)]
        self._right = held.ends = None
        self._place()
        if held.waiting and held.raw is not None:
            held.settle_when_ready()

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep these sequences, in this order. IndexError for one that isn't there."""
        held = self._held
        indices = chosen(batch_indices, held.batch)
        kept: list[int] = indices.tolist()  # type: ignore[assignment]
        if not kept:
            self._adopt(Coded(held.choice, held.attends, *held.shared, 0))
            return
        held.floors = [held.floor_of(i) for i in kept]
        held.pads = [held.pads[i] for i in kept]
        held.runs = [held.runs[i] for i in kept] if held.runs else []
        held.ends = [held.ends[i] for i in kept] if held.ends is not None else None
        self._right = [self._right[i] for i in kept] if self._right is not None else None
        for name in ("codes", "scales"):
            if (array := getattr(held, name)) is not None:
                setattr(held, name, selected((array,), indices)[0])
        for name in ("raw", "recent", "decoded"):
            if (pair := getattr(held, name)) is not None:
                setattr(held, name, _two(selected(pair, indices)))
        if held.kind is not None:
            _shift_left(held, min(*held.pads, held.rows))
        self._place()

    def extend(self, other: BatchTurboQuantKVCache) -> None:
        """The sequences of another batch behind those of this one; the other stays as it is.

        ValueError for another choice of codec, other widths, heads or dtype.
        """
        if not isinstance(other, BatchTurboQuantKVCache):
            raise TypeError(f"extend({type(other).__name__}): give a BatchTurboQuantKVCache")
        if self._right is not None or other._right is not None:
            raise ValueError("a batch with padding on the right: finalize() it first")
        self._adopt(_together([self._held, other._held]))

    def extract(self, idx: int) -> TurboQuantKVCache:
        """One sequence, by itself."""
        held = self._held
        chosen([idx], held.batch)
        pad, rows, one = held.pads[idx], held.tokens_of(idx), slice(idx, idx + 1)
        made = Coded(held.choice, held.attends, *held.shared, 1)
        made.waiting, made.runs, made.floors = held.waiting, held.runs[one], [max(held.floor_of(idx) - pad, 0)]
        if rows:
            made.kind, made.rows = held.kind, rows
            own = slice(pad, pad + rows)
            made.codes, made.scales = (
                mx.contiguous(array[one, :, own]) if array is not None else None for array in (held.codes, held.scales)
            )
            if held.decoded is not None:
                made.decoded = _two(tuple(mx.contiguous(array[one, :, own]) for array in held.decoded))
            if held.raw is not None:
                tokens = own if held.waiting else slice(None)
                made.raw = _two(tuple(mx.contiguous(array[one, :, tokens]) for array in held.raw))
            if held.recent is not None:
                made.recent = _turned((held.recent[0][one], held.recent[1][one]), [-pad])
        cache = TurboQuantKVCache.__new__(TurboQuantKVCache)
        cache._held = made
        return cache

    @classmethod
    def merge(cls, caches: Sequence[TurboQuantKVCache]) -> BatchTurboQuantKVCache:
        """One batch of caches of one sequence each, any of them empty; they stay as they are.

        ValueError for none, for a cache of several sequences, another choice of codec, other widths, heads or dtype.
        """
        if not caches:
            raise ValueError("merge([]): give one cache or more")
        for cache in caches:
            if not isinstance(cache, TurboQuantKVCache):
                raise TypeError(f"{type(cache).__name__} and TurboQuantKVCache in one batch: convert all, or none")
            if cache._held.batch > 1:
                raise ValueError(f"a cache of {cache._held.batch} sequences can't be merged: one sequence each")
        made = cls.__new__(cls)
        made._adopt(_merged([cache._held for cache in caches]))
        return made

    @property
    def state(self) -> list[mx.array]:
        """All of it as arrays, the first of which says what the others are."""
        return self._held.described(right=self._right)

    @state.setter
    def state(self, state: Sequence[mx.array]) -> None:
        held = Coded.__new__(Coded)
        said = held.restore(state)
        self._adopt(held)
        self._right = said.get("right")

    def __repr__(self) -> str:
        held = self._held
        return (
            f"BatchTurboQuantKVCache({held.choice}, {held.batch} sequences, {held.rows} rows, attend={held.attends!r})"
        )


# -- several into one ------------------------------------------------------------------------------------------------


def _merged(singles: list[Coded]) -> Coded:
    ready = _alike(singles, 1)
    made = Coded(ready[0].choice, ready[0].attends, *ready[0].shared, 0)
    made.waiting = ready[0].waiting
    made.rows = max(held.rows for held in ready)
    made.pads = [made.rows - held.rows for held in ready]
    made.floors = [held.floor_of(0) + pad for held, pad in zip(ready, made.pads, strict=True)]
    made.kind = next((held.kind for held in ready if held.kind is not None), None)
    made.runs = [] if made.waiting else [held.runs[0] for held in ready]
    if made.kind is None:
        return made

    def rows(of: str) -> tuple[mx.array, ...]:
        return stacked([(_tuple(getattr(held, of)), held.rows) for held in ready])

    if made.waiting:
        made.raw = _two(rows("raw"))
        made.settle_when_ready()
        return made
    pairs = [_codes(held) for held in ready]
    made.codes, made.scales = _two(stacked([(pair, held.rows) for pair, held in zip(pairs, ready, strict=True)]))
    if made.attends == "buffer":
        made.decoded = _two(rows("decoded"))
    made.raw = _listed([held.raw for held in ready], [1] * len(ready))
    made.recent = _listed([held.recent for held in ready], [1] * len(ready))
    if made.recent is not None:
        made.recent = _turned(made.recent, made.pads)
    return made


def _together(batches: list[Coded]) -> Coded:
    first, second = ready = _alike(batches)
    made = Coded(first.choice, first.attends, *first.shared, 0)
    made.waiting = first.waiting
    made.kind = next((held.kind for held in ready if held.kind is not None), None)
    made.runs = [] if made.waiting else [*first.runs, *second.runs]
    made.rows = max(held.rows for held in ready)
    made.pads = [*first.pads, *second.pads]
    made.floors = [held.floor_of(b) for held in ready for b in range(held.batch)]
    if made.kind is None:
        return made
    grown = [made.rows - held.rows for held in ready for _ in held.pads]
    made.pads, made.floors = (
        [own + more for own, more in zip(each, grown, strict=True)] for each in (made.pads, made.floors)
    )

    def both(arrays: list[tuple[mx.array, ...] | None]) -> tuple[mx.array, mx.array] | None:
        some = next((own for own in arrays if own is not None), None)
        if some is None:
            return None
        one, two = (own or without_rows(some, held.batch) for own, held in zip(arrays, ready, strict=True))
        return _two(joined(one, first.rows, two, second.rows))

    if made.waiting:
        made.raw = both([_tuple(held.raw) for held in ready])
        made.settle_when_ready()
        return made
    codes = both([_codes(held) for held in ready])
    if codes is not None:
        made.codes, made.scales = codes
    made.decoded = both([_tuple(held.decoded) for held in ready])
    sizes = [held.batch for held in ready]
    made.raw = _listed([held.raw for held in ready], sizes)
    made.recent = _listed([held.recent for held in ready], sizes)
    if made.recent is not None:
        made.recent = _turned(made.recent, grown)
    return made


def _alike(several: list[Coded], sequences: int = 0) -> list[Coded]:
    """Copies that can be one batch: all waiting, or all coded. ValueError where they can't. `sequences`: how many a cache
    stands for that has seen nothing."""
    first = several[0]
    kinds = [held.kind._asdict() for held in several if held.kind is not None]
    for held in several:
        check_alike(
            first.choice._asdict() | {"attend": first.attends}, held.choice._asdict() | {"attend": held.attends}, ALIKE
        )
    for kind in kinds:
        check_alike(kinds[0], kind, ALIKE)
    ready = []
    for held in several:
        own = Coded.__new__(Coded)
        own.take_over(held)
        own.pads, own.floors = own.pads or [0] * sequences, own.floors or [0] * sequences
        ready.append(own)
    levels: Pair | None = next((held.runs[0][-1].levels for held in ready if held.runs and not held.waiting), None)
    if levels is not None or not first.choice.levelling:
        for held in ready:
            if held.waiting:
                held.settle(levels or PLAIN)
            elif not held.runs:
                held.runs = [(Run(0, levels or PLAIN),)] * held.batch
    return ready


def _shift_left(held: Coded, spare: int) -> None:
    """Drop the first `spare` rows of all, which are nobody's."""
    if not spare:
        return
    held.rows -= spare
    held.pads, held.floors = [pad - spare for pad in held.pads], [max(floor - spare, 0) for floor in held.floors]
    held.ends = [end - spare for end in held.ends] if held.ends is not None else None
    if held.codes is not None and held.scales is not None:
        held.codes, held.scales = held.codes[:, :, spare:], held.scales[:, :, spare:]
    if held.waiting and held.raw is not None:
        held.raw = held.raw[0][:, :, spare:], held.raw[1][:, :, spare:]
    if held.decoded is not None:
        held.decoded = held.decoded[0][:, :, spare:], held.decoded[1][:, :, spare:]
    if held.recent is not None:
        held.recent = _turned(held.recent, [-spare] * held.batch)


def _turned(ring: tuple[mx.array, mx.array], shifts: list[int]) -> tuple[mx.array, mx.array]:
    """Rings of recent rows, where rows get other numbers: row r becomes r + shifts[b]."""
    size = ring[0].shape[2]
    return ring if all(n % size == 0 for n in shifts) else _two(rolled(ring, mx.array([n % size for n in shifts])))


def _listed(several: list[Any], sizes: list[int]) -> tuple[mx.array, mx.array] | None:
    """Pairs of arrays one behind the other, zeros for each of `sizes` sequences that has none."""
    some = next((own for own in several if own is not None), None)
    if some is None:
        return None
    each = [
        own if own is not None else tuple(mx.zeros((size, *array.shape[1:]), array.dtype) for array in some)
        for own, size in zip(several, sizes, strict=True)
    ]
    return _two(tuple(mx.concatenate([own[i] for own in each]) for i in range(2)))


def _codes(held: Coded) -> tuple[mx.array, mx.array] | None:
    return (held.codes, held.scales) if held.codes is not None and held.scales is not None else None


def _tuple(arrays: Any) -> tuple[mx.array, ...] | None:
    return arrays if arrays is None else tuple(arrays)


def _two(arrays: tuple[mx.array, ...]) -> tuple[mx.array, mx.array]:
    return arrays[0], arrays[1]
