"""A codec from what a user wrote: an object, its spec, or text such as "turboquant:4:3"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .affine import Affine
from .base import Codec
from .raw import Raw
from .turboquant import TurboQuant

_REMEDY = 'write "raw", "affine", "affine:8", "affine:4:32", "turboquant", "turboquant:4" or "turboquant:4:3"'


def as_codec(value: Any) -> Codec | None:
    """The codec that `value` means; None for None.

    Text is a name and numbers: raw; affine:bits:group_size; turboquant:key_bits:value_bits (one number is for both).
    TypeError and ValueError name the value and the remedy.
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
        numbers = [int(n) for n in rest]
    except ValueError:
        raise ValueError(f"codec={value!r}: not a codec; {_REMEDY}") from None
    if name == "raw" and not numbers:
        return Raw()
    if name == "affine" and len(numbers) <= 2:
        return Affine(*numbers)
    if name == "turboquant" and len(numbers) <= 2:
        return TurboQuant(numbers[0], numbers[-1]) if numbers else TurboQuant()
    raise ValueError(f"codec={value!r}: not a codec; {_REMEDY}")
