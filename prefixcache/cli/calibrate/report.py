"""The report of `prefixcache calibrate`, in lines for a person or as values that JSON can hold: the basis that was made, and
how many bytes a token of the model takes with each codec that suits it, in RAM, on an SSD and in a fleet.
"""

from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from prefixcache.calibration.statistics import FISHER
from prefixcache.cli.calibrate.anchor import LONG_ENOUGH
from prefixcache.cli.calibrate.making import CalibratedBasis, reasons
from prefixcache.cli.calibrate.options import Calibration
from prefixcache.cli.evaluate.report import number
from prefixcache.cli.tables import Grid, table
from prefixcache.cli.text import foreign, many, size
from prefixcache.codecs import Codec, Raw, TurboQuant
from prefixcache.codecs.base import Stream
from prefixcache.codecs.transform.basis import GUESSED, MATCHED, NEAREST, Basis
from prefixcache.codecs.transform.codec import QUALITY
from prefixcache.image_format import Spec

QUALITIES = (5.0, QUALITY, 3.0)
RAM = 8 * 10**9  # bytes of which the table says how many tokens they hold
PROMPT = 10_000  # tokens of which it says what is written, read or sent


def _divergence(basis: Basis) -> str:
    """Return what was measured of quality 4."""
    if basis.measured is None:
        return f"KL not measured at quality {QUALITY:g}"
    kl, reference = number(basis.measured.kl), number(basis.measured.reference_kl)
    return f"KL {kl} nats at quality {QUALITY:g} (turboquant:4: {reference})"


def _doubt(basis: Basis) -> str:
    """Return why quality 4 need not have the KL of turboquant:4; "" where it has."""
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
    """Return the report as values that JSON can hold."""
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
    layers, groups = many(basis.layers + len(calibrated.left_out), "layer"), many(len(basis.groups), "group")
    spread = "each layer's spread, since the model has no gradient"
    weight = "gradients of what the model says next" if basis.metric == FISHER else spread
    lines = [
        f"{calibrated.path}{' (was there)' * calibrated.was_there}",
        f"transformed: {basis.layers} of {layers}, in {groups}",
        *_windows(basis),
    ]
    if calibrated.left_out:
        lines.append(f"left to TurboQuant, or as they are: {reasons(calibrated.left_out)}")
    tokens = saved_from(basis)
    saved = f", which quality {QUALITY:g} saves from {tokens:,} tokens on, beside turboquant:4" if tokens else ""
    lines += [
        f"on text it had not seen: {_divergence(basis)}, {fp16 / coded:.1f} times smaller than fp16",
        _doubt(basis),
        f"errors are weighed by {weight}",
        f"the basis takes {size(basis.nbytes)} of RAM{saved}",
        "a token in the transformed layers:",
    ]
    words = ["prefixcache", "serve", "--model", job.model, *(["--adapter-path", job.adapter] if job.adapter else [])]
    words += ["--trust-remote-code"] if job.trust_remote_code else []
    words += ["--codec", "transform", *(["--basis-dir", str(basis_dir)] if basis_dir else [])]
    return [*map(foreign, filter(None, lines)), table(grid(basis)), foreign(f"next: {shlex.join(words)}")]


# -- what each codec takes --------------------------------------------------------------------------------------------


class CodecChoice(NamedTuple):
    """A codec, by the text of --codec; what a token takes in the transformed layers; the KL of the next token, in nats, None
    where nobody knows it, and whether it was measured; the basis's bytes of RAM, 0 of a codec that needs none.
    """

    codec: str
    token_bytes: float
    kl: float | None
    measured: bool
    basis_bytes: int = 0


def choices(basis: Basis) -> list[CodecChoice]:
    """Return the codecs, the most exact first. An error's amplitude doubles from one quality to the next, so its KL is taken
    for four times as large.
    """
    measured = basis.measured
    kl, reference_kl = (measured.kl, measured.reference_kl) if measured else (None, None)
    plain = [
        CodecChoice("raw", _token_bytes(basis, Raw()), 0.0, measured=True),
        CodecChoice("turboquant:4", _token_bytes(basis, TurboQuant()), reference_kl, measured=True),
    ]
    return plain + [
        CodecChoice(
            f"transform:{quality:g}",
            basis.coded_bytes(quality),
            kl and kl * 4 ** (QUALITY - quality),
            quality == QUALITY,
            basis.nbytes,
        )
        for quality in QUALITIES
    ]


def saved_from(basis: Basis) -> int | None:
    """Return from how many tokens on a basis takes less RAM than it saves beside TurboQuant; None where it saves nothing."""
    saved = _token_bytes(basis, TurboQuant()) - basis.coded_bytes(QUALITY)
    return round(basis.nbytes / saved) if saved > 0 else None


def _token_bytes(basis: Basis, codec: Codec) -> float:
    total = 0
    for layer in (layer for group in basis.groups for layer in group.layers):
        heads, key_width, value_width, dtype = layer.heads, layer.key_width, layer.value_width, layer.dtype
        keys = Stream(0, 1, "keys", heads, key_width, value_width, dtype)  # these codecs code all layers alike
        values = Stream(0, 1, "values", heads, value_width, key_width, dtype)
        planes = codec.row_codec(keys).planes + codec.row_codec(values).planes
        total += sum(Spec(plane.name, plane.dtype, (heads, *plane.shape)).nbytes for plane in planes)
    return float(total)


def grid(basis: Basis) -> Grid:
    headings = ["codec", "a token", "KL, nats", f"RAM: tokens\nin {size(RAM)}", f"SSD, fleet:\n{PROMPT:,} tokens"]
    return Grid(headings, [_row(choice) for choice in choices(basis)])


def _row(choice: CodecChoice) -> list[str]:
    tokens = max(RAM - choice.basis_bytes, 0) / choice.token_bytes
    return [
        choice.codec,
        size(round(choice.token_bytes)),
        "about " * (choice.kl is not None and not choice.measured) + number(choice.kl),
        f"{tokens:,.0f}",
        size(round(PROMPT * choice.token_bytes)),
    ]
