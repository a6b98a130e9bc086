"""A tiered prefix cache for LLM servers built on MLX.

`PrefixCache` keeps the attention state of prompts that were seen, compressed in RAM under a hard budget and on SSD, and
gives it back in milliseconds. `make_prompt_cache` and `convert_prompt_cache` give a model caches that stay compressed
while it generates.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefixcache.cache import Match, PrefixCache
    from prefixcache.codecs import Raw, Transform, TurboQuant
    from prefixcache.identity import model_identity
    from prefixcache.layers import CacheError, StoredLayer, StoredPrompt, allow
    from prefixcache.live import (
        BatchTurboQuantKVCache,
        LivePromptCache,
        SharedLevels,
        TurboQuantKVCache,
        convert_in_place,
        convert_prompt_cache,
        make_prompt_cache,
    )
    from prefixcache.media import Media, chunks, media_digest
    from prefixcache.metrics.stats import Stats
    from prefixcache.ranks import rank_identity
    from prefixcache.settings import Settings
    from prefixcache.ssd import DirectoryError, DirectoryHeld
    from prefixcache.store_fetch_remove.store import Stored

__version__ = "0.1.0"

__all__ = [
    "BatchTurboQuantKVCache",
    "CacheError",
    "DirectoryError",
    "DirectoryHeld",
    "LivePromptCache",
    "Match",
    "Media",
    "PrefixCache",
    "Raw",
    "Settings",
    "SharedLevels",
    "Stats",
    "Stored",
    "StoredLayer",
    "StoredPrompt",
    "Transform",
    "TurboQuant",
    "TurboQuantKVCache",
    "allow",
    "chunks",
    "convert_in_place",
    "convert_prompt_cache",
    "make_prompt_cache",
    "media_digest",
    "model_identity",
    "rank_identity",
]


# Where each name is, if not in `live`.
_HOMES = {
    "Match": "cache",
    "PrefixCache": "cache",
    "Stored": "store_fetch_remove.store",
    "Raw": "codecs",
    "Transform": "codecs",
    "TurboQuant": "codecs",
    "model_identity": "identity",
    "chunks": "media",
    "CacheError": "layers",
    "StoredLayer": "layers",
    "StoredPrompt": "layers",
    "allow": "layers",
    "Media": "media",
    "media_digest": "media",
    "rank_identity": "ranks",
    "Settings": "settings",
    "DirectoryError": "ssd",
    "DirectoryHeld": "ssd",
    "Stats": "metrics.stats",
}


def __getattr__(name: str) -> Any:
    """Names are looked up when they are first asked for: the commands that care for a directory run without MLX, and live
    caches import mlx-lm, which takes seconds.
    """
    if name in __all__:
        found = globals()[name] = getattr(import_module(f"prefixcache.{_HOMES.get(name, 'live')}"), name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
