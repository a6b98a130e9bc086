"""NaN and infinity in a state end what is stored: what lies before is kept, and no hit ever gives such a row."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, QuantizedKVCache, RotatingKVCache

from prefixcache import PrefixCache
from prefixcache.layers.finite import is_finite
from prefixcache.live.turboquant import TurboQuantKVCache
from tests.models import states

CODECS = ["raw", "turboquant:4", "turboquant:4:4:plain"]
BAD = [float("nan"), float("inf"), float("-inf")]
KINDS = {
    "plain": KVCache,
    "ring": lambda: RotatingKVCache(300),
    "long ring": lambda: RotatingKVCache(2000, 4),
    "chunks": lambda: ChunkedKVCache(512),
    "codes": TurboQuantKVCache,
    "quantized": lambda: QuantizedKVCache(32),
}

# Where the way of a state depends on whether a GPU has it.
GPUS = ("layers.finite", "layers.encode", "store_fetch_remove.image_maker")


@contextmanager
def computed_on(where: str) -> Iterator[None]:
    """Have what is stored go a GPU's way, on whatever there is here."""
    with pytest.MonkeyPatch.context() as patch:
        for module in GPUS if where == "gpu" else ():
            patch.setattr(f"prefixcache.{module}.on_cpu", lambda: False)
        yield


@pytest.fixture(params=["cpu", "gpu"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    with computed_on(request.param):
        yield request.param


def rows(count: int, bad: float | None = None, at: int = 0, dtype: mx.Dtype = mx.float16, seed: int = 0) -> mx.array:
    made = np.random.default_rng(seed).standard_normal((1, 2, count, 32)).astype(np.float32)
    if bad is not None and at < count:
        made[0, 1, at, 7] = bad
    return mx.array(made).astype(dtype)


def layers(kind: str, tokens: int, bad: float | None, at: int, *, part: str = "values", **more: Any) -> list[Any]:
    """A sound layer, and one of this kind with one value that isn't finite."""
    made = [KVCache(), KINDS[kind]()]
    for number, layer in enumerate(made):
        keys = rows(tokens, bad if number and part == "keys" else None, at, seed=1, **more)
        values = rows(tokens, bad if number and part == "values" else None, at, seed=2, **more)
        for first in range(0, tokens, 128):
            if isinstance(layer, ChunkedKVCache):
                layer.maybe_trim_front()
            layer.update_and_fetch(keys[..., first : first + 128, :], values[..., first : first + 128, :])
    return made


def is_sound(prompt_cache: list[Any]) -> bool:
    return all(
        np.isfinite(np.array(array.astype(mx.float32))).all()
        for layer in prompt_cache
        for part in (layer.keys, layer.values)
        for array in (part if isinstance(part, tuple) else [part])
        if array.dtype in (mx.float16, mx.bfloat16, mx.float32)
    )


@pytest.mark.parametrize(("dtype", "bad"), [*zip([mx.float16, mx.bfloat16, mx.float32], BAD, strict=True)])
@pytest.mark.parametrize("codec", CODECS)
def test_blocks_before_it_are_kept_and_nothing_behind(codec, bad, dtype, way):
    tokens = list(range(900))
    with PrefixCache(ram="16MB", codec=codec, memory_reserve=0) as cache:
        stored = cache.store(tokens, layers("plain", 900, bad, 600, dtype=dtype), model="m")
        assert (stored.tokens, stored.new_tokens) == (512, 512)
        made, rest = cache.fetch(tokens, model="m")
        assert len(rest) == 900 - 512
        assert is_sound(made)
        assert cache.stats().counters.not_finite == 1
        assert cache.stats().counters.unkept_tokens == 900 - 512
        cache.check_integrity()


@pytest.mark.parametrize("at", [3, 256, 599])
@pytest.mark.parametrize("part", ["keys", "values"])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_in_each_kind_of_layer(kind, part, at, way):
    codec = "turboquant:4" if kind == "codes" else "raw" if kind == "quantized" else "turboquant:3"
    bad = BAD[1] if kind == "quantized" else BAD[at % 3]  # MLX quantizes NaN to a number
    tokens, live = list(range(600)), layers(kind, 600, bad, at, part=part)
    with PrefixCache(ram="16MB", codec=codec, memory_reserve=0) as cache:
        stored = cache.store(tokens, live, model="m")
        held = kind not in ("ring", "chunks") or at >= live[1].offset - live[1].keys.shape[2] + 128
        assert stored.tokens <= (at // 256 * 256 if held else 600)
        assert stored.tokens == at // 256 * 256 or kind in ("ring", "chunks")
        made, _ = cache.fetch(tokens, model="m")
        assert made is None or is_sound(made)
        cache.check_integrity()


def test_live_codes_of_rows_that_are_as_large_as_numbers_get_are_finite(way):
    """Their scales are bf16's: taken for float16, the largest would be infinite."""
    live = TurboQuantKVCache()
    live.update_and_fetch(*(rows(600, dtype=mx.bfloat16, seed=seed) * 2.0**123 for seed in (1, 2)))
    with PrefixCache(ram="16MB", codec="turboquant:4", memory_reserve=0) as cache:
        assert cache.store(list(range(600)), [live], model="m").tokens == 600


def test_recurrent_state_that_is_not_finite_is_no_snapshot(way):
    tokens, live = list(range(600)), layers("plain", 600, None, 0)
    state = ArraysCache(2)
    state[0], state[1] = mx.zeros((1, 3, 8)), mx.array([[1.0, float("nan")]])
    with PrefixCache(ram="16MB", codec="raw", memory_reserve=0) as cache:
        stored = cache.store(tokens, [CacheList(state, live[0]), live[1]], model="m")
        assert not stored.snapshot
        assert cache.fetch(tokens, model="m")[0] is None
        assert cache.stats().counters.not_finite == 1
        state[1] = mx.array([[1.0, 2.0]])
        assert cache.store(tokens, [CacheList(state, live[0]), live[1]], model="m").snapshot
        assert cache.stats().counters.not_finite == 1


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("behind", [False, True])
def test_a_prefill_in_chunks_ends_its_stores_there(codec, behind, way):
    """With write_back, what was computed stays as it was computed from the block on: nothing finite is made of it."""
    tokens, live = list(range(1024)), [KVCache(), RotatingKVCache(2000) if way == "cpu" else KVCache()]
    keys, values = rows(1024, BAD[0], 600, seed=1), rows(1024, seed=2)
    with PrefixCache(ram="16MB", codec=codec, memory_reserve=0) as cache:
        for at in range(0, 1024, 256):
            for layer in live:
                layer.update_and_fetch(keys[..., at : at + 256, :], values[..., at : at + 256, :])
            if behind:
                cache.store_behind(cache.prompt(tokens[: at + 256], model="m"), live, write_back_from=at)
            else:
                cache.store(tokens[: at + 256], live, model="m", write_back_from=at)
        for layer in live:
            assert np.isnan(np.array(layer.keys[0, 1, 600, 7]))
            if way == "cpu":  # a GPU is not waited for
                assert mx.array_equal(layer.keys[..., 512:1024, :], keys[..., 512:, :], equal_nan=True)
                assert mx.array_equal(layer.values[..., 512:1024, :], values[..., 512:, :])
        assert cache.match(tokens, model="m") == (512, 512)
        assert cache.stats().counters.not_finite == 2
        assert cache.stats().pinned == 0


def test_another_that_computes_the_same_soundly_stores_all_of_it():
    tokens = list(range(900))
    with PrefixCache(ram="16MB", memory_reserve=0) as cache:
        cache.store(tokens, layers("ring", 900, BAD[0], 700), model="m")
        assert cache.store(tokens, layers("ring", 900, None, 0), model="m").tokens == 900
        assert is_sound(cache.fetch(tokens, model="m")[0])


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("behind", [False, True])
def test_it_is_said_once_by_model_and_layer_and_never_with_the_prompt(codec, behind, caplog, way):
    with (
        PrefixCache(ram="16MB", codec=codec, memory_reserve=0) as cache,
        caplog.at_level(logging.WARNING, "prefixcache"),
    ):
        for first in (123456, 654321):
            live = layers("plain", 600, BAD[1], 300)
            prompt = cache.prompt(range(first, first + 600), model="org/some-model")
            cache.store_behind(prompt, live).result() if behind else cache.store(prompt, live)
    (record,) = [record.getMessage() for record in caplog.records if "NaN" in record.getMessage()]
    assert record.startswith("model 'org/some-model', layer 1 (KVCache): the row of token 300 holds NaN or infinity")
    assert "123" not in record


def test_after_a_restart_and_from_ssd_no_row_is_broken(tmp_path):
    tokens = list(range(600))
    options: dict[str, Any] = {"ram": "16MB", "ssd_dir": tmp_path, "ssd": "16MB", "memory_reserve": 0}
    for codec in CODECS:
        with PrefixCache(**options, codec=codec) as cache:
            cache.store(tokens, layers("long ring", 600, BAD[0], 300), model=codec)
        with PrefixCache(**options, codec=codec) as cache:
            made, rest = cache.fetch(tokens, model=codec, promote=True)
            assert len(rest) == 600 - 256
            assert is_sound(made)


@settings(max_examples=100)
@given(data=st.data())
def test_the_bits_of_a_float_say_whether_it_is_finite(data):
    numpy, dtype = data.draw(
        st.sampled_from([(np.float16, "float16"), (np.float32, "float32"), (np.float64, "float64")])
    )
    width = np.dtype(numpy).itemsize * 8
    bits = data.draw(st.lists(st.integers(0, 2**width - 1), min_size=1, max_size=5))
    values = np.array(bits, f"u{width // 8}").view(numpy)
    assert is_finite(values, dtype) == bool(np.isfinite(values).all())
    if dtype == "float32":  # bfloat16 is the half of it
        halves = (np.array(bits, np.uint32) >> 16).astype(np.uint16)
        as_float32 = (halves.astype(np.uint32) << 16).view(np.float32)
        assert is_finite(halves, "bfloat16") == bool(np.isfinite(as_float32).all())


@settings(max_examples=25)
@given(data=st.data())
def test_whatever_is_broken_is_never_fetched(data):
    """Prompts that begin alike, some of them broken somewhere, stored in any order."""
    kind, codec = (
        data.draw(st.sampled_from(["plain", "ring", "long ring", "chunks"])),
        data.draw(st.sampled_from(CODECS)),
    )
    way = data.draw(st.sampled_from(["cpu", "gpu"]))
    with computed_on(way), PrefixCache(ram="16MB", codec=codec, memory_reserve=0) as cache:
        prompts = []
        for number in range(data.draw(st.integers(1, 4), label="prompts")):
            count = data.draw(st.sampled_from([100, 256, 300, 600, 800]), label="tokens")
            shared = data.draw(st.sampled_from([0, 100, 256, 400]), label="shared")
            bad = data.draw(st.sampled_from([None, *BAD]), label="bad")
            at = data.draw(st.integers(0, count - 1), label="at")
            tokens = [*range(min(shared, count)), *range(10_000 * (number + 1), 10_000 * (number + 1) + count)][:count]
            write_back = data.draw(st.booleans(), label="write back")
            cache.store(tokens, layers(kind, count, bad, at), model="m", write_back_from=0 if write_back else None)
            prompts.append(tokens)
            cache.check_integrity()
        for tokens in prompts:
            made, _ = cache.fetch(tokens, model="m", leave=0)
            assert made is None or is_sound(made)
            if made is not None:
                assert states.held(made)
