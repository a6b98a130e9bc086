"""vllm-mlx's memory_cache and ssd_cache as a contestant, by its scheduler's calls, promotion by the scheduler's own code.

Its scheduler stores a request's end beside the entries that it goes on from (`evict_prefixes=False`). Here the default of its
`store` is used, which lets those go and takes much less; the option "as-scheduled" does as the scheduler does.
"""

from __future__ import annotations

import copy
import logging
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from mlx_lm.models import cache as mlx_lm_cache

from tools.bench.peer.side import Place

NO_LIMIT = 1 << 40  # entries: bytes are what limits it here


def without_start(name: str) -> None:
    """A package whose modules can be imported, without what its __init__ imports: the rest of its dependencies."""
    spec = find_spec(name)
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError(f"{name} is not installed in {sys.prefix}")
    package = ModuleType(name)
    package.__path__, package.__spec__ = list(spec.submodule_search_locations), spec
    sys.modules[name] = package


class Side:
    classes: ModuleType = mlx_lm_cache

    def __init__(self, place: Place, empty: list[Any]):
        without_start("mlx_vlm")  # the scheduler asks it for cache classes
        from vllm_mlx.memory_cache import MemoryAwarePrefixCache, MemoryCacheConfig
        from vllm_mlx.ssd_cache import SSDCacheConfig, SSDCacheTier

        logging.disable(logging.WARNING)
        model = SimpleNamespace(name_or_path=place.model)
        config = MemoryCacheConfig(max_memory_mb=max(place.ram >> 20, 1), max_entries=NO_LIMIT)
        self.cache = MemoryAwarePrefixCache(model, config)
        self.evict_prefixes = "as-scheduled" not in place.options
        self.saved: str | None = None
        self.tier: Any = None
        if place.folder:
            self.tier = SSDCacheTier(SSDCacheConfig(cache_dir=str(Path(place.folder) / "ssd"), max_size_gb=20))
            self.tier.start_writer()
            self.tier.reconcile()
            self.cache.set_ssd_tier(self.tier)
            if place.restarts:
                self.saved = str(Path(place.folder) / "saved")
                self.cache.load_from_disk(self.saved)

    def fetch(self, tokens: list[int]) -> tuple[list[Any] | None, int]:
        found, rest = self.cache.fetch(tokens)
        if found is None and self.tier is not None and (candidate := self.cache.check_ssd(tokens)) is not None:
            found, rest = self._promote(tokens, candidate)
        # What it gives is its own: the scheduler copies it into its batch. Wrappers of one's own do the same for arrays.
        return (None if found is None else [copy.copy(layer) for layer in found]), len(tokens) - len(rest)

    def _promote(self, tokens: list[int], candidate: dict[str, Any]) -> tuple[list[Any] | None, list[int]]:
        from vllm_mlx.scheduler import Scheduler

        request = SimpleNamespace(
            request_id="bench",
            cache_hit_type="ssd_pending",
            _ssd_candidate=candidate,
            prompt_token_ids=tokens,
            prompt_cache=None,
            remaining_tokens=tokens,
        )
        scheduler = SimpleNamespace(
            waiting=[request],
            memory_aware_cache=self.cache,
            _ssd_tier=self.tier,
            _reconstruct_ssd_layers=lambda layers: Scheduler._reconstruct_ssd_layers(None, layers),
        )
        Scheduler._try_promote_ssd_pending(scheduler)
        return request.prompt_cache, request.remaining_tokens

    def store(self, tokens: list[int], prompt_cache: list[Any]) -> None:
        self.cache.store(tokens, prompt_cache, evict_prefixes=self.evict_prefixes)

    def held(self) -> int:
        return self.cache._current_memory

    def written(self) -> int:
        return self.tier.get_stats()["spill_bytes"] if self.tier is not None else 0

    def settle(self) -> None:
        before = None
        while self.tier is not None and (now := (self.tier._spill_queue.qsize(), self.written())) != before:
            before = now  # it has no call that waits: its writer is done when nothing changes any more
            time.sleep(0.5)

    def close(self) -> None:
        if self.saved is not None:
            self.cache.save_to_disk(self.saved)
        if self.tier is not None:
            self.tier.close()
