"""A tail that grows must not lose the boundaries that could be hit before."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from prefixcache import PrefixCache, Raw


def prompt_cache(tokens: int, window: int = 100) -> list:
    made = [KVCache(), RotatingKVCache(window)]
    rows = mx.random.normal((1, 1, tokens, 8))
    for layer in made:
        for at in range(0, tokens, 50):
            layer.update_and_fetch(rows[:, :, at : at + 50], rows[:, :, at : at + 50])
    return made


def test_a_turn_longer_than_the_window_keeps_the_boundary_of_the_turn_before():
    prompt = list(range(900))
    with PrefixCache(ram="64MB", codec=Raw()) as cache:
        cache.store(prompt[:400], prompt_cache(400), model="m")
        assert cache.match([*prompt[:400], 9999], model="m").ram == 400
        cache.store(prompt, prompt_cache(900), model="m")
        assert cache.match(prompt, model="m").ram == 900
        assert cache.match([*prompt[:400], 9999], model="m").ram == 400
