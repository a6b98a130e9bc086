"""The codec that a calibration makes possible: a token's keys and values of neighbouring layers, coded together.

`Transform` is what a user chooses. For a model with a basis it becomes a `Calibrated`, whose layers that the basis knows
are coded by it; all others, and all models without a basis, stay with TurboQuant. Decision 0019 has the choices.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from prefixcache.codecs.base import Codec, RowCodec, Stream
from prefixcache.codecs.interchange import FLOATS
from prefixcache.codecs.transform.bases import Bases, is_part
from prefixcache.codecs.transform.basis import LEAST_QUALITY, MOST_QUALITY, Basis
from prefixcache.codecs.transform.coding import GroupCoder
from prefixcache.codecs.turboquant.codec import TurboQuant

log = logging.getLogger("prefixcache")

QUALITY = 4.0
VERSION = 1
# About what a value of a row takes where there is no basis to ask: bits by quality, the row's head included. Those of 3 and 4
# were measured on SmolLM2-135M-Instruct, on texts that its basis had not seen. The others were measured on the texts that it
# was made of, and are 5 % more than that, as those of 3 and 4 are.
TYPICAL_BITS = {
    1.0: 0.27,
    1.5: 0.37,
    2.0: 0.49,
    2.5: 0.65,
    3.0: 0.83,
    3.5: 1.07,
    4.0: 1.34,
    4.5: 1.63,
    5.0: 1.98,
    5.5: 2.35,
    6.0: 2.77,
}
_warned: set[str] = set()


class Place(NamedTuple):
    """Where a stream's channels are: its group, and the number of the stream in it."""

    group: int
    stream: int


@dataclass(frozen=True)
class Transform:
    """Transform coding (after KVTC, arXiv 2511.01815) for models that `prefixcache calibrate` has a basis of.

    `quality` 4 changes what a model says next as much as 4 bits of TurboQuant do, by KL on text that the basis was not made
    of, at about a third of the bytes; one less doubles the error's amplitude (1 to 6, fractions too). What a basis doesn't
    cover is coded by `otherwise`. ValueError for a quality out of range, and for an `otherwise` that is no TurboQuant.
    """

    quality: float = QUALITY
    otherwise: TurboQuant = field(default_factory=TurboQuant)

    def __post_init__(self) -> None:
        if isinstance(self.quality, bool) or not isinstance(self.quality, (int, float)):
            raise ValueError(f"quality={self.quality!r}: give a number from 1 to 6, as 4 or 3.5")
        if not LEAST_QUALITY <= self.quality <= MOST_QUALITY:
            raise ValueError(
                f"quality={self.quality!r}: out of range; 4 is about TurboQuant's 4 bits, 1 to 6 are possible"
            )
        if not isinstance(self.otherwise, TurboQuant):
            raise ValueError(f"otherwise={self.otherwise!r}: not a TurboQuant; give one, or leave it out")
        object.__setattr__(self, "quality", float(self.quality))

    @property
    def sink_tokens(self) -> int:
        return self.otherwise.sink_tokens

    def spec(self) -> dict[str, Any]:
        return {"name": "transform", "version": VERSION, "quality": self.quality, "otherwise": self.otherwise.spec()}

    def row_codec(self, stream: Stream) -> RowCodec:
        return self.otherwise.row_codec(stream)

    def for_model(self, model: str, bases: Bases) -> Codec:
        """Return the codec of one model, by its identity: calibrated, or what it is coded by otherwise."""
        basis = bases.of_model(model)
        if basis is not None:
            return Calibrated(self.quality, self.otherwise, basis)
        self.warn_of_no_basis(model, bases.folder)
        return self.otherwise

    def warn_of_no_basis(self, model: str, folder: Path, command: str = "prefixcache calibrate MODEL") -> None:
        """Say what to run, once in a process for each model."""
        if model in _warned:
            return
        _warned.add(model)
        if is_part(model):
            log.warning("no basis is of a part of a model: the rows of %s are coded by %s", model, self.otherwise)
        else:
            log.warning(
                "no basis of model %s in %s: its rows are coded by %s until you run `%s`",
                model,
                folder,
                self.otherwise,
                command,
            )

    def __str__(self) -> str:
        name = f"transform quality {self.quality}".removesuffix(".0")
        return name if self.otherwise == TurboQuant() else f"{name} otherwise {self.otherwise}"


@dataclass(frozen=True, eq=False)
class Calibrated:
    """Transform coding with a model's basis."""

    quality: float
    otherwise: TurboQuant
    basis: Basis

    @property
    def sink_tokens(self) -> int:
        return self.otherwise.sink_tokens

    def spec(self) -> dict[str, Any]:
        return {**Transform(self.quality, self.otherwise).spec(), "basis": self.basis.hash}

    def row_codec(self, stream: Stream) -> RowCodec:
        """Return the codec of a stream that the basis doesn't cover."""
        return self.otherwise.row_codec(stream)

    def place_of(self, stream: Stream, window: int) -> Place | None:
        """Return where a stream is coded of a layer that attends to the last `window` tokens (0: to all). None where the
        basis has no layer like it.
        """
        place = self.basis.place_of(stream.layer)
        if place is None:
            return None
        group, layer = place
        keys = stream.part == "keys"
        width = layer.key_width if keys else layer.value_width
        shape = stream.heads, stream.width, window
        if shape != (layer.heads, width, layer.window) or stream.dtype not in FLOATS:
            return None
        number = 2 * self.basis.groups[group].layers.index(layer) + (not keys)
        return Place(group, number)

    def coder(self, group: int, dtype: str) -> GroupCoder:
        return GroupCoder(self.basis.groups[group], self.basis.tables, self.quality, dtype)

    def __str__(self) -> str:
        return f"{Transform(self.quality, self.otherwise)} basis {self.basis.hash[:8]}"
