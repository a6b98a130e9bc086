"""The flags by which `prefixcache serve` and `prefixcache warm` are told how their cache is to be, and the `Settings`
that they mean. What no flag says is left to `PREFIXCACHE_*` variables, the TOML file and the defaults.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from prefixcache.codecs import TurboQuant
from prefixcache.codecs.choice import as_codec
from prefixcache.settings import Settings, parse_size

Ram = Annotated[
    str | None, typer.Option("--ram", metavar="SIZE", help="RAM budget, such as 8GB. Default: a quarter of the memory.")
]
SsdDir = Annotated[
    str | None, typer.Option("--ssd-dir", metavar="DIR", help="Directory of the SSD tier. Default: RAM only.")
]
Ssd = Annotated[
    str | None,
    typer.Option("--ssd", metavar="SIZE", help="What DIR may take, such as 200GB. Default: half of what is free."),
]
CodecText = Annotated[
    str | None,
    typer.Option("--codec", metavar="SPEC", help='"turboquant:4:3", "affine:8", "raw". Default: turboquant.'),
]
KeyBits = Annotated[
    int | None, typer.Option("--key-bits", metavar="N", help="TurboQuant's bits for keys: 1, 2, 3, 4 or 8.")
]
ValueBits = Annotated[int | None, typer.Option("--value-bits", metavar="N", help="The same for values.")]


def settings_from(
    ram: str | None,
    ssd_dir: str | None,
    ssd: str | None,
    codec: str | None,
    key_bits: int | None,
    value_bits: int | None,
) -> Settings:
    """The settings that these flags mean; None is a flag that was not given.

    Bits change the codec that variables or the TOML file choose, where that is a TurboQuant, or else TurboQuant's defaults.
    ValueError, one line, names the flag or the setting that is bad, or the flags that contradict each other.
    """
    bits: dict[str, Any] = {
        name: n for name, n in (("key_bits", key_bits), ("value_bits", value_bits)) if n is not None
    }
    flags = " and ".join(f"--{name.replace('_', '-')}" for name in bits)
    if codec is not None and bits:
        raise ValueError(f"--codec with {flags}: both choose the codec; give one, such as --codec turboquant:4:3")
    given: dict[str, Any] = {"ram": _size("--ram", ram), "ssd_dir": ssd_dir, "ssd": _size("--ssd", ssd)}
    given = {name: value for name, value in given.items() if value is not None}
    if codec is not None:
        given["codec"] = _codec(codec)
    others = _settings({**given, "ram": "auto"} if given.get("ram") == 0 else given)
    if given.get("ssd") and others.ssd_dir is None:
        raise ValueError(f"--ssd {ssd} without --ssd-dir: no directory to keep it in; add --ssd-dir DIR")
    if given.get("ram") == 0 and (others.ssd_dir is None or others.ssd == 0):
        missing = "without --ssd-dir" if others.ssd_dir is None else "with an --ssd of 0"
        raise ValueError(f"--ram {ram} {missing}: nothing could be kept; give --ram a size, or add --ssd-dir DIR")
    if bits:
        given["codec"] = _with_bits(others.codec, bits)
    return _settings(given)


def _size(flag: str, value: str | None) -> Any:
    return value if value in (None, "auto") else parse_size(value, flag)


def _codec(text: str) -> Any:
    try:
        return as_codec(text)
    except ValueError as error:
        said = str(error)
        raise ValueError(f"--{said}" if said.startswith("codec=") else f"--codec {text!r}: {said}") from None


def _with_bits(codec: Any, bits: dict[str, Any]) -> TurboQuant:
    try:
        return replace(codec if isinstance(codec, TurboQuant) else TurboQuant(), **bits)
    except ValueError as error:  # it begins with the field's name
        name = str(error).partition("=")[0]
        raise ValueError(f"--{name.replace('_', '-')}{str(error).removeprefix(name)}") from None


def _settings(given: dict[str, Any]) -> Settings:
    try:
        return Settings(**given)
    except ValidationError as error:
        raise ValueError("; ".join(map(_said, error.errors(include_url=False, include_input=False)))) from None


def _said(error: Any) -> str:
    """One of pydantic's findings. Those of `Settings` itself name the setting already."""
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    return f"{'.'.join(map(str, error['loc']))}: {error['msg']}"
