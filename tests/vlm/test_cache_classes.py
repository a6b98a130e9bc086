"""mlx-vlm's cache classes are read, coded and made again as mlx-lm's of the same names: the same rows in the same bytes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx_lm.models.cache as of_mlx_lm
import mlx_vlm.models.cache as of_mlx_vlm
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_vlm.models.unlimited_ocr.language import RingSlidingKVCache

from prefixcache import CacheError, PrefixCache
from prefixcache.layers import read
from tests.models.families import MLX_LM_0_31

LEAVES = (
    ("KVCache",),
    ("ConcatenateKVCache",),
    ("QuantizedKVCache", 32, 4),
    ("RotatingKVCache", 100),
    ("RotatingKVCache", 300, 4),
    ("ArraysCache", 2),
    *([] if MLX_LM_0_31 else [("ChunkedKVCache", 256)]),  # 0.31: it drops rows of the chunk that it is in
)
leaves = st.sampled_from(LEAVES)
layers = st.lists(st.one_of(leaves, st.lists(leaves, min_size=1, max_size=3)), min_size=1, max_size=3)


def made(module: Any, layer: Any) -> Any:
    """An empty layer cache, as one of the two modules defines it; a list of them is a CacheList."""
    if isinstance(layer, list):
        return module.CacheList(*(made(module, leaf) for leaf in layer))
    return getattr(module, layer[0])(*layer[1:])


def feed(cache: Any, count: int, step: int, rng: np.random.Generator) -> None:
    """Append so many tokens' rows, in such steps."""
    if hasattr(cache, "caches"):
        for leaf in cache.caches:
            feed(leaf, count, step, rng)
    elif hasattr(cache, "update_and_fetch"):
        for at in range(0, count, step):
            rows = rng.standard_normal((2, 1, 2, min(step, count - at), 64), np.float32)
            if hasattr(cache, "maybe_trim_front"):
                cache.maybe_trim_front()
            cache.update_and_fetch(*mx.array(rows).astype(mx.bfloat16))
    else:
        cache[0], cache[1] = mx.array(rng.standard_normal((2, 1, 3, 8), np.float32))


def held(prompt_cache: list[Any]) -> Iterator[np.ndarray]:
    """What each leaf holds: the rows of its tokens, in their order, and its state."""
    for leaf in read(prompt_cache).leaves:
        yield from (
            np.array(array.view(mx.uint8))[:, :, leaf.where(first, last)]
            for array in leaf.arrays.values()
            for first, last in leaf.held
        )
        yield from (np.array(array) for array in leaf.state.get("cache", ()))


def stored_and_fetched(module: Any, layers: list[Any], codec: str, tokens: int, step: int, asked: int) -> Any:
    """What a store says, and of the prompt and of one that leaves it at `asked`, after a restart: what is left of it, and
    what a hit holds once it has gone on."""
    prompt = list(range(tokens))
    live = [made(module, layer) for layer in layers]
    for number, layer in enumerate(live):
        feed(layer, tokens, step, np.random.default_rng(number))
    with tempfile.TemporaryDirectory() as folder:
        options = {"ram": "20MB", "ssd_dir": folder, "ssd": "100MB", "codec": codec}
        with PrefixCache(**options) as cache:
            stored = cache.store(prompt, live, model="m")
            cache.check_integrity()
        with PrefixCache(**options) as cache:
            hits = []
            for question in (prompt, [*prompt[:asked], *range(5000, 5100)]):
                cache.promote(question, model="m").result(20)
                hit, rest = cache.fetch(question, model="m", leave=0)
                assert hit is None or [type(layer) for layer in hit] == [type(layer) for layer in live]
                for layer in hit or ():
                    feed(layer, 3, 3, np.random.default_rng(9))
                hits.append((rest, list(held(hit)) if hit else []))
                cache.check_integrity()
    return stored, hits


@pytest.mark.parametrize("codec", ["raw", "turboquant:4"])
@given(layers=layers, tokens=st.integers(1, 700), step=st.sampled_from((1, 90, 256, 700)), asked=st.integers(1, 700))
def test_what_comes_back_is_what_comes_back_of_mlx_lms_classes(codec, layers, tokens, step, asked):
    step = max(step, tokens // 50)
    expected, expected_hits = stored_and_fetched(of_mlx_lm, layers, codec, tokens, step, asked)
    stored, hits = stored_and_fetched(of_mlx_vlm, layers, codec, tokens, step, asked)
    assert stored._replace(new_bytes=0) == expected._replace(new_bytes=0)
    # A header names the classes, and mlx-vlm's ArraysCache has more attributes: 1 kB an image at most.
    assert 0 <= stored.new_bytes - expected.new_bytes < 1000 * (3 * tokens // 256 + 3)
    for (rest, rows), (expected_rest, expected_rows) in zip(hits, expected_hits, strict=True):
        assert rest == expected_rest
        for a, b in zip(rows, expected_rows, strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_class_that_lays_out_its_rows_in_its_own_way_is_kept_whole():
    """After 16 generated tokens this ring overwrites rows behind the prompt's: no place says any more whose row it has."""
    ring = RingSlidingKVCache(16)
    feed(ring, 300, 300, np.random.default_rng(0))
    feed(ring, 40, 1, np.random.default_rng(1))
    assert read([ring]).layout["kinds"][0]["kind"] == "snapshot"
    prompt = list(range(340))
    with PrefixCache(ram="20MB", codec="turboquant:4") as cache:
        cache.store(prompt, [ring], model="m")
        assert cache.match([*prompt[:300], 1], model="m") == (0, 0)
        (hit,), _ = cache.fetch(prompt, model="m", leave=0)
    assert (hit.offset, hit.prefill_length, hit._ring_pos) == (ring.offset, ring.prefill_length, ring._ring_pos)
    assert mx.array_equal(hit.keys, ring.keys)


@pytest.mark.parametrize("name", ["BatchKVCache", "BatchRotatingKVCache", "BatchQuantizedKVCache", "BatchPoolingCache"])
def test_batches_are_refused_and_told_how(name):
    batch = object.__new__(getattr(of_mlx_vlm, name))
    with pytest.raises(CacheError, match=rf"layer 0.*{name}.*extract"):
        read([batch])
