"""With `write_back` a store leaves in the live cache what a fetch would give: a hit never changes an answer."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache

from prefixcache import PrefixCache, TurboQuant
from prefixcache.keys import BLOCK, TOKEN_BYTES
from prefixcache.live.turboquant import TurboQuantKVCache
from tests.inside import inside, layer_of
from tests.models.states import held, whole_hit

HEADS, WIDTH, SINKS = 2, 64, 4
PARTS = ("keys", "values")


WINDOWS = {
    "ring": lambda: RotatingKVCache(300),
    "ring with first tokens": lambda: RotatingKVCache(300, 4),
    "ring, not full": lambda: RotatingKVCache(2000, 4),
    "chunks": lambda: ChunkedKVCache(512),
}


@lru_cache(64)
def some_rows(tokens: int, seed: int = 0, dtype: str = "float16") -> list[tuple[mx.array, mx.array]]:
    """Keys and values of two layers; the first tokens' are alike in prompts of any length."""
    rng = np.random.default_rng(seed)
    offset = 10 * rng.standard_normal((2, HEADS, 1, WIDTH))
    made = rng.standard_normal((tokens, 2, 2, HEADS, WIDTH)).transpose(1, 2, 3, 0, 4)[:, :, None]
    made[:, 0] += offset[:, None]
    return [(mx.array(k).astype(getattr(mx, dtype)), mx.array(v).astype(getattr(mx, dtype))) for k, v in made]


def extend(
    layers: list[Any], rows: list[tuple[mx.array, mx.array]], first: int, last: int, chunk: int = 100
) -> list[Any]:
    """Append rows `first` to `last` (not included), as a prefill in chunks does."""
    for layer, (keys, values) in zip(layers, rows, strict=True):
        for at in range(first, last, chunk):
            if isinstance(layer, ChunkedKVCache):
                layer.maybe_trim_front()
            end = min(at + chunk, last)
            layer.update_and_fetch(keys[..., at:end, :], values[..., at:end, :])
    return layers


def alike(live: list[Any], back: list[Any], below: int = 10**9) -> bool:
    """Whether all rows of tokens `below` that a fetched cache may attend to are those of the live one."""
    pairs = []
    for a, b in zip(held(live), held(back), strict=True):
        for part, rows in b.items():
            pairs.append((a[part], {token: bits for token, bits in rows.items() if token < below}))
    return bool(pairs) and all(b.items() <= a.items() for a, b in pairs)


def changed(before: list[dict[str, dict[int, bytes]]], layers: list[Any]) -> list[set[int]]:
    """Of each layer, the tokens whose key and value are others now."""
    sets = []
    for a, b in zip(before, held(layers), strict=True):
        assert a.keys() == b.keys()
        apart = [{token for token in a[part] if a[part][token] != b[part][token]} for part in a]
        assert all(one == apart[0] for one in apart)
        sets.append(apart[0])
    return sets


@pytest.mark.parametrize(
    ("codec", "dtype", "here"),
    [
        (codec, dtype, (i + j) % 2 == 0)  # each pair of them
        for i, codec in enumerate(["turboquant", "turboquant:3", "turboquant:4:2:plain"])
        for j, dtype in enumerate(["float16", "bfloat16", "float32"])
    ],
)
def test_rows_of_whole_blocks_become_what_a_fetch_gives(
    codec: str, dtype: str, here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, whether they are encoded as on the CPU or in launches; the sinks and the tail stay as they are."""
    monkeypatch.setattr("prefixcache.layers.encode.on_cpu", lambda: here)
    tokens, live = list(range(700)), extend([KVCache(), KVCache()], some_rows(700, dtype=dtype), 0, 700)
    before = held(live)
    with PrefixCache(ram="50MB", codec=codec) as cache:
        cache.store(tokens, live, model="m", write_back_from=0)
        assert changed(before, live) == [set(range(SINKS, 512))] * 2
        assert [layer.offset for layer in live] == [700, 700]
        assert alike(live, whole_hit(cache, tokens))
        assert alike(live, whole_hit(cache, tokens[:300]))


@pytest.mark.parametrize("window", [None, *sorted(WINDOWS)])
def test_images_are_the_same_with_and_without_and_however_rows_are_encoded(
    window: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU piece by piece, on a GPU all blocks in one launch, their levels measured in one pass."""
    made = []
    for here in (True, False):
        for write_back in (True, False):
            monkeypatch.setattr("prefixcache.layers.encode.on_cpu", lambda here=here: here)
            empty = [KVCache(), WINDOWS[window]() if window is not None else KVCache()]
            live = extend(empty, some_rows(5000), 0, 5000)
            with PrefixCache(ram="80MB", codec="turboquant:4:3") as cache:
                cache.store(list(range(5000)), live, model="m", write_back_from=0 if write_back else None)
                made.append(images(cache))
                back = whole_hit(cache, list(range(5000)))
                assert not write_back or alike(live, back)
    assert all(one == made[0] for one in made[1:])


@pytest.mark.parametrize("first", [100, 256, 900])
def test_what_was_stored_first_changes_nothing_for_later_prompts(first: int) -> None:
    """However long it was, and however unlike its rows are: levels are a block's own."""
    made, tokens = [], list(range(1000, 1700))
    for others in (0, first):
        with PrefixCache(ram="50MB", codec="turboquant:4:3") as cache:
            if others:
                cache.store(
                    list(range(others)), extend([KVCache(), KVCache()], some_rows(others, 1), 0, others), model="m"
                )
            before = images(cache)
            cache.store(tokens, extend([KVCache(), KVCache()], some_rows(700, 2), 0, 700), model="m")
            made.append({key: image for key, image in images(cache).items() if key not in before})
    assert len(made[0]) == 2
    assert made[0] == made[1]


def test_without_it_the_live_cache_is_not_changed() -> None:
    tokens, live = list(range(700)), extend([KVCache(), KVCache()], some_rows(700), 0, 700)
    before = held(live)
    with PrefixCache(ram="50MB", codec="turboquant") as cache:
        cache.store(tokens, live, model="m")
        assert changed(before, live) == [set(), set()]


@pytest.mark.parametrize(
    ("window", "total", "here"),
    [
        (window, total, (i + j) % 2 == 0)  # each kind of window by each way to encode, with a tail and without one
        for i, window in enumerate(sorted(WINDOWS))
        for j, total in enumerate([256, 300, 700, 512, 1024, 1100])
    ],
)
def test_windows_too(window: str, total: int, here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prefixcache.layers.encode.on_cpu", lambda: here)
    tokens, live = list(range(total)), extend([KVCache(), WINDOWS[window]()], some_rows(total), 0, total)
    before = held(live)
    with PrefixCache(ram="50MB", codec="turboquant") as cache:
        cache.store(tokens, live, model="m", write_back_from=0)
        whole = total // BLOCK * BLOCK
        full, windowed = changed(before, live)
        assert full == set(range(SINKS, whole))
        assert windowed == {token for token in before[1]["keys"] if SINKS <= token < whole}
        assert alike(live, whole_hit(cache, tokens))
        cache.check_integrity()


@pytest.mark.parametrize("window", sorted(WINDOWS))
def test_a_prefill_in_chunks_of_whole_blocks_goes_on_from_what_is_stored(window: str) -> None:
    total = 1200
    rows, live = some_rows(total), [KVCache(), WINDOWS[window]()]
    with PrefixCache(ram="50MB", codec="turboquant") as cache:
        for at in range(0, total, BLOCK):
            end = min(at + BLOCK, total)
            extend(live, rows, at, end)
            tokens = list(range(end))
            cache.store(tokens, live, model="m", write_back_from=at)
            assert alike(live, whole_hit(cache, tokens))
            cache.check_integrity()


@pytest.mark.parametrize("since", [0, 2, 100, 256, 300, 512, 700, 10**9])
def test_blocks_before_that_of_since_are_left_alone(since: int) -> None:
    tokens, live = list(range(700)), extend([KVCache(), RotatingKVCache(2000)], some_rows(700), 0, 700)
    before = held(live)
    with PrefixCache(ram="50MB", codec="turboquant") as cache:
        cache.store(tokens, live, model="m", write_back_from=since)
        assert changed(before, live) == [set(range(max(since // BLOCK * BLOCK, SINKS), 512))] * 2


@pytest.mark.parametrize("first", [-1, 1.5, True, "0"])
def test_rows_are_written_back_from_a_number_of_tokens(first: Any) -> None:
    live = extend([KVCache(), KVCache()], some_rows(20), 0, 20)
    with PrefixCache(ram="50MB") as cache, pytest.raises(ValueError, match="store: write_back_from"):
        cache.store(list(range(20)), live, model="m", write_back_from=first)


@pytest.mark.parametrize("stood", [256, 300, 512, 700])
def test_blocks_that_stood_already_are_decoded_into_the_live_cache(stood: int) -> None:
    """Another cache stored them, of rows that are not quite these: computed in other chunks."""
    tokens, rows = list(range(700)), some_rows(700)
    with PrefixCache(ram="50MB", codec="turboquant") as cache:
        cache.store(tokens[:stood], extend([KVCache(), RotatingKVCache(2000)], some_rows(700, 1), 0, stood), model="m")
        live = extend([KVCache(), RotatingKVCache(2000)], rows, 0, 700)
        before = held(live)
        cache.store(tokens, live, model="m", write_back_from=0)
        assert changed(before, live) == [set(range(512))] * 2
        back = whole_hit(cache, tokens)
        of_live, of_back = held(live), held(back)
        for part in PARTS:
            mine = [{t: bits for t, bits in own[0][part].items() if t < 512} for own in (of_live, of_back)]
            assert mine[0] == mine[1]
        stands = stood // BLOCK * BLOCK
        assert alike([live[1]], [back[1]]) or stands < stood  # a tail's window is the older prompt's, as is the block's
        cache.check_integrity()


@pytest.mark.parametrize(
    ("codec", "window", "restart", "here"),
    [
        (codec, window, (i + j) % 2 == 0, (i + j) // 2 % 2 == 0)  # each pair of them
        for i, codec in enumerate(["turboquant", "turboquant:3", "raw"])
        for j, window in enumerate([None, *sorted(WINDOWS)])
    ],
)
def test_blocks_that_the_ssd_alone_has_are_made_again(
    tmp_path: Path, codec: str, window: str | None, restart: bool, here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And are in RAM again without a read, since they are the same ones."""
    monkeypatch.setattr("prefixcache.layers.encode.on_cpu", lambda: here)
    tokens, values = list(range(700)), {"ram": "50MB", "codec": codec, "ssd_dir": tmp_path, "ssd": "50MB"}

    def computed() -> list[Any]:
        return extend([KVCache(), WINDOWS[window]() if window is not None else KVCache()], some_rows(700), 0, 700)

    cache = PrefixCache(**values)
    cache.store(tokens, first := computed(), model="m", write_back_from=0)
    kept = images(cache)
    assert cache.flush(30)
    if restart:
        cache.close()
        cache = PrefixCache(**values)
    with cache:
        cache.trim_to(0)
        assert cache.match(tokens, model="m") == (0, 700)
        stored = cache.store(tokens, again := computed(), model="m", write_back_from=0)
        assert (stored.tokens, stored.new_tokens, stored.new_bytes) == (700, 0, 0)
        assert alike(first, again)
        stats = cache.stats()
        assert (stats.pinned, stats.ram_reserved, stats.ssd.read_bytes) == (0, 0, 0)
        cache.check_integrity()
        assert images(cache) == (kept if codec != "raw" else {})  # where nothing changes, nothing is made
        made, rest = cache.fetch(tokens, model="m", leave=0, promote=True)
        assert (made is not None, rest) == (True, [])
        assert alike(again, made)


@pytest.mark.parametrize("window", [None, *sorted(WINDOWS)])
def test_blocks_that_the_ssd_alone_has_stay_as_they_are_where_rows_round_otherwise(
    tmp_path: Path, window: str | None
) -> None:
    """They go back as an empty cache would have them. No image is replaced, or taken for another."""
    tokens = list(range(700))

    def computed(seed: int) -> list[Any]:
        layers = [KVCache(), WINDOWS[window]() if window is not None else KVCache()]
        return extend(layers, some_rows(700, seed), 0, 700)

    with PrefixCache(ram="50MB", codec="turboquant") as fresh:
        fresh.store(tokens, alone := computed(1), model="m", write_back_from=0)
    with PrefixCache(ram="50MB", codec="turboquant", ssd_dir=tmp_path, ssd="50MB") as cache:
        cache.store(tokens, first := computed(0), model="m", write_back_from=0)
        assert cache.flush(30)
        cache.trim_to(0)
        stored = cache.store(tokens, again := computed(1), model="m", write_back_from=0)
        assert (stored.tokens, stored.new_tokens, stored.new_bytes) == (700, 0, 0)
        assert alike(again, alone)
        stats = cache.stats()
        assert (stats.pinned, stats.ram_reserved) == (0, 0)
        assert cache.match(tokens, model="m") == (0, 700)
        cache.check_integrity()
        made, rest = cache.fetch(tokens, model="m", leave=0, promote=True)
        assert (made is not None, rest) == (True, [])
        assert alike(first, made)


def test_a_second_store_changes_nothing_and_stores_nothing() -> None:
    tokens, live = list(range(700)), extend([KVCache(), RotatingKVCache(300, 4)], some_rows(700), 0, 700)
    with PrefixCache(ram="50MB", codec="turboquant") as cache:
        cache.store(tokens, live, model="m", write_back_from=0)
        before = held(live)
        for _ in range(3):
            stored = cache.store(tokens, live, model="m", write_back_from=0)
            assert (stored.new_tokens, stored.new_bytes) == (0, 0)
            assert changed(before, live) == [set(), set()]
            live = whole_hit(cache, tokens)
            before = held(live)


def test_a_lossless_codec_leaves_every_bit() -> None:
    tokens, live = list(range(700)), extend([KVCache(), RotatingKVCache(300, 4)], some_rows(700), 0, 700)
    before = held(live)
    with PrefixCache(ram="50MB", codec="raw") as cache:
        cache.store(tokens, live, model="m", write_back_from=0)
        assert changed(before, live) == [set(), set()]
        assert alike(live, whole_hit(cache, tokens))


def test_layers_that_are_kept_as_they_are_stay_so_beside_coded_ones() -> None:
    tokens, live = list(range(700)), extend([KVCache(), KVCache()], some_rows(700), 0, 700)
    latent = KVCache()
    latent.update_and_fetch(mx.random.normal((1, 1, 700, 512)), mx.random.normal((1, 1, 700, 64)))
    before = held([*live, latent])
    with PrefixCache(ram="50MB", codec="turboquant") as cache:
        cache.store(tokens, [*live, latent], model="m", write_back_from=0)
        assert changed(before, [*live, latent]) == [set(range(SINKS, 512))] * 2 + [set()]
        assert alike([*live, latent], whole_hit(cache, tokens))


def test_recurrent_state_beside_rows_is_not_touched() -> None:
    tokens, live = list(range(512)), extend([KVCache(), KVCache()], some_rows(512), 0, 512)
    state = ArraysCache(2)
    state[0], state[1] = mx.random.normal((1, 3, 8)), mx.random.normal((1, 2, 5))
    bits = [np.array(array) for array in state.cache]
    layers = [CacheList(state, live[0]), live[1]]
    with PrefixCache(ram="50MB", codec="turboquant") as cache:
        assert cache.store(tokens, layers, model="m", write_back_from=0).snapshot
        back = whole_hit(cache, tokens)
        assert alike(live, [back[0][1], back[1]])
        for own in (state, back[0][0]):
            assert all(np.array_equal(a, np.array(b)) for a, b in zip(bits, own.cache, strict=True))


def test_live_caches_of_codes_are_left_alone() -> None:
    tokens, rows = list(range(700)), some_rows(700)
    live = [TurboQuantKVCache(), KVCache()]
    extend(live, rows, 0, 700)
    codes, sinks, recent = (
        np.array(part.arrays[0])
        for part in (layer_of(live[0]).codes, layer_of(live[0]).sinks, layer_of(live[0]).recent)
    )
    with PrefixCache(ram="50MB", codec="turboquant") as cache:
        before = held(live[1:])
        cache.store(tokens[:300], extend([KVCache(), KVCache()], some_rows(700, 1), 0, 300), model="m")
        cache.store(tokens, live, model="m", write_back_from=0)
        layer = layer_of(live[0])
        now = [part.arrays[0] for part in (layer.codes, layer.sinks, layer.recent)]
        assert all(np.array_equal(a, b) for a, b in zip((codes, sinks, recent), now, strict=True))
        assert changed(before, live[1:]) == [set(range(512))]


def test_a_prompt_cache_that_is_longer_than_the_tokens_keeps_what_lies_beyond() -> None:
    live = extend([KVCache(), KVCache()], some_rows(700), 0, 700)
    before = held(live)
    with PrefixCache(ram="50MB", codec="turboquant") as cache:
        cache.store(list(range(300)), live, model="m", write_back_from=0)
        assert changed(before, live) == [set(range(SINKS, 256))] * 2
        assert [layer.offset for layer in live] == [700, 700]


def test_what_found_no_room_is_no_worse_than_before() -> None:
    """Rows that were not stored are as they were, or as they would have been stored."""
    tokens, live = list(range(3000)), extend([KVCache(), KVCache()], some_rows(3000), 0, 3000)
    with PrefixCache(ram="200kB", codec="turboquant") as cache:
        stored = cache.store(tokens, live, model="m", write_back_from=0)
        assert 0 < stored.tokens < 3000
        assert alike(live, whole_hit(cache, tokens[: stored.tokens]))
        assert cache.stats().pinned == 0


@pytest.mark.parametrize("tokens", [1, 30, 255, 300, 511])
def test_a_prompt_that_ends_within_a_block_that_stands_keeps_its_tail_as_it_was_computed(tokens: int) -> None:
    """As it was when nobody had gone on from it: else the answer would depend on what others stored."""
    with PrefixCache(ram="50MB", codec="turboquant") as cache:
        cache.store(list(range(512)), extend([KVCache(), RotatingKVCache(2000)], some_rows(512), 0, 512), model="m")
        live = extend([KVCache(), RotatingKVCache(2000)], some_rows(512), 0, tokens)
        alone = extend([KVCache(), RotatingKVCache(2000)], some_rows(512), 0, tokens)
        cache.store(list(range(tokens)), live, model="m", write_back_from=0)
    with PrefixCache(ram="50MB", codec="turboquant") as fresh:
        fresh.store(list(range(tokens)), alone, model="m", write_back_from=0)
    assert alike(live, alone)


# -- tails ----------------------------------------------------------------------------------------------------------------


def images(cache: PrefixCache) -> dict[tuple[str, bytes], bytes]:
    """Of whole blocks: their rows' and windows' images."""
    slots = [slot for slot in inside(cache).storage.graph.orders[0] if slot.kind != "snapshot"]
    return {
        (slot.kind, slot.key): bytes(slot.image.data) for slot in slots if len(slot.node.tokens) == BLOCK * TOKEN_BYTES
    }


@pytest.mark.parametrize("first", [1, 20, 63, 64, 200, 255])
def test_a_tail_comes_back_as_it_is_and_is_coded_once_from_its_rows(first: int) -> None:
    """As if the block had come at once."""
    rows, tokens = some_rows(300), list(range(300))
    made = []
    for steps in ([300], [first, 256, 300]):
        with PrefixCache(ram="50MB", codec="turboquant") as cache:
            live: list[Any] = [KVCache(), RotatingKVCache(1000, 2)]
            at = 0
            for step in steps:
                extend(live, rows, at, step)
                at = step
                cache.store(tokens[:at], live, model="m")
                if at < BLOCK:
                    back = whole_hit(cache, tokens[:at])
                    assert alike(live, back)
                    live = back
                cache.check_integrity()
            made.append({key: image for key, image in images(cache).items() if key[0] == "rows"})
            back = whole_hit(cache, tokens)
            made.append([{part: dict(own[part]) for part in PARTS} for own in held(back)])
    assert made[0] == made[2]
    assert made[1] == made[3]


@pytest.mark.parametrize(("first", "size", "total"), [(30, 250, 300), (200, 100, 600)])
def test_rows_of_a_tail_s_window_that_the_live_cache_has_forgotten_are_coded_with_the_others(
    first: int, size: int, total: int
) -> None:
    """With levels of all of them: of 30 rows alone there would be none."""
    rows, tokens = some_rows(total), list(range(total))
    live: list[Any] = [KVCache(), RotatingKVCache(size)]
    with PrefixCache(ram="50MB", codec="turboquant") as cache:
        for at, end in ((0, first), (first, total)):
            extend(live, rows, at, end, chunk=1 if end == total else 100)
            cache.store(tokens[:end], live, model="m", write_back_from=0)
            assert alike(live, whole_hit(cache, tokens[:end]))
        early = whole_hit(cache, tokens[:first])
        keys = np.array(early[1].keys[..., :first, :]).astype(np.float64)[:, :, 1:]
        wanted = np.array(rows[1][0][..., :first, :]).astype(np.float64)[:, :, -keys.shape[2] :]
        assert np.mean((keys - wanted) ** 2) < 0.02
        cache.check_integrity()


@pytest.mark.parametrize("shared", [300, 400, 511])
@pytest.mark.parametrize("window", sorted(WINDOWS))
def test_a_prompt_that_parts_within_a_whole_block_has_a_tail_with_windows(shared: int, window: str) -> None:
    rows = some_rows(1000)
    with PrefixCache(ram="50MB", codec="turboquant") as cache:
        live: list[Any] = extend([KVCache(), WINDOWS[window]()], rows, 0, 300, chunk=300)
        cache.store(list(range(300)), live, model="m", write_back_from=0)
        extend(live, rows, 300, 600, chunk=300)
        cache.store(list(range(600)), live, model="m", write_back_from=0)
        fork = [*range(shared), *range(5000, 5200)]
        back, rest = cache.fetch(fork, model="m", leave=0)
        assert back is not None
        assert len(rest) == 200
        for end in (min(shared + 30, 511), shared + 200):
            at = back[0].offset
            extend(back, rows, at, end)
            cache.store(fork[:end], back, model="m", write_back_from=0)
            assert alike(back, whole_hit(cache, fork[:end]))
            cache.check_integrity()


@given(data=st.data())
def test_rows_of_a_block_never_change_once_they_are_written(data: st.DataObject) -> None:
    """Store, fetch and extend in steps of any size, over prompts that part and meet again."""
    dtype = data.draw(st.sampled_from(["float16", "bfloat16"]))
    window = data.draw(st.sampled_from([None, *sorted(WINDOWS)]))

    def empty() -> list[Any]:
        return [KVCache(), WINDOWS[window]() if window is not None else KVCache()]

    texts = {name: some_rows(1600, name, dtype) for name in (0, 1)}
    with PrefixCache(ram="80MB", codec=data.draw(st.sampled_from(["turboquant", "turboquant:8:3"]))) as cache:
        written: dict[tuple[str, bytes], bytes] = {}
        tokens: list[int] = []
        live = empty()
        for _ in range(data.draw(st.integers(1, 7), label="steps")):
            if tokens and data.draw(st.booleans(), label="go on from a hit"):
                cut = data.draw(st.integers(0, len(tokens)), label="of so many tokens")
                found, rest = cache.fetch(tokens[:cut], model="m", leave=0)
                live = found if found is not None else empty()
                tokens = tokens[: cut - len(rest)]
            text = data.draw(st.sampled_from([0, 1]), label="text")
            step = data.draw(st.sampled_from([1, 30, 56, 100, 156, 200, 256, 300]), label="more tokens")
            before, end = len(tokens), len(tokens) + step
            extend(live, texts[text], before, end)
            tokens = [*tokens, *range(10_000 * text + before, 10_000 * text + end)]
            since = data.draw(st.sampled_from([0, before]), label="since")
            assert cache.store(tokens, live, model="m", write_back_from=since).tokens == end
            cache.check_integrity()
            now = images(cache)
            assert all(now[key] == image for key, image in written.items() if key[0] == "rows")
            written = now
            if since == 0:
                assert alike(live, whole_hit(cache, tokens), end // BLOCK * BLOCK)


@pytest.mark.parametrize("here", [True, False])
@pytest.mark.parametrize("step", [256, 512])
def test_a_branch_whose_twin_has_forgotten_its_window(here: bool, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPU's launch some targets are whole blocks, and others take rows over from the twin."""
    monkeypatch.setattr("prefixcache.layers.encode.on_cpu", lambda: here)
    first = list(range(768))
    second = first[:28] + [9999] * (512 - 28)
    with PrefixCache(ram="50MB", codec="turboquant") as cache:
        other = [KVCache(), RotatingKVCache(300)]
        for at in range(0, 768, step):
            extend(other, some_rows(768), at, min(at + step, 768))
        cache.store(first, other, model="m", write_back_from=0)
        live = [KVCache(), RotatingKVCache(300)]
        for at in range(0, 512, step):
            extend(live, some_rows(768), at, at + step)
        cache.store(second, live, model="m", write_back_from=0)
        assert alike(live, whole_hit(cache, second))


def test_what_is_kept_as_it_is_of_blocks_that_stood_is_put_back_too() -> None:
    """Another cache stored them, of rows that are not quite these: whole layers, a ring's first tokens, and sinks."""
    tokens = list(range(700))
    with PrefixCache(ram="50MB", codec=TurboQuant(layers={0: None})) as cache:
        for seed in (1, 2):
            live = extend([KVCache(), RotatingKVCache(2000, 6)], some_rows(700, seed), 0, 700)
            cache.store(tokens[:512], live, model="m", write_back_from=0)
            back = whole_hit(cache, tokens[:512])
            for own, other in zip(held(live), held(back), strict=True):
                for part in PARTS:
                    assert {t: b for t, b in own[part].items() if t < 512} == other[part]


def test_a_hit_ends_anywhere_in_an_incomplete_block_and_never_inside_a_whole_one() -> None:
    tokens = list(range(600))
    with PrefixCache(ram="50MB", codec="turboquant:4") as cache:

        def depth(parts_at: int) -> int:
            return cache.match(cache.prompt([*tokens[:parts_at], 9999], model="m", whole_blocks=True)).ram

        cache.store(tokens[:400], extend([KVCache(), KVCache()], some_rows(400), 0, 400), model="m")
        assert [depth(at) for at in (100, 256, 257, 300, 400, 500)] == [0, 256, 257, 300, 400, 400]
        cache.store(tokens, extend([KVCache(), KVCache()], some_rows(600), 0, 600), model="m")
        assert [depth(at) for at in (300, 400, 512, 550, 600)] == [256, 256, 512, 550, 600]
