"""Prompts that are computed and stored while a server has no request: on the thread that generates, chunk by chunk, so that a
request that comes waits for one chunk at most. `servers.warming` does the work.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import Any

from prefixcache.servers.mlx_lm.generator import Generator
from prefixcache.servers.warm_prompts import WarmSequence
from prefixcache.servers.warming import Step, unkept, warm_sequences

log = logging.getLogger("prefixcache")

Json = dict[str, Any]

BEAT = 1.0  # seconds between two words to who waits, so that one that has gone is noticed


class Interrupted(Exception):
    """A request has come, or who asked has gone: what was computed is stored, and the rest may follow later."""


class IdleJob:
    """Prompts of one call. `news`: what the caller hears, a result with `unkept` or `error` last."""

    def __init__(self, sequences: list[WarmSequence], model_key: Any, name: str):
        self.sequences, self.model_key, self.name = sequences, model_key, name
        self.step = Step(0, sum(len(sequence.tokens) for sequence in sequences), 0, len(sequences))
        self.stored_before = 0
        self.news: SimpleQueue[Json] = SimpleQueue()
        self.cancelled = False


class IdleWarming:
    """The jobs of one server, in the order in which they came. `step` runs on the thread that generates."""

    def __init__(self, generator: Generator):
        self._generator = generator
        self._lock = threading.Lock()  # of the jobs
        self._jobs: deque[IdleJob] = deque()
        generator.when_idle = self.step

    def begin(self, sequences: list[WarmSequence], model_key: Any, name: str) -> Iterator[Json]:
        """Queue a job, and give its progress until it is done. Closing the iterator cancels it."""
        job = IdleJob(sequences, model_key, name)
        job.stored_before = len(sequences) - unkept(self._generator.prompts.cache, sequences, model=name)
        with self._lock:
            self._jobs.append(job)
        return self._news(job)

    def _news(self, job: IdleJob) -> Iterator[Json]:
        try:
            yield job.step._asdict()
            while True:
                try:
                    news = job.news.get(timeout=BEAT)
                except Empty:
                    if self._generator.stopped or not self._generator.thread.is_alive():
                        yield {"error": "the server ends; what was computed is stored: ask again when it is back"}
                        return
                    news = job.step._asdict()
                yield news
                if "unkept" in news or "error" in news:
                    return
        finally:
            job.cancelled = True

    def step(self) -> None:
        """Go on with the first job, until a request comes."""
        while self._jobs and not self._is_wanted():
            job = self._jobs[0]
            try:
                if not job.cancelled:
                    self._run(job)
            except Interrupted:
                if not job.cancelled:
                    return
            except Exception as error:
                log.warning("warming failed: %s: %s", type(error).__name__, error)
                job.news.put({"error": f"it failed: {type(error).__name__}; see the server's log"})
            with self._lock:
                self._jobs.popleft()

    def _is_wanted(self) -> bool:
        return self._generator.stopped or self._generator.request_waits()

    def _run(self, job: IdleJob) -> None:
        provider, cache = self._generator.model_provider, self._generator.prompts.cache
        if provider.model_key != job.model_key:
            job.news.put({"error": "another model was loaded meanwhile: load the first one again, or warm this one"})
            return

        def progress(step: Step) -> None:
            job.step = step
            job.news.put(step._asdict())
            if job.cancelled or self._is_wanted():
                raise Interrupted

        done = warm_sequences(
            cache,
            lambda: provider.nets,
            job.sequences,
            model=job.name,
            prefill_step_size=provider.cli_args.prefill_step_size,
            progress=progress,
        )
        job.news.put(
            {
                "prompts": done.prompts,
                "tokens": done.tokens,
                "stored_before": job.stored_before,
                "unkept": done.unkept,
            }
        )
        log.info("admin: %d prompts of %d tokens are warm", done.prompts, done.tokens)
