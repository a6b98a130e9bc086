"""Numbers that callers give, checked: the error names the argument, the value and what to give."""

from __future__ import annotations

from typing import Any

YEAR = 365 * 86_400.0


def seconds(value: Any, what: str) -> float | None:
    """Return a time to wait, None for the setting's: a year at most, as threads can wait. ValueError for what is no time."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ValueError(f"{what}={value!r}: give seconds, 0 or more")
    return float(min(value, YEAR))


def unix_time(value: Any, what: str) -> float | None:
    """Return a time, None for none; else ValueError."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise ValueError(f"{what}={value!r}: give a Unix time in seconds, such as time.time() - 3600")
    return float(value)


def number(value: Any, call: str, what: str, most: int | None = None) -> int:
    """Return a whole number of `what`, 0 or more and `most` at most; else ValueError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{call}({value!r}): give a number of {what}, 0 or more")
    if most is not None and value > most:
        raise ValueError(f"{call}({value if value < 1 << 63 else '...'}): give at most {most} {what}")
    return value


def check_leave(leave: Any) -> None:
    if isinstance(leave, bool) or not isinstance(leave, int) or leave < 0:
        raise ValueError(f"leave={leave!r}: give the number of tokens to leave, 0 or more")
