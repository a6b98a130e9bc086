"""A tiered prefix cache for LLM servers built on MLX.

`PrefixCache` keeps the attention state of prompts that were seen, compressed in RAM under a hard budget and on SSD, and
gives it back in milliseconds. `make_prompt_cache` and `convert_prompt_cache` give a model caches that stay compressed
while it generates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prefixcache.cache import Match, PrefixCache, Stored
from prefixcache.codecs import Affine, Raw, TurboQuant
from prefixcache.identity import model_identity
from prefixcache.layers import CacheError, StoredLayer, StoredPrompt, allow
from prefixcache.settings import Settings
from prefixcache.ssd import DirectoryError, DirectoryHeld
from prefixcache.stats import Stats

if TYPE_CHECKING:
    from prefixcache.live import (
        BatchQuantizedKVCache,
        BatchTurboQuantKVCache,
        LivePromptCache,
        QuantizedKVCache,
        SharedLevels,
        TurboQuantKVCache,
        convert_prompt_cache,
        make_prompt_cache,
    )

__version__ = "0.1.0"

__all__ = [
    "Affine",
    "BatchQuantizedKVCache",
    "BatchTurboQuantKVCache",
    "CacheError",
    "DirectoryError",
    "DirectoryHeld",
    "LivePromptCache",
    "Match",
    "PrefixCache",
    "QuantizedKVCache",
    "Raw",
    "Settings",
    "SharedLevels",
    "Stats",
    "Stored",
    "StoredLayer",
    "StoredPrompt",
    "TurboQuant",
    "TurboQuantKVCache",
    "allow",
    "convert_prompt_cache",
    "make_prompt_cache",
    "model_identity",
]


def __getattr__(name: str) -> Any:
    """Live caches are looked up when they are first asked for: they import mlx-lm, which takes seconds."""
    if name in __all__:
        from prefixcache import live

        return getattr(live, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
