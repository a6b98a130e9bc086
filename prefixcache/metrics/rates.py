"""`MeasuredRates`: how long it takes here to fetch, to read and to compute, learnt from use. A `PrefixCache` has one, which
learns from its fetches; who computes prompts tells it what that took.

Two ask it: `servers.read_or_compute`, whether a read pays, which needs a guess from the first request on; and
`store_fetch_remove.fetch`, whether to decline a hit, which needs evidence. Nothing here looks at a clock.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import combinations
from statistics import median
from typing import NamedTuple

READ_LATENCY = 0.002  # seconds of a promotion beside its bytes
ASSUMED_BYTES = 500e6  # read a second, before anything was read: a slow SSD
ASSUMED_TOKENS = 667.0  # computed a second, before anything was computed: 30 s for 20,000
DECODE_TOKENS = 16  # tokens of a prefill that take about as long as one generated token
MIN_TOKENS = 64  # computed ones: fewer say nothing about the speed
MODELS = 64  # whose rates are remembered

EVIDENCE, LONG = 5, 256  # a hit is declined after so many fetches and prefills of so many tokens each
KEPT = 5  # measurements of each doubling of the tokens
REACH = 4  # times the longest measured: what is longer is not judged
CLEAR, SECONDS = (
    1.25,
    0.02,
)  # a fetch is slow by this factor and this much: busy machines vary by less, nobody sees less
AGAIN = 16  # slow hits that are declined before one is given, to measure it again
DECAY = 0.9  # of an average: what one more measurement leaves of the weight of those before


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


class LinearTime(NamedTuple):
    """So many seconds, and so many for each token."""

    fixed: float
    each: float

    def at(self, tokens: float) -> float:
        return self.fixed + self.each * tokens


class MeasuredTimes:
    """How long something took for how many tokens: the last `KEPT` times of each doubling of the tokens, so that many short
    ones leave the few long ones.
    """

    def __init__(self) -> None:
        self._by_size: dict[int, deque[tuple[int, float]]] = {}
        self._line: LinearTime | None = None

    def add(self, tokens: int, seconds: float) -> None:
        self._by_size.setdefault(tokens.bit_length(), deque(maxlen=KEPT)).append((tokens, seconds))
        self._line = None

    def line(self) -> LinearTime | None:
        """Return the line through what was measured; None where nothing was."""
        if self._line is None and self._by_size:
            self._line = line_through([time for times in self._by_size.values() for time in times])
        return self._line

    def tells_of(self, tokens: int) -> bool:
        """Return whether there is evidence of how long so many tokens take."""
        lengths = [length for times in self._by_size.values() for length, _ in times if length >= LONG]
        return len(lengths) >= EVIDENCE and tokens <= REACH * max(lengths)


def line_through(times: Sequence[tuple[int, float]]) -> LinearTime:
    """Return the line through these (tokens, seconds) by Theil and Sen's medians, which one bad time in four doesn't move. A
    pair tells of the slope if one has twice the tokens; without such, or where the line would begin below 0, it begins there.
    """
    slopes = [
        (seconds - less) / (tokens - fewer)
        for (fewer, less), (tokens, seconds) in combinations(sorted(times), 2)
        if tokens >= 2 * fewer
    ]
    if slopes:
        each = max(median(slopes), 0.0)
        fixed = median(seconds - each * tokens for tokens, seconds in times)
        if fixed >= 0:
            return LinearTime(fixed, each)
    return LinearTime(0.0, median(seconds / tokens for tokens, seconds in times))


class ModelRates:
    """One model's. What its fetches take depends on its codec, too; in one cache a model has one."""

    def __init__(self) -> None:
        self.fetches, self.prefills, self.answers = MeasuredTimes(), MeasuredTimes(), MeasuredTimes()
        self.to_decline = AGAIN  # of the slow hits to come, before one is given

    def computing(self, tokens: int) -> float:
        line = self.prefills.line() or self.answers.line() or LinearTime(0.0, 1 / ASSUMED_TOKENS)
        return line.at(tokens) if tokens > 0 else 0.0

    def fetching(self, tokens: int) -> float:
        line = self.fetches.line()
        return line.at(tokens) if line is not None and self.fetches.tells_of(tokens) else 0.0

    def is_slow(self, seconds: float, computed: int) -> bool:
        """Return whether a fetch of so many seconds is clearly slower than computing so many tokens, as far as is known."""
        if not self.prefills.tells_of(computed):
            return False
        computing = self.computing(computed)
        return seconds > max(CLEAR * computing, computing + SECONDS)


class MeasuredRates:
    """How long fetching, reading and computing take here. Thread-safe: `_lock` guards all of it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = MovingAverage(ASSUMED_BYTES)
        self._models: OrderedDict[str, ModelRates] = OrderedDict()

    def learn_read(self, nbytes: int, seconds: float) -> None:
        if nbytes > 0 and seconds > 0:
            with self._lock:
                self._bytes.add(nbytes, seconds)

    def learn_fetch(self, model: str, tokens: int, seconds: float) -> None:
        if tokens > 0 and seconds > 0:
            with self._lock:
                rates = self._of(model)
                if rates.is_slow(rates.fetching(tokens), tokens) and not rates.is_slow(seconds, tokens):
                    rates.to_decline = 0  # it was quicker than expected: so may be the next
                rates.fetches.add(tokens, seconds)

    def learn_prefill(self, model: str, tokens: int, seconds: float, generated: int = 0) -> None:
        """Learn that so many tokens of a prompt were computed, and so many generated, in so many seconds."""
        if tokens >= MIN_TOKENS and generated >= 0 and seconds > 0:
            with self._lock:
                rates = self._of(model)
                measured = rates.answers if generated else rates.prefills
                measured.add(tokens + DECODE_TOKENS * generated, seconds)

    def reading(self, nbytes: int) -> float:
        """Return how many seconds reading so many bytes will take."""
        with self._lock:
            return READ_LATENCY + nbytes / self._bytes.per_second()

    def fetching(self, model: str, tokens: int) -> float:
        """Return how many seconds decoding so many tokens will take; 0 where there is no evidence."""
        with self._lock:
            return self._of(model).fetching(tokens)

    def computing(self, model: str, tokens: int) -> float:
        """Return how many seconds a prefill of so many tokens will take."""
        with self._lock:
            return self._of(model).computing(tokens)

    def declines(self, model: str, decoded: int, computed: int) -> bool:
        """Return whether to compute so many tokens of a hit rather than decode so many. After `AGAIN` slow hits one is given,
        and so measured; if it was quick the next is given, too.
        """
        with self._lock:
            rates = self._of(model)
            if not rates.is_slow(rates.fetching(decoded), computed):
                return False
            is_declined = rates.to_decline > 0
            rates.to_decline = rates.to_decline - 1 if is_declined else AGAIN
            return is_declined

    def _of(self, model: str) -> ModelRates:
        rates = self._models.setdefault(model, ModelRates())
        self._models.move_to_end(model)
        if len(self._models) > MODELS:
            self._models.popitem(last=False)
        return rates
