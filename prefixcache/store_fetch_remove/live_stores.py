"""Stores of live prompt caches: reads the caches, warns of a state that is not finite, and has the thread that ends stores,
so that a caller who generates doesn't wait for them (decision 0044).
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from prefixcache.keys import TOKEN_BYTES
from prefixcache.layers.adapters import arrays_in
from prefixcache.layers.reading import read
from prefixcache.store_fetch_remove.image_maker import LiveMaker
from prefixcache.store_fetch_remove.namespaces import Namespaces
from prefixcache.store_fetch_remove.store import StoreCall
from prefixcache.tiers.prompt import Prompt
from prefixcache.tiers.storage import Storage
from prefixcache.trace.recording import Recorder

log = logging.getLogger("prefixcache")

T = TypeVar("T")


class LiveStores:
    """Makes the calls that store live prompt caches, and records them. The storage's lock guards what was said."""

    def __init__(self, storage: Storage, namespaces: Namespaces, recorder: Recorder | None):
        self._storage, self._namespaces, self._recorder = storage, namespaces, recorder
        self._said_not_finite = False

    def call(
        self, prompt: Prompt, prompt_cache: list[Any], write_back_from: int | None, *, snapshot: bool
    ) -> StoreCall | None:
        """Read a prompt cache, and return the call that stores it. None where nothing has gone through it yet."""
        reading = read(prompt_cache)
        seen = min(len(prompt), reading.positions) if reading.positions is not None else len(prompt)
        limit = prompt.outside_media(seen)
        counted = any(leaf.positions for leaf in reading.leaves)
        if (seen and not limit) or (not counted and not any(arrays_in(leaf.state) for leaf in reading.leaves)):
            return None
        if prompt.form is not None:
            prompt.form.learn(reading.layout)
        namespace = self._namespaces.of_layout(prompt.model, reading.layout, prompt.salt)
        plan = namespace.plan
        recoded = prompt.given_rows.turn_to(namespace.row.codec)  # decision 0058
        if recoded and write_back_from is not None:
            write_back_from = 0
        agreed = reading.agreed and limit == seen and reading.positions in (None, seen)
        if self._recorder is not None and (snapshot or write_back_from is None):
            root = self._namespaces.recorded_root(prompt.model, prompt.salt)
            self._recorder.store(root, prompt.token_bytes[: limit * TOKEN_BYTES])
        maker = LiveMaker(
            namespace,
            reading.leaves,
            limit,
            with_snapshot=bool(plan.snapshots) and agreed and snapshot,
            since=None if plan.lossless else write_back_from,
        )
        maker.recoded += recoded
        return StoreCall(self._storage, namespace, prompt, limit, maker, sys.intern(prompt.terms.label))

    def warn_of(self, call: StoreCall) -> None:
        """Say once in the life of a cache that a state wasn't finite; the counter says how often it was so."""
        if (wrong := call.not_finite) is None:
            return
        with self._storage.lock:
            said, self._said_not_finite = self._said_not_finite, True
        if not said:
            plan, model = call.plan, call.prompt.model
            layer, kind = plan.layer_of[wrong.leaf], plan.leaves[wrong.leaf]["class"].rpartition(".")[2]
            where = "the recurrent state" if wrong.token is None else f"the row of token {wrong.token}"
            log.warning(
                "model %r, layer %d (%s): %s holds NaN or infinity, so nothing from there on is kept. The model overflowed: "
                "load it in bfloat16 or float32. Said once; prefixcache_not_finite_stores_total counts",
                model,
                layer,
                kind,
                where,
            )


class StoresBehind:
    """One thread, which ends stores in the order of the calls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._last: Future[object] | None = None

    def submit(self, end: Callable[[], T]) -> Future[T]:
        """Have the thread call `end` after all that was submitted before."""
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="prefixcache-store")
            future = self._pool.submit(end)
            self._last = future  # type: ignore[assignment]
        return future

    def wait(self) -> None:
        """Wait until all that was submitted has ended, well or not."""
        last = self._last
        if last is not None:
            wait([last])

    def close(self) -> None:
        """Wait, and let the thread go."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True)
