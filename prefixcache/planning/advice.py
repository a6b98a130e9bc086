"""What follows from simulated runs for whoever buys and waits: times to first token, what the SSD wears, what a size costs,
and where more of it stops paying. Pure functions of numbers: nothing is read and nothing is simulated here.
Decision 0038 says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

DAY = 86_400.0  # seconds
YEAR = 365.25  # days
GB = 10**9
LEAST_YEARS = 1.0  # that an SSD must last
FRUGAL = 0.5  # of what money brings on the average, the least that more of it must bring


class Rates(NamedTuple):
    """How quick a machine is: prefill in tokens a second, reads from the SSD and decoding of images in bytes a second."""

    prefill: float
    ssd: float
    decode: float


class Link(NamedTuple):
    """The way to a remote tier: the seconds of a round trip, and bytes a second."""

    rtt: float
    rate: float


NO_WAIT = Link(0.0, float("inf"))


class Served(NamedTuple):
    """What each request asked for and was given, arrays int64 with an element for each: tokens `asked` for, `hit` in any
    tier, and of these `hot`, with nothing to decode; bytes `read` from the SSD and `remote_read` from a remote tier, and the
    round `trips` to it that the request waited for. `seconds`: from the first request to the last.
    """

    seconds: float
    asked: np.ndarray
    hit: np.ndarray
    hot: np.ndarray
    read: np.ndarray
    remote_read: np.ndarray
    trips: np.ndarray

    @property
    def requests(self) -> int:
        return len(self.asked)

    @property
    def asked_tokens(self) -> int:
        return int(self.asked.sum())


class Latency(NamedTuple):
    """Percentiles of the time to first token, seconds."""

    p50: float
    p90: float
    p99: float


class Prices(NamedTuple):
    """Of one GB (10^9 bytes), in any currency: only the ratio of the two decides."""

    ram: float
    ssd: float


class Wear(NamedTuple):
    """What a workload writes: bytes a day, None for a trace of no length; and the years until the SSD's rated bytes are
    written, None also where nothing is written.
    """

    bytes_per_day: float | None
    years: float | None


# -- time -------------------------------------------------------------------------------------------------------------


def times_to_first_token(served: Served, bytes_per_token: float, rates: Rates, link: Link = NO_WAIT) -> np.ndarray:
    """Return seconds of each request: the tokens that were not hit at the prefill rate, the bytes that a promotion read at
    the SSD's, the bytes of the hit at the decoder's, but for what was hot; and over the `link` to a remote tier its round
    trips and the bytes that it read there. Each request has the machine to itself: nobody queues.
    """
    computing, decoded = (served.asked - served.hit) / rates.prefill, served.hit - served.hot
    own = computing + served.read / rates.ssd + decoded * bytes_per_token / rates.decode
    return np.asarray(own + served.trips * link.rtt + served.remote_read / link.rate, np.float64)


def percentiles(seconds: np.ndarray) -> Latency | None:
    """Return the percentiles by linear interpolation; None of no requests."""
    return Latency(*(float(value) for value in np.percentile(seconds, (50, 90, 99)))) if seconds.size else None


def reading_pays(bytes_per_token: float, rates: Rates) -> bool:
    """Return whether a token comes from the SSD, decoded, sooner than it is computed."""
    return bytes_per_token / rates.ssd + bytes_per_token / rates.decode < 1 / rates.prefill


# -- wear -------------------------------------------------------------------------------------------------------------


def wear(written: int, seconds: float, tbw: float) -> Wear:
    """Return the wear of `written` bytes in `seconds` of a trace, on an SSD that is rated for `tbw` bytes."""
    if seconds <= 0:
        return Wear(None, None)
    per_day = written * DAY / seconds
    return Wear(per_day, tbw / per_day / YEAR if per_day else None)


# -- money ------------------------------------------------------------------------------------------------------------


def cost(ram: int, ssd: int, prices: Prices) -> float:
    return (ram * prices.ram + ssd * prices.ssd) / GB


def front(costs: Sequence[float], values: Sequence[float]) -> list[int]:
    """Return the Pareto front: the indices that no other beats (none costs as little and gives more, or costs less and gives
    as much), cheapest first, so both costs and values rise. Of equals the first. What gives nothing is no choice.
    """
    best, chosen = 0.0, []
    for i in sorted(range(len(costs)), key=lambda i: (costs[i], -values[i], i)):
        if values[i] > best:
            best = values[i]
            chosen.append(i)
    return chosen


def knee(costs: Sequence[float], values: Sequence[float]) -> int | None:
    """Return the index on the Pareto front up to which more money is well spent; of equals the cheapest, None when nothing
    gives anything.

    It has the greatest value / last value - `FRUGAL` x cost / last cost, where the last is the front's dearest. So a dearer
    one is chosen while each part of its price brings at least half of what money brings on the average up to the last, and
    what is chosen has at least half of the last's value. With a FRUGAL of 1 it is Kneedle's knee (Satopaa, Albrecht, Irwin,
    Raghavan: Finding a "Kneedle" in a Haystack, ICDCS Workshops 2011), which can never be the last.
    """
    indices = front(costs, values)
    if not indices:
        return None
    last_cost, last_value = costs[indices[-1]], values[indices[-1]]
    return max(indices, key=lambda i: values[i] / last_value - (FRUGAL * costs[i] / last_cost if last_cost else 0.0))


def advised(costs: Sequence[float], values: Sequence[float], livable: Sequence[bool]) -> int | None:
    """Return the `knee` of what can be lived with; where nothing that gives anything can be, the knee of all."""
    indices = [i for i, of in enumerate(livable) if of]
    chosen = knee([costs[i] for i in indices], [values[i] for i in indices])
    return knee(costs, values) if chosen is None else indices[chosen]


def cheapest(costs: Sequence[float], values: Sequence[float], least: float) -> int | None:
    """Return the index on the Pareto front that costs least of those that give `least` or more; None when none does."""
    return next((i for i in front(costs, values) if values[i] >= least), None)
