"""A circuit breaker: after failures in a row an engine is left alone, but for a probe now and then."""

from __future__ import annotations

import logging
import threading
from time import monotonic

log = logging.getLogger("prefixcache")

FAILURES = 2  # in a row, after which it opens
FIRST_DELAY, LONGEST_DELAY = 1.0, 60.0  # seconds until the first probe; between two at most


class Breaker:
    """Thread-safe: `_lock` guards all. While it is `closed` calls go through. When it has opened, none should be made but
    probes, of which `takes_probe` gives out one at a time; the first that succeeds closes it. Each change is logged once.

    A question may succeed where no image does, so failures in a row of questions and of images are counted apart. A breaker
    that opens again soon waits longer and longer.
    """

    def __init__(self, what: str):
        """`what` it guards, for the log."""
        self._what = what
        self._lock = threading.Lock()
        self._failures = {False: 0, True: 0}  # in a row: of images, of questions
        self._delay = FIRST_DELAY
        self._probe_at: float | None = None  # None while it is closed
        self.reason = ""  # of the last failure
        self.closed_at = 0.0  # when it closed last, by `monotonic`; 0: it has always been closed

    @property
    def closed(self) -> bool:
        return self._probe_at is None

    def takes_probe(self) -> bool:
        """Tell whether the caller is to probe now. The next probe is due after a longer delay."""
        with self._lock:
            if self._probe_at is None or monotonic() < self._probe_at:
                return False
            self._delay = min(2 * self._delay, LONGEST_DELAY)
            self._probe_at = monotonic() + self._delay
            return True

    def probe_in(self) -> float | None:
        """Return the seconds until a probe is due; None while it is closed."""
        with self._lock:
            return None if self._probe_at is None else max(self._probe_at - monotonic(), 0.0)

    def succeeded(self, *, question: bool = False, probe: bool = False) -> None:
        with self._lock:
            self._failures[question] = 0
            if self._probe_at is None or (question and not probe):
                return
            self._probe_at, self.closed_at, self._failures = None, monotonic(), {False: 0, True: 0}
        log.info("%s: works again", self._what)

    def failed(self, reason: str, *, question: bool = False) -> None:
        with self._lock:
            self.reason, now = reason, monotonic()
            self._failures[question] += 1
            if self._failures[question] < FAILURES or self._probe_at is not None:
                return
            if now > self.closed_at + self._delay:
                self._delay = FIRST_DELAY
            self._probe_at = now + self._delay
        log.warning("%s: %s; going on without it until it works again", self._what, reason)
