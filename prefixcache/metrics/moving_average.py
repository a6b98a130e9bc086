"""A rate that is learnt from use."""

from __future__ import annotations

DECAY = 0.9  # what one more measurement leaves of the weight of those before


class MovingAverage:
    """So much a second: decayed amounts over decayed seconds, so long measurements count more than short ones."""

    def __init__(self, assumed: float):
        self._assumed = assumed
        self._amount = self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        self._amount = DECAY * self._amount + amount
        self._seconds = DECAY * self._seconds + seconds

    def per_second(self) -> float:
        return self._amount / self._seconds if self._seconds else self._assumed
