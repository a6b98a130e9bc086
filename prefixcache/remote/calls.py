"""`EngineCalls`: calls of an engine on threads of their own, so that whoever waits can stop waiting. It says when the
engine is to be left alone, because it fails or is late.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FuturesTimeout
from functools import partial
from typing import TypeVar

from prefixcache.remote.breaker import Breaker
from prefixcache.remote.engine import EngineError
from prefixcache.remote.stats import RemoteCounters
from prefixcache.remote.threads import DaemonThreads

READERS = 8  # images that are read at once
ASKERS = 8  # questions

Result = TypeVar("Result")


class EngineCalls:
    """Thread-safe: `_lock` guards the count of late calls and when something was lost; the breakers guard themselves.

    The engine may be asked while it is `ready`: it doesn't fail, and no call is late. Writing may fail by itself, where the
    engine is full.
    """

    def __init__(self, label: str, counters: RemoteCounters):
        self.reading = Breaker(f"remote {label}, reading")
        self.writing = Breaker(f"remote {label}, writing")
        self._counters = counters
        self._lock = threading.Lock()
        self._askers = DaemonThreads(ASKERS, "prefixcache-remote-ask")  # questions don't wait behind images
        self._readers = DaemonThreads(READERS, "prefixcache-remote-read")
        self._late = 0
        self._lost_at = 0.0
        self._closed = False

    @property
    def ready(self) -> bool:
        return self.reading.closed and not self._late

    @property
    def takes_writes(self) -> bool:
        """Tell whether images may be sent: neither reading nor writing has failed. A sender first asks what is there."""
        return self.writing.closed and self.reading.closed

    @property
    def believed_since(self) -> float:
        """Return the time, by time.monotonic(), before which the engine may have lost what it had: it failed since, or was
        emptied.
        """
        return max(self.reading.closed_at, self._lost_at)

    def note_loss(self, since: float) -> None:
        """Note that something that the engine had is gone: it was missing at `since`."""
        with self._lock:
            self._lost_at = max(self._lost_at, since)

    def ask(self, call: Callable[..., Result], *arguments: object) -> Future[Result]:
        """Begin a call that asks something. Raises EngineError when closed."""
        return self._submit(self._askers, call, arguments, question=True)

    def read(self, call: Callable[..., Result], *arguments: object) -> Future[Result]:
        """Begin a call that reads an image, by way of `Client.read`. Raises EngineError when closed."""
        return self._submit(self._readers, call, arguments, question=False)

    def _submit(
        self, threads: DaemonThreads, call: Callable[..., Result], arguments: tuple[object, ...], *, question: bool
    ) -> Future[Result]:
        try:
            return threads.submit(partial(self.guarded, self.reading, call, *arguments, question=question))
        except RuntimeError:  # whoever is still at work when the cache is closed
            raise EngineError("closed") from None

    def guarded(
        self, breaker: Breaker, call: Callable[..., Result], *arguments: object, question: bool = False
    ) -> Result:
        """Do a call on this thread, and return its result; the breaker hears how it ended. `question`: no image is moved."""
        try:
            result = call(*arguments)
        except EngineError as error:
            if not self._closed:
                self._counters.failed(str(error))
                breaker.failed(str(error), question=question)
            raise
        breaker.succeeded(question=question)
        return result

    def wait(self, future: Future[Result], timeout: float | None) -> Result:
        """Return a call's result. Raises EngineError, too, when it has none in time: until it ends, the engine is not
        `ready`.
        """
        try:
            return future.result(timeout)
        except CancelledError:
            raise EngineError("closed") from None
        except FuturesTimeout:
            self.give_up(future)
            self._counters.add(timeouts=1)
            raise EngineError(f"no answer within {timeout:.2g} s") from None

    def give_up(self, future: Future[Result]) -> None:
        """Wait for a call no more, since it took too long."""
        if not future.cancel():
            with self._lock:
                self._late += 1
            future.add_done_callback(self._end_late)

    def _end_late(self, future: Future[Result]) -> None:
        with self._lock:
            self._late -= 1

    def probe_in(self) -> float | None:
        """Return the seconds until a probe is due; None while nothing fails."""
        due = [wait for breaker in (self.reading, self.writing) if (wait := breaker.probe_in()) is not None]
        return min(due) if due else None

    def close(self) -> None:
        """Begin nothing more. What an engine that hangs is doing ends with its timeout, and says nothing of the engine."""
        self._closed = True
        for threads in (self._askers, self._readers):
            threads.close()
