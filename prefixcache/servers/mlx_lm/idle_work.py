"""What a server computes while it has no request: on the thread that generates, chunk by chunk, so that a request that comes
waits for one chunk at most. `idle_warming` and `next_turns` have the jobs; `servers.warming` computes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

log = logging.getLogger("prefixcache")

Check = Callable[[], None]


class Interrupted(Exception):
    """A request has come, or nobody wants the job any longer: what was computed is stored, and the rest may follow later."""


class IdleJob(Protocol):
    """A job. `wanted`: False ends it at its next check; set on any thread."""

    wanted: bool

    def run(self, check: Check) -> None:
        """Do what is left to do, and call `check` between two chunks. It raises Interrupted when a request has come: then
        this is called again later.
        """

    def fail(self, error: Exception) -> None:
        """Hear that `run` raised this, which ends the job."""


class IdleWork:
    """The jobs of one server, in the order in which they came. `request_waits`: whether somebody does."""

    def __init__(self, request_waits: Callable[[], bool]):
        self._request_waits = request_waits
        self._lock = threading.Lock()  # of what follows
        self._jobs: list[IdleJob] = []
        self._holders = 0

    def add(self, job: IdleJob) -> None:
        """Queue a job, and forget those that nobody wants any longer."""
        with self._lock:
            self._jobs = [*(other for other in self._jobs if other.wanted), job]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let no job go on within the block, beyond its present chunk."""
        with self._lock:
            self._holders += 1
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1

    def step(self) -> None:
        """Go on with the first job, until a request comes. Called on the thread that generates, while there is none."""
        while (job := self._first()) is not None and not self._must_stop():
            try:
                if job.wanted:
                    job.run(lambda job=job: self._check(job))  # type: ignore[misc]
            except Interrupted:
                if job.wanted:
                    return
            except Exception as error:
                log.warning("what was begun while idle failed: %s: %s", type(error).__name__, error)
                job.fail(error)
            with self._lock:
                self._jobs = [other for other in self._jobs if other is not job]

    def _first(self) -> IdleJob | None:
        with self._lock:
            return self._jobs[0] if self._jobs else None

    def _check(self, job: IdleJob) -> None:
        if not job.wanted or self._must_stop():
            raise Interrupted

    def _must_stop(self) -> bool:
        return self._holders > 0 or self._request_waits()
