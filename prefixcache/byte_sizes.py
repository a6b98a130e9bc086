"""Sizes in bytes as people write and read them: "8GB" in a setting, "1.23 GB" in a log line, a table, an error."""

from __future__ import annotations

import re
from typing import Any

UNITS = {"": 1, "B": 1}
UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGTP", 1)}
UNITS |= {f"{letter}IB": 1024**power for power, letter in enumerate("KMGTP", 1)}
UNITS |= {letter: 1024**power for power, letter in enumerate("KMGT", 1)}
_SIZE = re.compile(r"\s*([0-9]{1,40}(?:\.[0-9]{1,40})?)\s*([A-Za-z]*)\s*")
_REMEDY = 'write "20GB", "512MiB" or a number of bytes'


def parse_size(value: Any, name: str = "size") -> int:
    """Return the bytes of "8GB" (10^9), "512MiB" (2^20), "8G" (2^30: a letter alone is a power of 1024), "8 GB" or a whole
    number. ValueError names the setting and the remedy.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError(f"{name}={value!r}: not a size; {_REMEDY}")
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        unit = UNITS.get(match[2].upper()) if match else None
        if match is None or unit is None:
            raise ValueError(f"{name}={value!r}: not a size; {_REMEDY}")
        nbytes = float(match[1]) * unit if "." in match[1] else int(match[1]) * unit
    else:
        nbytes = value
    if not 0 <= nbytes < 2**63 or 0 < nbytes < 1:
        raise ValueError(f"{name}={value!r}: not a size; {_REMEDY}")
    return int(nbytes)


def size(nbytes: int) -> str:
    """Return three digits and a unit of powers of ten, as `parse_size` reads them: "1.23 GB"."""
    if nbytes < 1000:
        return f"{nbytes} B"
    value = float(nbytes)
    for unit in ("kB", "MB", "GB", "TB", "PB"):
        value /= 1000
        if value < 999.5 or unit == "PB":
            break
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:,.{digits}f} {unit}"


def as_setting(nbytes: int) -> str:
    """Return a size as it is written for a setting, rounded down: "58MB"."""
    for unit in ("TB", "GB", "MB", "KB"):
        factor = UNITS[unit]
        if nbytes >= 10 * factor or (nbytes >= factor and not nbytes % factor):
            return f"{nbytes // factor}{unit}"
    return str(nbytes)
