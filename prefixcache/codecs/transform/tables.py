"""The tables of the entropy coder: how often a component has each magnitude, by its *class*, which is how widely it spreads.

A component is quantised to whole steps. Its magnitude is a *symbol* and, from 8 on, some extra bits, as in a floating-point
number; `frequencies` of a class's symbols add up to 2**12. `fit` makes tables from a calibration's rows, `entropy` codes
with them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import NamedTuple

import numpy as np

from prefixcache.codecs.interchange import Array

PRECISION = 12  # bits of a frequency
TOTAL = 1 << PRECISION
OCTAVE = 4  # classes to an octave of spread
LOWEST = -20  # the class number of index 0: a spread of 2**-5 steps
CLASSES = 61
DIRECT = 8  # magnitudes below have a symbol each
MOST = (1 << 15) - 1  # the largest magnitude
ESCAPE = DIRECT + 4 * 12  # then the magnitude follows in 15 bits
SYMBOLS = ESCAPE + 1
ESCAPE_BITS = 15
COST = 256  # units of a cost, to the bit
DEAD_ZONE = 0.42  # a value is rounded up from .58 steps on: dearer magnitudes have to earn it
FITTED = 2  # magnitudes 1 and 2 are decoded to their class's mean, larger ones to themselves
GAINS = 15  # classes that a row's may all be shifted by, around the middle one
_LEAST_SEEN = 50  # values, for a mean to be taken from them


class Tables:
    """Tables of all classes: `frequencies` uint16 (61, 57), each row's sum 4096; `points` float32 (61, 2), what magnitudes 1
    and 2 are decoded to, in steps. ValueError for others.
    """

    def __init__(self, frequencies: Array, points: Array):
        if (frequencies.dtype, frequencies.shape) != (np.dtype(np.uint16), (CLASSES, SYMBOLS)):
            raise ValueError(f"frequencies of {frequencies.dtype} {frequencies.shape}: not uint16 {(CLASSES, SYMBOLS)}")
        if (points.dtype, points.shape) != (np.dtype(np.float32), (CLASSES, FITTED)):
            raise ValueError(f"points of {points.dtype} {points.shape}: not float32 {(CLASSES, FITTED)}")
        if (frequencies.sum(axis=1, dtype=np.int64) != TOTAL).any() or (frequencies[:, ESCAPE] == 0).any():
            raise ValueError(f"frequencies: those of a class don't add up to {TOTAL}, or leave no escape")
        if not (np.isfinite(points).all() and (points > 0).all() and (points <= FITTED + 1).all()):
            raise ValueError("points: not between 0 and 3 steps")
        self.frequencies, self.points = frequencies, points

    @cached_property
    def starts(self) -> Array:
        """Return where each symbol's slots begin: uint16 (61, 57)."""
        ends = np.cumsum(self.frequencies, axis=1, dtype=np.uint32)
        return (ends - self.frequencies).astype(np.uint16)

    @cached_property
    def symbols(self) -> Array:
        """Return the symbol of each slot: uint8 (61, 4096)."""
        return np.stack([np.repeat(np.arange(SYMBOLS, dtype=np.uint8), row) for row in self.frequencies])

    @cached_property
    def costs(self) -> Array:
        """Return what a magnitude of each symbol costs, sign and extra bits included, in 1/256 bits: int32 (61, 57)."""
        seen = self.frequencies > 0
        bits = PRECISION - np.log2(np.where(seen, self.frequencies, 1)) + extra_bits(np.arange(SYMBOLS))
        escaped = PRECISION - np.log2(self.frequencies[:, ESCAPE:]) + ESCAPE_BITS
        bits = np.where(seen, bits, escaped)
        bits += ~seen | (np.arange(SYMBOLS) > 0)  # the sign; the escape has one even of 0
        return np.rint(bits * COST).astype(np.int32)


def symbol_of(magnitudes: Array) -> Array:
    """Return the symbols of magnitudes (int, 0 to 32767)."""
    octave = np.frexp(magnitudes.astype(np.float32))[1] - 1
    symbols = DIRECT + 4 * (octave - 3) + ((magnitudes >> np.maximum(octave - 2, 0)) & 3)
    return np.where(magnitudes < DIRECT, magnitudes, symbols).astype(np.int64)


def extra_bits(symbols: Array) -> Array:
    """Return how many bits of a magnitude its symbol leaves open."""
    bits = np.where(symbols < DIRECT, 0, (symbols - DIRECT) // 4 + 1)
    return np.where(symbols == ESCAPE, ESCAPE_BITS, bits)


def least_magnitude(symbols: Array) -> Array:
    """Return the magnitude of a symbol whose extra bits are all zero; 0 of the escape's."""
    octave, quarter = np.divmod(np.maximum(symbols - DIRECT, 0), 4)
    magnitudes = np.where(symbols < DIRECT, symbols, (4 + quarter) << (octave + 1))
    return np.where(symbols == ESCAPE, 0, magnitudes)


def class_of(spread: Array) -> Array:
    """Return the class's index of components with these standard deviations, in steps: int32 (components,)."""
    number = np.rint(np.log2(np.maximum(spread, 2.0**-30)) * OCTAVE)
    return np.clip(number - LOWEST, 0, CLASSES - 1).astype(np.int32)


def shifted(classes: Array, gains: Array) -> Array:
    """Return the classes (rows, components) of rows with these gains, numbers 0 to 14 of which 7 shifts none."""
    return np.clip(classes + (gains.astype(np.int32)[:, None] - GAINS // 2), 0, CLASSES - 1)


class SymbolCodes(NamedTuple):
    """How each class codes each symbol, (61, 57) each: one that it has no slots for as the escape. `least` is the magnitude
    whose extra bits are all zero, `open_bits` counts these and the sign.
    """

    frequency: Array
    start: Array
    least: Array
    open_bits: Array


def codes_of(tables: Tables) -> SymbolCodes:
    symbols = np.where(tables.frequencies > 0, np.arange(SYMBOLS), ESCAPE)
    frequency, start = (np.take_along_axis(each, symbols, axis=1) for each in (tables.frequencies, tables.starts))
    return SymbolCodes(frequency, start, least_magnitude(symbols), np.where(symbols > 0, extra_bits(symbols) + 1, 0))


def points_of(tables: Tables) -> Array:
    """Return the value that each class decodes each magnitude below 8 to: float32 (61, 8)."""
    points = np.tile(np.arange(DIRECT, dtype=np.float32), (CLASSES, 1))
    points[:, 1 : FITTED + 1] = tables.points
    return points


def shifted_classes() -> Array:
    """Return the class of a component of class c in a row of gain g, at index c + g: int64 (76,), of which 75 are used."""
    return np.clip(np.arange(CLASSES + GAINS) - GAINS // 2, 0, CLASSES - 1)


def quantised(values: Array) -> Array:
    """Round values in steps, float32 -> whole steps, int32, of at most `MOST`; what is no number is 0."""
    magnitudes = np.floor(np.abs(values) + np.float32(DEAD_ZONE))
    magnitudes = np.minimum(np.where(np.isnan(magnitudes), 0, magnitudes), MOST).astype(np.int32)
    return np.where(values < 0, -magnitudes, magnitudes)


def gains_of(steps: Array, classes: Array, tables: Tables) -> Array:
    """Return each row's gain at which it costs least: steps int32 (rows, components), classes (components,) -> int64."""
    symbols = symbol_of(np.abs(steps))
    costs = np.empty((len(steps), GAINS), np.int64)
    for gain in range(GAINS):
        of_class = tables.costs[np.clip(classes + gain - GAINS // 2, 0, CLASSES - 1)]
        costs[:, gain] = np.take_along_axis(of_class, symbols.T, axis=1).sum(axis=0)
    return costs.argmin(axis=1)


# -- made from a calibration -------------------------------------------------------------------------------------------


def first_guess() -> Tables:
    """Return tables of values that are distributed as Laplace has it, before any was seen."""
    return _tables(np.zeros((CLASSES, SYMBOLS)), np.zeros((CLASSES, FITTED)), np.zeros((CLASSES, FITTED)))


def fit(groups: Iterable[tuple[Array, Array]]) -> Tables:
    """Return tables for groups of rows: values in steps float32 (rows, components), classes int32 (components,)."""
    stepped = [(values, quantised(values), classes) for values, classes in groups]
    tables = first_guess()
    for _ in range(2):  # each row is counted where the round before would have it
        counts, sums, seen = np.zeros((CLASSES, SYMBOLS)), np.zeros((CLASSES, FITTED)), np.zeros((CLASSES, FITTED))
        for values, steps, classes in stepped:
            of_rows, magnitudes = shifted(classes, gains_of(steps, classes, tables)), np.abs(steps)
            np.add.at(counts, (of_rows, symbol_of(magnitudes)), 1)
            for number in range(FITTED):
                matches = magnitudes == number + 1
                sums[:, number] += np.bincount(of_rows[matches], np.abs(values[matches]), CLASSES)
                seen[:, number] += np.bincount(of_rows[matches], minlength=CLASSES)
        tables = _tables(counts, sums, seen)
    return tables


def _tables(counts: Array, sums: Array, seen: Array) -> Tables:
    prior = _laplace()
    smoothed = counts + prior * (4 + counts.sum(axis=1, keepdims=True) * 1e-4)
    frequencies = np.stack([_whole(row / row.sum()) for row in smoothed])
    points = np.where(seen > _LEAST_SEEN, sums / np.maximum(seen, 1), np.arange(1, FITTED + 1))
    return Tables(frequencies, points.astype(np.float32))


def _laplace() -> Array:
    """Return the share of each symbol, by class: (61, 57)."""
    spread = 2.0 ** ((np.arange(CLASSES) + LOWEST) / OCTAVE)
    first = np.append(least_magnitude(np.arange(ESCAPE)), MOST + 1.0)
    tail = np.exp(-np.sqrt(2) / spread[:, None] * np.maximum(first - DEAD_ZONE, 0))
    return np.concatenate([tail[:, :-1] - tail[:, 1:], np.full((CLASSES, 1), 1e-6)], axis=1)


def _whole(shares: Array) -> Array:
    """Return shares of 1 as whole frequencies that add up to 4096: at least 1 for the escape, 0 for a rarer symbol."""
    whole = np.rint(shares * TOTAL).astype(np.int64)
    whole[ESCAPE] = max(whole[ESCAPE], 1)
    whole[whole[:ESCAPE].argmax()] += TOTAL - whole.sum()
    return whole.astype(np.uint16)
