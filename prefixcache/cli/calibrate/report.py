"""What `prefixcache calibrate` says in the end: in lines for a person, or as values that JSON can hold."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from rich.text import Text

from prefixcache.calibration.statistics import FISHER
from prefixcache.cli.calibrate.making import Made, reasons
from prefixcache.cli.text import foreign, many, size
from prefixcache.codecs.transform.codec import QUALITY

METRICS = {FISHER: "by gradients of what the model says next"}
WITHOUT_GRADIENT = "by each layer's spread, since the model has no gradient"


def facts(made: Made) -> dict[str, Any]:
    basis, coded, fp16 = made.basis, made.basis.coded_bytes(QUALITY), made.basis.fp16_bytes
    return {
        "file": str(made.path), "hash": basis.hash, "model": basis.model, "was_there": made.was_there,
        "metric": basis.metric, "texts": basis.texts, "sinks": basis.sinks, "ram_bytes": basis.nbytes,
        "groups": [[layer.index for layer in group.layers] for group in basis.groups],
        "left_out": {str(index): reason for index, reason in made.left_out.items()},
        "quality": QUALITY, "token_bytes": {"fp16": fp16, "coded": coded, "ratio": fp16 / coded},
    }  # fmt: skip


def screen(made: Made, model: str, adapter: str | None, basis_dir: Path | None) -> list[Text]:
    """`model`, `adapter` and `basis_dir` as they were given: a server wants the same."""
    basis, coded, fp16 = made.basis, made.basis.coded_bytes(QUALITY), made.basis.fp16_bytes
    inside = basis.layers
    layers, groups = many(inside + len(made.left_out), "layer"), many(len(basis.groups), "group")
    lines = [f"{made.path}{' (was there)' * made.was_there}", f"transformed: {inside} of {layers}, in {groups}"]
    if made.left_out:
        lines.append(f"left to TurboQuant, or as they are: {reasons(made.left_out)}")
    small = f"{size(fp16)} in fp16, {size(round(coded))} coded at quality {QUALITY:g}: {fp16 / coded:.1f} times smaller"
    lines += [
        f"a token in the transformed layers: {small}",
        f"errors are weighed {METRICS.get(basis.metric, WITHOUT_GRADIENT)}",
        f"the basis takes {size(basis.nbytes)} of RAM",
    ]
    words = ["prefixcache", "serve", "--model", model, *(["--adapter-path", adapter] if adapter else [])]
    words += ["--codec", "transform", *(["--basis-dir", str(basis_dir)] if basis_dir else [])]
    return [foreign(line) for line in (*lines, f"next: {shlex.join(words)}")]
