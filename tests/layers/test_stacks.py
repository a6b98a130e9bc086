"""Rows that go to a GPU in stacks of blocks are those that a CPU decodes block by block, to the bit."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache

from prefixcache import PrefixCache
from prefixcache.codecs import levels
from prefixcache.codecs.turboquant.codec import TurboQuantRows
from prefixcache.layers import stacks, stored_rows
from prefixcache.layers.read_ahead import ReadAhead
from prefixcache.layers.reading import live_arrays
from tests.cache.test_write_back import images
from tests.models.families import FAMILIES

NAMES = sorted(name for name, family in FAMILIES.items() if "snapshot" not in family.kinds)
CODECS = ["raw", "turboquant:4", "turboquant:8"]
_live = {}


def computed(name):
    """A model's prompt cache of 700 tokens."""
    if name not in _live:
        model = FAMILIES[name].build()
        cache = make_prompt_cache(model)
        tokens = np.random.default_rng(1).integers(2, 120, 700).tolist()
        for first in range(0, 700, 100):
            mx.eval(model(mx.array([tokens[first : first + 100]]), cache=cache))
        _live[name] = tokens, cache
    return _live[name]


def fetched(cache, tokens, patch, *, stacked, at_once):
    patch.setattr(stored_rows, "on_cpu", lambda: not stacked)
    patch.setattr(ReadAhead, "serves", lambda plan: False)
    patch.setattr(stacks, "AT_ONCE", at_once)
    layers, rest = cache.fetch(tokens, model="m", leave=0)
    assert layers is not None
    return len(rest), live_arrays(layers)


@given(
    name=st.sampled_from(NAMES),
    codec=st.sampled_from(CODECS),
    count=st.integers(1, 700),
    at_once=st.integers(0, 1 << 17),
)
def test_a_fetch_in_stacks_is_the_same_fetch(name, codec, count, at_once):
    tokens, live = computed(name)
    with PrefixCache(ram="64MB", codec=codec, hot=0) as cache, pytest.MonkeyPatch.context() as patch:
        cache.store(tokens, live, model="m")
        if cache.lookup(tokens[:count], model="m", leave=0) is None:
            return
        left, rows = fetched(cache, tokens[:count], patch, stacked=False, at_once=0)
        again, stacked = fetched(cache, tokens[:count], patch, stacked=True, at_once=at_once)
        assert left == again
        assert len(rows) == len(stacked)
        assert all(mx.array_equal(a, b) for a, b in zip(rows, stacked, strict=True))


def test_bytes_go_to_the_gpu_once_for_many_blocks_and_streams(monkeypatch):
    tokens, live = computed("llama")
    with PrefixCache(ram="64MB", codec="turboquant:4", hot=0) as cache:
        cache.store(tokens, live, model="m")
        copies, copy = [], stacks.bring_in_stacked
        for module in (stacks, levels):
            monkeypatch.setattr(module, "bring_in_stacked", lambda arrays: copies.append(len(arrays)) or copy(arrays))
        launches, decode = [], TurboQuantRows.decode_blocks

        def counted(codec, *coded):
            launches.append(codec)
            return decode(codec, *coded)

        monkeypatch.setattr(TurboQuantRows, "decode_blocks", counted)
        fetched(cache, tokens, monkeypatch, stacked=True, at_once=stacks.AT_ONCE)
    # Sinks; codes, scales and levels of keys, of values; the tail. Two blocks each, whatever the number of layers.
    assert copies.count(2) == 7
    assert len(copies) == 9
    assert len(launches) == 2  # keys and values


@pytest.mark.parametrize("codec", ["raw", "turboquant:4"])
@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_images_are_the_same_however_a_store_reads_rows(name, codec, monkeypatch):
    """Layers without values, or of few rows, too."""
    tokens, live = computed(name)
    with PrefixCache(ram="64MB", codec=codec, hot=0) as here, PrefixCache(ram="64MB", codec=codec, hot=0) as there:
        here.store(tokens, live, model="m")
        for module in ("encode", "finite"):
            monkeypatch.setattr(f"prefixcache.layers.{module}.on_cpu", lambda: False)
        there.store(tokens, live, model="m")
        assert images(here) == images(there)
