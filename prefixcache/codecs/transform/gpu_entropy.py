"""The entropy coder in kernels of its own, for MLX's GPUs: heads, words and values of `entropy` bit for bit.

Values lie component by component, (components, rows), and nothing leaves the GPU but what the caller asks for. `kernels` has
the text.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import mlx.core as mx
import numpy as np

from prefixcache.codecs.interchange import Array
from prefixcache.codecs.transform import entropy
from prefixcache.codecs.transform.tables import (
    CLASSES,
    DEAD_ZONE,
    GAINS,
    PRECISION,
    SYMBOLS,
    TOTAL,
    Tables,
    codes_of,
    first_guess,
    points_of,
    quantised,
    shifted_classes,
)
from prefixcache.kernels import transform_entropy as kernels  # type: ignore[import-not-found]
from prefixcache.kernels.dialects import SIMD_WIDTH, Dialect, dialect_here  # type: ignore[import-not-found]

log = logging.getLogger("prefixcache")

NAMES = {"metal": "Metal", "cuda": "CUDA"}
SKIPPED, CODED, AS_IT_IS = kernels.SKIPPED, kernels.CODED, kernels.AS_IT_IS
_WRONG = {
    kernels.MISPLACED: entropy.MISPLACED,
    kernels.TOO_FEW: entropy.TOO_FEW,
    kernels.TOO_MANY: entropy.TOO_MANY,
}


class _Prepared(NamedTuple):
    """As the kernels take them; index 7 of an axis of 76 is class 0."""

    slots: mx.array
    codes: mx.array
    costs: mx.array
    points: mx.array
    cost_of_0: Array


_prepared: WeakKeyDictionary[Tables, _Prepared] = WeakKeyDictionary()


def available() -> bool:
    """Whether MLX's default device is a GPU whose compiler and arithmetic give what NumPy gives."""
    return _refused() is None


def describe() -> str:
    """ "Metal kernel", "CUDA kernel", or why there is none."""
    return _refused() or f"{NAMES[dialect_here().name]} kernel"


def _refused() -> str | None:
    dialect = dialect_here()
    return "no GPU kernel: MLX's default device has none" if dialect is None else _tried(dialect)


@lru_cache(maxsize=1)
def _tried(dialect: Dialect) -> str | None:
    """What is wrong with the kernels on this device, by a few rows: then those are coded on the CPU."""
    chance, tables = np.random.default_rng(0), first_guess()
    classes = np.arange(CLASSES, dtype=np.int32)[::-1].copy()
    values = chance.laplace(size=(2 * SIMD_WIDTH + 1, CLASSES)) * 2.0 ** ((classes - 20) / 4)
    values = values.astype(np.float32)
    expected, parts = entropy.pack(quantised(values), classes, tables)
    there = entropy.decoded(quantised(values), expected, classes, tables)
    words = np.concatenate(parts)
    counts = entropy.words_of(expected)
    try:
        wanted = mx.full((len(values),), CODED, mx.uint32)
        heads, decoded, scratch = pack(mx.array(np.ascontiguousarray(values.T)), wanted, classes, tables)
        first = mx.array((np.cumsum(counts) - counts).astype(np.uint32))
        back, wrong = unpack(mx.array(expected), mx.array(words), first, classes, tables)
        pairs = [(heads, expected), (decoded.T, there), (gathered(expected, scratch), words), (back.T, there)]
        right = all(np.array_equal(np.array(mine), theirs) for mine, theirs in pairs) and not np.array(wrong).any()
    except (RuntimeError, ValueError) as error:  # of the device's compiler
        log.warning("transform coding stays on the CPU: its kernels don't compile on this GPU (%s)", error)
        return "no GPU kernel: it doesn't compile here"
    if right:
        return None
    log.warning("transform coding stays on the CPU: its kernels give other codes on this GPU than NumPy does")
    return "no GPU kernel: it errs here"


def _prepare(tables: Tables) -> _Prepared:
    if tables not in _prepared:
        shifted, symbols, codes = shifted_classes(), tables.symbols, codes_of(tables)
        at = symbols.astype(np.int64)
        frequency, start = (np.take_along_axis(each, at, axis=1) for each in (tables.frequencies, tables.starts))
        slots = _packed(frequency - 1, np.arange(TOTAL) - start, 12) | symbols.astype(np.uint32) << 24
        both = _packed(codes.frequency, codes.start, 16), _packed(codes.least, codes.open_bits, 16)
        costs = tables.costs[shifted].T
        _prepared[tables] = _Prepared(
            slots=mx.array(slots[shifted]),
            codes=mx.array(np.stack(both, axis=-1)[shifted]),
            costs=mx.array(np.ascontiguousarray(costs - costs[0], np.int32)),
            points=mx.array(points_of(tables)[shifted]),
            cost_of_0=np.ascontiguousarray(costs[0]),
        )
    return _prepared[tables]


def _packed(low: Array, high: Array, bits: int) -> Array:
    """Two numbers in one uint32, of which the lower has so many bits."""
    packed: Array = low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(bits)
    return packed


def pack(values: mx.array, wanted: mx.array, classes: Array, tables: Tables) -> tuple[mx.array, mx.array, mx.array]:
    """Values in steps, float32 (components, rows), and of each row whether it is SKIPPED, CODED or kept AS_IT_IS, uint32
    (rows,) -> heads uint16 (rows,), what `unpack` gives, and the words, for `gathered`. Lazy.
    """
    prepared, components = _prepare(tables), len(classes)
    if not components:
        heads = mx.where(wanted == CODED, GAINS // 2 << PRECISION, mx.where(wanted == AS_IT_IS, 0xFFFF, 0))
        return heads.astype(mx.uint16), values, mx.zeros((len(wanted), 1), mx.uint16)
    room = min(2 * components + 2, entropy.MOST_WORDS + 1)
    zeros = prepared.cost_of_0[classes[:, None] + np.arange(GAINS)].sum(axis=0, dtype=np.int32)
    heads, decoded, scratch = kernels.pack(
        dialect_here(),
        [
            mx.contiguous(values), wanted, mx.array(classes.astype(np.uint32)), prepared.costs, mx.array(zeros),
            prepared.codes, prepared.points,
        ],
        room,
        int(np.float32(DEAD_ZONE).view(np.uint32)),
    )  # fmt: skip
    return heads, decoded, scratch


def gathered(heads: Array, scratch: mx.array) -> mx.array:
    """The words of all rows, in their order: uint16. Lazy."""
    counts = np.where(entropy.gain_of(heads) == entropy.AS_IT_IS, 0, entropy.words_of(heads))
    ends = np.cumsum(counts)
    if not len(heads) or not ends[-1]:
        return mx.zeros((0,), mx.uint16)
    first = mx.array((ends - counts).astype(np.uint32))
    words: mx.array = kernels.gather(dialect_here(), mx.array(heads), scratch, first, int(ends[-1]))
    return words


def unpack(
    heads: mx.array, words: mx.array, first: mx.array, classes: Array, tables: Tables
) -> tuple[mx.array, mx.array]:
    """Heads uint16 (rows,), words uint16, one at least, each row's from `first` (uint32 (rows,)) on -> values in steps,
    float32 (components, rows), and what is wrong with each row, for `reason_of`. Lazy. Zeros of rows that are kept as they
    are.
    """
    (rows,), components = heads.shape, len(classes)
    if not rows or not components:
        return mx.zeros((components, rows), mx.float32), mx.zeros((rows,), mx.uint32)
    prepared, classes_there = _prepare(tables), mx.array(classes.astype(np.uint32))
    values, wrong = kernels.unpack(dialect_here(), heads, first, words, classes_there, prepared.slots, prepared.points)
    return values, wrong


def reason_of(wrong: int) -> str | None:
    """What is wrong with a row of which `unpack` says this; None: nothing."""
    return _WRONG.get(wrong)


assert (SYMBOLS, CLASSES) == (57, 61)  # the kernels' numbers
