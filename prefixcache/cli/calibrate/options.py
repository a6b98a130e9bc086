"""What `prefixcache calibrate` is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from prefixcache.cli.options import AdapterPath, Float32, TrustRemoteCode

DRAWS = 6  # of a window, where there are windows enough: then its prefix is prefilled less often


@dataclass(frozen=True)
class Calibration:
    """A model, and what it reads. `texts` are files, none for the default; `draws` counts those of all windows together."""

    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model's folder, or its name on Hugging Face.", show_default=False)
    ] = ""
    adapter: AdapterPath = None
    texts: Annotated[
        list[Path] | None,
        typer.Option(
            "--text", metavar="FILE", help="Read this text; may be given again. Without it: a mix of many kinds."
        ),
    ] = None
    windows: Annotated[int, typer.Option(min=1, help="Pieces of text that the model reads.")] = 64
    tokens: Annotated[int, typer.Option(min=16, help="Tokens of each.")] = 2048
    draws: Annotated[
        int, typer.Option(min=1, help="Gradients that weigh errors, in all; each is one pass forth and back.")
    ] = 96
    float32: Float32 = False
    trust_remote_code: TrustRemoteCode = False

    @property
    def fisher_windows(self) -> int:
        """Return in how many windows gradients are drawn: evenly many in each, and `draws` at least in all."""
        return min(self.windows, -(-self.draws // DRAWS))

    @property
    def draws_each(self) -> int:
        return -(-self.draws // self.fisher_windows)
