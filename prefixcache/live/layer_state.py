"""The state of one layer that live caches keep as codes, for the modules that read it. `live.layer` changes it."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from prefixcache.codecs.turboquant.coding import Choice, CodedSpan, LayerLevels, LayerRows, Run, run_at, spans_of
from prefixcache.codecs.turboquant.live import LevelStack
from prefixcache.live.buffers import Alignment, CodeBuffer, FirstRows, RecentRows, RowBuffer, RowNumbers
from prefixcache.live.levels import LevelStacks, SharedLevels

NO_ROWS, NO_CODES = RowBuffer(), CodeBuffer()


@dataclass(eq=False)
class LayerState:
    """The rows of B sequences of one layer.

    While `waiting`, rows wait uncoded: until their levels are known, or 256 are there to measure them from. Then all are
    coded, in `codes`. Beside their codes each sequence's `sinks` and `recent` rows stay uncoded, and attention reads those.
    """

    choice: Choice
    shared: SharedLevels | None
    number: int  # of the layer, in `shared`
    alignment: Alignment
    sinks: FirstRows
    recent: RecentRows
    kind: LayerRows | None = None
    runs: tuple[tuple[Run, ...], ...] = ()  # of each sequence; none while rows wait
    waiting: RowBuffer | None = None
    codes: CodeBuffer = NO_CODES
    _stacks: LevelStacks | None = None

    def __post_init__(self) -> None:
        self.numbers = RowNumbers()

    @property
    def rows(self) -> int:
        return self.alignment.rows

    @property
    def pads(self) -> tuple[int, ...]:
        return self.alignment.pads

    @property
    def batch(self) -> int:
        return len(self.alignment.pads)

    @property
    def has_uncoded(self) -> bool:
        """Tell whether some rows are attended to uncoded."""
        return self.sinks.arrays is not None or self.recent.arrays is not None

    def known_kind(self) -> LayerRows:
        """Return what rows there are. ValueError before the first."""
        if self.kind is None:
            raise ValueError("this cache holds no rows yet")
        return self.kind

    def arrays(self) -> list[mx.array]:
        waiting = self.waiting or NO_ROWS
        parts = (self.codes, waiting, self.sinks, self.recent)
        return [array for part in parts for array in part.arrays or ()]

    def levels_in_use(self) -> list[LayerLevels]:
        """Return the levels of all runs, each once."""
        return list({id(run.levels): run.levels for runs in self.runs for run in runs}.values())

    @property
    def nbytes(self) -> int:
        """Count the bytes of all buffers, slack included, and levels. Nothing is evaluated."""
        levels = [part for levels in self.levels_in_use() for part in levels if part is not None]
        return sum(array.nbytes for array in self.arrays()) + sum(2 * part.mean.nbytes for part in levels)

    def stacks_of(self, levels: list[LayerLevels]) -> tuple[LevelStack, LevelStack]:
        """Return the levels of each sequence's keys, and of its values, side by side; `levels` may be one for all."""
        if self._stacks is None:
            self._stacks = LevelStacks(self.choice, self.known_kind())
        return self._stacks.of(levels)

    def stacks_at(self, row: int) -> tuple[LevelStack, LevelStack]:
        """Return the levels that this row of each sequence is coded with."""
        return self.stacks_of([run_at(runs, row - pad).levels for runs, pad in zip(self.runs, self.pads, strict=True)])

    def coded_spans(self, b: int) -> list[CodedSpan]:
        """Return the rows of a sequence that are attended to by their codes, cut where levels change."""
        low = self.pads[b] + self.choice.sink_tokens
        high = min(self.rows, max(self.recent.first(b, self.alignment.end_of(b)), low))
        return spans_of(self.runs[b], self.pads[b], low, high)
