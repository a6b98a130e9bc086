"""mlx-lm's LRUPromptCache as a contestant, as mlx_lm.server calls it. It has no SSD."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from mlx_lm.models import cache as mlx_lm_cache

from tools.bench.peer.side import Place

NO_LIMIT = 1 << 40  # entries: bytes are what limits it here


class Side:
    classes: ModuleType = mlx_lm_cache

    def __init__(self, place: Place, empty: list[Any]):
        self.key = (place.model, None, None)
        self.cache = mlx_lm_cache.LRUPromptCache(NO_LIMIT, place.ram)

    def fetch(self, tokens: list[int]) -> tuple[list[Any] | None, int]:
        made, rest = self.cache.fetch_nearest_cache(self.key, tokens)
        return made, len(tokens) - len(rest)

    def store(self, tokens: list[int], prompt_cache: list[Any]) -> None:
        self.cache.insert_cache(self.key, tokens, prompt_cache)

    def held(self) -> int:
        return self.cache.nbytes

    def written(self) -> int:
        return 0

    def settle(self) -> None:
        pass

    def close(self) -> None:
        pass
