"""Hot prompts: a hit gives what images give, takes nothing from them, and is gone with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache

from prefixcache import PrefixCache
from prefixcache.keys import BLOCK, common_prefix
from prefixcache.layers.hot_state import HotState
from prefixcache.layers.reading import live_arrays
from prefixcache.tiers.hot import MOST
from tests.inside import inside
from tests.models import states
from tests.models.states import prompt

LONG = prompt(1, 700)


@pytest.fixture
def cache() -> Iterator[PrefixCache]:
    with PrefixCache(ram="20MB", codec="turboquant:4", memory_reserve=0) as opened:
        yield opened
        opened.check_integrity()


def computed(cache: PrefixCache, tokens: list[int], layers: str = "ring") -> list[Any]:
    """A prompt's layers, stored as a server does and kept hot."""
    prompt = cache.prompt(tokens, model="m")
    live = states.stored_in_steps(cache, prompt, states.LAYERS[layers](), 0, 256)
    assert cache.keep_hot(prompt, live) == cache.stats().ram_hot > 0
    return live


def plain(cache: PrefixCache, tokens: list[int], salt: bytes = b"") -> list[KVCache]:
    live, prompt = [KVCache(), KVCache()], cache.prompt(tokens, model="m", salt=salt)
    states.fed_uneven(live, tokens, 0)
    cache.store(prompt, live, write_back_from=0)
    assert cache.keep_hot(prompt, live)
    return live


def hot_tokens(cache: PrefixCache) -> int:
    return cache.stats().counters.hot_hit_tokens


@pytest.mark.parametrize("layers", sorted(states.LAYERS))
def test_a_hot_hit_is_what_images_give(cache, layers):
    computed(cache, LONG, layers)
    hot, rest = cache.fetch([*LONG, 1], model="m")
    assert (hot_tokens(cache), rest) == (700, [1])
    cache.trim_to(cache.stats().ram_held - 1)
    assert cache.stats().hot_prompts == 0
    cold, rest = cache.fetch([*LONG, 1], model="m")
    assert (hot_tokens(cache), rest) == (700, [1])
    for mine, theirs in zip(states.held(hot), states.held(cold), strict=True):
        for part in ("keys", "values"):
            assert {t for t in mine[part].keys() & theirs[part] if mine[part][t] != theirs[part][t]} == set()
            assert len(theirs[part].keys() - mine[part]) == 0


@pytest.mark.parametrize(("shared", "depth"), [(700, 700), (650, 650), (512, 512), (300, 256), (100, 0)])
def test_a_hit_ends_in_the_last_rows_or_with_a_block(cache, shared, depth):
    plain(cache, LONG)
    asked = cache.prompt([*LONG[:shared], *[7] * 20], model="m", whole_blocks=True)
    made, rest = cache.fetch(asked)
    assert hot_tokens(cache) == depth
    assert len(rest) == shared + 20 - depth
    if depth:
        states.check_uneven(made, LONG[:depth])


def quantized(tokens: list[int]) -> list[QuantizedKVCache]:
    layer = QuantizedKVCache(32, 8)
    layer.update_and_fetch(*map(mx.array, (states.uneven_rows(tokens, 0), states.uneven_rows(tokens, 7))))
    return [layer]


def half(tokens: list[int]) -> list[KVCache]:
    made = states.uneven(tokens)
    for layer in made:
        layer.keys, layer.values = layer.keys.astype(mx.bfloat16), layer.values.astype(mx.bfloat16)
    return made


DEEPER = LONG + prompt(2, 300)


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("codec", ["raw", "turboquant:4", "turboquant:4:sink_tokens=0"])
@pytest.mark.parametrize(
    "make",
    [states.uneven, half, quantized, lambda tokens: [CacheList(*states.uneven(tokens)), *half(tokens)]],
    ids=["float32", "bfloat16", "quantized", "lists"],
)
def test_a_hit_goes_on_with_images_where_they_reach_deeper(monkeypatch, make, codec, on_cpu):
    for module in ("hot_state", "stored_rows"):
        monkeypatch.setattr(f"prefixcache.layers.{module}.on_cpu", lambda: on_cpu)
    with PrefixCache(ram="20MB", codec=codec, memory_reserve=0) as cache:
        asked = cache.prompt(LONG, model="m")
        cache.store(asked, live := make(LONG), write_back_from=0)
        assert cache.keep_hot(asked, live)
        cache.store(DEEPER, make(DEEPER), model="m")
        made, rest = cache.fetch(DEEPER, model="m", room=50)
        assert (rest, hot_tokens(cache)) == (
            DEEPER[-1:],
            512,
        )  # the rows of its last block are not those that an image has
        images = cache.lookup(DEEPER, model="m", leave=1).dequantize(50)
        for mine, theirs in zip(live_arrays(made), live_arrays(images), strict=True):
            assert mx.array_equal(mine, theirs)
        for array in live_arrays(made):
            array[...] = 0
        again, _ = cache.fetch(DEEPER, model="m", room=50)
        for mine, theirs in zip(live_arrays(again), live_arrays(images), strict=True):
            assert mx.array_equal(mine, theirs)
        cache.check_integrity()


@pytest.mark.parametrize("make", [states.windowed, states.hybrid])
def test_layers_that_forget_don_t_go_on_from_a_hot_beginning(make):
    with PrefixCache(ram="20MB", codec="raw", memory_reserve=0) as cache:
        cache.store(LONG, live := make(LONG), model="m")
        assert cache.keep_hot(LONG, live, model="m")
        cache.store(DEEPER, make(DEEPER), model="m")
        made, rest = cache.fetch([*DEEPER, 1], model="m")
        assert (rest, hot_tokens(cache)) == ([1], 0)
        states.check(made, DEEPER)


@settings(max_examples=40)
@given(
    runs=st.lists(
        st.tuples(st.lists(st.sampled_from([1, 100, 156, 256, 300]), min_size=1, max_size=4), st.booleans()),
        min_size=1,
        max_size=6,
    ),
    data=st.data(),
    whole_blocks=st.booleans(),
)
def test_a_hit_takes_as_many_hot_blocks_as_there_are(runs, data, whole_blocks):
    prompts = [[i % 2 for i, count in enumerate(counts) for _ in range(count)] for counts, _ in runs]
    with PrefixCache(ram="20MB", codec="turboquant:4", memory_reserve=0) as cache:
        for tokens, hot in zip(prompts, (hot for _, hot in runs), strict=True):
            asked = cache.prompt(tokens, model="m")
            cache.store(asked, live := states.uneven(tokens), write_back_from=0)
            if hot:
                assert cache.keep_hot(asked, live)
        tokens = data.draw(st.sampled_from(prompts)) + data.draw(st.sampled_from(prompts))
        asked = cache.prompt(tokens, model="m", whole_blocks=whole_blocks)
        made, rest = cache.fetch(asked)
        depth = len(tokens) - len(rest)
        kept = inside(cache).storage.hot
        alike = [common_prefix(hot.ids, np.array(tokens[:depth])) for root in kept.roots() for hot in kept.of(root)]
        assert hot_tokens(cache) // BLOCK == max(alike, default=0) // BLOCK
        if made is not None:
            images = cache.lookup(asked, leave=1).dequantize()
            whole = depth // BLOCK * BLOCK
            for mine, theirs in zip(live_arrays(made), live_arrays(images), strict=True):
                assert mx.array_equal(mine[:, :, :whole], theirs[:, :, :whole])
        cache.check_integrity()


@pytest.mark.parametrize("codec", ["raw", "turboquant:4"])
def test_what_a_promotion_brings_behind_a_hot_beginning(tmp_path, monkeypatch, codec):
    monkeypatch.setattr("prefixcache.open_cache.device_memory", lambda: 8_000_000)  # they leave with no image
    with PrefixCache(ram="20MB", codec=codec, ssd_dir=tmp_path, ssd="50MB", memory_reserve=0) as cache:
        plain(cache, LONG)
        cache.store(DEEPER, states.uneven(DEEPER), model="m")
        assert cache.flush(30)
        cache.trim_to(0)
        made, rest = cache.fetch(DEEPER, model="m", promote=True)
        assert (rest, hot_tokens(cache)) == (DEEPER[-1:], 512)
        images = cache.lookup(DEEPER, model="m", leave=1).dequantize(1)
        for mine, theirs in zip(live_arrays(made), live_arrays(images), strict=True):
            assert mx.array_equal(mine, theirs)
        cache.trim_to(0)
        made, rest = cache.fetch([*LONG, 1], model="m", promote=True)
        assert (rest, hot_tokens(cache)) == ([1], 512 + 700)
        cache.check_integrity()


def test_nobody_sees_what_others_append(cache):
    live = plain(cache, LONG)
    want = states.held(live)
    states.fed_uneven(live, LONG + prompt(2, 50), 700)
    first, _ = cache.fetch([*LONG, 1], model="m")
    states.fed_uneven(first, LONG + prompt(3, 50), 700)
    first[0].keys[...] = 0
    second, _ = cache.fetch([*LONG, 1], model="m")
    assert hot_tokens(cache) == 1400
    assert states.held(second) == want


@pytest.mark.parametrize(
    "make",
    [states.hybrid, lambda tokens: [CacheList(*states.sliceable(tokens)), *states.sliceable(tokens, 1)]],
    ids=["recurrent", "lists"],
)
def test_every_kind_of_layer_is_hot(make):
    with PrefixCache(ram="20MB", codec="raw", memory_reserve=0) as cache:
        cache.store(LONG, made := make(LONG), model="m")
        assert cache.keep_hot(LONG, made, model="m")
        hot, rest = cache.fetch([*LONG, 1], model="m")
        assert rest == [1]
        assert hot_tokens(cache) == 700
        images = cache.lookup([*LONG, 1], model="m").dequantize()
        for a, b in zip(live_arrays(hot), live_arrays(images), strict=True):
            n = min(a.shape[2], b.shape[2]) if a.ndim == 4 else None
            assert mx.array_equal(a[:, :, :n] if n else a, b[:, :, :n] if n else b)


def test_quantized_rows_are_hot_and_cut_anywhere():
    with PrefixCache(ram="20MB", codec="raw", memory_reserve=0) as cache:
        (layer,) = quantized(LONG)
        cache.store(LONG, [layer], model="m")
        assert cache.keep_hot(LONG, [layer], model="m")
        made, _ = cache.fetch([*LONG[:300], 1], model="m")
        assert (made[0].offset, hot_tokens(cache)) == (300, 300)
        for mine, theirs in zip(made[0].keys, layer.keys, strict=True):
            assert mx.array_equal(mine[:, :, :300], theirs[:, :, :300])


def test_a_chat_s_next_turn_takes_the_place_of_the_last(cache):
    plain(cache, LONG[:600])
    plain(cache, LONG)
    assert cache.stats().hot_prompts == 1


def test_a_salt_keeps_hot_prompts_apart(cache):
    plain(cache, LONG, b"one")
    cache.fetch(LONG, model="m", salt=b"two")
    cache.fetch(LONG, model="m")
    assert hot_tokens(cache) == 0


@pytest.mark.parametrize(
    "delete",
    [
        lambda cache: cache.remove(LONG, model="m"),
        lambda cache: cache.remove(LONG[:300], model="m", following=True),
        lambda cache: cache.clear(),
        lambda cache: cache.clear(model="m"),
        lambda cache: cache.prune(model="m"),
        lambda cache: cache.keep(0),
        lambda cache: cache.drop_hit(cache.prompt(LONG, model="m"), 700),
    ],
)
def test_what_is_deleted_is_not_hot_any_longer(cache, delete):
    plain(cache, LONG)
    delete(cache)
    assert (cache.stats().hot_prompts, cache.stats().ram_hot) == (0, 0)
    assert cache.fetch(LONG, model="m")[0] is None


def test_what_is_deleted_while_it_becomes_hot_is_not_hot(cache, monkeypatch):
    def meanwhile(*args: Any) -> HotState:
        monkeypatch.undo()
        cache.remove(LONG, model="m")
        return HotState.of(*args)

    cache.store(asked := cache.prompt(LONG, model="m"), live := states.uneven(LONG), write_back_from=0)
    monkeypatch.setattr(HotState, "of", meanwhile)
    assert cache.keep_hot(asked, live) == 0
    assert cache.stats().hot_prompts == cache.stats().ram_hot == 0


def test_chats_by_turns_stay_hot_in_a_share_for_them_alone():
    share = 5 * 600 * (states.WIDTH * 4 * 4 + 8) // 2  # two of them, and half a third
    with PrefixCache(ram="20MB", hot=share, codec="raw", memory_reserve=0) as cache:
        for turn in range(4):
            for chat in range(2):
                tokens = prompt(chat, 540 + 20 * turn)
                cache.fetch(tokens, model="m")
                cache.store(tokens, states.sliceable(tokens), model="m")
                assert cache.keep_hot(tokens, states.sliceable(tokens), model="m")
                assert cache.stats().hot_prompts == min(2 * turn + chat + 1, 2)
                cache.check_integrity()


def test_hot_prompts_leave_before_any_image():
    with PrefixCache(ram="1MB", hot="500kB", codec="raw", memory_reserve=0) as cache:
        seed = 0
        while cache.stats().counters.evicted == 0:
            cache.store(prompt(seed), states.sliceable(prompt(seed)), model="m")
            if seed == 3:
                assert cache.keep_hot(prompt(seed), states.sliceable(prompt(seed)), model="m")
            seed += 1
            assert seed <= 4 or cache.stats().counters.evicted == 0 or cache.stats().hot_prompts == 0
        assert cache.stats().ram_hot == 0
        assert not cache.keep_hot(prompt(seed - 1), states.sliceable(prompt(seed - 1)), model="m")  # no SSD to spill to


def test_they_take_their_share_the_oldest_leaving(tmp_path):
    with PrefixCache(ram="2MB", hot="100kB", codec="raw", ssd_dir=tmp_path, ssd="50MB", memory_reserve=0) as cache:
        for seed in range(20):
            cache.store(prompt(seed), states.sliceable(prompt(seed)), model="m")
            cache.keep_hot(prompt(seed), states.sliceable(prompt(seed)), model="m")
            cache.check_integrity()
        stats = cache.stats()
        assert 0 < stats.ram_hot <= 100_000
        assert stats.hot_prompts == 100_000 // (600 * (states.WIDTH * 4 * 4 + 8))
        cache.trim_to(stats.ram_held - 1)
        assert cache.stats().hot_prompts < stats.hot_prompts
        cache.resize(ram="400kB", wait=30)
        assert cache.stats().ram_hot == 0


@pytest.mark.parametrize(("ram", "hot"), [("20MB", "40kB"), ("150kB", "140kB")])
def test_one_without_room_pushes_no_other_out(ram, hot):
    """It is larger than their share, or than what RAM has free beside images."""
    with PrefixCache(ram=ram, hot=hot, codec="raw", memory_reserve=0) as cache:
        cache.store(LONG, states.sliceable(LONG), model="m")
        short = LONG[:100]
        assert cache.keep_hot(short, states.sliceable(short), model="m")
        assert cache.match(LONG, model="m").ram == len(LONG)
        assert cache.keep_hot(LONG, states.sliceable(LONG), model="m") == 0
        assert cache.stats().hot_prompts == 1


@pytest.mark.parametrize("lowered", [False, True])
def test_those_that_become_hot_at_once_share_their_share(monkeypatch, lowered):
    """Or when it is lowered meanwhile."""
    with PrefixCache(ram="20MB", hot="120kB", codec="raw", memory_reserve=0) as cache:
        tokens = [prompt(seed) for seed in range(2)]
        for each in tokens:
            cache.store(each, states.sliceable(each), model="m")

        def meanwhile(*args: Any) -> HotState:
            monkeypatch.undo()
            if lowered:
                inside(cache).storage.hot.resize(60_000)
            else:
                assert cache.keep_hot(tokens[1], states.sliceable(tokens[1]), model="m") > 60_000
            return HotState.of(*args)

        monkeypatch.setattr(HotState, "of", meanwhile)
        kept = cache.keep_hot(tokens[0], states.sliceable(tokens[0]), model="m")
        assert (kept > 60_000) is not lowered
        cache.check_integrity()
        assert cache.stats().hot_prompts == (not lowered)
        assert cache.stats().ram_hot == kept


def test_none_are_kept_with_hot_0():
    with PrefixCache(ram="20MB", hot=0, codec="raw", memory_reserve=0) as cache:
        cache.store(LONG, made := states.sliceable(LONG), model="m")
        assert cache.keep_hot(LONG, made, model="m") == 0


def test_what_is_not_stored_is_not_hot(cache):
    assert cache.keep_hot(LONG, states.uneven(LONG), model="m") == 0
    assert cache.fetch(LONG, model="m")[0] is None


@pytest.mark.parametrize("off", [0, 1e-3])
@pytest.mark.parametrize("behind", [False, True])
def test_rows_that_a_fetch_would_not_give_are_not_hot(tmp_path, off, behind):
    with PrefixCache(ram="20MB", codec="turboquant:4", ssd_dir=tmp_path, ssd="50MB", memory_reserve=0) as cache:
        asked = cache.prompt(LONG, model="m")
        cache.store(asked, live := states.uneven(LONG))
        assert cache.keep_hot(asked, live) == 0  # they are as they were computed
        assert cache.flush(30)
        cache.trim_to(0)
        for layer in live:
            layer.keys += off  # computed in another batch, say
        if behind:
            cache.store_behind(asked, live, write_back_from=0).result()
        else:
            cache.store(asked, live, write_back_from=0)
        assert bool(cache.keep_hot(asked, live)) is (off == 0)
        made, rest = cache.fetch(asked, leave=0, promote=True)
        assert rest == []
        assert cache.keep_hot(asked, made)


def test_a_chat_goes_on_hot_from_turn_to_turn(cache):
    tokens, layers, rest = [], [KVCache(), KVCache()], []
    for turn in range(5):
        tokens = tokens + prompt(turn, 300)
        asked = cache.prompt(tokens, model="m", whole_blocks=True)
        before = hot_tokens(cache)
        made, rest = cache.fetch(asked)
        assert (len(rest), hot_tokens(cache) - before) == (300, len(tokens) - 300)
        layers = made or layers
        states.stored_in_steps(cache, asked, layers, len(tokens) - len(rest), 256)
        assert cache.keep_hot(asked, layers)
        assert cache.stats().hot_prompts == 1


def test_a_device_with_memory_of_its_own_has_a_budget_of_its_own(monkeypatch):
    monkeypatch.setattr("prefixcache.open_cache.device_memory", lambda: 8_000_000)
    with PrefixCache(ram="400kB", codec="raw", memory_reserve=0) as cache:
        for seed in range(20):
            cache.store(prompt(seed), made := states.sliceable(prompt(seed)), model="m")
            assert cache.keep_hot(prompt(seed), made, model="m")
            cache.check_integrity()
        stats = cache.stats()
        assert stats.counters.evicted > 0
        assert stats.ram_hot == 0
        assert 0 < stats.hot_bytes <= 1_000_000
        assert stats.hot_prompts > 5  # images that left RAM took their hot prompts with them only when asked for
        assert cache.fetch([*prompt(19), 1], model="m")[1] == [1]
        assert cache.fetch([*prompt(12), 1], model="m")[0] is None
        cache.resize(ram="300kB")
        assert cache.stats().hot_bytes == stats.hot_bytes
        cache.clear()
        assert cache.stats().hot_bytes == 0


def test_a_hot_hit_counts_although_its_images_have_left_ram(tmp_path, monkeypatch):
    monkeypatch.setattr("prefixcache.open_cache.device_memory", lambda: 8_000_000)
    with PrefixCache(ram="2MB", codec="raw", ssd_dir=tmp_path, ssd="50MB", memory_reserve=0) as cache:
        cache.store(LONG, made := states.sliceable(LONG), model="m")
        assert cache.keep_hot(LONG, made, model="m")
        assert cache.flush(30)
        cache.trim_to(0)
        assert cache.match(LONG, model="m").ram == 0
        assert cache.fetch([*LONG, 1], model="m")[1] == [1]
        counters = cache.stats().counters
        assert counters.hit_tokens == counters.ram_hit_tokens == counters.hot_hit_tokens == 700


def test_a_fetch_looks_at_a_bounded_number_of_them(cache):
    for seed in range(MOST + 5):
        plain(cache, prompt(seed, 20))
    assert cache.stats().hot_prompts == MOST
    for seed in (4, MOST + 4):  # the oldest has left
        cache.fetch([*prompt(seed, 20), 1], model="m")
    assert hot_tokens(cache) == 20
