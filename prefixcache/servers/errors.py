"""Why a server can't be started or go on, and whose fault it is where a step of the model fails."""

from __future__ import annotations

import re
from types import TracebackType

SAMPLING = ("sample_utils.py",)  # of mlx-lm: what fails there fails of a request's own options


class ServeError(Exception):
    """The server can't be started as asked. The text is one line: what is wrong, and what to do."""


def no_address(host: str, port: int, error: OSError | OverflowError) -> ServeError:
    """Return the ServeError for an address that a server can't have."""
    reason = getattr(error, "strerror", None) or str(error).rstrip(".")
    return ServeError(f"--host {host} --port {port}: {reason}; give another, or stop what uses it")


class RankFailed(BaseException):
    """A rank can't go on, so none can. It ends the thread that generates, whose loop takes an Exception for a request's."""


class ServeFailed(ServeError):
    """The same, of a server whose thread has used MLX already."""


def may_be_the_hits(error: Exception) -> bool:
    """Return whether an exception in a step may come from the state that a hit gave: not want of memory, and not what
    a request's sampling raises.
    """
    if isinstance(error, MemoryError) or re.search("memory|allocat", str(error), re.IGNORECASE):
        return False
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.endswith(SAMPLING):
            return False
        trace = trace.tb_next
    return True
