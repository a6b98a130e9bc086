"""What `prefixcache calibrate` says in the end: in lines for a person, or as values that JSON can hold."""

from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from prefixcache.calibration.statistics import FISHER
from prefixcache.cli.calibrate.anchor import LONG_ENOUGH
from prefixcache.cli.calibrate.choices import choices, grid, saved_from
from prefixcache.cli.calibrate.making import CalibratedBasis, reasons
from prefixcache.cli.calibrate.options import Calibration
from prefixcache.cli.evaluate.report import number
from prefixcache.cli.tables import table
from prefixcache.cli.text import foreign, many, size
from prefixcache.codecs.transform.basis import GUESSED, MATCHED, NEAREST, Basis
from prefixcache.codecs.transform.codec import QUALITY

METRICS = {FISHER: "by gradients of what the model says next"}
WITHOUT_GRADIENT = "by each layer's spread, since the model has no gradient"


def divergence(basis: Basis) -> str:
    """Return what was measured of quality 4."""
    if basis.measured is None:
        return f"KL not measured at quality {QUALITY:g}"
    kl, reference = number(basis.measured.kl), number(basis.measured.reference_kl)
    return f"KL {kl} nats at quality {QUALITY:g} (turboquant:4: {reference})"


def doubt(basis: Basis) -> str:
    """Return why quality 4 need not have the KL of turboquant:4; nothing where it has."""
    if basis.measured is None:
        return (
            f"quality {QUALITY:g} is a guess: KL takes windows of some {LONG_ENOUGH} tokens (--tokens), and a prompt "
            "cache that can be restored"
        )
    return {
        MATCHED: "",
        NEAREST: f"quality {QUALITY:g} was brought as near to turboquant:4 as it may be: the guess was far off; more --draws "
        "make a better one",
        GUESSED: f"quality {QUALITY:g} is a guess: KL there is next to nothing, or doesn't fall as quality rises",
    }[basis.measured.anchor]


def facts(calibrated: CalibratedBasis) -> dict[str, Any]:
    basis, coded, fp16 = calibrated.basis, calibrated.basis.coded_bytes(QUALITY), calibrated.basis.fp16_bytes
    return {
        "file": str(calibrated.path),
        "hash": basis.hash,
        "model": basis.model,
        "was_there": calibrated.was_there,
        "metric": basis.metric,
        "texts": basis.texts,
        "sinks": basis.sinks,
        "ram_bytes": basis.nbytes,
        "groups": [[layer.index for layer in group.layers] for group in basis.groups],
        "left_out": {str(index): reason for index, reason in calibrated.left_out.items()},
        "quality": QUALITY,
        "token_bytes": {"fp16": fp16, "coded": coded, "ratio": fp16 / coded},
        "measured": basis.measured and basis.measured._asdict(),
        "codecs": [choice._asdict() for choice in choices(basis)],
    }


def _windows(basis: Basis) -> list[str]:
    """Return a line for each window that layers have."""
    counts = Counter(layer.window for group in basis.groups for layer in group.layers if layer.window)
    return [
        f"of them {count} attend{'s' * (count == 1)} to the last {window:,} tokens"
        for window, count in sorted(counts.items())
    ]


def screen(calibrated: CalibratedBasis, job: Calibration, basis_dir: Path | None) -> list[Text | Table]:
    """Return the lines, and what each codec would take. The last line names model, adapter and `basis_dir` as they were
    given: a server wants the same.
    """
    basis, coded, fp16 = calibrated.basis, calibrated.basis.coded_bytes(QUALITY), calibrated.basis.fp16_bytes
    inside = basis.layers
    layers, groups = many(inside + len(calibrated.left_out), "layer"), many(len(basis.groups), "group")
    lines = [
        f"{calibrated.path}{' (was there)' * calibrated.was_there}",
        f"transformed: {inside} of {layers}, in {groups}",
        *_windows(basis),
    ]
    if calibrated.left_out:
        lines.append(f"left to TurboQuant, or as they are: {reasons(calibrated.left_out)}")
    tokens = saved_from(basis)
    saved = f", which quality {QUALITY:g} saves from {tokens:,} tokens on, beside turboquant:4" if tokens else ""
    lines += [
        f"on text it had not seen: {divergence(basis)}, {fp16 / coded:.1f} times smaller than fp16",
        *(line for line in (doubt(basis),) if line),
        f"errors are weighed {METRICS.get(basis.metric, WITHOUT_GRADIENT)}",
        f"the basis takes {size(basis.nbytes)} of RAM{saved}",
        "a token in the transformed layers:",
    ]
    words = ["prefixcache", "serve", "--model", job.model, *(["--adapter-path", job.adapter] if job.adapter else [])]
    words += ["--codec", "transform", *(["--basis-dir", str(basis_dir)] if basis_dir else [])]
    return [*map(foreign, lines), table(grid(basis)), foreign(f"next: {shlex.join(words)}")]
