"""Whether a server should wait for the SSD: reading what it has of a prompt, or computing it again, from measured rates.

`Rates` learns both from what happens in use. `ReadOrCompute` asks it before a prefill, starts the promotion, and says how
long waiting pays; the integrations wait so long, or let the request wait aside while others are served.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FuturesTimeout
from typing import NamedTuple

import numpy as np
import xxhash

from prefixcache.cache import PrefixCache
from prefixcache.keys import Tokens, as_tokens

log = logging.getLogger("prefixcache")

FORGET = 0.9  # what one more observation leaves of the weight of those before
LATENCY = 0.002  # seconds that a promotion takes before its first byte
ASSUMED_READING = 500e6  # bytes a second, before anything was read: a slow SSD
UNDER_WAY = 256  # requests whose time is taken at once
ASSUMED_COMPUTING = 1 / 2000  # seconds a token, before anything was computed: a small model on a large GPU


class Rates:
    """What reading a byte and computing a token cost here. Thread-safe; `_lock` guards the sums.

    Computing is fitted by least squares to what requests took: so much for a token of the prompt, so much for one that was
    generated. Reading is bytes over seconds. Both forget, so that they follow the machine's load.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._read = (0.0, 0.0)  # bytes, seconds
        self._sums: tuple[float, ...] = (
            0.0,
        ) * 5  # of p*p, p*g, g*g, p*s, g*s over requests: prompt tokens, generated, seconds

    def read(self, nbytes: int, seconds: float) -> None:
        """A promotion read so many bytes in so many seconds."""
        if nbytes > 0 and seconds > 0:
            with self._lock:
                self._read = (FORGET * self._read[0] + nbytes, FORGET * self._read[1] + max(seconds - LATENCY, 1e-6))

    def computed(self, prompt: int, generated: int, seconds: float) -> None:
        """A request computed `prompt` tokens of its prompt and generated `generated` in so many seconds."""
        if prompt > 0 and generated >= 0 and seconds > 0:
            p, g = float(prompt), float(generated)
            now = (p * p, p * g, g * g, p * seconds, g * seconds)
            with self._lock:
                self._sums = tuple(FORGET * old + new for old, new in zip(self._sums, now, strict=True))

    def reading(self, nbytes: int) -> float:
        """Seconds that reading so many bytes will take."""
        with self._lock:
            read, seconds = self._read
        return LATENCY + nbytes * (seconds / read if read else 1 / ASSUMED_READING)

    def computing(self, tokens: int) -> float:
        """Seconds that a prefill of so many tokens will take."""
        with self._lock:
            pp, pg, gg, ps, gs = self._sums
        if not pp:
            return tokens * ASSUMED_COMPUTING
        determinant = pp * gg - pg * pg
        alone = ps / pp  # as if generating cost nothing: too much, never too little
        if determinant <= 1e-9 * pp * gg:
            return tokens * alone
        fitted = (ps * gg - gs * pg) / determinant
        return tokens * min(max(fitted, 0.0), alone)


class _Began(NamedTuple):
    """A request that was looked up: how much of its prompt is computed, and since when."""

    computed: int
    at: float


class Reading(NamedTuple):
    """A promotion under way. `depth`: its future, the tokens that RAM has then; `worth`: seconds that waiting pays."""

    depth: Future[int]
    worth: float


class ReadOrCompute:
    """Promotes what the SSD has for a prompt. Thread-safe.

    `longest`: seconds that a wait takes at most, whatever it may save.
    """

    def __init__(self, cache: PrefixCache, longest: float = 30.0):
        if not longest >= 0:
            raise ValueError(f"longest={longest!r}: give seconds, 0 or more")
        self.cache = cache
        self.longest = longest
        self.rates = Rates()
        self.waited = 0  # promotions waited for
        self.late = 0  # of them, those that had not ended when waiting stopped to pay
        self.passed = 0  # promotions not waited for: computing is quicker
        self._lock = threading.Lock()
        self._under_way: OrderedDict[tuple[int, int], _Began] = OrderedDict()  # by prompt: its length and its hash

    def begin(self, tokens: Tokens, *, model: str, salt: bytes = b"", leave: int = 1) -> Reading | None:
        """Start to bring in what the SSD has beyond RAM. None where there is nothing, or where computing is quicker: then
        it comes too, for the next request, but is not worth waiting for.
        """
        ids = as_tokens(tokens)
        match = self.cache.match(ids, model=model, salt=salt)
        more = min(match.ssd, len(ids) - leave) - match.ram
        if more <= 0:
            return None
        nbytes = self.cache.unread(ids, model=model, salt=salt)
        worth = min(self.rates.computing(more), self.longest)
        started = time.monotonic()
        future = self.cache.promote(ids, model=model, salt=salt)
        future.add_done_callback(lambda done: self._learn(done, match.ram, nbytes, time.monotonic() - started))
        if self.rates.reading(nbytes) >= worth:
            self.passed += 1
            return None
        return Reading(future, worth)

    def wait(self, tokens: Tokens, *, model: str, salt: bytes = b"", leave: int = 1) -> None:
        """`begin`, and wait for it as long as that pays. What comes later comes for the next request."""
        reading = self.begin(tokens, model=model, salt=salt, leave=leave)
        if reading is None:
            return
        self.waited += 1
        try:
            reading.depth.result(reading.worth)
        except FuturesTimeout:
            self.late += 1
        except Exception as error:  # the request goes on without what could not be read
            log.warning("a promotion failed: %s", error)

    def began(self, ids: np.ndarray, computed: int) -> None:
        """A request begins whose prompt is `ids`, of which the last `computed` tokens are to be computed."""
        with self._lock:
            self._under_way[len(ids), _hash(ids)] = _Began(computed, time.monotonic())
            while len(self._under_way) > UNDER_WAY:
                self._under_way.popitem(last=False)

    def ended(self, ids: np.ndarray) -> None:
        """The state of these tokens is being stored: learn from how long the request took whose prompt they go on from."""
        now = time.monotonic()
        with self._lock:
            for length, digest in reversed(self._under_way):
                if length <= len(ids) and _hash(ids[:length]) == digest:
                    began = self._under_way.pop((length, digest))
                    self.rates.computed(began.computed, len(ids) - length, now - began.at)
                    return

    def _learn(self, done: Future[int], before: int, nbytes: int, seconds: float) -> None:
        if not done.cancelled() and done.exception() is None and done.result() > before:
            self.rates.read(nbytes, seconds)


def _hash(ids: np.ndarray) -> int:
    return xxhash.xxh3_64_intdigest(ids.tobytes())
