"""A codec from what a user wrote: an object, its spec, or text such as "turboquant:4:3"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .affine import Affine
from .base import Codec
from .raw import Raw
from .turboquant import TurboQuant

_REMEDY = (
    'write "raw", "affine", "affine:8", "affine:4:32", "turboquant", "turboquant:4", "turboquant:4:3" or '
    '"turboquant:4:3:plain"'
)


def as_codec(value: Any) -> Codec | None:
    """The codec that `value` means; None for None.

    Text is a name and numbers: raw; affine:bits:group_size; turboquant:key_bits:value_bits (one number is for both), then
    any of plain (no levelling), fp16_layers=N, sink_tokens=N, seed=N. TypeError and ValueError name the value and the remedy.
    """
    if value is None or (not isinstance(value, type) and isinstance(value, Codec)):
        return value
    if isinstance(value, Mapping):
        from prefixcache.codecs import codec_from_spec

        return codec_from_spec(value)
    if not isinstance(value, str):
        raise TypeError(f"codec of type {type(value).__name__}: pass a codec such as TurboQuant(), or its name")
    name, *rest = value.strip().lower().split(":")
    try:
        chosen = dict(_option(text) for text in rest if not text.isdecimal())
        numbers = [int(text) for text in rest if text.isdecimal()]
    except ValueError:
        raise ValueError(f"codec={value!r}: not a codec; {_REMEDY}") from None
    if name == "turboquant" and len(numbers) <= 2 and all(text.isdecimal() for text in rest[: len(numbers)]):
        key_bits, value_bits = (numbers * 2)[:2] or (4, 4)
        return TurboQuant(key_bits, value_bits, **chosen)
    if chosen:
        raise ValueError(f"codec={value!r}: not a codec; {_REMEDY}")
    if name == "raw" and not numbers:
        return Raw()
    if name == "affine" and len(numbers) <= 2:
        return Affine(*numbers)
    raise ValueError(f"codec={value!r}: not a codec; {_REMEDY}")


def _option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    if text == "plain":
        return "levelling", False
    if name in ("fp16_layers", "sink_tokens", "seed"):
        return name, int(value)
    raise ValueError(text)
