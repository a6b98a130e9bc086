"""The entropy coder in kernels, for MLX's GPUs: heads and words of `entropy` bit for bit, values in half precision.

Groups of layers are coded together, their values component by component, (groups, components, rows), and nothing leaves the
GPU but what the caller asks for. `kernels` has the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np

from prefixcache.codecs.interchange import Array
from prefixcache.codecs.transform import entropy
from prefixcache.codecs.transform.basis import ALIGNED, LEFT_OUT_SHARE
from prefixcache.codecs.transform.tables import (
    CLASSES,
    DEAD_ZONE,
    GAINS,
    SYMBOLS,
    TOTAL,
    Tables,
    codes_of,
    first_guess,
    points_of,
    quantised,
    shifted_classes,
)
from prefixcache.kernels import transform_entropy as kernels
from prefixcache.kernels.dialects import SIMD_WIDTH, Dialect
from prefixcache.kernels.dialects import dialect_here as dialect_here

_WRONG = {
    kernels.MISPLACED: entropy.MISPLACED,
    kernels.TOO_FEW: entropy.TOO_FEW,
    kernels.TOO_MANY: entropy.TOO_MANY,
}


class _GpuTables(NamedTuple):
    """As the kernels take them. Axes of 76 are indexed by class + gain; gain 7 shifts by none."""

    slots: mx.array
    codes: mx.array
    costs: mx.array
    points: mx.array
    cost_of_0: Array


_prepared: WeakKeyDictionary[Tables, _GpuTables] = WeakKeyDictionary()


def dialect() -> Dialect:
    """Return the dialect of MLX's default device, which must be a GPU with kernels."""
    here = dialect_here()
    assert here is not None, "MLX's default device has no GPU kernels"
    return here


def right() -> bool:
    """Tell whether the kernels give on this device what NumPy gives, of a few rows. RuntimeError where they don't compile."""
    chance, tables = np.random.default_rng(0), first_guess()
    classes = np.arange(CLASSES, dtype=np.int32)[::-1].copy()
    values = chance.laplace(size=(2 * SIMD_WIDTH + 1, CLASSES)) * 2.0 ** ((classes - 20) / 4)
    values = values.astype(np.float16).astype(np.float32)
    expected, parts = entropy.pack(quantised(values), classes, tables)
    there = entropy.decoded(quantised(values), expected, classes, tables).astype(np.float16)
    words = np.concatenate(parts)
    counts = entropy.words_of(expected)
    several = Classes.of([classes])
    lying = mx.array(np.ascontiguousarray(values.T).astype(np.float16))
    packed = pack(
        several.padded(lying)[None], mx.array((values**2).sum(axis=1))[None], *_no_limits(len(values)), several, tables
    )
    first = mx.array((np.cumsum(counts) - counts).astype(np.uint32))[None]
    back, wrong = unpack(mx.array(expected)[None], mx.array(words), first, several, tables)
    pairs = [(packed.heads[0], expected), (gathered(packed, len(words)), words)]
    pairs += [(of[0, :CLASSES].T, there) for of in (packed.decoded, back)]
    return all(np.array_equal(np.array(mine), theirs) for mine, theirs in pairs) and not np.array(wrong).any()


def _no_limits(rows: int) -> tuple[mx.array, mx.array]:
    """Return arguments of `pack` by which no row is skipped, and each may lose whatever it does."""
    return mx.zeros((rows,), mx.uint32), mx.full((1,), 1e9)


def _prepare(tables: Tables) -> _GpuTables:
    if tables not in _prepared:
        shifted, symbols, codes = shifted_classes(), tables.symbols, codes_of(tables)
        at = symbols.astype(np.int64)
        frequency, start = (np.take_along_axis(each, at, axis=1) for each in (tables.frequencies, tables.starts))
        slots = _packed(frequency - 1, np.arange(TOTAL) - start, 12) | symbols.astype(np.uint32) << 24
        both = _packed(codes.frequency, codes.start, 16), _packed(codes.least, codes.open_bits, 16)
        of_zeros = tables.costs[shifted, 0]
        of_gains = np.arange(CLASSES)[:, None] + np.arange(GAINS)
        costs = np.zeros((SYMBOLS, CLASSES, GAINS + 1), np.int16)
        costs[:, :, :GAINS] = np.moveaxis((tables.costs[shifted] - of_zeros[:, None])[of_gains], 2, 0)
        prepared = _GpuTables(
            slots=mx.array(slots[shifted]),
            codes=mx.array(np.stack(both, axis=-1)[shifted]),
            costs=mx.array(costs.view(np.uint32)),
            points=mx.array(points_of(tables)[shifted].astype(np.float16)).view(mx.uint16),
            cost_of_0=of_zeros,
        )
        mx.eval(prepared[:-1])  # MLX evaluates an array only on the thread that made it, and these are for all
        _prepared[tables] = prepared
    return _prepared[tables]


def _packed(low: Array, high: Array, bits: int) -> Array:
    """Pack two numbers in one uint32, of which the lower has so many bits."""
    packed: Array = low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(bits)
    return packed


class Classes(NamedTuple):
    """The classes of several groups' components, uint32 (groups, most), behind each group's zeros, and how many it has.
    `of_groups` are each group's as bytes of int32.
    """

    numbers: mx.array
    counts: mx.array
    of_groups: tuple[bytes, ...]

    @classmethod
    def of(cls, of_groups: Sequence[Array]) -> Classes:
        """Join the classes of each group, int32 (components,)."""
        return _joined(tuple(classes.astype(np.int32).tobytes() for classes in of_groups))

    @property
    def most(self) -> int:
        return self.numbers.shape[1]

    def padded(self, values: mx.array) -> mx.array:
        """Return values (components, rows) of a group, of as many components as there are classes at most."""
        behind = self.most - len(values)
        return mx.pad(values, [(0, behind), (0, 0)]) if behind else values


@lru_cache(maxsize=16)
def _joined(of_groups: tuple[bytes, ...]) -> Classes:
    several = [np.frombuffer(classes, np.int32) for classes in of_groups]
    numbers = np.zeros((len(several), padded_count(max(map(len, several)))), np.uint32)
    for row, classes in zip(numbers, several, strict=True):
        row[: len(classes)] = classes
    joined = Classes(mx.array(numbers), mx.array(np.array([len(classes) for classes in several], np.uint32)), of_groups)
    mx.eval(
        joined.numbers, joined.counts
    )  # MLX evaluates an array only on the thread that made it, and these are for all
    return joined


def padded_count(components: int) -> int:
    """Return how many values there are of so many components, one at least."""
    return max(1, -(-components // ALIGNED)) * ALIGNED


class Packed(NamedTuple):
    """Coded rows: heads uint16 (groups, rows), which of them are `fine`, uint16 1 or 0, what `unpack` gives, words for
    `gathered`, and where each row's words end, counted over all groups, uint32 (groups, rows).
    """

    heads: mx.array
    fine: mx.array
    decoded: mx.array
    scratch: mx.array
    ends: mx.array


def pack(
    values: mx.array, lengths: mx.array, skipped: mx.array, limits: mx.array, classes: Classes, tables: Tables
) -> Packed:
    """Pack values in steps, float16 (groups, most, rows), the squares of rows' lengths in steps, float32 (groups,
    rows), and which rows are skipped, uint32 (rows,), whose heads are 0. A row is kept as it is if it loses more to
    vectors that are left out than its group's limit, float32 (groups,), and LEFT_OUT_SHARE of its square along the
    others; it is `fine` if it loses no more than the limit. Lazy.
    """
    prepared = _prepare(tables)
    room = min(2 * classes.most + 2, entropy.MOST_WORDS + 1)
    heads, fine, decoded, scratch = kernels.pack(
        dialect(),
        [
            mx.contiguous(values).view(mx.uint16),
            lengths,
            skipped,
            limits,
            classes.numbers,
            classes.counts,
            prepared.costs,
            _costs_of_zeros(tables, classes.of_groups),
            prepared.codes,
            prepared.points,
        ],
        room,
        _bits(DEAD_ZONE),
        _bits(LEFT_OUT_SHARE),
    )
    counts = mx.where(heads == 0xFFFF, 0, heads & entropy.MOST_WORDS).astype(mx.uint32)
    ends = mx.cumsum(counts.reshape(-1)).reshape(heads.shape)
    return Packed(heads, fine, decoded.view(mx.float16), scratch, ends)


@lru_cache(maxsize=16)
def _costs_of_zeros(tables: Tables, of_groups: tuple[bytes, ...]) -> mx.array:
    """Return what a row of zeros of each group's classes costs with each gain: int32 (groups, gains)."""
    cost_of_0, gains = _prepare(tables).cost_of_0, np.arange(GAINS)
    shifted = [np.frombuffer(classes, np.int32)[:, None] + gains for classes in of_groups]
    costs = mx.array(np.stack([cost_of_0[of_group].sum(axis=0, dtype=np.int32) for of_group in shifted]))
    mx.eval(costs)
    return costs


def _bits(number: float) -> int:
    return int(np.float32(number).view(np.uint32))


def gathered(packed: Packed, count: int) -> mx.array:
    """Return the words of all rows, in their order: uint16 (count,), the last of `packed.ends`. Lazy."""
    if not count:
        return mx.zeros((0,), mx.uint16)
    words: mx.array = kernels.gather(
        dialect(), packed.heads.reshape(-1), packed.scratch, packed.ends.reshape(-1), count
    )
    return words


def unpack(
    heads: mx.array, words: mx.array, first: mx.array, classes: Classes, tables: Tables
) -> tuple[mx.array, mx.array]:
    """Unpack heads uint16 (groups, rows), words uint16, one at least, each row's from `first`, uint32 (groups, rows),
    on -> values in steps, float16 (groups, most, rows), zeros of rows that are kept as they are; and what is wrong with
    each row, for `reason_of`. Lazy.
    """
    prepared = _prepare(tables)
    values, wrong = kernels.unpack(
        dialect(), [heads, first, words, classes.numbers, classes.counts, prepared.slots, prepared.points]
    )
    return values.view(mx.float16), wrong


def reason_of(wrong: int) -> str | None:
    """Return what is wrong with a row of which `unpack` says this; None: nothing."""
    return _WRONG.get(wrong)


assert (SYMBOLS, CLASSES) == (57, 61)  # the kernels' numbers
