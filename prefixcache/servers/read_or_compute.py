"""Whether a server should wait for the SSD and the remote tier, or compute a prompt again, by measured rates.

`ReadOrCompute` tells the cache's `MeasuredRates` how fast the SSD reads and the model computes, and asks them before a
prefill. It starts the promotion, and says how long waiting for it pays. The servers wait, or serve others meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FuturesTimeout
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple

import xxhash

from prefixcache.cache import Match, PrefixCache
from prefixcache.keys import TOKEN_BYTES
from prefixcache.ranks.agreement import MAX, Ranks
from prefixcache.tiers.prompt import Prompt

log = logging.getLogger("prefixcache")

MAX_REQUESTS = 256  # whose time is taken at once


class _TimedPrefill(NamedTuple):
    """A request that was looked up: the tokens of its prompt that it has to compute, and since when."""

    computed: int
    started: float


class AwaitedPromotions(NamedTuple):
    """Promotions of one prompt under way, from the SSD or the remote tier or both; `worth`: seconds that waiting pays."""

    promotions: tuple[Future[int], ...]
    worth: float
    asks_remote: bool = False

    def done(self) -> bool:
        return all(promotion.done() for promotion in self.promotions)

    def add_done_callback(self, call: Callable[[Future[int]], None]) -> None:
        """Call it whenever one of them has ended."""
        for promotion in self.promotions:
            promotion.add_done_callback(call)

    def wait(self) -> None:
        """Wait as long as that pays. Raises the error of one that failed, and TimeoutError where one had not ended."""
        until = time.monotonic() + self.worth
        for promotion in self.promotions:
            promotion.result(max(until - time.monotonic(), 0.0))


class Costs(NamedTuple):
    """Seconds that it takes to read what the SSD has, or to compute it, and to compute what is beyond that."""

    reading: float = 0.0
    computing: float = 0.0
    computing_beyond: float = 0.0
    asks_remote: bool = False


class ReadOrCompute:
    """Promotes what the SSD and the remote tier have for a prompt. Thread-safe.

    `longest`: seconds that a wait takes at most, whatever it may save.
    """

    def __init__(self, cache: PrefixCache, longest: float = 30.0):
        if not longest >= 0:
            raise ValueError(f"longest={longest!r}: give seconds, 0 or more")
        self.cache = cache
        self.longest = longest
        self.rates = cache.rates
        self.waited = 0  # promotions that were worth a wait
        self.late = 0  # of those that `wait` waited for, those that had not ended when it stopped to pay
        self.passed = 0  # promotions not waited for: computing is quicker
        self._lock = threading.Lock()
        self._requests: OrderedDict[tuple[int, int], _TimedPrefill] = (
            OrderedDict()
        )  # by prompt: its length and its hash

    def begin(self, prompt: Prompt, match: Match, leave: int = 1) -> AwaitedPromotions | None:
        """Start to bring in what SSD and remote tier have beyond RAM, of a prompt with this `match`. None where there is
        nothing, or where computing is quicker: then what the SSD has comes too, for the next request; nobody waits for it.
        """
        ranks = self.cache.ranks
        more, beyond = match.ssd - match.ram, len(prompt) - leave - match.ssd
        remote, local, costs = None, None, Costs()
        try:
            prefill_rate = len(prompt) / self.rates.computing(prompt.model, len(prompt)) if len(prompt) else None
            remote = self.cache.promote_remote(prompt, leave=leave, prefill_rate=prefill_rate)
            if more > 0:
                if ranks is not None:  # deeper than all ranks can go is of no use
                    leave = len(prompt) - match.ssd
                nbytes = self.cache.unread(prompt, leave=leave)
                local, costs = self._read(prompt, leave, nbytes), Costs(self._until_decoded(prompt, nbytes, more))
        except Exception as error:
            if ranks is None:
                raise
            log.warning("a promotion failed, so this rank has what RAM has: %s", error)
        computing = partial(self.rates.computing, prompt.model)
        costs = Costs(costs.reading, computing(more), computing(beyond), remote is not None)
        if ranks is not None and (more > 0 or self.cache.settings.remote is not None):
            costs = _agreed(ranks, costs)
        worth = min(costs.computing, self.longest)
        waits = more > 0 and costs.reading < worth
        self.waited += waits
        self.passed += more > 0 and not waits
        promotions = tuple(coming for coming in (remote, local if waits else None) if coming is not None)
        if costs.asks_remote:
            longest = max(costs.computing_beyond, worth if waits else 0.0)
            return AwaitedPromotions(promotions, min(longest, self.longest), True)
        return AwaitedPromotions(promotions, worth) if waits else None

    def _until_decoded(self, prompt: Prompt, nbytes: int, tokens: int) -> float:
        """Return the seconds from here on to a hit of these bytes and tokens, as far as its decoding counts."""
        decoding = self.rates.fetching(prompt.model, tokens) if self.cache.declines_slow_hits else 0.0
        return self.rates.reading(nbytes) + decoding

    def _read(self, prompt: Prompt, leave: int, nbytes: int) -> Future[int]:
        """Start to promote the bytes that the SSD has, and learn from it how long that takes."""
        started = time.monotonic()
        future = self.cache.promote_local(prompt, leave=leave)

        def learn(done: Future[int]) -> None:
            seconds = time.monotonic() - started
            if not done.cancelled() and done.exception() is None:
                with suppress(RuntimeError):  # the cache was closed
                    self.rates.learn_read(nbytes - self.cache.unread(prompt, leave=leave), seconds)

        if not future.done():  # else another had begun to read it
            future.add_done_callback(learn)
        return future

    def wait(self, prompt: Prompt, leave: int = 1) -> None:
        """`begin`, and wait for it as long as that pays. What comes later comes for the next request."""
        try:
            reading = self.begin(prompt, self.cache.match(prompt, leave=leave), leave)
            if reading is not None:
                reading.wait()
        except FuturesTimeout:
            self.late += 1
        except Exception as error:  # the request goes on without what could not be read
            log.warning("a promotion failed: %s", error)

    def began(self, prompt: Prompt, computed: int) -> None:
        """Hear that a request begins, of whose prompt the last `computed` tokens are to be computed."""
        with self._lock:
            self._requests[_prompt_key(prompt, len(prompt))] = _TimedPrefill(computed, time.monotonic())
            while len(self._requests) > MAX_REQUESTS:
                self._requests.popitem(last=False)

    def ended(self, stored: Prompt) -> None:
        """Learn from how long the request has taken whose state is being stored: its prompt without the last token, when its
        prefill has ended, or its prompt and the answer.
        """
        now = time.monotonic()
        with self._lock:
            for length, digest in reversed(self._requests):
                if length - 1 <= len(stored) and _prompt_key(stored, length) == (length, digest):
                    request = self._requests.pop((length, digest))
                    generated = max(len(stored) - length, 0)
                    self.rates.learn_prefill(stored.model, request.computed, now - request.started, generated)
                    return


def _agreed(ranks: Ranks, costs: Costs) -> Costs:
    """Return the longest reading of all ranks, what rank 0 would compute, and whether any rank asks the remote tier."""
    here = [costs.reading, costs.computing * ranks.is_first, costs.computing_beyond * ranks.is_first]
    *milliseconds, asked = ranks.most(*(min(int(1000 * seconds), MAX) for seconds in here), int(costs.asks_remote))
    reading, computing, beyond = (value / 1000 for value in milliseconds)
    return Costs(reading, computing, beyond, bool(asked))


def _prompt_key(tokens: Prompt, length: int) -> tuple[int, int]:
    """Return of the first `length` of these tokens how many they are, and the hash of all but the last."""
    return length, xxhash.xxh3_64_intdigest(memoryview(tokens.token_bytes)[: max(length - 1, 0) * TOKEN_BYTES])


@contextmanager
def quietly(what: str, warn: Callable[..., None] = log.warning) -> Iterator[None]:
    """Warn of what fails here, so that it does not go on to the thread that generates."""
    try:
        yield
    except Exception as error:
        warn(f"{what} failed: %s: %s", type(error).__name__, error)
