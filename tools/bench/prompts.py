"""Prompt caches as a server makes them: real layer caches filled with random rows, and a chat that goes on by turns.

No model runs: rows are drawn, and they go in through `update_and_fetch` as a prefill and decode steps would put them. Peers'
processes import this too, so nothing of prefixcache is imported here.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models import cache as mlx_lm_cache

if TYPE_CHECKING:
    from prefixcache import PrefixCache

MODEL = "bench"
VOCABULARY = 150_000
FP16 = 2  # bytes a value


class Shape(NamedTuple):
    """A model's layers by kind, and the K/V heads and width that those with rows have."""

    full: int
    heads: int
    width: int
    sliding: int = 0
    window: int = 0
    recurrent: int = 0

    @property
    def layers(self) -> int:
        return self.full + self.sliding + self.recurrent

    def row_bytes(self, layers: int) -> int:
        """Bytes of one token's K and V in so many layers, as fp16."""
        return layers * 2 * self.heads * self.width * FP16


def empty(shape: Shape, classes: ModuleType = mlx_lm_cache) -> list[Any]:
    """A prompt cache before the first token, as `make_prompt_cache` gives, of this module's classes."""
    return [
        *(classes.KVCache() for _ in range(shape.full)),
        *(classes.RotatingKVCache(shape.window) for _ in range(shape.sliding)),
        *(classes.ArraysCache(2) for _ in range(shape.recurrent)),
    ]


def extend(shape: Shape, prompt_cache: list[Any], count: int, decoded: int = 0) -> None:
    """`count` more tokens go through: one prefill chunk, and the last `decoded` of them one by one."""
    for chunk in filter(None, [count - decoded, *[1] * decoded]):
        rows = (1, shape.heads, chunk, shape.width)
        for layer in prompt_cache:
            if isinstance(layer, mlx_lm_cache.ArraysCache):
                layer[0] = mx.random.normal((1, 3, 256)).astype(mx.float16)  # the convolution's last inputs
                layer[1] = mx.random.normal((1, 4, 32, 32))  # the recurrent state, fp32
            else:
                layer.update_and_fetch(
                    mx.random.normal(rows).astype(mx.float16), mx.random.normal(rows).astype(mx.float16)
                )
    mx.eval(
        [vars(layer).get("keys") for layer in prompt_cache],
        [vars(layer).get("values") for layer in prompt_cache],
        [vars(layer).get("cache") for layer in prompt_cache],
    )


def filled(shape: Shape, tokens: int, classes: ModuleType = mlx_lm_cache) -> list[Any]:
    prompt_cache = empty(shape, classes)
    extend(shape, prompt_cache, tokens)
    return prompt_cache


def turn(cache: PrefixCache, shape: Shape, tokens: np.ndarray, decoded: int = 0) -> int:
    """One turn of a server: promote, fetch what is known, compute the rest, store. Returns how deep the hit was."""
    if cache.settings.ssd_dir is not None:
        cache.promote(tokens, model=MODEL).result()
    prompt_cache, rest = cache.fetch(tokens, model=MODEL)
    extend(shape, prompt_cache := prompt_cache or empty(shape), len(rest), decoded)
    cache.store(tokens, prompt_cache, model=MODEL)
    return len(tokens) - len(rest)


def draw(seed: int) -> Callable[[int], np.ndarray]:
    """A source of random tokens, as int64 arrays."""
    generator = np.random.default_rng(seed)
    return lambda count: generator.integers(0, VOCABULARY, count)


def image_bytes(cache: PrefixCache, *kinds: str) -> int:
    """Bytes of the images of these kinds that the cache holds, each counted once, in whichever tier."""
    with cache._storage.lock:
        return sum(slot.nbytes for slot in cache._storage.graph.slots.values() if slot.kind in kinds)
