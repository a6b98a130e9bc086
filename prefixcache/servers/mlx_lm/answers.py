"""The queue on which mlx-lm's loop answers a request, watched: whether the answer is still wanted, and how it ends."""

from __future__ import annotations

import logging
from typing import Any

from mlx_lm.server import GenerationContext

from prefixcache.servers.mlx_lm.upstream import is_given_up
from prefixcache.servers.request_log import RequestLog
from prefixcache.tiers.parting import Parting

log = logging.getLogger("prefixcache")


class Ended(Exception):
    """The server ends before a request is answered. `status`: HTTP's for it."""

    status = 503

    def __init__(self, text: str = "the server ends; ask again when it is back") -> None:
        super().__init__(text)


class StepFailed(Ended):
    """A step of the model raised an exception, so the requests of its batch end without an answer."""

    status = 500

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"the answer could not be computed ({type(error).__name__}); the server's log says more")


class Answers:
    """What mlx-lm's loop puts goes on to the client's queue, until the client is gone or the server ends."""

    def __init__(self, queue: Any, request_log: RequestLog | None = None):
        self._queue = queue
        self._log = request_log or RequestLog()
        self._context: Any = None
        self._over = False
        self._cut = False
        self._failed = False
        self.alone = False  # served by itself, in one call that only an exception can end
        self.in_step = False  # several ranks serve it by itself: all stop at the same token, which `stop_asked` begins
        self.stop_asked = False

    def put(self, answer: Any) -> None:
        if isinstance(answer, GenerationContext):
            self._context = answer
            if self.in_step:
                answer.stop = self._ask_to_stop
        if self._cut:
            self.stop()
            if self.alone and isinstance(answer, tuple):
                raise Ended  # in the middle of its prefill
            return
        if self._failed:
            return
        if isinstance(answer, Exception) and not isinstance(answer, Ended) and self._context is not None:
            log.error("a request failed: %s", type(answer).__name__, exc_info=answer)
            answer = StepFailed(answer)
        if answer is None or isinstance(answer, Exception):
            self._over = True
        self._log.saw(answer)
        self._queue.put(answer)

    def wanted(self) -> bool:
        """Return whether it is neither answered, nor given up by the client."""
        return not self._over and not self.stop_asked and not self.given_up

    def _ask_to_stop(self) -> None:
        self.stop_asked = True

    @property
    def given_up(self) -> bool:
        """The client has gone before the answer was whole, or the server ends."""
        return self._context is not None and is_given_up(self._context)

    def fail(self, error: Exception) -> None:
        """End an answer whose step failed by an error, if it is not whole. What the loop still puts goes nowhere."""
        self._failed = True
        if not self._over:
            self._over = True
            self._queue.put(StepFailed(error))
        if self._context is not None:
            self._context.stop()

    def part(self, parting: Parting) -> None:
        """Hear where a request's prompt parted from what is stored."""
        self._log.parting = parting

    def begin_without_hit(self) -> None:
        """Hear that the hit was of no use: all of the prompt is computed."""
        if self._context is not None:
            self._context.prompt_cache_count = 0

    def stop(self) -> None:
        """End an answer, as the server ends: if it is not whole, `Ended` is its last word, and no more than one token, or one
        step of the prefill, is still computed.
        """
        if not self._over:
            self._over = self._cut = True
            self._queue.put(Ended())
        if self._context is not None:
            self._context.stop()
