"""mlx-vlm's APC as a contestant, by the calls that its `stream_generate` makes around a generation."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

from tools.bench.peer.side import Place
from tools.bench.peer.vllm_mlx import without_start

BLOCK = 16  # its default
MOST_BLOCKS = 1 << 16  # a million tokens: every store and lookup sums up all of the pool
without_start("mlx_vlm")


class Side:
    from mlx_vlm.models import cache as classes  # type: ignore[no-redef]

    def __init__(self, place: Place, empty: list[Any]):
        from mlx_vlm import apc
        from mlx_vlm.apc_coordinator import APCCoordinator

        logging.disable(logging.WARNING)
        self.manager = apc.from_env(
            apc.apc_disk_namespace(place.model),
            {
                "enabled": True,
                "memory_max_gb": place.ram / (1 << 30),
                "memory_reserve_gb": 0,
                "checkpoint_entries": 1000,
                "num_blocks": min(place.tokens // BLOCK + 1024, MOST_BLOCKS),
                "disk_enabled": place.folder is not None,
                "disk_path": place.folder,
                "disk_max_gb": 20,
            },
        )
        model = SimpleNamespace(make_cache=lambda: empty)
        self.coordinator = APCCoordinator(self.manager, model)
        self.hit: dict[str, Any] | None = None

    def fetch(self, tokens: list[int]) -> tuple[list[Any] | None, int]:
        self.coordinator.prepare_prefill(len(tokens))
        self.coordinator.release_hit(self.hit)
        self.hit = self.coordinator.lookup(
            tokens,
            extra_hash=0,
            safe_lookup_min=0,
            suffix_is_text_only=lambda n: True,
            prefix_has_media=lambda n: False,
        )
        if self.hit is None:
            return None, 0
        made = self.coordinator.materialize_single(self.hit, min_capacity_tokens=len(tokens) + 1)
        return made, self.hit["prefix_len"]

    def store(self, tokens: list[int], prompt_cache: list[Any]) -> None:
        hit, self.hit = self.hit or {}, None
        self.coordinator.commit(
            prompt_cache,
            tokens,
            skip_first_n_tokens=hit.get("prefix_len", 0),
            blocks_in_use=hit.get("matched_blocks", ()),
        )

    def held(self) -> int:
        return self.manager.resident_bytes()

    def written(self) -> int:
        self.settle()
        return self.manager.disk.disk_bytes if self.manager.disk is not None else 0

    def settle(self) -> None:
        if self.manager.disk is not None:
            self.manager.disk.flush()

    def close(self) -> None:
        self.coordinator.release_hit(self.hit)
        self.manager.close()
