"""Rows of whole steps as bytes and back: a range variant of asymmetric numeral systems (rANS; Duda, arXiv 1311.2540).

Each row is coded by itself: a *head* (its gain in the upper 4 bits, the number of its words in the lower 12) and 16-bit
words. So rows can be cut and joined, and all of them decoded at once. Here a step of the coder is taken for all rows
together; `kernels/transform.c` does the same row by row.
"""

from __future__ import annotations

import numpy as np

from prefixcache.codecs.interchange import Array
from prefixcache.codecs.transform.tables import (
    CLASSES,
    ESCAPE,
    FITTED,
    GAINS,
    PRECISION,
    TOTAL,
    Tables,
    extra_bits,
    gains_of,
    least_magnitude,
    shifted,
    symbol_of,
)

LEAST = 1 << 16  # a state is at least this between two words
WORD_BITS = 16
MOST_WORDS = (1 << 12) - 1  # of one row
AS_IT_IS = 15  # the gain of a row that isn't coded


MISPLACED = "a row's words are not where its head has them"
TOO_FEW = "a row has too few words"
TOO_MANY = "a row's words don't end with its last component"


class DamagedCodes(ValueError):
    """Words that no encoder wrote; where several blocks are looked at, in the `block`-th."""

    def __init__(self, reason: str, block: int = 0):
        super().__init__(reason)
        self.block = block


def words_of(heads: Array) -> Array:
    """Return how many words each coded row has: int64. Not for rows that are kept as they are."""
    return (heads & MOST_WORDS).astype(np.int64)


def gain_of(heads: Array) -> Array:
    return heads >> PRECISION


def pack(steps: Array, classes: Array, tables: Tables) -> tuple[Array, list[Array]]:
    """Pack steps int32 (rows, components), classes int32 (components,) -> heads uint16 (rows,), and each row's words
    uint16.

    A row of zeros has no words. What would take more than 4095 has head 0xffff, `AS_IT_IS` and no words: it can't be coded.
    """
    rows, components = steps.shape
    magnitudes, gains = np.abs(steps), gains_of(steps, classes, tables)
    of_rows, symbols = shifted(classes, gains), symbol_of(magnitudes)
    symbols = np.where(tables.frequencies[of_rows, symbols] > 0, symbols, ESCAPE)
    frequencies = tables.frequencies[of_rows, symbols].astype(np.uint64)
    starts = tables.starts[of_rows, symbols].astype(np.uint64)
    open_bits = np.where(symbols > 0, extra_bits(symbols) + 1, 0).astype(np.uint64)  # the sign is the lowest
    open_value = ((magnitudes - least_magnitude(symbols)) * 2 + (steps < 0)).astype(np.uint64)
    state = np.full(rows, LEAST, np.uint64)
    written, counts = np.zeros((rows, 2 * components + 2), np.uint16), np.zeros(rows, np.int64)

    def make_room(limit: Array) -> None:
        full = np.flatnonzero(state >= limit)
        written[full, counts[full]] = state[full] & np.uint64(LEAST - 1)
        counts[full] += 1
        state[full] >>= np.uint64(WORD_BITS)

    for i in reversed(range(components)):  # what is decoded first is coded last
        make_room(np.uint64(1) << (np.uint64(32) - open_bits[:, i]))
        state = state << open_bits[:, i] | open_value[:, i]
        frequency = frequencies[:, i]
        make_room(frequency << np.uint64(32 - PRECISION))
        state = (state // frequency << np.uint64(PRECISION)) + state % frequency + starts[:, i]
    for shift in (0, WORD_BITS):
        written[np.arange(rows), counts] = state >> np.uint64(shift) & np.uint64(LEAST - 1)
        counts += 1
    zero = ~steps.any(axis=1)
    fits = zero | (counts <= MOST_WORDS)
    counts[zero | ~fits] = 0
    gains = np.where(fits, np.where(zero, GAINS // 2, gains), AS_IT_IS)
    heads = np.where(fits, gains << PRECISION | counts, 0xFFFF).astype(np.uint16)
    return heads, [written[row, :count][::-1] for row, count in enumerate(counts)]


def decoded(steps: Array, heads: Array, classes: Array, tables: Tables) -> Array:
    """Return what `unpack` gives for rows that `pack` gave these heads: float32 (rows, components)."""
    gains, magnitudes = gain_of(heads), np.abs(steps)
    values = magnitudes.astype(np.float32)
    rows, components = np.nonzero((magnitudes > 0) & (magnitudes <= FITTED))
    of_rows = np.clip(classes[components] + gains[rows].astype(np.int32) - GAINS // 2, 0, CLASSES - 1)
    values[rows, components] = tables.points[of_rows, magnitudes[rows, components] - 1]
    np.negative(values, out=values, where=steps < 0)
    values[gains == AS_IT_IS] = 0
    return values


def unpack(heads: Array, words: Array, first: Array, classes: Array, tables: Tables) -> Array:
    """Unpack heads uint16 (rows,), words uint16, each row's from `first` (int64 (rows,)) on -> values in steps, float32
    (rows, components); zeros of rows that are kept as they are.

    DamagedCodes for words that no encoder wrote, where that shows: other words are other values.
    """
    rows, components = len(heads), len(classes)
    gains, counts = gain_of(heads), words_of(heads)
    coded = np.flatnonzero((gains < GAINS) & (counts > 0))
    values = np.zeros((rows, components), np.float32)
    if not len(coded):
        return values
    at, counts = first[coded], counts[coded]
    if (counts < 2).any() or (at < 0).any() or (at > len(words) - counts).any():
        raise DamagedCodes(MISPLACED)
    end = at + counts
    of_rows = shifted(classes, gains[coded])
    state = words[at].astype(np.uint64) << np.uint64(WORD_BITS) | words[at + 1]
    at = at + 2

    def refill() -> None:
        low = np.flatnonzero(state < LEAST)
        if (at[low] >= end[low]).any():
            raise DamagedCodes(TOO_FEW)
        state[low] = state[low] << np.uint64(WORD_BITS) | words[at[low]]
        at[low] += 1

    for i in range(components):
        of_row = of_rows[:, i]
        slots = (state & np.uint64(TOTAL - 1)).astype(np.int64)
        symbols = tables.symbols[of_row, slots].astype(np.int64)
        frequencies = tables.frequencies[of_row, symbols].astype(np.uint64)
        starts = tables.starts[of_row, symbols]
        state = frequencies * (state >> np.uint64(PRECISION)) + (slots - starts).astype(np.uint64)
        refill()
        open_bits = np.where(symbols > 0, extra_bits(symbols) + 1, 0).astype(np.uint64)
        open_value = (state & ((np.uint64(1) << open_bits) - np.uint64(1))).astype(np.int64)
        state >>= open_bits
        refill()
        magnitudes = least_magnitude(symbols) + (open_value >> 1)
        fitted = (magnitudes == 1) | (magnitudes == 2)
        decoded = np.where(fitted, tables.points[of_row, np.where(fitted, magnitudes - 1, 0)], magnitudes)
        values[coded, i] = np.where(open_value & 1, -decoded, decoded)
    if (state != LEAST).any() or (at != end).any():
        raise DamagedCodes(TOO_MANY)
    return values
