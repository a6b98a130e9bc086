"""The store and live compressed caches share codes: what is stored of one is its own bits, and what a hit gives is those."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache, RotatingKVCache

from prefixcache import CacheError, PrefixCache, TurboQuant
from prefixcache.codecs.levels import same_levels
from prefixcache.codecs.turboquant.codec import TurboQuantRows
from prefixcache.codecs.turboquant.coding import Run
from prefixcache.keys import BLOCK
from prefixcache.layers.restore import MOST_LEVELS
from prefixcache.live.decoding import decoded_sequence
from prefixcache.live.levels import SharedLevels
from prefixcache.live.turboquant import BatchTurboQuantKVCache, TurboQuantKVCache
from tests.inside import inside, layer_of
from tests.layers.test_levels import error, skewed
from tests.models import states

BLOCK_BYTES = 8 * BLOCK
LONG = list(range(700))
CODEC = TurboQuant(4, 3)


def coded(plain: list[Any], codec: TurboQuant = CODEC, levels: SharedLevels | None = None) -> list[TurboQuantKVCache]:
    """Plain layers as live compressed ones, made with a codec."""
    return [TurboQuantKVCache(codec, levels=levels, layer=i).filled_from(layer) for i, layer in enumerate(plain)]


def cut(plain: list[Any], first: int, last: int) -> list[tuple[mx.array, mx.array]]:
    return [(layer.keys[..., first:last, :], layer.values[..., first:last, :]) for layer in plain]


def append(live: list[Any], rows: list[tuple[mx.array, mx.array]]) -> None:
    for layer, own in zip(live, rows, strict=True):
        layer.update_and_fetch(*own)


def first_rows(plain: list[Any], tokens: int) -> list[KVCache]:
    made = [KVCache() for _ in plain]
    append(made, cut(plain, 0, tokens))
    return made


def bits(layer: TurboQuantKVCache) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales that are in use."""
    codes, scales = layer_of(layer).codes.arrays
    return np.array(codes[:, :, : layer.offset]), np.array(scales[:, :, : layer.offset])


def same_bits(a: list[Any], b: list[Any], tokens: int | None = None) -> bool:
    pairs = [
        (x[:, :, :tokens], y[:, :, :tokens])
        for p, q in zip(a, b, strict=True)
        for x, y in zip(bits(p), bits(q), strict=True)
    ]
    return all(np.array_equal(x, y) for x, y in pairs)


def starts(live: list[Any]) -> list[list[int]]:
    """Of each layer, from which tokens on rows have levels of their own."""
    return [[run.first for run in layer_of(layer).runs[0]] for layer in live]


def stored_bits(cache: PrefixCache, tokens: list[int], leaf: int) -> tuple[np.ndarray, np.ndarray]:
    """What the images have of a leaf, laid out as a live cache's buffers."""
    entry = cache.lookup(tokens, model="m")
    assert entry is not None
    planes: list[list[np.ndarray]] = [[], []]
    for image in [block.tensors for block in entry.blocks]:
        both = []
        for part in ("keys", "values"):
            group, member = entry.plan.places[leaf][part]
            own = slice(member.head, member.head + member.heads)
            both.append([image[name][:, own].swapaxes(0, 1) for name in entry.plan.rows.groups[group].names])
        planes[0].append(np.concatenate([codes for codes, _ in both], axis=2))
        planes[1].append(np.stack([scales for _, scales in both], axis=2))
    codes, scales = (np.concatenate(own, axis=1)[None, :, : len(tokens)] for own in planes)
    return codes, scales


@pytest.fixture
def cache() -> Iterator[PrefixCache]:
    with PrefixCache(ram="50MB", codec=CODEC) as opened:
        yield opened
        opened.check_integrity()
        assert opened.stats().pinned == 0
        assert opened.stats().ram_reserved == 0


def fetched(cache: PrefixCache, tokens: list[int], compressed: bool = True) -> list[Any]:
    fetch = states.compressed if compressed else PrefixCache.fetch
    made, rest = fetch(cache, tokens, model="m", leave=0)
    assert made is not None
    assert rest == []
    return made


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Each call that encodes or decodes TurboQuant's rows in the store."""
    seen: list[str] = []

    def counting(name: str) -> Any:
        call = getattr(TurboQuantRows, name)

        def counted(self: Any, batch: Any, *args: Any) -> Any:
            if not isinstance(batch, list) or batch:
                seen.append(name)
            return call(self, batch, *args)

        return counted

    for name in ("encode", "encode_all", "decode", "decode_all"):
        monkeypatch.setattr(TurboQuantRows, name, counting(name))
    return seen


# -- in and out ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [CODEC, TurboQuant(8, 2, levelling=False), TurboQuant(3, 3, sink_tokens=5, seed=3)])
def test_what_is_stored_of_a_live_cache_is_its_own_bits_and_so_is_what_comes_back(
    codec: TurboQuant, conversions: list[str]
) -> None:
    live = coded(skewed(700), codec)
    with PrefixCache(ram="50MB", codec=codec) as cache:
        conversions.clear()
        stored = cache.store(LONG, live, model="m")
        assert (stored.tokens, stored.new_tokens) == (700, 700)
        for leaf, layer in enumerate(live):
            assert all(np.array_equal(x, y) for x, y in zip(bits(layer), stored_bits(cache, LONG, leaf), strict=True))
        back = fetched(cache, LONG)
        assert conversions == []
        assert [type(layer) for layer in back] == [TurboQuantKVCache] * 2
        assert same_bits(live, back)
        assert [layer.offset for layer in back] == [700, 700]
        for a, b in zip(live, back, strict=True):
            assert (a.choice, a.kind) == (b.choice, b.kind)
            assert layer_of(b).codes.capacity == 1024
        assert cache.store(LONG, back, model="m").new_tokens == 0
        cache.check_integrity()


def test_live_and_plain_caches_share_blocks(cache: PrefixCache) -> None:
    plain = skewed(700)
    cache.store(LONG[:400], first_rows(plain, 400), model="m")
    stored = cache.store(LONG, coded(plain), model="m")
    assert (stored.tokens, stored.new_tokens) == (700, 300)
    assert cache.stats().namespaces == 1
    assert error(plain, fetched(cache, LONG, compressed=False), 700) < 0.02
    assert error(plain, [layer.dequantize() for layer in fetched(cache, LONG)], 700) < 0.02
    assert cache.stats().counters.recoded_tokens == 0


def test_a_hit_on_what_plain_caches_stored_has_the_blocks_codes_and_codes_the_tail(
    cache: PrefixCache, conversions: list[str]
) -> None:
    live = skewed(700)
    cache.store(LONG, live, model="m")
    conversions.clear()
    back = fetched(cache, LONG)
    assert conversions == []
    assert starts(back) == [[0, 256]] * 2
    plain = fetched(cache, LONG, compressed=False)
    for own, a, b in zip(live, plain, back, strict=True):
        assert type(a) is KVCache
        for name in ("keys", "values"):
            x, y = getattr(a, name), getattr(b.dequantize(), name)
            assert mx.array_equal(x[..., :512, :], y[..., :512, :])
            assert mx.array_equal(getattr(own, name)[..., 636:700, :], y[..., 636:700, :])  # the recent ones
    assert error(live, [layer.dequantize() for layer in back], 700) < 0.02
    assert cache.store(LONG, back, model="m").new_bytes == 0


def test_a_hit_on_more_levels_than_a_live_cache_takes_is_coded_anew(cache: PrefixCache) -> None:
    tokens, plain = list(range(1400)), skewed(1400)
    cache.store(tokens, plain, model="m")
    assert starts(fetched(cache, tokens[: MOST_LEVELS * 256])) == [[0, 256, 512, 768]] * 2
    for depth in (MOST_LEVELS * 256 + 1, 1280, 1400):
        back = fetched(cache, tokens[:depth])
        assert [type(layer) for layer in back] == [TurboQuantKVCache] * 2
        assert depth == MOST_LEVELS * 256 + 1 or starts(back) == [[0]] * 2
        assert error(plain, [layer.dequantize() for layer in back], depth) < 0.04


@pytest.mark.parametrize("depth", [1, 255, 256, 257, 511, 512, 699])
def test_a_hit_may_end_anywhere(cache: PrefixCache, depth: int) -> None:
    live = coded(skewed(700))
    cache.store(LONG, live, model="m")
    back, rest = states.compressed(cache, [*LONG[:depth], 5000, 5001])
    assert rest == [5000, 5001]
    assert back is not None
    assert same_bits([_trimmed(layer, depth) for layer in live], back)
    append(back, cut(skewed(300, 3), 0, 300))
    assert same_bits([_trimmed(layer, depth) for layer in live], back, depth)


def _trimmed(layer: TurboQuantKVCache, tokens: int) -> TurboQuantKVCache:
    made = layer.copy()
    made.trim(made.offset - tokens)
    return made


def test_wrappers_give_live_caches_too(cache: PrefixCache) -> None:
    live = coded(skewed(700))
    cache.store(LONG, live, model="m")
    entry = cache.lookup(LONG, model="m")
    assert entry is not None
    one = entry.layers[1]
    assert one.trim(100) == 100
    assert same_bits([_trimmed(live[1], 600)], [one.live(room=1000)])
    assert layer_of(one.live(room=1000)).codes.capacity == 2048
    assert same_bits(live, entry.live())
    assert entry.trim(700) == 700
    assert [layer.offset for layer in entry.live()] == [0, 0]


def test_storing_leaves_the_live_cache_as_it_was_and_holds_nothing_of_it(cache: PrefixCache) -> None:
    live = coded(skewed(700))
    before = [bits(layer) for layer in live]
    cache.store(LONG, live, model="m")
    append(live, cut(skewed(20, 3), 0, 20))
    back = fetched(cache, LONG)
    append(back, cut(skewed(50, 4), 0, 50))
    assert all(
        np.array_equal(x, y)
        for own, layer in zip(before, fetched(cache, LONG), strict=True)
        for x, y in zip(own, bits(layer), strict=True)
    )
    assert [layer.offset for layer in live] == [720, 720]


# -- cycles -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [[256] * 5, [100, 37, 300, 19, 256, 1, 88], [300, 5, 7, 500, 30]])
@pytest.mark.parametrize("sinks", [0, 5])
def test_cycles_of_store_fetch_and_append_give_the_codes_of_one_pass(steps: list[int], sinks: int) -> None:
    codec = TurboQuant(3, 4, sink_tokens=sinks)
    total = sum(steps)
    plain, tokens = skewed(total), list(range(total))
    with PrefixCache(ram="50MB", codec=codec) as cache:
        levels = SharedLevels()
        whole = coded(plain, codec, levels)
        live: list[Any] = coded(first_rows(plain, steps[0]), codec, levels)
        at = steps[0]
        for turn, step in enumerate([*steps[1:], 0]):
            assert cache.store(tokens[:at], live, model="m").new_tokens == steps[turn]
            live = fetched(cache, tokens[:at])
            append(live, cut(plain, at, at + step))
            at += step
            cache.check_integrity()
        back = fetched(cache, tokens)
        assert same_bits(whole, back)
        if sinks:
            for a, b in zip(whole, back, strict=True):
                assert all(
                    mx.array_equal(x, y)
                    for x, y in zip(layer_of(a).sinks.arrays, layer_of(b).sinks.arrays, strict=True)
                )
        assert cache.stats().counters.recoded_tokens == 0


def images_by_block(cache: PrefixCache) -> dict[bytes, bytes]:
    """Of whole blocks: the bytes of their rows images."""
    nodes = {slot.node for slot in inside(cache).storage.graph.orders[0] if slot.kind == "rows"}
    return {node.key: bytes(node.rows.image.data) for node in nodes if len(node.tokens) == BLOCK_BYTES}


@settings(max_examples=25)
@given(data=st.data())
def test_a_live_cache_that_grows_is_stored_and_fetched_without_coding_twice(data: st.DataObject) -> None:
    """Whatever it starts from: nothing, a hit on its own blocks, or on those of plain caches."""
    plain = skewed(2200)
    at, live = 0, [TurboQuantKVCache(CODEC), TurboQuantKVCache(CODEC)]
    with PrefixCache(ram="50MB", codec=CODEC) as cache:
        if data.draw(st.booleans(), label="plain first"):
            at = data.draw(st.sampled_from([100, 256, 300, 512, 900]), label="plain tokens")
            cache.store(list(range(at)), first_rows(plain, at), model="m")
            live = fetched(cache, list(range(at)))
        written: dict[bytes, bytes] = {}
        for step in data.draw(st.lists(st.sampled_from([1, 7, 90, 156, 256, 300, 411]), min_size=1, max_size=4)):
            append(live, cut(plain, at, at + step))
            at += step
            tokens = list(range(at))
            assert cache.store(tokens, live, model="m").tokens == at
            now = images_by_block(cache)
            assert all(now[key] == image for key, image in written.items())
            written = now
            back = fetched(cache, tokens)
            if not any(layer_of(layer).waiting is not None for layer in live):
                assert same_bits(live, back)
            if data.draw(st.booleans(), label="go on with the hit"):
                live = back
            cache.check_integrity()
        assert cache.stats().counters.recoded_tokens == 0
        if at >= 64:
            assert error(plain, [layer.dequantize() for layer in fetched(cache, tokens)], at) < 0.02


def test_sinks_come_back_as_they_are_also_of_a_prompt_shorter_than_them() -> None:
    codec, plain = TurboQuant(2, 2, sink_tokens=9), skewed(700)
    with PrefixCache(ram="50MB", codec=codec) as cache:
        cache.store(LONG, coded(plain, codec), model="m")
        for depth in (4, 9, 300):
            back = fetched(cache, LONG[:depth])
            for a, b in zip(plain, back, strict=True):
                for own, raw in zip((a.keys, a.values), layer_of(b).sinks.arrays, strict=True):
                    assert raw.shape == (1, 2, 9, 64)
                    assert mx.array_equal(raw[:, :, : min(depth, 9)], own[:, :, : min(depth, 9)])
            append(back, cut(plain, depth, 400))
            assert all(
                mx.array_equal(layer_of(b).sinks.arrays[0], a.keys[:, :, :9]) for a, b in zip(plain, back, strict=True)
            )
            cache.store([*LONG[:depth], *range(5000, 5400 - depth)], back, model="m")
            cache.check_integrity()


# -- levels -------------------------------------------------------------------------------------------------------------


def test_levels_that_a_live_cache_measured_are_those_of_all_its_blocks(cache: PrefixCache) -> None:
    live = coded(skewed(700))
    cache.store(LONG, live, model="m")
    back = fetched(cache, LONG)
    assert starts(back) == [[0]] * 2
    for a, b in zip(live, back, strict=True):
        assert all(map(same_levels, layer_of(a).runs[0][0].levels, layer_of(b).runs[0][0].levels))
    cache.store(list(range(2000, 2600)), skewed(600, 1), model="m")
    assert same_bits(live, fetched(cache, LONG))


def test_codes_of_a_live_cache_stand_behind_blocks_that_plain_ones_stored(cache: PrefixCache) -> None:
    plain = skewed(1000)
    cache.store(LONG[:600], first_rows(plain, 600), model="m")
    live = coded(first_rows(plain, 700))
    cache.store(LONG, live, model="m")
    back = fetched(cache, LONG)
    assert starts(back) == [[0, 256, 512]] * 2
    mine = [[x[:, :, 512:] for x in bits(layer)] for layer in live]
    assert all(
        np.array_equal(x, y[:, :, 512:])
        for own, layer in zip(mine, back, strict=True)
        for x, y in zip(own, bits(layer), strict=True)
    )
    append(back, cut(plain, 700, 900))
    longer = [*LONG, *range(3000, 3200)]
    cache.store(longer, back, model="m")
    assert same_bits(back, fetched(cache, longer))
    assert starts(fetched(cache, longer)) == [[0, 256, 512]] * 2
    assert cache.stats().counters.recoded_tokens == 0


def test_a_tail_that_a_plain_cache_stored_waits_in_a_live_one_until_it_is_long_enough(cache: PrefixCache) -> None:
    plain = skewed(700)
    cache.store(LONG[:100], first_rows(plain, 100), model="m")
    live = fetched(cache, LONG[:100])
    assert all(layer_of(layer).waiting is not None for layer in live)
    assert all(
        mx.array_equal(a.dequantize().keys[..., :100, :], b.keys[..., :100, :])
        for a, b in zip(live, plain, strict=True)
    )
    assert cache.store(LONG[:100], live, model="m").new_tokens == 0
    append(live, cut(plain, 100, 700))
    assert cache.store(LONG, live, model="m").new_tokens == 600
    assert same_bits(live, fetched(cache, LONG))
    assert starts(fetched(cache, LONG)) == [[0]] * 2
    assert cache.stats().counters.recoded_tokens == 0


def test_a_tail_of_codes_keeps_them_when_a_plain_cache_goes_on(cache: PrefixCache) -> None:
    """Its rows are those codes decoded: coded again they would be worse."""
    plain = skewed(700)
    live = coded(first_rows(plain, 600))
    cache.store(LONG[:600], live, model="m")
    for at in (650, 768):
        back = fetched(cache, LONG[:600], compressed=False)
        append(back, cut(skewed(800), 600, at))
        tokens = list(range(at))
        cache.store(tokens, back, model="m")
        assert same_bits(live, fetched(cache, tokens[:600]))
        assert starts(fetched(cache, tokens)) == [[0]] * 2
        cache.check_integrity()


def test_a_live_cache_that_measured_after_its_first_turn_was_stored_keeps_its_codes(cache: PrefixCache) -> None:
    """Its first tokens were stored while they waited, without levels; what it codes them to later takes their place."""
    plain = skewed(700)
    live = coded(first_rows(plain, 100))
    cache.store(LONG[:100], live, model="m")
    append(live, cut(plain, 100, 700))
    cache.store(LONG, live, model="m")
    assert same_bits(live, fetched(cache, LONG))
    assert error(plain, fetched(cache, LONG, compressed=False), 700) < 0.02
    assert cache.stats().counters.recoded_tokens == 0


def test_a_prompt_that_parts_within_a_block_of_other_levels_keeps_its_codes(cache: PrefixCache) -> None:
    cache.store(LONG, coded(skewed(700)), model="m")
    other, tokens = coded(skewed(700, 8)), [*LONG[:600], *range(4000, 4100)]
    cache.store(tokens, other, model="m")
    back = fetched(cache, tokens)
    mine = [[x[:, :, 512:] for x in bits(layer)] for layer in other]
    assert all(
        np.array_equal(x, y[:, :, 512:])
        for own, layer in zip(mine, back, strict=True)
        for x, y in zip(own, bits(layer), strict=True)
    )
    assert starts(back) == [[0, 512]] * 2  # one's, then the other's
    assert cache.stats().counters.recoded_tokens == 0


def test_codes_beside_rows_that_are_not_coded_yet_share_an_image(cache: PrefixCache) -> None:
    """Half of the layers live, half plain: the live ones' codes go in as they are, the plain ones' rows are encoded."""
    for first in (1, 0):
        plain = skewed(700, 10 * first)
        live = coded(plain[:1])
        tokens = [first, *LONG[1:]]
        cache.store(tokens, [*live, plain[1]], model="m")
        back = fetched(cache, tokens)
        assert same_bits(live, back[:1])
        assert error(plain, [layer.dequantize() for layer in back], 700) < 0.02
    assert cache.stats().counters.recoded_tokens == 0


def test_where_rows_are_encoded_in_launches_codes_beside_them_are_copied_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: only what is not coded yet is launched, whether it is all of a tensor or not."""
    plain = skewed(700)
    images = []
    for here in (True, False):
        monkeypatch.setattr("prefixcache.layers.encode.on_cpu", lambda here=here: here)
        for own in (coded(plain), [plain[0], *coded(plain[1:])], [*coded(plain[:1]), plain[1]]):
            with PrefixCache(ram="50MB", codec=TurboQuant(4, 3, seed=0)) as cache:
                cache.store(LONG, own, model="m")
                images.append([stored_bits(cache, LONG, leaf) for leaf in range(2)])
    for a, b in zip(images[:3], images[3:], strict=True):
        assert all(np.array_equal(x, y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True))


def test_a_tail_beside_codes_is_coded_too_and_its_rows_are_taken_from_the_live_cache(cache: PrefixCache) -> None:
    plain = skewed(700)
    cache.store(LONG[:100], first_rows(plain, 100), model="m")
    live = coded(plain[:1])
    cache.store(LONG, [*live, plain[1]], model="m")
    assert cache.stats().counters.recoded_tokens == 0
    back = fetched(cache, LONG)
    assert same_bits(live, back[:1])
    assert error(plain, fetched(cache, LONG, compressed=False), 700) < 0.02


def test_levels_may_change_within_a_block(cache: PrefixCache) -> None:
    """No cache of ours does so, but a block can have one set only: what has others is coded anew."""
    live = coded(skewed(700))
    other = coded(skewed(700, 5))
    for a, b in zip(live, other, strict=True):
        layer_of(a).runs = ((Run(0, layer_of(a).runs[0][0].levels), Run(300, layer_of(b).runs[0][0].levels)),)
    cache.store(LONG, live, model="m")
    assert cache.stats().counters.recoded_tokens == 212
    back = fetched(cache, LONG)
    assert same_bits(live, back, 300)
    ends = [[x[:, :, 512:] for x in bits(layer)] for layer in (*live, *back)]
    assert all(np.array_equal(x, y) for a, b in zip(ends[:2], ends[2:], strict=True) for x, y in zip(a, b, strict=True))
    for a, b in zip(live, back, strict=True):
        x, y = (decoded_sequence(layer, 0, slice(0, 2))[0] for layer in (_coded_only(a), _coded_only(b)))
        assert mx.abs(x - y).mean() < 0.2 * mx.abs(x - x.mean(2, keepdims=True)).mean()


def _coded_only(layer: TurboQuantKVCache) -> Any:
    """What a live cache holds, without the last rows that it keeps as they are."""
    coded, kind = layer_of(layer), layer.kind
    assert kind is not None
    codes, sinks = coded.codes.arrays, coded.sinks.arrays
    return layer_of(TurboQuantKVCache.from_codes(coded.choice, kind, coded.runs[0], codes, coded.rows, sinks))


def test_what_one_tenant_s_hit_gave_is_stored_as_it_is_for_another_one() -> None:
    with PrefixCache(ram="50MB", codec=CODEC) as cache:
        first, second = (cache.prompt(LONG, model="m", salt=salt) for salt in (b"a", b"b"))
        cache.store(first, coded(skewed(700)))
        live, _ = states.compressed(cache, first, model=None, leave=0)
        cache.store(second, live)
        back, _ = states.compressed(cache, second, model=None, leave=0)
        assert starts(back) == [[0]] * 2
        assert same_bits(live, back)
        assert cache.stats().counters.recoded_tokens == 0
        cache.check_integrity()


def test_windows_beside_live_layers_have_levels_of_their_own() -> None:
    ring = skewed(700, 4, RotatingKVCache, max_size=300, keep=4)
    with PrefixCache(ram="50MB", codec=CODEC) as cache:
        live = coded(skewed(700))
        cache.store(LONG, [*live, *ring], model="m")
        back = fetched(cache, LONG)
        assert [type(layer) for layer in back] == [TurboQuantKVCache] * 2 + [RotatingKVCache] * 2
        assert same_bits(live, back[:2])
        plain = fetched(cache, LONG, compressed=False)
        for a, b in zip(plain[2:], back[2:], strict=True):
            assert mx.array_equal(a.keys, b.keys)
        x, y = ring[0].keys[:, :, 400:], back[2].keys[:, :, -300:]
        assert mx.abs(x - y).mean() < 0.2 * mx.abs(x - x.mean(2, keepdims=True)).mean()
        assert cache.stats().counters.recoded_tokens == 0
        cache.check_integrity()


# -- what can't be kept -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mine", "said"),
    [
        (TurboQuant(4, 4), "turboquant k4 v4"),
        (TurboQuant(4, 3, levelling=False), "turboquant k4 v3 plain"),
        (TurboQuant(4, 3, sink_tokens=2), "turboquant k4 v3 sinks 2"),
        (TurboQuant(4, 3, seed=5), "turboquant k4 v3 seed 5"),
    ],
)
def test_codes_of_another_codec_are_refused(cache: PrefixCache, mine: TurboQuant, said: str) -> None:
    plain = skewed(700)
    with pytest.raises(CacheError) as caught:
        cache.store(LONG, [*coded(plain[:1]), *coded(plain[1:], mine)], model="m")
    assert str(caught.value) == (
        f"layer 1 (TurboQuantKVCache): its rows are coded by {said}, and here the layer's are kept by turboquant k4 v3; "
        "open the PrefixCache with that codec, or store what dequantize() gives"
    )
    assert cache.stats().blocks == 0
    cache.store(LONG, [layer.dequantize() for layer in coded(plain, mine)], model="m")


@pytest.mark.parametrize(
    ("codec", "kept"),
    [
        ("raw", "raw"),
        (TurboQuant(4, 3, fp16_layers=1), "raw"),
        (TurboQuant(4, 4, layers={0: (4, 3), 1: (8, 3)}), "by turboquant k8 v3"),
    ],
)
def test_codes_of_a_layer_that_is_kept_otherwise_are_refused(codec: Any, kept: str) -> None:
    with PrefixCache(ram="50MB", codec=codec) as cache, pytest.raises(CacheError, match=f"are kept {kept};"):
        cache.store(LONG, coded(skewed(700)), model="m")


def test_layers_of_different_bits_and_raw_ones_are_kept_each_in_its_way() -> None:
    codec = TurboQuant(4, 4, layers={0: (4, 3), 1: None, 2: (8, 3)})
    plain = [*skewed(700), *skewed(700, 1)]
    live = [coded(plain[:1])[0], plain[1], *coded(plain[2:3], TurboQuant(8, 3)), *coded(plain[3:], TurboQuant(4, 4))]
    with PrefixCache(ram="50MB", codec=codec) as cache:
        cache.store(LONG, live, model="m")
        back = fetched(cache, LONG)
        assert type(back[1]) is KVCache
        assert mx.array_equal(back[1].keys[..., :700, :], plain[1].keys[..., :700, :])
        assert same_bits([live[0], *live[2:]], [back[0], *back[2:]])
        cache.check_integrity()


def test_where_nothing_is_turboquant_s_a_hit_is_plain() -> None:
    with PrefixCache(ram="50MB", codec="raw") as cache:
        cache.store(LONG, skewed(700), model="m")
        assert [type(layer) for layer in fetched(cache, LONG)] == [KVCache] * 2


def test_latents_come_back_plain_whatever_codes_them() -> None:
    latent = KVCache()
    latent.update_and_fetch(mx.random.normal((1, 1, 300, 512)), mx.random.normal((1, 1, 300, 64)))
    with PrefixCache(ram="50MB", codec=TurboQuant(raw_latents=False)) as cache:
        cache.store(LONG[:300], [latent], model="m")
        assert [type(layer) for layer in fetched(cache, LONG[:300])] == [KVCache]


def test_several_sequences_in_one_cache_are_refused(cache: PrefixCache) -> None:
    several = TurboQuantKVCache(CODEC)
    several.update_and_fetch(mx.zeros((3, 2, 5, 64)), mx.zeros((3, 2, 5, 64)))
    with pytest.raises(CacheError, match=r"layer 0 \(TurboQuantKVCache\): a batch of 3 sequences"):
        cache.store(LONG, [several], model="m")
    batch = BatchTurboQuantKVCache.merge(coded(skewed(300)))
    with pytest.raises(CacheError, match=r"BatchTurboQuantKVCache holds a batch; call extract\(i\)"):
        cache.store(LONG, [batch], model="m")
    live = coded(skewed(300))
    out = [BatchTurboQuantKVCache.merge([layer, layer]).extract(1) for layer in live]
    cache.store(LONG[:300], out, model="m")
    assert same_bits(live, fetched(cache, LONG[:300]))


def test_levels_that_are_none_are_refused(cache: PrefixCache) -> None:
    live = coded(skewed(700))
    pair = layer_of(live[1]).runs[0][0].levels
    divisor = pair.values.divisor.copy()
    divisor[0, 0] = 0.5
    layer_of(live[1]).runs = ((Run(0, pair._replace(values=type(pair.values)(pair.values.mean, divisor))),),)
    with pytest.raises(CacheError, match=r"layer 1 .*the levels of its values"):
        cache.store(LONG, live, model="m")


def test_unused_and_waiting_live_caches_are_read_as_plain_ones(cache: PrefixCache) -> None:
    assert cache.store(LONG, [TurboQuantKVCache(TurboQuant(2, 2)) for _ in range(2)], model="m").tokens == 0
    plain = skewed(100)
    waiting = coded(plain, TurboQuant(8, 8))  # not coded yet: any codec may have them
    cache.store(LONG[:100], waiting, model="m")
    before = fetched(cache, LONG[:100], compressed=False)
    assert cache.store(LONG[:100], plain, model="m").new_tokens == 0
    with PrefixCache(ram="50MB", codec=CODEC) as other:
        other.store(LONG[:100], plain, model="m")
        after = fetched(other, LONG[:100], compressed=False)
    assert all(mx.array_equal(a.keys, b.keys) for a, b in zip(before, after, strict=True))


# -- room, and the SSD --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ram", [6_000, 20_000, 60_000, 150_000, 250_000])
def test_where_ram_has_no_room_the_leading_part_is_kept(ram: int) -> None:
    live = coded(skewed(700))
    with PrefixCache(ram=ram, codec=CODEC) as cache:
        stored = cache.store(LONG, live, model="m")
        assert cache.match(LONG, model="m").ram == stored.tokens
        assert (stored.tokens == 700) == (ram == 250_000)
        cache.check_integrity()
        held = cache.stats()
        assert (held.pinned, held.ram_reserved) == (0, 0)
        assert held.ram_peak <= ram
        if stored.tokens:
            assert same_bits([_trimmed(layer, stored.tokens) for layer in live], fetched(cache, LONG[: stored.tokens]))


def test_codes_are_the_same_after_spill_restart_and_promotion(tmp_path: Path) -> None:
    settings = {"ram": "50MB", "ssd_dir": tmp_path / "ssd", "ssd": "1GB", "codec": CODEC}
    plain = skewed(900)
    live = coded(first_rows(plain, 700))
    with PrefixCache(**settings) as cache:
        cache.store(LONG, live, model="m")
        assert cache.flush(20)
        cache.trim_to(0)
        assert cache.lookup(LONG, model="m") is None
        cache.check_integrity()
    with PrefixCache(**settings) as cache:
        assert cache.promote(LONG, model="m").result(20) == 700
        back = fetched(cache, LONG)
        assert same_bits(live, back)
        append(back, cut(plain, 700, 900))
        tokens = [*LONG, *range(5000, 5200)]
        cache.store(tokens, back, model="m")
        cache.check_integrity()
    with PrefixCache(**settings) as cache:
        assert cache.promote(tokens, model="m").result(20) == 900
        assert same_bits(back, fetched(cache, tokens))
        assert starts(fetched(cache, tokens)) == [[0]] * 2
        assert cache.stats().counters.recoded_tokens == 0
        cache.check_integrity()


@pytest.mark.parametrize("levelling", [True, False])
def test_a_tail_on_the_ssd_alone_costs_live_codes_nothing(tmp_path: Path, levelling: bool) -> None:
    plain, codec = skewed(400), TurboQuant(4, 3, levelling=levelling)
    with PrefixCache(ram="50MB", ssd_dir=tmp_path / "ssd", ssd="1GB", codec=codec) as cache:
        live = coded(first_rows(plain, 300), codec)
        cache.store(LONG[:300], live, model="m")
        assert cache.flush(20)
        cache.trim_to(0)
        append(live, cut(plain, 300, 400))
        cache.store(LONG[:400], live, model="m")
        assert cache.promote(LONG[:400], model="m").result(20) == 400
        assert same_bits(live, fetched(cache, LONG[:400]))
        assert cache.stats().counters.recoded_tokens == 0
        cache.check_integrity()
