"""What the queries look at: measured on real models, and used by the levels of a namespace."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import base
from mlx_lm.models.cache import KVCache, make_prompt_cache

from prefixcache import PrefixCache, TurboQuant
from prefixcache.queries import query_rms
from tests.families import FAMILIES


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text", "gpt_oss", "qwen3_next", "falcon_h1"])
def test_every_attention_layer_s_queries_are_measured_by_key_head_and_channel(family: str) -> None:
    model = FAMILIES[family].build()
    before = base.scaled_dot_product_attention
    found = query_rms(model, [1 + i % 100 for i in range(300)])
    assert base.scaled_dot_product_attention is before
    cache = make_prompt_cache(model)
    model(mx.array([[1, 2, 3]]), cache=cache)
    for own, layer in zip(found, cache, strict=True):
        children = getattr(layer, "caches", (layer,))
        keys = next((child.keys for child in children if hasattr(child, "keys")), None)
        assert (own is None) == (keys is None)
        if own is not None:
            assert own.shape == (keys.shape[1], keys.shape[3])
            assert own.dtype == np.float32
            assert (own > 0).all()


def test_no_text_is_an_error() -> None:
    with pytest.raises(ValueError, match="tokens are empty"):
        query_rms(FAMILIES["llama"].build(), [])


def _cache(tokens: int, seed: int = 0) -> list[KVCache]:
    rng = np.random.default_rng(seed)
    layer = KVCache()
    layer.update_and_fetch(*(mx.array(rng.standard_normal((1, 2, tokens, 64)).astype(np.float16)) for _ in range(2)))
    return [layer]


def test_a_calibrated_model_has_smaller_errors_where_its_queries_look() -> None:
    rms = np.ones((2, 64), np.float32)
    rms[:, :8] = 10
    live, tokens, errors = _cache(600), list(range(600)), []
    for calibrated in (False, True):
        with PrefixCache(ram="50MB", codec=TurboQuant(3, 3)) as cache:
            if calibrated:
                cache.calibrate("m", [rms])
            cache.store(tokens, live, model="m")
            back, _ = cache.fetch(tokens, model="m", leave=0)
            assert back is not None
            wrong = np.array(live[0].keys[..., :600, :]).astype(np.float64) - np.array(back[0].keys[..., :600, :])
            errors.append((np.square(wrong * rms[:, None]).mean(), np.square(wrong).mean()))
    assert errors[1][0] < 0.5 * errors[0][0]
    assert errors[1][1] > errors[0][1]


def test_what_is_no_measurement_is_an_error() -> None:
    with PrefixCache(ram="1MB") as cache:
        for bad in ([np.ones(3)], ["x"], [None, np.full((1, 2), np.nan)]):
            with pytest.raises(ValueError, match=r"query_rms\[\d\]: give a NumPy array"):
                cache.calibrate("m", bad)  # type: ignore[arg-type]
        cache.calibrate("m", [np.ones((7, 9), np.float32)])  # of another model: of no use, and no harm
        assert cache.store(list(range(300)), _cache(300), model="m").tokens == 300
