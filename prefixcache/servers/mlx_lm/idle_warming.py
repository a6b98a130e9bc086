"""Prompts that an operator has warmed while a server has no request (`idle_work`), and what is heard of them meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import Any

from prefixcache.servers.mlx_lm.generator import Generator
from prefixcache.servers.mlx_lm.idle_work import Check
from prefixcache.servers.warm_prompts import WarmSequence
from prefixcache.servers.warming import Step, unkept, warm_sequences

log = logging.getLogger("prefixcache")

Json = dict[str, Any]

BEAT = 1.0  # seconds between two words to who waits, so that one that has gone is noticed


class IdleWarming:
    """Prompts of one call. `news`: what the caller hears, a result with `unkept` or `error` last."""

    def __init__(self, generator: Generator, sequences: list[WarmSequence], model_key: Any, name: str):
        self._generator, self._sequences, self._model_key, self._name = generator, sequences, model_key, name
        self.wanted = True
        self.stored_before = len(sequences) - unkept(generator.prompts.cache, sequences, model=name)
        self.step = Step(0, sum(len(sequence.tokens) for sequence in sequences), 0, len(sequences))
        self.news: SimpleQueue[Json] = SimpleQueue()

    def begin(self) -> Iterator[Json]:
        """Queue the job, and return its progress until it is done. Closing the iterator cancels it."""
        self._generator.idle.add(self)
        return self._news()

    def _news(self) -> Iterator[Json]:
        try:
            yield self.step._asdict()
            while True:
                try:
                    news = self.news.get(timeout=BEAT)
                except Empty:
                    if self._generator.stopped or not self._generator.thread.is_alive():
                        yield {"error": "the server ends; what was computed is stored: ask again when it is back"}
                        return
                    news = self.step._asdict()
                yield news
                if "unkept" in news or "error" in news:
                    return
        finally:
            self.wanted = False

    def fail(self, error: Exception) -> None:
        self.news.put({"error": f"it failed: {type(error).__name__}; see the server's log"})

    def run(self, check: Check) -> None:
        provider, cache = self._generator.model_provider, self._generator.prompts.cache
        if provider.model_key != self._model_key:
            self.news.put({"error": "another model was loaded meanwhile: load the first one again, or warm this one"})
            return

        def progress(step: Step) -> None:
            self.step = step
            self.news.put(step._asdict())
            check()

        done = warm_sequences(
            cache,
            lambda: provider.nets,
            self._sequences,
            model=self._name,
            prefill_step_size=provider.cli_args.prefill_step_size,
            progress=progress,
        )
        self.news.put(
            {
                "prompts": done.prompts,
                "tokens": done.tokens,
                "stored_before": self.stored_before,
                "unkept": done.unkept,
            }
        )
        log.info("admin: %d prompts of %d tokens are warm", done.prompts, done.tokens)
