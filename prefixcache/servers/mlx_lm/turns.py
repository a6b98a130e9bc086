"""When a request's turn comes: its wait, how often the loop asks for the next one, and how one process (`Turns`) or several
(`rank_turns.RankTurns`) decide this.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from queue import Empty, Queue
from typing import Any, NamedTuple, Protocol

from prefixcache.servers.buffer_pool import empty_pool
from prefixcache.servers.in_flight import Wait
from prefixcache.servers.mlx_lm.answers import Answers
from prefixcache.servers.mlx_lm.prompt_tokenizer import PromptTokenizer
from prefixcache.servers.mlx_lm.provider import Loading, Provider
from prefixcache.servers.mlx_lm.upstream import Loop

STEPS = 0.5  # seconds of steps, at most, before the loop asks for a request again
IDLE_POLLS = 30  # in a row that find no request: mlx-lm's loop waits .1 s for one
WAKE = object()  # in the queue of requests: a deferred one may be ready


class DeferredRequest(NamedTuple):
    """A request and its wait."""

    item: Any
    wait: Wait


class TimeBudget:
    """How long the batch goes on before the loop asks for a request: until one waits or `seconds` are over, and one step at
    least.
    """

    def __init__(self, request_waits: Callable[[], bool], seconds: float = STEPS):
        self._request_waits, self._seconds = request_waits, seconds

    def __iter__(self) -> Iterator[None]:
        until = time.monotonic() + self._seconds
        yield
        while not self._request_waits() and time.monotonic() < until:
            yield


class IdlePool:
    """The buffers that MLX has freed and keeps for the next arrays. After `IDLE_POLLS` in a row without a request they are
    given back to the system, once.
    """

    def __init__(self) -> None:
        self._empty = empty_pool
        self._polls = 0

    def count_poll(self, *, busy: bool) -> None:
        """Count one poll for a request. `busy`: one came, waits, or is under way."""
        self._polls = 0 if busy else self._polls + 1
        if self._polls == IDLE_POLLS:
            self._empty()


class Requests(Protocol):
    """The part of the generator that `Turns` use."""

    model_provider: Provider
    prompt_tokenizer: PromptTokenizer
    requests: Queue[Any]
    loop: Loop
    answering: set[Answers]


class Turns(Loading):
    """Decides for the thread that generates, before each step, as one process decides: by itself.

    `seconds`: of steps before the loop asks for a request again. `thread`: runs the loop; None for one of its own.
    `is_first`: clients are answered here.
    """

    seconds = STEPS
    thread: threading.Thread | None = None
    is_first = True

    def name_part(self, model_key: Any, model: Any) -> str:
        """Return the suffix of a just loaded model's identity in the name of its prompts."""
        return ""

    def begin_poll(self, timeout: float | None, *, deferred: bool) -> float | None:
        """Hear that the loop asks for a request. Return how many seconds it waits for one; None for not at all."""
        return timeout

    def take(self, of: Requests, timeout: float | None) -> Any:
        """Return a client's request, as `(queue, request, args)`, or None. `timeout`: as `begin_poll` gives it."""
        with suppress(Empty):
            return of.requests.get(block=timeout is not None, timeout=timeout)
        return None

    def any_waits(self, of: Requests, waits: Callable[[], bool]) -> bool:
        """Return whether the loop should ask for a request. `waits`: whether there is one."""
        return waits()

    def first_over(self, waits: list[Wait]) -> int | None:
        """Return the place of the first wait that is over, or None."""
        return next((place for place, wait in enumerate(waits) if wait.over()), None)

    def awaited(self, find: Callable[[], Wait | None]) -> Wait | None:
        """Return whom a request waits for, as `find` says."""
        return find()

    def tokens(self, request: Any, tokenize: Callable[[], Any]) -> Any:
        """Return a request's tokens, as `tokenize` gives them."""
        return tokenize()

    def failure_scope(self, what: str, request: Any = None) -> AbstractContextManager[None]:
        """Let an exception within the block fail its request alone. `what` says what has failed."""
        return nullcontext()

    def begin_alone(self, answers: Answers) -> None:
        """Hear that a request is served by itself, by `stream`, from here on."""

    def stream(self, begin: Callable[..., Iterator[Any]], options: dict[str, Any]) -> Iterator[Any]:
        """Return the answer that `begin` gives with these options."""
        return begin(**options)

    def step_may_take_long(self) -> None:
        """Hear that the next step of the thread may take any time."""

    def stop(self, loop: Loop) -> None:
        """End the loop after its present step."""
        loop.stop()

    def leave(self) -> None:
        """Hear that the process ends at once, in the middle of loading."""
