"""What is told of a model's requests: numbers as vllm-mlx shows them, and warnings, each once."""

from __future__ import annotations

import logging
import threading
from contextlib import AbstractContextManager
from typing import Any

from prefixcache.cache import PrefixCache
from prefixcache.servers.read_or_compute import quietly

log = logging.getLogger("prefixcache")

MIB = 1 << 20  # vllm-mlx's megabyte


class Reports:
    """Counts lookups and what was not kept, and says what went wrong. Its lock guards the numbers and what was said."""

    def __init__(self, cache: PrefixCache):
        self._cache = cache
        self._lock = threading.Lock()
        self._said: set[str] = set()
        self._hits = self._misses = self._saved = self._rejections = self._evicted_before = 0

    def looked_up(self, depth: int, *, is_hit: bool) -> None:
        """Count a lookup, and the tokens that it saved."""
        with self._lock:
            self._hits += is_hit
            self._misses += not is_hit
            self._saved += depth

    def refused(self, error: Exception) -> None:
        """Count a prompt cache that was not kept, and say why."""
        with self._lock:
            self._rejections += 1
        self.warn_once("a prompt cache was not kept: %s: %s", type(error).__name__, error)

    def numbers(self) -> dict[str, Any]:
        """Return what `TieredPrefixCache.get_stats` gives."""
        stats = self._cache.stats()
        with self._lock:
            asked = self._hits + self._misses
            return {
                "hits": self._hits,
                "misses": self._misses,
                "hit_rate": round(self._hits / asked, 4) if asked else 0.0,
                "evictions": stats.counters.evicted - self._evicted_before,
                "tokens_saved": self._saved,
                "current_memory_mb": round(stats.ram_held / MIB, 2),
                "max_memory_mb": round(stats.ram_limit / MIB, 2),
                "memory_utilization": round(stats.ram_held / stats.ram_limit, 4),
                "entry_count": stats.sequences,
                "store_rejections": self._rejections,
                "prefixcache": stats.as_dict(),
            }

    def reset(self) -> None:
        evicted = self._cache.stats().counters.evicted
        with self._lock:
            self._hits = self._misses = self._saved = self._rejections = 0
            self._evicted_before = evicted

    def quietly(self, what: str) -> AbstractContextManager[None]:
        """Warn once of what fails here, so that it does not go on to the thread that generates."""
        return quietly(what, self.warn_once)

    def warn_once(self, text: str, *values: Any) -> None:
        with self._lock:
            level = logging.DEBUG if text in self._said else logging.WARNING
            self._said.add(text)
        log.log(level, text, *values)
