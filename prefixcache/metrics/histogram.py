"""How long things took, counted in fixed buckets: what a fetch or the SSD's writer tells costs about a microsecond, and a
percentile over any time can be read from the counts later. Nothing here knows what is measured.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from typing import Any, NamedTuple

# Seconds, from a read of one image out of the page cache to a promotion from a disk that is in trouble.
SECONDS = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    25.0,
    50.0,
    100.0,
)


class Observed(NamedTuple):
    """A histogram at one moment. `counts[i]` values were at most `bounds[i]`; the last of `counts` is of all values."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def number(self) -> int:
        return self.counts[-1]

    def quantile(self, share: float) -> float:
        """Return about the value that so much of all is at most, as if a bucket's values lay evenly in it; 0.0 of none.

        What is beyond the last bound counts as that bound.
        """
        wanted, below, low = share * self.number, 0, 0.0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            if count >= wanted and count > below:
                return low + (bound - low) * max(wanted - below, 0.0) / (count - below)
            below, low = count, bound
        return self.bounds[-1] if self.number else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON types; the buckets are cumulative, without that of all."""
        return {
            "count": self.number,
            "total": self.total,
            "buckets": dict(zip(map(str, self.bounds), self.counts, strict=False)),
        }


class Histogram:
    """Thread-safe: `_lock` guards the counts, each of its own bucket, and the sum."""

    __slots__ = ("_counts", "_lock", "_total", "bounds")

    def __init__(self, bounds: tuple[float, ...] = SECONDS):
        self.bounds = bounds
        self._lock = threading.Lock()
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        bucket = bisect_left(self.bounds, value)
        with self._lock:
            self._counts[bucket] += 1
            self._total += value

    def read(self) -> Observed:
        with self._lock:
            counts, total = list(self._counts), self._total
        for i in range(1, len(counts)):
            counts[i] += counts[i - 1]
        return Observed(self.bounds, tuple(counts), total)
