"""Levels: each block's own, measured on its rows when it is whole, and kept in its image beside the codes."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache

from prefixcache import PrefixCache, TurboQuant
from prefixcache.codecs.turboquant.measure_levels import measure_levels
from tests.inside import inside
from tests.models.states import whole_hit

HEADS, WIDTH = 2, 64


def skewed(tokens: int, seed: int = 0, cls: type = KVCache, **kwargs: int) -> list[object]:
    """A prompt cache whose channels have spreads of their own, and those of keys offsets, the same in every prompt."""
    shape = np.random.default_rng(99)
    spread, offset = (
        np.exp(1.5 * shape.standard_normal((HEADS, 1, WIDTH))),
        40 * shape.standard_normal((HEADS, 1, WIDTH)),
    )
    rng = np.random.default_rng(seed)
    layers = []
    for _ in range(2):
        layer = cls(**kwargs)
        rows = [
            mx.array((rng.standard_normal((1, HEADS, tokens, WIDTH)) * spread + own).astype(np.float16))
            for own in (offset, 0)
        ]
        layer.update_and_fetch(*rows)
        layers.append(layer)
    return layers


def error(live: list[object], back: list[object], tokens: int, parts: tuple[str, ...] = ("keys", "values")) -> float:
    total = []
    for a, b in zip(live, back, strict=True):
        for name in parts:
            x = np.array(getattr(a, name)[..., :tokens, :]).astype(np.float64)
            y = np.array(getattr(b, name)[..., :tokens, :]).astype(np.float64)
            total.append(np.mean((x - y) ** 2) / np.mean((x - x.mean(2, keepdims=True)) ** 2))
    return float(np.mean(total))


def rows_tensors(cache: PrefixCache, tokens: list[int]) -> list[dict[str, np.ndarray]]:
    entry = cache.lookup(tokens, model="m")
    assert entry is not None
    return [block.tensors for block in entry.blocks]


def apart(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Copies that outlive their image."""
    return {name: np.array(array) for name, array in tensors.items()}


def equal(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def other(tokens: int, seed: int) -> list[object]:
    """Another kind of text: its channels' offsets and spreads are others."""
    rng = np.random.default_rng(seed)
    layers = []
    for layer in skewed(tokens, seed):
        made = KVCache()
        spread, offset = np.exp(1.5 * rng.standard_normal((2, 1, 2, 1, WIDTH)))
        made.update_and_fetch(
            (layer.keys[..., :tokens, :] * spread - 70 * offset).astype(mx.float16),
            (layer.values[..., :tokens, :] / spread).astype(mx.float16),
        )
        layers.append(made)
    return layers


@pytest.mark.parametrize("bits", [3, 4])
def test_levels_take_what_all_rows_have_in_common_out_of_the_error(bits: int) -> None:
    tokens, live = list(range(700)), skewed(700)
    errors = {}
    for levelling in (True, False):
        with PrefixCache(ram="50MB", codec=TurboQuant(bits, bits, levelling=levelling)) as cache:
            cache.store(tokens, live, model="m")
            cache.check_integrity()
            errors[levelling] = error(live, whole_hit(cache, tokens), 700, ("keys",))
    assert errors[True] < errors[False] / 50


def test_a_block_far_from_the_first_prompt_s_kind_is_as_good_as_the_first() -> None:
    first, second = list(range(512)), list(range(5000, 5512))
    with PrefixCache(ram="50MB", codec=TurboQuant()) as cache:
        cache.store(first, skewed(512), model="m")
        cache.store(second, other(512, 3), model="m")
        mine = whole_hit(cache, second)
        codes = apart(rows_tensors(cache, second)[1])
    with PrefixCache(ram="50MB", codec=TurboQuant()) as alone:
        alone.store(second, other(512, 3), model="m")
        assert equal(codes, rows_tensors(alone, second)[1])
    keys = [np.array(layer.keys[..., :512, :]).astype(np.float64) for layer in other(512, 3)]
    back = [np.array(layer.keys[..., :512, :]).astype(np.float64) for layer in mine]
    wrong = [
        np.mean((x - y) ** 2) / np.mean((x - x.mean(2, keepdims=True)) ** 2) for x, y in zip(keys, back, strict=True)
    ]
    assert max(wrong) < 0.012


def test_a_short_first_prompt_changes_nothing() -> None:
    tokens, images = list(range(600)), []
    for before in (0, 3, 40, 255):
        with PrefixCache(ram="50MB", codec=TurboQuant()) as cache:
            if before:
                cache.store(list(range(9000, 9000 + before)), other(before, 5), model="m")
            cache.store(tokens, skewed(600), model="m")
            images.append([apart(block) for block in rows_tensors(cache, tokens)])
    assert all(equal(a, b) for image in images[1:] for a, b in zip(images[0], image, strict=True))


def test_prompts_have_the_same_images_in_whatever_order_they_come() -> None:
    prompts = {n: list(range(1000 * n, 1000 * n + 600)) for n in (1, 2, 3)}
    images = []
    for order in ((1, 2, 3), (3, 1, 2)):
        with PrefixCache(ram="50MB", codec=TurboQuant()) as cache:
            for n in order:
                cache.store(prompts[n], other(600, n), model="m")
            images.append({n: [apart(block) for block in rows_tensors(cache, prompts[n])] for n in order})
    for n in prompts:
        assert all(equal(a, b) for a, b in zip(images[0][n], images[1][n], strict=True))


def test_an_image_of_a_block_has_its_levels_and_one_of_a_tail_has_its_rows() -> None:
    tokens, live = list(range(300)), skewed(300)
    with PrefixCache(ram="50MB", codec=TurboQuant(4, 3)) as cache:
        cache.store(tokens, live, model="m")
        whole, tail = rows_tensors(cache, tokens)
        (home,) = inside(cache).storage.namespaces.values()
        keys, values = home.plan.rows.groups
        assert (keys.mean, keys.steps, values.mean, values.steps) == ("r0.mean", "r0.root", "", "r1.root")
        for group in (keys, values):
            assert (whole[group.steps].dtype, whole[group.steps].shape) == (np.uint8, (2 * HEADS, WIDTH))
        assert (whole[keys.mean].dtype, whole[keys.mean].shape) == (np.uint16, (2 * HEADS, WIDTH))
        assert all(whole[group.steps].max() > 16 for group in (keys, values))
        assert set(tail) == {"t0.rows", "tokens"}
        assert tail["t0.rows"].dtype == np.float16
        for a, b in zip(live, whole_hit(cache, tokens), strict=True):
            assert mx.array_equal(a.keys[..., 256:300, :], b.keys[..., 256:300, :])
            assert mx.array_equal(a.values[..., 256:300, :], b.values[..., 256:300, :])


def test_levels_are_those_of_the_block_s_rows_but_for_the_sinks() -> None:
    tokens, live = list(range(600)), skewed(600)
    for layer in live:
        layer.keys[..., :4, :] = 3e4 * mx.sin(mx.arange(WIDTH)).astype(mx.float16)
    with PrefixCache(ram="50MB", codec=TurboQuant()) as cache:
        cache.store(tokens, live, model="m")
        for start, tensors in zip((0, 256), rows_tensors(cache, tokens), strict=False):
            # keys and values have rows of other codecs: those of keys are centred
            keys = np.concatenate([np.array(layer.keys[0, :, max(start, 4) : start + 256]) for layer in live])
            mean, steps = measure_levels(keys.swapaxes(0, 1).astype(np.float32), True).packed()
            assert np.array_equal(tensors["r0.mean"], mean)
            assert np.array_equal(tensors["r0.root"], steps)
        back = whole_hit(cache, tokens)
        assert all(mx.array_equal(a.keys[..., :4, :], b.keys[..., :4, :]) for a, b in zip(live, back, strict=True))


@pytest.mark.parametrize("harm", ["mean", "root", "shape"])
def test_an_image_without_its_levels_does_not_fit(harm: str) -> None:
    from prefixcache.image_format import Blueprint, Spec

    tokens = list(range(256))
    with PrefixCache(ram="50MB", codec=TurboQuant()) as cache:
        cache.store(tokens, skewed(256), model="m")
        (home,) = inside(cache).storage.namespaces.values()
        (slot,) = inside(cache).storage.graph.orders[0]
        meta, _ = slot.image.header()
        assert home.plan.fits(slot.image, "rows", 0, 256)
        specs = home.plan.rows_specs(0, 256, True)
        if harm == "shape":
            specs = [Spec(s.name, s.dtype, (s.shape[0] + 1, *s.shape[1:])) if s.name == "r0.root" else s for s in specs]
        else:
            specs = [spec for spec in specs if spec.name != f"r0.{harm}"]
        assert not home.plan.fits(Blueprint(meta, specs).draft().seal(), "rows", 0, 256)


def test_a_whole_block_kept_as_a_tail_is_does_not_fit() -> None:
    """Nor a tail with the rows of a whole block."""
    from prefixcache.image_format import Blueprint

    with PrefixCache(ram="50MB", codec=TurboQuant()) as cache:
        cache.store(list(range(300)), skewed(300), model="m")
        (home,) = inside(cache).storage.namespaces.values()
        meta, _ = next(slot for slot in inside(cache).storage.graph.orders[0] if slot.node.start == 0).image.header()

        def fits(tokens: int, coded: bool) -> bool:
            image = Blueprint(meta, home.plan.rows_specs(0, tokens, coded)).draft().seal()
            return bool(home.plan.fits(image, "rows", 0, tokens))

        assert fits(256, True)
        assert not fits(256, False)
        assert fits(100, False)
        assert fits(100, True)  # of a live cache's codes


def test_levels_are_the_same_after_a_restart(tmp_path: Path) -> None:
    live, tokens = skewed(700), list(range(700))
    settings = {"ram": "50MB", "ssd_dir": tmp_path / "ssd", "ssd": "1GB", "codec": TurboQuant()}
    with PrefixCache(**settings) as cache:
        cache.store(tokens, live, model="m")
        before = whole_hit(cache, tokens)
    with PrefixCache(**settings) as cache:
        assert cache.promote(tokens, model="m").result(20) == 700
        after = whole_hit(cache, tokens)
        for a, b in zip(before, after, strict=True):
            assert mx.array_equal(a.keys, b.keys)
            assert mx.array_equal(a.values, b.values)
        cache.check_integrity()


def test_rows_that_two_prompts_share_within_a_block_keep_their_codes() -> None:
    """And with them their levels, which code the rest of the second prompt's block."""
    live = skewed(600)
    with PrefixCache(ram="50MB", codec=TurboQuant()) as cache:
        cache.store(list(range(600)), live, model="m")
        fork = [*range(400), *range(7000, 7200)]
        cache.store(fork, live, model="m")
        one, two = (rows_tensors(cache, tokens)[1] for tokens in (list(range(600)), fork))
        assert all(np.array_equal(one[name][:144], two[name][:144]) for name in ("r0.codes", "r0.scale", "r1.codes"))
        assert all(np.array_equal(one[name], two[name]) for name in ("r0.mean", "r0.root", "r1.root"))
        assert error(live, whole_hit(cache, fork), 600) < 0.02
        cache.check_integrity()


def test_windows_have_levels_of_their_own() -> None:
    live, tokens = skewed(900, cls=RotatingKVCache, max_size=512, keep=4), list(range(900))
    errors = {}
    for levelling in (True, False):
        with PrefixCache(ram="50MB", codec=TurboQuant(levelling=levelling)) as cache:
            cache.store(tokens, live, model="m")
            back = whole_hit(cache, tokens)
            for a, b in zip(live, back, strict=True):
                assert mx.array_equal(a.keys[..., :4, :], b.keys[..., :4, :])
                assert mx.array_equal(a.keys[..., -132:, :], b.keys[..., -132:, :])  # the tail's
            x, y = (np.array(c[0].keys).astype(np.float64)[:, :, 10:] for c in (live[:1], back))
            x = x[:, :, -y.shape[2] :]
            errors[levelling] = np.mean((x - y) ** 2)
            cache.check_integrity()
    assert errors[True] < errors[False] / 50


def test_the_first_tokens_stay_as_they_are_when_sinks_are_asked_for() -> None:
    live, tokens = skewed(600), list(range(600))
    with PrefixCache(ram="50MB", codec=TurboQuant(2, 2, sink_tokens=5)) as cache:
        cache.store(tokens[:3], [_cut(layer, 3) for layer in live], model="m")
        cache.store(tokens, live, model="m")
        for depth in (2, 5, 300, 600):
            back = whole_hit(cache, tokens[:depth])
            for a, b in zip(live, back, strict=True):
                same = np.array(a.keys[..., :depth, :]) == np.array(b.keys[..., :depth, :])
                assert same[..., :5, :].all()
                assert depth <= 5 or not same[..., 5:, :].all()
        entry = cache.lookup(tokens, model="m")
        assert entry is not None
        assert sum(layer.nbytes for layer in entry.layers) < entry.nbytes
        cache.check_integrity()


def test_layers_at_the_ends_stay_as_they_are_when_asked_for() -> None:
    live, tokens = [*skewed(300), *skewed(300, 1)], list(range(300))
    with PrefixCache(ram="50MB", codec=TurboQuant(fp16_layers=1)) as cache:
        assert cache.store(tokens, live, model="m").raw_layers == (0, 3)
        back = whole_hit(cache, tokens)
        same = [
            np.array_equal(np.array(a.keys[..., :300, :]), np.array(b.keys[..., :300, :]))
            for a, b in zip(live, back, strict=True)
        ]
        assert same == [True, False, False, True]


def test_five_turns_of_store_and_fetch_leave_the_codes_as_they_were() -> None:
    tokens, live = list(range(777)), skewed(777)
    with PrefixCache(ram="50MB", codec=TurboQuant(3, 3)) as cache:
        cache.store(tokens, live, model="m")
        codes = [bytes(slot.image.data) for slot in inside(cache).storage.graph.orders[0]]
        first = whole_hit(cache, tokens)
        for turn in range(5):
            back = whole_hit(cache, tokens)
            assert all(np.array_equal(np.array(a.keys), np.array(b.keys)) for a, b in zip(first, back, strict=True))
            stored = cache.store(tokens, back, model="m")
            assert (stored.new_tokens, stored.new_bytes) == (0, 0), turn
        assert sorted(bytes(slot.image.data) for slot in inside(cache).storage.graph.orders[0]) == sorted(codes)


def _cut(layer: KVCache, tokens: int) -> KVCache:
    made = KVCache()
    made.update_and_fetch(layer.keys[..., :tokens, :], layer.values[..., :tokens, :])
    return made
