"""Live caches: the attention state of prompts that a model is working on, kept as codes.

`make_prompt_cache` and `convert_prompt_cache` are what a server calls; the classes have mlx-lm's cache protocol.
`upstream.hook_attention` is how attention reaches the codes, `families` which models it holds for. Importing this imports
mlx-lm, and enters the classes there by name, so that its `load_prompt_cache` finds what its `save_prompt_cache` wrote.
"""

from mlx_lm.models import cache as _mlx_caches

from prefixcache.live.levels import SharedLevels
from prefixcache.live.making import LivePromptCache, convert_in_place, convert_prompt_cache, make_prompt_cache
from prefixcache.live.turboquant import BatchTurboQuantKVCache, TurboQuantKVCache

__all__ = [
    "BatchTurboQuantKVCache",
    "LivePromptCache",
    "SharedLevels",
    "TurboQuantKVCache",
    "convert_in_place",
    "convert_prompt_cache",
    "make_prompt_cache",
]

for _class in (TurboQuantKVCache, BatchTurboQuantKVCache):
    vars(_mlx_caches).setdefault(_class.__name__, _class)
