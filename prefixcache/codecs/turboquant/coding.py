"""How the rows of one layer are coded, in plain data that live caches and the store share. No rows are here.

`Choice` is the user's choice, `LayerRows` the heads, widths and dtype of a layer's rows, `LayerLevels` the levels of its keys
and values, `Run` the token from which on rows have such levels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from prefixcache.codecs.base import RowCodec
from prefixcache.codecs.interchange import FLOATS
from prefixcache.codecs.levels import Levels
from prefixcache.codecs.turboquant.codec import LEAST_WIDTH, TurboQuant, TurboQuantRows
from prefixcache.codecs.turboquant.format import Form, form_of

RECENT = 64  # last rows that attention sees uncoded: most of what codes cost is lost on the nearest rows
MOST_RECENT = 4096


class LayerRows(NamedTuple):
    """The heads, widths and dtype of a layer's rows."""

    heads: int
    key_width: int
    value_width: int
    dtype: str

    @property
    def widths(self) -> tuple[int, int]:
        return self.key_width, self.value_width

    def check(self) -> None:
        """Raise ValueError for rows that TurboQuant doesn't take."""
        if self.dtype not in FLOATS:
            raise ValueError(f"rows of {self.dtype}: TurboQuant takes {', '.join(FLOATS)}; keep this layer as it is")
        for part, width in zip(("keys", "values"), self.widths, strict=True):
            if width < LEAST_WIDTH:
                raise ValueError(
                    f"{part} {width} wide: TurboQuant takes {LEAST_WIDTH} or more; keep this layer as it is"
                )

    def __str__(self) -> str:
        widths = self.key_width if self.key_width == self.value_width else f"{self.key_width} and {self.value_width}"
        return f"{self.heads} heads of {widths} {self.dtype}"


class Choice(NamedTuple):
    """How rows are coded, and which of them stay uncoded beside their codes."""

    key_bits: int = 4
    value_bits: int = 4
    levelling: bool = True
    sink_tokens: int = 4
    seed: int = 0
    recent_tokens: int = RECENT

    @classmethod
    def of_codec(cls, codec: TurboQuant, recent_tokens: int) -> Choice:
        """Return what a codec says of any layer. ValueError for another number of recent tokens than can be kept."""
        chosen = codec.key_bits, codec.value_bits, codec.levelling, codec.sink_tokens, codec.seed
        return cls(*chosen, recent_tokens).check()

    @classmethod
    def of(cls, keys: RowCodec, values: RowCodec, sink_tokens: int) -> Choice | None:
        """Return the choice that gives the codes of these row codecs; None where one of them is not TurboQuant's."""
        if not isinstance(keys, TurboQuantRows) or not isinstance(values, TurboQuantRows):
            return None
        return cls(keys.bits, values.bits, keys.levelled, sink_tokens, keys.seed)

    def same_codes(self, other: Choice | None) -> bool:
        """Tell whether both give the same codes: all but `recent_tokens` decides that."""
        return other is not None and self._replace(recent_tokens=0) == other._replace(recent_tokens=0)

    def forms(self, kind: LayerRows) -> tuple[Form, Form]:
        """Return the forms of keys and of values."""
        return form_of(kind.key_width, self.key_bits, self.seed), form_of(kind.value_width, self.value_bits, self.seed)

    def check(self) -> Choice:
        """Raise ValueError for bits and numbers that TurboQuant doesn't take."""
        self.codec()
        if type(self.recent_tokens) is not int or not 0 <= self.recent_tokens <= MOST_RECENT:
            raise ValueError(f"recent_tokens={self.recent_tokens!r}: give a number of tokens, 0 to {MOST_RECENT}")
        return self

    def codec(self) -> TurboQuant:
        return TurboQuant(self.key_bits, self.value_bits, self.levelling, sink_tokens=self.sink_tokens, seed=self.seed)

    def __str__(self) -> str:
        return str(self.codec())


class LayerLevels(NamedTuple):
    """The levels of a layer's keys and of its values; None where a part isn't levelled."""

    keys: Levels | None
    values: Levels | None


PLAIN = LayerLevels(None, None)


class Run(NamedTuple):
    """From token `first` of a sequence on, up to the next run, rows are coded with `levels`."""

    first: int
    levels: LayerLevels


def run_at(runs: Sequence[Run], token: int) -> Run:
    """Return the run of a token; of padding before the first token, the first run."""
    return next((run for run in reversed(runs) if run.first <= token), runs[0])


class CodedSpan(NamedTuple):
    """Rows `first` to `last` (not included) of a sequence, coded with `levels`."""

    first: int
    last: int
    levels: LayerLevels


def spans_of(runs: Sequence[Run], pad: int, low: int, high: int) -> list[CodedSpan]:
    """Return rows `low` to `high` (not included) of a sequence behind `pad` rows of padding, cut where levels change."""
    if len(runs) == 1 and low >= pad + runs[0].first:  # as most often
        return [CodedSpan(low, high, runs[0].levels)] if low < high else []
    spans = []
    for run, after in zip(runs, (*runs[1:], None), strict=True):
        first, last = max(pad + run.first, low), high if after is None else min(pad + after.first, high)
        if first < last:
            spans.append(CodedSpan(first, last, run.levels))
    return spans
