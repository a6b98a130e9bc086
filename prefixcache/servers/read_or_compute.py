"""Whether a server should wait for the SSD: reading what it has of a prompt, or computing it again, from measured rates.

`Rates` learns both from what happens in use. `ReadOrCompute` asks it before a prefill, starts the promotion, and says how
long waiting pays; the servers wait so long, or let the request wait aside while others are served.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FuturesTimeout
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import xxhash

from prefixcache.cache import PrefixCache
from prefixcache.keys import Tokens, as_tokens

log = logging.getLogger("prefixcache")

FORGET = 0.9  # what one more observation leaves of the weight of those before
ASSUMED_LATENCY = 0.002  # seconds that a promotion takes beside its bytes, before anything was read
ASSUMED_READING = 500e6  # bytes a second: a slow SSD
UNDER_WAY = 256  # requests whose time is taken at once
ASSUMED_COMPUTING = 1 / 667  # seconds a token, before anything was computed: 30 s for 20,000
LEAST = 64  # tokens of a prompt that must be computed to tell what one costs


class Rates:
    """What reading a byte and computing a token cost here. Thread-safe; `_lock` guards the sums.

    Both are fitted by least squares: what requests took to so much for a token of the prompt and so much for one that was
    generated, what promotions took to so much each and so much a byte. Both forget, so that they follow the machine's load.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reads: tuple[float, ...] = (
            0.0,
        ) * 5  # over promotions: how many, and sums of b, b*b, s, b*s: bytes, seconds
        self._sums: tuple[float, ...] = (
            0.0,
        ) * 5  # of p*p, p*g, g*g, p*s, g*s over requests: prompt tokens, generated, seconds

    def read(self, nbytes: int, seconds: float) -> None:
        """A promotion read so many bytes in so many seconds."""
        if nbytes > 0 and seconds > 0:
            b = float(nbytes)
            now = (1.0, b, b * b, seconds, b * seconds)
            with self._lock:
                self._reads = tuple(FORGET * old + new for old, new in zip(self._reads, now, strict=True))

    def computed(self, prompt: int, generated: int, seconds: float) -> None:
        """A request computed `prompt` tokens of its prompt and generated `generated` in so many seconds."""
        if prompt >= LEAST and generated >= 0 and seconds > 0:
            p, g = float(prompt), float(generated)
            now = (p * p, p * g, g * g, p * seconds, g * seconds)
            with self._lock:
                self._sums = tuple(FORGET * old + new for old, new in zip(self._sums, now, strict=True))

    def reading(self, nbytes: int) -> float:
        """Seconds that reading so many bytes will take."""
        with self._lock:
            n, b, bb, s, bs = self._reads
        if not n:
            return ASSUMED_LATENCY + nbytes / ASSUMED_READING
        determinant = n * bb - b * b
        if determinant > 0.01 * n * bb:
            each = max((n * bs - b * s) / determinant, 0.0)
        else:  # all of a size: what is not the bytes' is the promotion's
            each = min(1 / ASSUMED_READING, s / b)
        latency = (s - each * b) / n
        return latency + nbytes * each if latency > 0 else nbytes * bs / bb

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

    `longest`: seconds that a wait takes at most, whatever it may save. `whole_blocks`: as the hits to come are, see
    `PrefixCache.fetch`.
    """

    def __init__(self, cache: PrefixCache, longest: float = 30.0, whole_blocks: bool = False):
        if not longest >= 0:
            raise ValueError(f"longest={longest!r}: give seconds, 0 or more")
        self.cache = cache
        self.longest = longest
        self.whole_blocks = whole_blocks
        self.rates = Rates()
        self.waited = 0  # promotions that were worth a wait
        self.late = 0  # of those that `wait` waited for, those that had not ended when it stopped to pay
        self.passed = 0  # promotions not waited for: computing is quicker
        self._lock = threading.Lock()
        self._under_way: OrderedDict[tuple[int, int], _Began] = OrderedDict()  # by prompt: its length and its hash

    def begin(self, tokens: Tokens, *, model: str, salt: bytes = b"", leave: int = 1) -> Reading | None:
        """Start to bring in what the SSD has beyond RAM. None where there is nothing, or where computing is quicker: then
        it comes too, for the next request, but is not worth waiting for.
        """
        ids = as_tokens(tokens)
        how: dict[str, Any] = {"model": model, "salt": salt, "leave": leave, "whole_blocks": self.whole_blocks}
        match = self.cache.match(ids, **how)
        more = match.ssd - match.ram
        if more <= 0:
            return None
        nbytes = self.cache.unread(ids, **how)
        worth = min(self.rates.computing(more), self.longest)
        started = time.monotonic()
        future = self.cache.promote(ids, **how)

        def learn(done: Future[int]) -> None:
            seconds = time.monotonic() - started
            if not done.cancelled() and done.exception() is None:
                with suppress(RuntimeError):  # the cache was closed
                    self.rates.read(nbytes - self.cache.unread(ids, **how), seconds)

        if not future.done():  # else another had begun to read it
            future.add_done_callback(learn)
        if self.rates.reading(nbytes) >= worth:
            self.passed += 1
            return None
        self.waited += 1
        return Reading(future, worth)

    def wait(self, tokens: Tokens, *, model: str, salt: bytes = b"", leave: int = 1) -> None:
        """`begin`, and wait for it as long as that pays. What comes later comes for the next request."""
        try:
            reading = self.begin(tokens, model=model, salt=salt, leave=leave)
            if reading is not None:
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


def _hash(ids: np.ndarray) -> int:
    return xxhash.xxh3_64_intdigest(ids.tobytes())
