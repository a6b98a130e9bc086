"""What a token of a calibrated model takes by each codec that suits it, in RAM, on an SSD and in a fleet: the table that
`prefixcache calibrate` ends with. Nothing is measured here; the basis says what was.
"""

from __future__ import annotations

from typing import NamedTuple

from prefixcache.cli.evaluate.report import number
from prefixcache.cli.tables import Grid
from prefixcache.cli.text import size
from prefixcache.codecs import Codec, Raw, TurboQuant
from prefixcache.codecs.base import Stream
from prefixcache.codecs.transform.basis import Basis
from prefixcache.codecs.transform.codec import QUALITY
from prefixcache.image_format import Spec

QUALITIES = (5.0, QUALITY, 3.0)
RAM = 8 * 10**9  # bytes of which the table says how many tokens they hold
PROMPT = 10_000  # tokens of which it says what is written, read or sent


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
    layers = [layer for group in basis.groups for layer in group.layers]
    total = 0
    for layer in layers:
        widths = layer.key_width, layer.value_width
        keys = Stream(layer.index, len(layers), "keys", layer.heads, *widths, layer.dtype)
        values = Stream(layer.index, len(layers), "values", layer.heads, *widths[::-1], layer.dtype)
        for stream in (keys, values):
            planes = codec.row_codec(stream).planes
            total += sum(Spec(plane.name, plane.dtype, (stream.heads, *plane.shape)).nbytes for plane in planes)
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
