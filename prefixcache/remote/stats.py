"""What a remote tier has done since the cache was opened, and how it is now."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import NamedTuple

from prefixcache.metrics.histogram import Histogram, Observed


class RemoteStats(NamedTuple):
    """Counts and bytes since the opening; `reading`, `writing` and `queued` are of now.

    `reading` and `writing` are False while the engine is left alone because it failed. `refused` images were there, and were
    not what their names say: another key's, damaged, forged. `timeouts` counts questions and reads that were given up because
    they took too long, `skipped` prompts that were not read because computing is quicker. `known` images were not sent
    because the engine had them. `dropped` ones were not sent: the queue was full, they had left RAM, there was no RAM to seal
    them in, or the engine failed.
    """

    engine: str
    reading: bool
    writing: bool
    asks: int
    read_images: int
    read_bytes: int
    refused: int
    timeouts: int
    skipped: int
    written_images: int
    written_bytes: int
    known: int
    queued: int
    dropped: int
    errors: int
    last_error: str
    ask_seconds: Observed
    read_seconds: Observed
    write_seconds: Observed


@dataclass
class RemoteCounters:
    """What `RemoteStats` counts. `lock` guards the numbers; the histograms guard themselves."""

    asks: int = 0
    read_images: int = 0
    read_bytes: int = 0
    refused: int = 0
    timeouts: int = 0
    skipped: int = 0
    written_images: int = 0
    written_bytes: int = 0
    known: int = 0
    dropped: int = 0
    errors: int = 0
    last_error: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)
    ask_seconds: Histogram = field(default_factory=Histogram)
    read_seconds: Histogram = field(default_factory=Histogram)
    write_seconds: Histogram = field(default_factory=Histogram)

    def add(self, **amounts: int) -> int:
        """Count. Returns the count so far, of the last one named."""
        count = 0
        with self.lock:
            for name, amount in amounts.items():
                count = getattr(self, name) + amount
                setattr(self, name, count)
        return count

    def failed(self, reason: str) -> None:
        with self.lock:
            self.errors += 1
            self.last_error = reason
