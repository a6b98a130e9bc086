"""Levels of live rows: measured from rows that wait, shared by caches. The arithmetic is `codecs`'s."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from prefixcache.codecs.interchange import copy_out
from prefixcache.codecs.turboquant.coding import Choice, LayerLevels, LayerRows
from prefixcache.codecs.turboquant.live import LevelStack
from prefixcache.codecs.turboquant.measure_levels import measure_levels

LEAST_MEASURED = 256  # rows to measure levels from, which are then for all that comes
MOST_MEASURED = 1024  # rows to measure levels from: the caller waits for it
MOST_STACKS = 8


class SharedLevels:
    """Levels of a model's layers, measured once by whichever cache first sees 256 rows, and used by all that share this.

    One for each tenant: levels are means and spreads of the text that they were measured on.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_layer: dict[int, LayerLevels] = {}

    def get(self, layer: int) -> LayerLevels | None:
        return self._by_layer.get(layer)

    def keep_first(self, layer: int, measured: LayerLevels) -> LayerLevels:
        """Keep `measured` for the layer unless it has levels already. Returns the levels that are kept."""
        with self._lock:
            return self._by_layer.setdefault(layer, measured)


class LevelStacks:
    """Levels of several sequences side by side, as encoders and decoders take them: each combination is stacked once.

    It keeps the levels that a stack was made of, so that their ids stay theirs. At most `MOST_STACKS` are kept.
    """

    def __init__(self, choice: Choice, kind: LayerRows):
        self._heads = kind.heads
        self._forms = choice.forms(kind)
        self._stacks: dict[tuple[int, ...], tuple[list[LayerLevels], tuple[LevelStack, LevelStack]]] = {}

    def of(self, levels: list[LayerLevels]) -> tuple[LevelStack, LevelStack]:
        """Return the stacks of keys and of values; `levels` are those of each sequence, or one for all."""
        if all(of_sequence is levels[0] for of_sequence in levels):
            levels = levels[:1]
        key = tuple(map(id, levels))
        if key not in self._stacks:
            if len(self._stacks) >= MOST_STACKS:
                self._stacks.clear()
            keys, values = self._forms
            stacks = (
                LevelStack([of_sequence.keys for of_sequence in levels], keys, self._heads),
                LevelStack([of_sequence.values for of_sequence in levels], values, self._heads),
            )
            self._stacks[key] = levels, stacks
        return self._stacks[key][1]

    def copy(self) -> LevelStacks:
        other = LevelStacks.__new__(LevelStacks)
        other._heads, other._forms, other._stacks = self._heads, self._forms, dict(self._stacks)
        return other


# -- measuring -----------------------------------------------------------------------------------------------------------


def measured_from(rows: tuple[mx.array, mx.array], ranges: Sequence[tuple[int, int]]) -> LayerLevels:
    """Measure levels of keys and values (B, heads, T, width): of rows evenly drawn from the `ranges` (first, last not
    included) of the sequences.
    """
    count = sum(last - first for first, last in ranges)
    drawn = np.linspace(0, count - 1, min(count, MOST_MEASURED)).astype(np.int64)
    at, drawn_of = 0, []
    for first, last in ranges:
        drawn_of.append(mx.array(drawn[(drawn >= at) & (drawn < at + last - first)] - at + first))
        at += last - first
    measured = []
    for part, centred in zip(rows, (True, False), strict=True):
        samples = [mx.take(part[b], chosen, axis=1) for b, chosen in enumerate(drawn_of) if chosen.size]
        sample = copy_out(mx.swapaxes(mx.concatenate(samples, axis=1), 0, 1).astype(mx.float32))
        measured.append(measure_levels(sample, centred))
    return LayerLevels(*measured)
