"""What `prefixcache evaluate` is asked for: which model, and how much is measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from prefixcache.cli.evaluate.texts import NAMES, depths_of
from prefixcache.cli.options import AdapterPath, Float32


@dataclass(frozen=True)
class EvaluatedModel:
    """The model, with its adapter and its basis."""

    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model's folder, or its name on Hugging Face.")]
    adapter: AdapterPath = None
    float32: Float32 = False
    basis_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", envvar="PREFIXCACHE_BASIS_DIR", help="Where the basis of codec transform is."),
    ] = None


@dataclass(frozen=True)
class EvaluationSize:
    """How much is measured. Lengths are in tokens."""

    prefix: Annotated[int, typer.Option(min=1, help="Tokens that are stored and restored.")] = 2048
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that are read after them.")] = 256
    windows: Annotated[int, typer.Option(min=1, help="Places in the text where that is done.")] = 8
    needles: Annotated[int, typer.Option(min=0, help="Texts in which numbers are hidden; 0: none.")] = 8
    depths: Annotated[
        int, typer.Option(min=1, max=len(NAMES), help="Numbers hidden in each, from beginning to end.")
    ] = 5
    seed: Annotated[int, typer.Option(min=0, help="Seed of the hidden numbers.")] = 0

    @property
    def haystack_depths(self) -> list[float]:
        return depths_of(self.depths) if self.needles else []
