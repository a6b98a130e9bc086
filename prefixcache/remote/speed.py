"""`Speed`: how quick an engine is, learnt from use. Decision 0035 has the times."""

from __future__ import annotations

import threading
import time

from prefixcache.metrics.rates import MovingAverage

ASSUMED_BYTES = 100e6  # read a second, before anything was read: 1 GbE
ASSUMED_ROUND_TRIP = 0.01  # seconds, before anything was asked
MEASURE_AGAIN = 30.0  # seconds after which a rate that makes reading not worth it is measured again


class Speed:
    """Thread-safe: `_lock` guards the averages."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rate = MovingAverage(ASSUMED_BYTES)
        self._trips = MovingAverage(1 / ASSUMED_ROUND_TRIP)
        self._measured_at = float("-inf")

    def expected(self, nbytes: int) -> float:
        """Return the seconds that reading so many bytes will take; of none, that an answer will."""
        with self._lock:
            return 1 / self._trips.per_second() + nbytes / self._rate.per_second()

    def learn_trip(self, seconds: float) -> None:
        with self._lock:
            self._trips.add(1, seconds)

    def learn_rate(self, nbytes: int, seconds: float) -> None:
        """Learn that so many bytes came in so many seconds, all images of a prompt together."""
        with self._lock:
            self._rate.add(nbytes, seconds)

    def measured(self, nbytes: int, seconds: float) -> None:
        """Learn that so many bytes came in so many seconds, just now: the rates before no longer count."""
        with self._lock:
            self._rate = MovingAverage(ASSUMED_BYTES)
            self._rate.add(nbytes, seconds)

    def is_time_to_measure(self) -> bool:
        """Tell whether rates that make reading not worth it are to be measured, with nobody waiting. The caller does it."""
        with self._lock:
            is_time = time.monotonic() > self._measured_at + MEASURE_AGAIN
            if is_time:
                self._measured_at = time.monotonic()
            return is_time
