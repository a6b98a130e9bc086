"""When each tick of the recency's clock was, to about a minute: slots keep the tick of their last use and no time."""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left
from collections.abc import Iterable

STEP = 60.0  # seconds between two times that are kept
MOST = 2048  # times that are kept: 32 kB


class UseTimes:
    """Ticks and the Unix times of their use, both ascending. Guarded by whoever guards the graph."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self._ticks, self._times = array("q"), array("d")
        self._last = 0, 0.0

    def load(self, uses: Iterable[tuple[int, float]], shift: int = 0) -> None:
        """Note what an index says: ticks and Unix times in any order. A time to come counts as now. The ticks that were noted
        before, which are of later uses, grow by `shift`.
        """
        newer = [*zip(self._ticks, self._times, strict=True), self._last]
        self._clear()
        latest: dict[int, float] = {}
        for tick, at in uses:
            if at > latest.get(tick, 0.0):
                latest[tick] = at
        now = time.time()
        for tick, at in sorted(latest.items()):
            self.note(tick, min(at, now))
        for tick, at in newer:
            if at:
                self.note(tick + shift, at)

    def note(self, tick: int, at: float | None = None) -> None:
        """Note that a tick was used at a Unix time, now if None. Ticks come in ascending order."""
        before, at = self._last, max(time.time() if at is None else at, self._last[1])
        self._last = tick, at
        if not self._times or at >= self._times[-1] + STEP:
            if self._times and before[0] > self._ticks[-1]:
                self._keep(*before)  # the last use before a pause
            self._keep(tick, at)

    def last_before(self, at: float) -> int:
        """Return the newest tick that was surely used before a Unix time, 0 where none was. Those of the minute before it may
        be missed.
        """
        tick, last = self._last
        if last < at:
            return tick
        place = bisect_left(self._times, at)
        return self._ticks[place - 1] if place else 0

    def _keep(self, tick: int, at: float) -> None:
        if len(self._times) >= MOST:  # of the older half every second one is enough
            del self._ticks[1 : MOST // 2 : 2], self._times[1 : MOST // 2 : 2]
        self._ticks.append(tick)
        self._times.append(at)
