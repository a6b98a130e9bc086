"""LMCache's two connectors to Redis and Valkey, as its storage backend calls them, in a process of their own.

Reads a task a line and answers each with a line of JSON behind `@`. A server that stops answers nothing, nor does this then:
who asks must not wait for ever.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import threading
import time
from collections.abc import Coroutine
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector.redis_connector import RedisConnector, RESPConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

MODEL, CHUNK = "bench", 256


class Side:
    """Both connectors on one server, and `chunks` of (layers, 2, 256, heads, width) fp16."""

    def __init__(self, port: int, chunks: int, shape: tuple[int, int, int]):
        layers, heads, width = shape
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK, local_cpu=False, max_local_cpu_size=1.0, save_unfull_chunk=False
        )
        dtype = torch.float16
        kv = (layers, 2, CHUNK, heads, width)
        self.cpu = LocalCPUBackend(config, LMCacheMetadata(MODEL, 1, 1, 0, 0, dtype, kv, chunk_size=CHUNK))
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.connectors: dict[str, Any] = {
            "resp": RESPConnector("127.0.0.1", port, self.loop, self.cpu),
            "redis": RedisConnector(f"redis://127.0.0.1:{port}", self.loop, self.cpu),
        }
        self.keys = {
            name: [CacheEngineKey(MODEL, 1, 0, start + n, dtype) for n in range(chunks)]
            for name, start in (("resp", 1), ("redis", 1 << 20))
        }

    def put(self, which: str) -> dict[str, Any]:
        connector, keys = self.connectors[which], self.keys[which]
        chunks = [self.cpu.allocate(connector.meta_shapes, connector.meta_dtypes, connector.meta_fmt) for _ in keys]
        for chunk in chunks:
            chunk.tensor.random_(-100, 100)
        self._wait(connector.batched_put(keys, chunks))
        for chunk in chunks:
            chunk.ref_count_down()
        return {"bytes": connector.full_chunk_size_bytes}

    def contains(self, which: str) -> dict[str, Any]:
        """Seconds of the question for all chunks."""
        connector, keys = self.connectors[which], self.keys[which]
        began = time.perf_counter()
        if which == "resp":
            found = connector.batched_contains(keys)
        else:
            found = self._wait(connector.batched_async_contains("bench", keys))
        return {"found": found, "seconds": time.perf_counter() - began}

    def get(self, which: str) -> dict[str, Any]:
        """Seconds of the question, and of all chunks after it."""
        connector, keys = self.connectors[which], self.keys[which]
        asked = self.contains(which)
        began = time.perf_counter()
        chunks = self._wait(connector.batched_get_non_blocking("bench", keys))
        seconds = time.perf_counter() - began
        for chunk in chunks:
            chunk.ref_count_down()
        return {"found": asked["found"], "asking": asked["seconds"], "getting": seconds, "got": len(chunks)}

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    side = Side(int(sys.argv[1]), int(sys.argv[2]), tuple(map(int, sys.argv[3:6])))  # type: ignore[arg-type]
    print("@{}", flush=True)
    for line in sys.stdin:
        task, which = line.split()
        try:
            answer = getattr(side, task)(which)
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"}
        print("@" + json.dumps(answer), flush=True)
