"""prefixcache as a contestant: `fetch` that waits for the SSD; rows as they are, because the others keep them so too."""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

from mlx_lm.models import cache as mlx_lm_cache

from prefixcache import PrefixCache, Raw, model_identity
from tools.bench.peer.side import Place


class Side:
    classes: ModuleType = mlx_lm_cache

    def __init__(self, place: Place, empty: list[Any]):
        disk: dict[str, Any] = {"ssd_dir": place.folder, "ssd": "20GB"} if place.folder else {}
        self.model = model_identity(place.model) if os.path.isdir(place.model) else place.model
        self.ssd = place.folder is not None
        self.cache = PrefixCache(ram=place.ram, codec=Raw(), spill="wait", spill_wait=10, **disk)

    def fetch(self, tokens: list[int]) -> tuple[list[Any] | None, int]:
        made, rest = self.cache.fetch(tokens, model=self.model, promote=self.ssd)
        return made, len(tokens) - len(rest)

    def store(self, tokens: list[int], prompt_cache: list[Any]) -> None:
        self.cache.store(tokens, prompt_cache, model=self.model)

    def held(self) -> int:
        stats = self.cache.stats()
        return stats.ram_images + stats.ram_nodes

    def written(self) -> int:
        ssd = self.cache.stats().ssd
        return ssd.written_bytes if ssd is not None else 0

    def settle(self) -> None:
        if self.ssd:
            self.cache.flush(60)

    def close(self) -> None:
        self.cache.close()
