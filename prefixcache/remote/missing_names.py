"""`MissingNames`: the names that an engine is not asked for again for a while."""

from __future__ import annotations

import threading
import time

MISSING_FOR = 5.0  # seconds that a name which was missing is taken for missing
REFUSED_FOR = 600.0  # seconds that an image which was refused is
REMEMBERED = 4096  # names of either kind


class MissingNames:
    """Thread-safe: `_lock` guards all. Names that were missing and names that were refused don't push each other out."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._missing: dict[str, float] = {}  # until when, by time.monotonic()
        self._refused: dict[str, float] = {}

    def __contains__(self, name: str) -> bool:
        now = time.monotonic()
        with self._lock:
            return self._missing.get(name, 0.0) > now or self._refused.get(name, 0.0) > now

    def add(self, name: str, seconds: float = MISSING_FOR) -> None:
        """Take a name for missing for so many seconds."""
        with self._lock:
            _remember(self._missing, name, seconds)

    def refuse(self, name: str) -> None:
        """Take a name for missing for a while, since what is under it is not to be believed."""
        with self._lock:
            _remember(self._refused, name, REFUSED_FOR)

    def discard(self, name: str) -> None:
        """Take a name for present: it was written, and what was refused is replaced."""
        with self._lock:
            self._missing.pop(name, None)
            self._refused.pop(name, None)


def _remember(names: dict[str, float], name: str, seconds: float) -> None:
    names.pop(name, None)
    names[name] = time.monotonic() + seconds
    while len(names) > REMEMBERED:
        del names[next(iter(names))]
