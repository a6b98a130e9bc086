"""Makes a codec from a user's setting (an object, its spec, or text such as "turboquant:4:3") or from a file's header."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from itertools import takewhile
from typing import Any

from prefixcache.codecs.base import Codec
from prefixcache.codecs.raw import Raw
from prefixcache.codecs.transform.basis import is_hash
from prefixcache.codecs.transform.codec import Transform
from prefixcache.codecs.turboquant.codec import TurboQuant

_CODECS: dict[str, type[Raw | Transform | TurboQuant]] = {"raw": Raw, "transform": Transform, "turboquant": TurboQuant}
_REMEDY = (
    'write "raw", "transform", "transform:3.5", "turboquant", "turboquant:4", "turboquant:4:3" or '
    '"turboquant:4:3:plain", with fp16_layers=2, sink_tokens=4, state_bits=8 or seed=1 after it, each once'
)


def codec_from_spec(spec: Mapping[str, Any]) -> Codec:
    """Return the codec whose `spec()` this is; of a calibrated model's, the `Transform` that it came of, since its
    basis is a file.

    ValueError names an unknown codec, another version of its format, a parameter too many or missing, or a bad value.
    """
    name, version = spec.get("name"), spec.get("version")
    kind = _CODECS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(f"codec {name!r}: not known here; known are {', '.join(_CODECS)}")
    ours = kind().spec()["version"]
    if type(version) is not int or version != ours:
        raise ValueError(f"codec {name!r} version {version!r}: this release reads version {ours} only")
    chosen = {key: value for key, value in spec.items() if key not in ("name", "version")}
    basis = chosen.pop("basis", None) if kind is Transform else None
    wanted = {field.name for field in fields(kind)}
    unsaid = wanted - chosen.keys() - {"state_bits"}  # the usual goes without saying
    if unsaid or chosen.keys() - wanted:
        odd = ", ".join(sorted(map(str, unsaid | (chosen.keys() - wanted))))
        raise ValueError(f"codec {name!r}: its parameters are {', '.join(sorted(wanted)) or 'none'}; check {odd}")
    if kind is Transform:
        if "basis" in spec and not is_hash(basis):
            raise ValueError(f"codec 'transform': basis {basis!r} is not named by 32 hex digits")
        otherwise = codec_from_spec(chosen["otherwise"]) if isinstance(chosen["otherwise"], Mapping) else None
        if not isinstance(otherwise, TurboQuant):
            raise ValueError(f"codec 'transform': otherwise is a spec of turboquant, not {chosen['otherwise']!r}")
        chosen["otherwise"] = otherwise
    return kind(**chosen)


def describe_spec(spec: Mapping[str, Any]) -> str:
    """Return what a person calls the codec of this spec, whose basis need not be here. ValueError as of `codec_from_spec`."""
    chosen = codec_from_spec(spec)
    return f"{chosen} basis {spec['basis'][:8]}" if "basis" in spec else str(chosen)


def as_codec(value: Any) -> Codec | None:
    """Return the codec that `value` means; None for None.

    Text is a name and numbers: raw; transform:quality; turboquant:key_bits:value_bits (one number is for both), then any
    of plain (no levelling), fp16_layers=N, sink_tokens=N, state_bits=N, seed=N. Of a spec (a table in TOML), fields that are
    left out have their defaults. TypeError and ValueError name the value and the remedy.
    """
    if value is None or (not isinstance(value, type) and isinstance(value, Codec)):
        return value
    if isinstance(value, Mapping):
        return codec_from_spec(_completed(value))
    if not isinstance(value, str):
        raise TypeError(f"codec of type {type(value).__name__}: pass a codec such as TurboQuant(), or its name")
    name, *rest = value.strip().lower().split(":")
    if name == "transform" and len(rest) <= 1:
        try:
            return Transform(float(rest[0])) if rest else Transform()
        except ValueError as error:
            raise ValueError(f"codec={value!r}: {error}") from None
    if name == "raw" and not rest:
        return Raw()
    bits = [int(text) for text in takewhile(_is_number, rest)]
    options = [_option(text) for text in rest[len(bits) :]]
    chosen = dict(option for option in options if option is not None)
    if name != "turboquant" or len(bits) > 2 or len(chosen) < len(options):
        raise ValueError(f"codec={value!r}: not a codec; {_REMEDY}")
    if bits:
        chosen |= {"key_bits": bits[0], "value_bits": bits[-1]}
    return TurboQuant(**chosen)


def _completed(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return a spec with the defaults of the fields that it leaves out, also of the codec `otherwise` in it."""
    name, otherwise = spec.get("name"), spec.get("otherwise")
    defaults = _CODECS[name]().spec() if isinstance(name, str) and name in _CODECS else {}
    inner = {"otherwise": _completed(otherwise)} if isinstance(otherwise, Mapping) else {}
    return {**defaults, **spec, **inner}


def _option(text: str) -> tuple[str, Any] | None:
    """Return the argument of `TurboQuant` that a part of a codec's text means; None where it means none."""
    name, _, value = text.partition("=")
    if text == "plain":
        return "levelling", False
    if name in ("fp16_layers", "sink_tokens", "state_bits", "seed") and _is_number(value):
        return name, int(value)
    return None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()
