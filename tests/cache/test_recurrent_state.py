"""Recurrent state is coded: a hit gives what its codes decode to, and so has the live cache that goes on from a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache

from prefixcache import PrefixCache, TurboQuant
from prefixcache.codecs import Codec, as_codec
from prefixcache.image_format import Blueprint, HeaderFields, Spec
from prefixcache.keys import canonical
from prefixcache.layers.image_layout import Plan
from prefixcache.layers.reading import read
from prefixcache.layers.snapshots import encode_state
from tests.cache.test_write_back import extend, some_rows
from tests.models.states import whole_hit

TOKENS = list(range(300))
HEADS, ROWS, WIDTH = 4, 128, 128


def state_of(seed: int, shape: tuple[int, ...] = (1, HEADS, ROWS, WIDTH), dtype: mx.Dtype = mx.float32) -> ArraysCache:
    """A layer's, after some tokens: sums of products of keys and values, whose channels are of unlike sizes."""
    rng = np.random.default_rng(seed)
    spread = np.exp(rng.standard_normal(shape[-1])) * np.exp(rng.standard_normal((*shape[:-1], 1)))
    layer = ArraysCache(2)
    layer[0] = mx.array(rng.standard_normal((1, 3, 3 * WIDTH))).astype(mx.bfloat16)
    layer[1] = mx.array(rng.standard_normal(shape) * spread).astype(dtype)
    return layer


def layers(seed: int = 0, tokens: int = 300, **more: Any) -> list[Any]:
    return [state_of(seed, **more), *extend([KVCache(), KVCache()], some_rows(tokens), 0, tokens)]


def bits(prompt_cache: list[Any]) -> list[bytes]:
    return [np.array(array.view(mx.uint8)).tobytes() for array in prompt_cache[0].cache]


def error(state: mx.array, exact: mx.array) -> float:
    own, other = (np.array(array.astype(mx.float32), np.float64) for array in (state, exact))
    return float(np.sqrt(np.mean((own - other) ** 2) / np.mean(other**2)))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize(
    ("codec", "most"), [("turboquant:4", 0.01), ("turboquant:2:plain", 0.01), ("turboquant:4:state_bits=4", 0.1)]
)
def test_state_becomes_what_a_fetch_gives(codec: str, most: float, dtype: mx.Dtype) -> None:
    """Bit for bit, and it is near what was computed. What a convolution keeps stays as it is."""
    exact, live = layers(dtype=dtype), layers(dtype=dtype)
    with PrefixCache(ram="50MB", codec=codec) as cache:
        assert cache.store(TOKENS, live, model="m", write_back_from=0).snapshot
        assert bits(live) == bits(whole_hit(cache, TOKENS))
        assert bits(live)[0] == bits(exact)[0]
        assert 0 < error(live[0][1], exact[0][1]) < most
        cache.check_integrity()


@pytest.mark.parametrize("codec", ["raw", TurboQuant(state_bits=None), TurboQuant(layers={0: None})])
def test_state_that_is_not_to_be_coded_keeps_every_bit(codec: Codec | str) -> None:
    exact, live = layers(), layers()
    with PrefixCache(ram="50MB", codec=codec) as cache:
        cache.store(TOKENS, live, model="m", write_back_from=0)
        assert bits(exact) == bits(live) == bits(whole_hit(cache, TOKENS))


KEPT_SHAPES = {
    "Mamba 1: a state of 16 a channel": (1, 512, 16),
    "a convolution's last inputs, by heads": (1, HEADS, 1, WIDTH),
    "two sequences' state, in an array of another meaning": (2, HEADS, ROWS, WIDTH),
    "narrow rows": (1, HEADS, ROWS, 16),
}


@pytest.mark.parametrize("shape", KEPT_SHAPES.values(), ids=KEPT_SHAPES)
def test_other_arrays_stay_as_they_are(shape: tuple[int, ...]) -> None:
    def made() -> ArraysCache:
        layer = state_of(1, shape=shape)
        layer.cache.insert(0, mx.zeros((1, 3)))  # the first array tells how many sequences there are
        return layer

    live, exact = [made(), *layers()[1:]], [made()]
    with PrefixCache(ram="50MB", codec="turboquant") as cache:
        cache.store(TOKENS, live, model="m", write_back_from=0)
        assert bits(exact) == bits(live) == bits(whole_hit(cache, TOKENS))


def test_without_write_back_the_live_state_is_not_changed() -> None:
    exact, live = layers(), layers()
    with PrefixCache(ram="50MB", codec="turboquant") as cache:
        cache.store(TOKENS, live, model="m")
        assert bits(exact) == bits(live) != bits(whole_hit(cache, TOKENS))


def test_state_in_lists_of_caches_and_without_any_rows_is_coded() -> None:
    nested = layers()
    nested = [CacheList(nested[0], nested[1]), nested[2]]
    with PrefixCache(ram="50MB", codec="turboquant") as cache:
        cache.store(TOKENS, nested, model="m", write_back_from=0)
        assert bits(nested[0].caches) == bits(whole_hit(cache, TOKENS)[0].caches) != bits(layers())
        alone = layers()[:1]
        cache.store(TOKENS, alone, model="alone", write_back_from=0)
        made, _ = cache.fetch(TOKENS, model="alone", leave=0)
        assert bits(alone) == bits(made or []) != bits(layers())


def test_a_snapshot_of_a_gated_delta_net_is_three_and_a_half_times_smaller() -> None:
    """The state in float32, what the convolution keeps in bfloat16, as Qwen 3.5 and Qwen3-Next have them."""
    sizes = []
    for codec in ("raw", "turboquant:4"):
        plan = Plan(read(layers()).layout, as_codec(codec))
        sizes.append(sum(spec.nbytes for spec in plan.describe_state(read(layers()).leaves).specs()))
    assert sizes[0] / sizes[1] > 3.5


# -- state that stands already --------------------------------------------------------------------------------------------


def test_the_state_that_stands_goes_into_a_live_cache_that_computed_it_otherwise() -> None:
    with PrefixCache(ram="50MB", codec="turboquant") as cache:
        cache.store(TOKENS, first := layers(0), model="m", write_back_from=0)
        stored = cache.store(TOKENS, again := layers(1), model="m", write_back_from=0)
        assert (stored.new_tokens, stored.new_bytes) == (0, 0)
        assert bits(first) == bits(again) == bits(whole_hit(cache, TOKENS))


@pytest.mark.parametrize("seed", [0, 1])
def test_state_that_the_ssd_alone_has_is_coded_again(tmp_path: Path, seed: int) -> None:
    """Computed in the same way it is the same, and in RAM again; else the live cache goes on on its own, which is not hot."""
    tokens = TOKENS[:256]
    with PrefixCache(ram="50MB", codec="turboquant", ssd_dir=tmp_path, ssd="50MB", hot="20MB") as cache:
        cache.store(tokens, first := layers(0, 256), model="m", write_back_from=0)
        assert cache.flush(30)
        cache.trim_to(0)
        prompt = cache.prompt(tokens, model="m")
        cache.store(prompt, again := layers(seed, 256), write_back_from=0)
        assert (bits(first) == bits(again)) is (seed == 0)
        assert cache.match(prompt) == (256 if seed == 0 else 0, 256)
        assert bool(cache.keep_hot(prompt, again)) is (seed == 0)
        assert cache.promote(prompt).result(30) == 256
        assert bits(whole_hit(cache, tokens)) == bits(first)
        cache.check_integrity()


@pytest.mark.parametrize("tokens", [40, 300])
@pytest.mark.parametrize("write_back", [True, False])
def test_what_is_hot_has_the_state_that_is_stored(tokens: int, write_back: bool) -> None:
    asked, live = TOKENS[:tokens], layers(tokens=tokens)
    with PrefixCache(ram="50MB", codec="turboquant", hot="20MB") as cache:
        prompt = cache.prompt(asked, model="m")
        cache.store(prompt, live, write_back_from=0 if write_back else None)
        assert bool(cache.keep_hot(prompt, live)) == write_back
        made = cache.lookup(asked, model="m")
        assert made is not None
        assert bits(whole_hit(cache, asked)) == bits(made.dequantize())


def test_snapshots_that_are_stored_as_they_are_are_read() -> None:
    """As they were before state was coded; a name is that of both."""
    exact = layers()
    plain, coded = (Plan(read(exact).layout, TurboQuant(state_bits=bits)) for bits in (None, 8))
    state = plain.describe_state(read(exact).leaves)
    meta = HeaderFields("snapshot", *["0" * 64] * 3, "m", "{}", "{}", 256, state.extra)
    draft = Blueprint(meta, [*state.specs(), Spec("tokens", "I64", (44,))]).draft()
    assert encode_state(state, draft.tensors, decoded=True) == ([], [])
    draft.tensors["tokens"][:] = TOKENS[256:]
    image = draft.seal()
    assert coded.fits(image, "snapshot", 256, 44)
    assert all(map(mx.array_equal, coded.stored_state(image).leaf(0)["cache"], exact[0].cache))


@pytest.mark.parametrize("shape", [[1, HEADS, 1, WIDTH], [], "1", [1.0, HEADS, ROWS, WIDTH]])
def test_a_header_whose_coded_state_no_codec_gives_does_not_fit(shape: Any) -> None:
    """Its tensors would be none, and a fetch would look for them."""
    plan = Plan(read(layers()[:1]).layout, TurboQuant())
    extra = {"state": [{"cache": ["list", [["array", 0]]]}], "dtypes": ["float32"], "coded": [shape]}
    meta = HeaderFields("snapshot", *["0" * 64] * 3, "m", "{}", "{}", 256, canonical(extra))
    image = Blueprint(meta, [Spec("tokens", "I64", (44,))]).draft().seal()
    assert not plan.fits(image, "snapshot", 256, 44)


# -- reuse ----------------------------------------------------------------------------------------------------------------


def test_a_hundred_hits_stored_again_change_no_bit() -> None:
    with PrefixCache(ram="50MB", codec="turboquant") as cache:
        cache.store(TOKENS, live := layers(), model="m", write_back_from=0)
        first = bits(live)
        for _ in range(100):
            live = whole_hit(cache, TOKENS)
            cache.store(TOKENS, live, model="m", write_back_from=0)
            assert bits(live) == first


@pytest.mark.parametrize("decay", [0.3, 0.9, 0.99])
def test_errors_of_states_made_of_hits_do_not_pile_up(decay: float) -> None:
    """A hundred turns of a chat, each from the hit of the one before: what is forgotten takes its error along."""
    rng, tokens, errors = np.random.default_rng(3), TOKENS[:], []
    with PrefixCache(ram="500MB", codec="turboquant") as cache:
        live, exact = layers(), layers()[0][1]
        for turn in range(100):
            cache.store(tokens, live, model="m", write_back_from=0)
            live = whole_hit(cache, tokens)
            errors.append(error(live[0][1], exact))
            new = mx.array(rng.standard_normal((1, HEADS, ROWS, WIDTH)).astype(np.float32)) * (1 - decay**2) ** 0.5
            live[0][1], exact = decay * live[0][1] + new, decay * exact + new
            tokens = [*tokens, 1000 + turn]
            extend(live[1:], some_rows(300 + turn + 1), 300 + turn, 300 + turn + 1)
    once = float(np.median(errors[:3]))
    assert max(errors) < 1.5 * once / (1 - decay**2) ** 0.5
