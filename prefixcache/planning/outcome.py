"""What a simulated run gave: `Outcome`, plain numbers. `simulator` makes one; `sweep`, `advice` and the command read them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Outcome(NamedTuple):
    """One run of a trace at one size. Tokens are counted in tokens, all else in bytes or images.

    `ram_tokens` are hits that RAM had at once, `ssd_tokens` those that a promotion brought; their share of `asked_tokens` is
    the hit rate. The arrays have one element a request, int64: `asked`, `hit` (tokens, of either tier) and `read` (bytes that
    the promotion took from the SSD).
    """

    ram: int
    ssd: int
    policy: str
    admission: str
    requests: int
    seconds: float
    asked_tokens: int
    ram_tokens: int
    ssd_tokens: int
    stored_tokens: int
    stored_bytes: int
    written_files: int
    written_bytes: int
    read_files: int
    read_bytes: int
    evicted: int
    ssd_evicted: int
    dropped: int
    declined: int
    unkept_tokens: int
    ram_peak: int
    ssd_peak: int
    asked: np.ndarray
    hit: np.ndarray
    read: np.ndarray

    @property
    def hit_tokens(self) -> int:
        return self.ram_tokens + self.ssd_tokens

    @property
    def hit_rate(self) -> float:
        """Hits of both tiers over tokens asked for; 0 of a trace that asks for none."""
        return self.hit_tokens / self.asked_tokens if self.asked_tokens else 0.0
