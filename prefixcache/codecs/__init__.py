"""Codecs: how rows of attention state become bytes and come back.

`Raw`, `Affine` and `TurboQuant` are what a user chooses from; `as_codec` reads a choice from a setting,
`codec_from_spec` from a file's header. Called by `prefixcache.layers`; nothing here knows blocks, images or files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from .affine import Affine
from .base import Codec, Plane, RowCodec, Stream
from .raw import Raw, RawRows
from .turboquant import TurboQuant

__all__ = [
    "Affine",
    "Codec",
    "Plane",
    "Raw",
    "RawRows",
    "RowCodec",
    "Stream",
    "TurboQuant",
    "as_codec",
    "codec_from_spec",
]

_CODECS: dict[str, type[Affine] | type[Raw] | type[TurboQuant]] = {
    codec().spec()["name"]: codec for codec in (Affine, Raw, TurboQuant)
}


def codec_from_spec(spec: Mapping[str, Any]) -> Codec:
    """The codec whose `spec()` this is.

    ValueError names an unknown codec, another version of its format, a parameter too many or missing, or a bad value.
    """
    name, version = spec.get("name"), spec.get("version")
    kind = _CODECS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(f"codec {name!r}: not known here; known are {', '.join(sorted(_CODECS))}")
    ours = kind().spec()["version"]
    if type(version) is not int or version != ours:
        raise ValueError(f"codec {name!r} version {version!r}: this release reads version {ours} only")
    chosen = {key: value for key, value in spec.items() if key not in ("name", "version")}
    wanted = {field.name for field in fields(kind)}
    if chosen.keys() != wanted:
        odd = ", ".join(sorted(map(str, chosen.keys() ^ wanted)))
        raise ValueError(f"codec {name!r}: its parameters are {', '.join(sorted(wanted)) or 'none'}; check {odd}")
    return kind(**chosen)


def as_codec(value: Any) -> Codec:
    """The codec that a setting names: a codec as it is, its spec, a text, or None for the default, `TurboQuant()`.

    Texts: "raw"; "affine:BITS" or "affine:BITS:GROUP_SIZE"; "turboquant:BITS" for keys and values alike, or
    "turboquant:KEY_BITS:VALUE_BITS". A name alone takes the codec's own defaults. ValueError for anything else.
    """
    if value is None:
        return TurboQuant()
    if isinstance(value, Mapping):
        return codec_from_spec(value)
    if isinstance(value, str):
        return _codec_from_text(value)
    if isinstance(value, Codec) and not isinstance(value, type):
        return value
    raise ValueError(f"codec={value!r}: not a codec; {_WRITE}")


_WRITE = 'write "turboquant:4:3", "affine:4:64" or "raw"'


def _codec_from_text(text: str) -> Codec:
    name, *numbers = text.strip().lower().split(":")
    if all(number.isascii() and number.isdigit() for number in numbers):
        match name, [int(number) for number in numbers]:
            case "raw", []:
                return Raw()
            case "affine", [*chosen] if len(chosen) <= 2:
                return Affine(*chosen)
            case "turboquant", []:
                return TurboQuant()
            case "turboquant", [bits]:
                return TurboQuant(bits, bits)
            case "turboquant", [key_bits, value_bits]:
                return TurboQuant(key_bits, value_bits)
    raise ValueError(f"codec={text!r}: not a codec; {_WRITE}")
