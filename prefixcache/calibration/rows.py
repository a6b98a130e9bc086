"""What a model's cache holds of a text, as NumPy rows: keys with RoPE undone, and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from prefixcache.codecs.interchange import Array, as_float32, borrow
from prefixcache.codecs.transform.layer import Layer

PREFILL = 512  # tokens in one call of the model, as mlx-lm's servers do it


class EveryRow(KVCache):
    """Keeps every token's row, of a layer that attends to the last `window` tokens; 0: to all."""

    def __init__(self, window: int = 0):
        super().__init__()
        self.window = window

    def make_mask(self, tokens: int, return_array: bool = False, window_size: int | None = None) -> Any:
        window = window_size or self.window or None
        return super().make_mask(tokens, return_array=return_array, window_size=window)


def window_of(cache: Any) -> int | None:
    """Return the last tokens that a layer with this fresh cache attends to, 0 for all; None for a cache of another kind."""
    if type(cache) is RotatingKVCache:
        return int(cache.max_size) if cache.keep == 0 else None
    return 0 if type(cache) is KVCache else None


def prefilled(model: nn.Module, tokens: Sequence[int]) -> list[Any]:
    """Return a fresh prompt cache that holds `tokens`, of windows too all of them."""
    prompt_cache = [EveryRow(window) if (window := window_of(c)) else c for c in make_prompt_cache(model)]
    for start in range(0, len(tokens), PREFILL):
        model(mx.array(list(tokens[start : start + PREFILL]))[None], cache=prompt_cache)
        mx.eval([cache.state for cache in prompt_cache])
        mx.clear_cache()
    return prompt_cache


def joined_rows(prompt_cache: Sequence[Any], layers: Sequence[Layer], first: int) -> Array:
    """Return rows from token `first` on, float32 (tokens, channels): each layer's keys with RoPE undone, then its values."""
    tokens = prompt_cache[layers[0].index].offset - first
    rows = np.empty((tokens, sum(layer.channels for layer in layers)), np.float32)
    start = 0
    for layer in layers:
        cache = prompt_cache[layer.index]
        for array, width, keys in ((cache.keys, layer.key_width, True), (cache.values, layer.value_width, False)):
            heads = as_float32(borrow(array)[0, :, first : first + tokens], layer.dtype)
            part = rows[:, start : start + layer.heads * width].reshape(tokens, layer.heads, width)
            np.copyto(part, heads.swapaxes(0, 1))
            if keys:
                layer.rotation.undo(part, first, part)
            start += layer.heads * width
    return rows
