"""The arrays of a live layer: rows that grow, the first rows of each sequence, the last ones in a ring; and which row is
whose. Nothing is encoded here, and levels are `live.levels`'s.

All of them are values. A method gives a new one and changes nothing that another cache may hold: an array is written
through a handle of its own (`copy.copy`), which costs nothing while nobody else has the array, and a copy of it when
somebody does.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import mlx.core as mx

from prefixcache.codecs.interchange import on_cpu
from prefixcache.live import ragged
from prefixcache.live.ragged import Pair, as_pair
from prefixcache.memory import trim_process_memory

if TYPE_CHECKING:
    from typing_extensions import Self

STEP = 256  # rows by which a buffer grows
LARGE = 1 << 22  # bytes of a buffer worth waiting for when it grows
MOST_NUMBERS = 8
ALL = slice(None)


class Alignment(NamedTuple):
    """How B sequences stand in common rows: token t of sequence b is row `pads[b] + t`, and `rows` rows are in use.

    `pads` is empty before the first rows have come, when the number of sequences isn't known. `ends`: the row where a
    sequence's padding on the right begins, until it is turned left.
    """

    rows: int = 0
    pads: tuple[int, ...] = ()
    ends: tuple[int, ...] | None = None

    def grown(self, rows: int) -> Alignment:
        return Alignment(self.rows + rows, self.pads, self.ends)

    def tokens_of(self, sequence: int) -> int:
        return max(self.rows - self.pads[sequence], 0)

    def end_of(self, sequence: int) -> int:
        """Return the row behind the sequence's last one: the end of the rows, but for padding on the right."""
        return self.rows if self.ends is None else min(self.rows, self.ends[sequence])

    def all_ends(self) -> list[int]:
        return [self.end_of(b) for b in range(len(self.pads))]


class RowBuffer(NamedTuple):
    """Keys and values of all rows, (B, heads, capacity, width) each; no arrays before the first row."""

    arrays: Pair | None = None

    def put(self, first: mx.array, second: mx.array, at: int) -> Self:
        """Return the rows with these rows from row `at` on."""
        before = self.arrays or (None, None)
        return type(self)((_put(before[0], first, at), _put(before[1], second, at)))

    def cut_out(self, rows: slice, heads: slice = ALL, sequences: slice = ALL) -> Pair:
        assert self.arrays is not None
        first, second = self.arrays
        return first[sequences, heads, rows], second[sequences, heads, rows]

    # -- of batches --

    def sequence(self, b: int, rows: slice) -> Self:
        """Return one sequence's rows, copied out."""
        if self.arrays is None:
            return self
        return type(self)(as_pair(mx.contiguous(array[b : b + 1, :, rows]) for array in self.arrays))

    def selected(self, indices: mx.array) -> Self:
        return self if self.arrays is None else type(self)(ragged.selected(self.arrays, indices))

    def without_first(self, rows: int) -> Self:
        return self if self.arrays is None or not rows else type(self)(self.cut_out(slice(rows, None)))

    def rolled(self, shifts: mx.array) -> Self:
        return self if self.arrays is None else type(self)(ragged.rolled(self.arrays, shifts))

    @classmethod
    def stacked(cls, singles: Sequence[tuple[RowBuffer, int]]) -> Self:
        """Return one batch of single sequences, of which so many rows count, left-padded to the longest."""
        return cls(ragged.stacked([(buffer.arrays, rows) for buffer, rows in singles]))

    def joined(self, rows: int, sequences: int, other: RowBuffer, other_rows: int, other_sequences: int) -> Self:
        """Return the sequences of both, right-justified to the longer; of which so many rows count."""
        alike = self.arrays or other.arrays
        if alike is None:
            return self
        mine = self.arrays or ragged.without_rows(alike, sequences)
        others = other.arrays or ragged.without_rows(alike, other_sequences)
        return type(self)(ragged.joined(mine, rows, others, other_rows))


class CodeBuffer(RowBuffer):
    """Codes uint32 (B, heads, capacity, key words + value words) and scales uint16 (B, heads, capacity, 2) of all rows."""

    __slots__ = ()

    @property
    def capacity(self) -> int:
        return self.arrays[0].shape[2] if self.arrays is not None else 0

    def release_outgrown(self) -> None:
        """Give the memory back that the codes had before they grew, where it is much.

        MLX would keep the outgrown buffer of every layer for reuse, and none is ever long enough to be used again.
        """
        assert self.arrays is not None
        if self.arrays[0].nbytes >= LARGE:
            mx.eval(*self.arrays)
            mx.clear_cache()
            if on_cpu():
                trim_process_memory()


class FirstRows(NamedTuple):
    """Keys and values of each sequence's first `size` tokens, uncoded: (B, heads, size, width)."""

    size: int
    arrays: Pair | None = None

    def put(self, keys: mx.array, values: mx.array, at: int, pads: Sequence[int]) -> FirstRows:
        """Return the rows with those of these rows, the first of which is row `at`, that are among a sequence's first."""
        arrays, count = self.arrays, keys.shape[2]
        for b, pad in enumerate(pads):
            first, last = max(at, pad), min(at + count, pad + self.size)
            if first < last:
                arrays = arrays or _zeros(keys, values, self.size)
                into, out = slice(first - pad, last - pad), slice(first - at, last - at)
                arrays = _written(arrays, b, into, (keys[b, :, out], values[b, :, out]))
        return self if arrays is self.arrays else FirstRows(self.size, arrays)

    def sequence(self, b: int) -> FirstRows:
        if self.arrays is None:
            return self
        return FirstRows(self.size, as_pair(mx.contiguous(array[b : b + 1]) for array in self.arrays))

    def selected(self, indices: mx.array) -> FirstRows:
        return self if self.arrays is None else FirstRows(self.size, ragged.selected(self.arrays, indices))

    @staticmethod
    def listed(several: Sequence[FirstRows], batches: Sequence[int]) -> FirstRows:
        """Return the rows of several batches, which have so many sequences, one batch behind the other."""
        return FirstRows(several[0].size, _listed([rows.arrays for rows in several], batches))


class RecentRows(NamedTuple):
    """Keys and values of each sequence's last `size` rows, uncoded: row r in place r % size of (B, heads, size, width).

    No row before `floors[b]` is there: after a cut, or where only codes were at hand. Decision 0027 says why they stay exact.
    """

    size: int
    floors: tuple[int, ...] = ()
    arrays: Pair | None = None

    def first(self, sequence: int, end: int) -> int:
        """Return the first row that is recent, of a sequence that ends at row `end`."""
        return max(self.floors[sequence], end - self.size)

    def firsts(self, ends: Sequence[int]) -> list[int]:
        return [self.first(b, end) for b, end in enumerate(ends)]

    def put(self, keys: mx.array, values: mx.array, at: int, ends: Sequence[int]) -> RecentRows:
        """Return the rows with those of these rows, the first of which is row `at`, that are among a sequence's last
        before `ends`.
        """
        if not self.size:
            return self
        arrays = self.arrays or _zeros(keys, values, self.size)
        together = len(set(ends)) == 1  # as always but for padding on the right
        for b, end in [(ALL, ends[0])] if together else list(enumerate(ends)):
            for low, high, place in places(max(at, end - self.size), end, self.size):
                into, out = slice(place, place + high - low), slice(low - at, high - at)
                arrays = _written(arrays, b, into, (keys[b, :, out], values[b, :, out]))
        return RecentRows(self.size, self.floors, arrays)

    def put_one(self, keys: mx.array, values: mx.array, at: int) -> RecentRows:
        """Return the rows with row `at` of every sequence. `put` of one row, without asking."""
        if self.arrays is None:
            return self
        place = at % self.size
        into_keys, into_values = copy.copy(self.arrays[0]), copy.copy(self.arrays[1])
        into_keys[:, :, place : place + 1], into_values[:, :, place : place + 1] = keys, values
        return RecentRows(self.size, self.floors, (into_keys, into_values))

    def pieces(self, b: int, heads: slice, low: int, high: int) -> list[Pair]:
        """Return rows `low` to `high` (not included) of a sequence, in order: (1, heads, n, width)."""
        if self.arrays is None:
            return []
        keys, values = self.arrays
        pieces = []
        for first, last, place in places(low, high, self.size):
            in_ring = slice(place, place + last - first)
            pieces.append((keys[b : b + 1, heads, in_ring], values[b : b + 1, heads, in_ring]))
        return pieces

    def numbers(self, low: int, high: int) -> list[int]:
        """Return the row in each place of the ring, -1 for none, where rows `low` to `high` (not included) are there."""
        numbers = [-1] * self.size
        for row in range(low, high):
            numbers[row % self.size] = row
        return numbers

    # -- of batches --

    def sequence(self, b: int, pad: int, end: int) -> RecentRows:
        """Return one sequence's, without its padding."""
        arrays = None if self.arrays is None else (self.arrays[0][b : b + 1], self.arrays[1][b : b + 1])
        return RecentRows(self.size, (self.floors[b],), arrays).renumbered([-pad], [end], end)

    def selected(self, indices: mx.array, ends: Sequence[int]) -> RecentRows:
        floors = tuple(self.first(b, ends[b]) for b in ragged.numbers(indices))
        arrays = None if self.arrays is None else ragged.selected(self.arrays, indices)
        return RecentRows(self.size, floors, arrays)

    def cut(self, ends: Sequence[int], rows: int) -> RecentRows:
        """Return what stays where only the first `rows` rows are left of sequences that ended there."""
        return self._replace(floors=tuple(min(first, rows) for first in self.firsts(ends)))

    def renumbered(self, shifts: Sequence[int], ends: Sequence[int], rows: int) -> RecentRows:
        """Return the same rows where row r of sequence b, which ended there, becomes row r + shifts[b], below `rows`."""
        moved = [max(first + n, 0) for first, n in zip(self.firsts(ends), shifts, strict=True)]
        return self._replace(floors=tuple(min(first, rows) for first in moved))._turned(shifts)

    def _turned(self, shifts: Sequence[int]) -> RecentRows:
        if self.arrays is None or all(n % self.size == 0 for n in shifts):
            return self
        return self._replace(arrays=ragged.rolled(self.arrays, mx.array([n % self.size for n in shifts])))

    @staticmethod
    def listed(several: Sequence[RecentRows], batches: Sequence[int]) -> RecentRows:
        """Return the rows of several batches, which have so many sequences, one batch behind the other."""
        floors = tuple(floor for rows in several for floor in rows.floors)
        return RecentRows(several[0].size, floors, _listed([rows.arrays for rows in several], batches))


class RowNumbers:
    """int32 arrays of a row's number for each sequence, made and evaluated once each; at most `MOST_NUMBERS` are kept."""

    def __init__(self) -> None:
        self._arrays: dict[tuple[int, ...], mx.array] = {}

    def of(self, rows: Sequence[int], default: int) -> mx.array | None:
        """Return numbers (B,); None where all are the default."""
        if all(row == default for row in rows):
            return None
        key = tuple(rows)
        if key not in self._arrays:
            if len(self._arrays) >= MOST_NUMBERS:
                self._arrays.clear()
            self._arrays[key] = mx.array(list(rows), dtype=mx.int32)
            mx.eval(self._arrays[key])
        return self._arrays[key]


# -- arrays ------------------------------------------------------------------------------------------------------------


def places(low: int, high: int, size: int) -> list[tuple[int, int, int]]:
    """Say where rows `low` to `high` (not included, at most `size`) stand in a ring: (first, behind the last, place)."""
    if low >= high:
        return []
    border = min(high, (low // size + 1) * size)
    return [(low, border, low % size), *([(border, high, 0)] if border < high else [])]


def _put(buffer: mx.array | None, new: mx.array, at: int) -> mx.array:
    """Return a buffer (B, heads, capacity, ...) with `new` in its rows from `at` on, longer by whole steps where need be."""
    end = at + new.shape[2]
    if buffer is None or end > buffer.shape[2]:
        room = -(-new.shape[2] // STEP) * STEP
        empty = mx.zeros((*new.shape[:2], room, *new.shape[3:]), new.dtype)
        buffer = empty if buffer is None or at == 0 else mx.concatenate([buffer[:, :, :at], empty], axis=2)
    else:
        buffer = copy.copy(buffer)
    buffer[:, :, at:end] = new
    return buffer


def _written(arrays: Pair, b: int | slice, into: slice, rows: Pair) -> Pair:
    written = copy.copy(arrays[0]), copy.copy(arrays[1])
    for array, new in zip(written, rows, strict=True):
        # Rows that fill the array are copied: as a view they would take its place, and keep a whole prefill alive.
        array[b, :, into] = new * 1 if new.shape[-2] == array.shape[-2] else new
    return written


def _zeros(keys: mx.array, values: mx.array, rows: int) -> Pair:
    return as_pair(mx.zeros((*part.shape[:2], rows, part.shape[3]), keys.dtype) for part in (keys, values))


def _listed(several: Sequence[Pair | None], batches: Sequence[int]) -> Pair | None:
    """Join the arrays of several batches, one behind the other; zeros for a batch that has no arrays."""
    alike = next((arrays for arrays in several if arrays is not None), None)
    if alike is None:
        return None
    filled = [
        arrays or as_pair(mx.zeros((count, *array.shape[1:]), array.dtype) for array in alike)
        for arrays, count in zip(several, batches, strict=True)
    ]
    return as_pair(mx.concatenate([arrays[i] for arrays in filled]) for i in range(2))
