"""Codecs: how rows of attention state become bytes and come back.

`Raw`, `Affine` and `TurboQuant` are what a user chooses from; `as_codec` reads a choice from a setting,
`codec_from_spec` from a file's header. Called by `prefixcache.layers`; nothing here knows blocks, images or files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from prefixcache.codecs.affine import Affine
from prefixcache.codecs.base import Codec, Plane, RowCodec, Stream
from prefixcache.codecs.choice import as_codec
from prefixcache.codecs.raw import Raw, RawRows
from prefixcache.codecs.turboquant.codec import TurboQuant

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
