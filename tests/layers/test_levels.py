"""Levels: measured from the first prompt that is long enough, kept beside the images, found again, or done without."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache

from prefixcache import PrefixCache, TurboQuant

HEADS, WIDTH = 2, 64


def skewed(tokens: int, seed: int = 0, cls: type = KVCache, **kwargs: int) -> list[object]:
    """A prompt cache whose channels have spreads and offsets of their own, the same in every prompt."""
    shape = np.random.default_rng(99)
    spread, offset = (
        np.exp(1.5 * shape.standard_normal((HEADS, 1, WIDTH))),
        40 * shape.standard_normal((HEADS, 1, WIDTH)),
    )
    rng = np.random.default_rng(seed)
    layers = []
    for _ in range(2):
        layer = cls(**kwargs)
        rows = [mx.array((rng.standard_normal((1, HEADS, tokens, WIDTH)) * spread + offset).astype(np.float16))
                for _ in range(2)]  # fmt: skip
        layer.update_and_fetch(*rows)
        layers.append(layer)
    return layers


def error(live: list[object], back: list[object], tokens: int) -> float:
    total = []
    for a, b in zip(live, back, strict=True):
        for name in ("keys", "values"):
            x = np.array(getattr(a, name)[..., :tokens, :]).astype(np.float64)
            y = np.array(getattr(b, name)[..., :tokens, :]).astype(np.float64)
            total.append(np.mean((x - y) ** 2) / np.mean((x - x.mean(2, keepdims=True)) ** 2))
    return float(np.mean(total))


def names(cache: PrefixCache) -> set[str]:
    """The statistics that images in RAM name."""
    return {slot.needs for slot in cache._tiers.tree.order[0]}


def fetched(cache: PrefixCache, tokens: list[int]) -> list[object]:
    made, rest = cache.fetch(tokens, model="m", leave=0)
    assert made is not None
    assert rest == []
    return made


@pytest.mark.parametrize("bits", [3, 4])
def test_levels_take_what_all_rows_have_in_common_out_of_the_error(bits: int) -> None:
    tokens, live = list(range(700)), skewed(700)
    errors = {}
    for levelling in (True, False):
        with PrefixCache(ram="50MB", codec=TurboQuant(bits, bits, levelling=levelling)) as cache:
            cache.store(tokens, live, model="m")
            cache.check_integrity()
            assert bool(names(cache) - {""}) == levelling
            errors[levelling] = error(live, fetched(cache, tokens), 700)
    assert errors[True] < errors[False] / 50


def test_a_first_prompt_that_is_short_is_coded_without_and_the_next_long_one_brings_levels() -> None:
    with PrefixCache(ram="50MB", codec=TurboQuant()) as cache:
        short, long = skewed(255), skewed(600, 1)
        cache.store(list(range(255)), short, model="m")
        assert names(cache) == {""}
        cache.store(list(range(1000, 1600)), long, model="m")
        (own,) = names(cache) - {""}
        assert error(short, fetched(cache, list(range(255))), 255) > 20 * error(
            long, fetched(cache, list(range(1000, 1600))), 600
        )
        cache.store(list(range(5000, 5300)), skewed(300, 2), model="m")
        assert names(cache) == {"", own}
        cache.check_integrity()


def test_a_tail_that_grows_keeps_the_levels_of_its_codes_and_blocks_after_it_have_the_namespace_s() -> None:
    """The codes of the first 100 tokens are plain and stay so; each image says what it needs."""
    with PrefixCache(ram="50MB", codec=TurboQuant()) as cache:
        live, tokens = skewed(600), list(range(600))
        first = [KVCache() for _ in live]
        for a, b in zip(live, first, strict=True):
            b.update_and_fetch(a.keys[..., :100, :], a.values[..., :100, :])
        cache.store(tokens[:100], first, model="m")
        before = fetched(cache, tokens[:100])
        cache.store(tokens, live, model="m")
        nodes = [slot for slot in cache._tiers.tree.order[0] if slot.kind == "rows"]
        assert [bool(slot.needs) for slot in sorted(nodes, key=lambda s: s.node.start)] == [False, True, True]
        whole = fetched(cache, tokens)
        assert np.array_equal(np.array(whole[0].keys[..., :100, :]), np.array(before[0].keys[..., :100, :]))
        assert error(live, whole, 600) < 0.5
        cache.check_integrity()


def test_levels_are_found_again_after_a_restart_and_used_for_what_is_new(tmp_path: Path) -> None:
    live, tokens = skewed(700), list(range(700))
    settings = {"ram": "50MB", "ssd_dir": tmp_path / "ssd", "ssd": "1GB", "codec": TurboQuant()}
    with PrefixCache(**settings) as cache:
        cache.store(tokens, live, model="m")
        before = fetched(cache, tokens)
        (own,) = names(cache)
    assert [file.name for file in (tmp_path / "ssd" / "stats").iterdir()] == [f"{own}.safetensors"]
    with PrefixCache(**settings) as cache:
        assert cache.match(tokens, model="m") == (0, 700)
        cache.store(list(range(9000, 9600)), skewed(600, 1), model="m")
        assert names(cache) == {own}
        assert cache.promote(tokens, model="m").result(20) == 700
        after = fetched(cache, tokens)
        assert all(np.array_equal(np.array(a.keys), np.array(b.keys)) for a, b in zip(before, after, strict=True))
        cache.check_integrity()


@pytest.mark.parametrize("harm", ["missing", "flipped"])
def test_images_whose_levels_are_lost_are_a_miss_and_are_made_anew(tmp_path: Path, harm: str) -> None:
    live, tokens = skewed(600), list(range(600))
    settings = {"ram": "50MB", "ssd_dir": tmp_path / "ssd", "ssd": "1GB", "codec": TurboQuant()}
    with PrefixCache(**settings) as cache:
        cache.store(tokens, live, model="m")
    (file,) = (tmp_path / "ssd" / "stats").iterdir()
    if harm == "missing":
        file.unlink()
    else:
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)
    with PrefixCache(**settings) as cache:
        assert cache.promote(tokens, model="m").result(20) == 0
        assert cache.match(tokens, model="m") == (0, 0)
        assert cache.stats().counters.corrupt >= 3
        cache.store(tokens, live, model="m")
        assert error(live, fetched(cache, tokens), 600) < 0.02
        assert cache.flush(20)
        cache.check_integrity()
    with PrefixCache(**settings) as cache:
        assert cache.promote(tokens, model="m").result(20) == 600


def test_levels_leave_ram_with_the_last_image_that_needs_them() -> None:
    with PrefixCache(ram="50MB", codec=TurboQuant()) as cache:
        cache.store(list(range(600)), skewed(600), model="m")
        assert len(cache._tiers.tree.shared) == 1
        cache.clear()
        assert not cache._tiers.tree.shared
        assert cache._tiers.budget.held().images == 0
        cache.check_integrity()


@pytest.mark.parametrize("tier", ["ram only", "ssd, all dropped"])
def test_levels_that_left_with_their_images_are_measured_again(tmp_path: Path, tier: str) -> None:
    """Without the file there is nothing to wait for: rows must not be coded without levels from then on."""
    settings = {} if tier == "ram only" else {"ssd_dir": tmp_path / "ssd", "ssd": "1GB"}
    with PrefixCache(ram="5MB", codec=TurboQuant(), **settings) as cache:
        cache.store(list(range(600)), skewed(600), model="m")
        (first,) = names(cache)
        if tier == "ram only":
            cache.trim_to(0)
        else:
            with cache._tiers.lock:
                for slot in list(cache._tiers.tree.order[0]):
                    cache._tiers.discard(slot)
        assert not cache._tiers.tree.shared
        cache.store(list(range(1000, 1600)), skewed(600, 1), model="m")
        (second,) = names(cache)
        assert second
        assert second != first
        cache.check_integrity()


def test_a_budget_too_small_for_levels_stores_without() -> None:
    with PrefixCache(ram="60kB", codec=TurboQuant(2, 2)) as cache:
        cache.store(list(range(300)), skewed(300), model="m")
        cache.check_integrity()
        assert cache.match(list(range(300)), model="m").ram >= 0


def test_tenants_have_levels_of_their_own() -> None:
    with PrefixCache(ram="50MB", codec=TurboQuant()) as cache:
        for salt in (b"a", b"b"):
            cache.store(list(range(600)), skewed(600, salt[0]), model="m", salt=salt)
        assert len(names(cache)) == 2


def test_windowed_layers_have_levels_too_for_kept_rows_and_windows_alike() -> None:
    live, tokens = skewed(900, cls=RotatingKVCache, max_size=512, keep=4), list(range(900))
    errors = {}
    for levelling in (True, False):
        with PrefixCache(ram="50MB", codec=TurboQuant(levelling=levelling)) as cache:
            cache.store(tokens, live, model="m")
            back = fetched(cache, tokens)
            x, y = (np.array(c[0].keys).astype(np.float64)[:, :, :4] for c in (live, back))
            errors[levelling] = np.mean((x - y) ** 2)
            cache.check_integrity()
    assert errors[True] < errors[False] / 50


def test_the_first_tokens_stay_as_they_are_when_sinks_are_asked_for() -> None:
    live, tokens = skewed(600), list(range(600))
    with PrefixCache(ram="50MB", codec=TurboQuant(2, 2, sink_tokens=5)) as cache:
        cache.store(tokens[:3], [_cut(layer, 3) for layer in live], model="m")
        cache.store(tokens, live, model="m")
        for depth in (2, 5, 300, 600):
            back = fetched(cache, tokens[:depth])
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
        back = fetched(cache, tokens)
        same = [np.array_equal(np.array(a.keys[..., :300, :]), np.array(b.keys[..., :300, :]))
                for a, b in zip(live, back, strict=True)]  # fmt: skip
        assert same == [True, False, False, True]


def test_five_turns_of_store_and_fetch_leave_the_codes_as_they_were() -> None:
    tokens, live = list(range(777)), skewed(777)
    with PrefixCache(ram="50MB", codec=TurboQuant(3, 3)) as cache:
        cache.store(tokens, live, model="m")
        codes = [bytes(slot.image.data) for slot in cache._tiers.tree.order[0]]
        first = fetched(cache, tokens)
        for turn in range(5):
            back = fetched(cache, tokens)
            assert all(np.array_equal(np.array(a.keys), np.array(b.keys)) for a, b in zip(first, back, strict=True))
            stored = cache.store(tokens, back, model="m")
            assert (stored.new_tokens, stored.new_bytes) == (0, 0), turn
        assert sorted(bytes(slot.image.data) for slot in cache._tiers.tree.order[0]) == sorted(codes)


def _cut(layer: KVCache, tokens: int) -> KVCache:
    made = KVCache()
    made.update_and_fetch(layer.keys[..., :tokens, :], layer.values[..., :tokens, :])
    return made


# -- two sets of levels in one namespace, and what may happen in between --------------------------------------------------


def without(cache: PrefixCache) -> None:
    """From now on the namespace's current levels are forgotten: the next store measures others."""
    cache._tiers._current.clear()


def test_a_hit_over_blocks_of_different_levels_is_put_together_with_windows_below_it() -> None:
    """A window that no boundary near the hit needs may have been coded with other levels than all that serve it."""
    tokens = list(range(1500))
    with PrefixCache(ram="50MB", codec=TurboQuant(8, 8)) as cache:
        first = [*skewed(1000), *skewed(1000, 4, RotatingKVCache, max_size=300)]
        cache.store(tokens[:1000], first, model="m")
        without(cache)
        longer = [*skewed(1500), *skewed(1500, 4, RotatingKVCache, max_size=300)]
        cache.store(tokens, longer, model="m")
        assert len(names(cache) - {""}) == 2
        for depth in (1000, 1300, 1500):
            made, _ = cache.fetch(tokens[:depth], model="m", leave=0)
            assert made is not None
        assert cache.stats().pinned == 0
        cache.check_integrity()


def test_a_window_that_is_the_last_to_need_its_levels_makes_place_for_a_larger_one() -> None:
    """The larger takes its codes over, so those levels must not go with it."""
    tokens = list(range(700))
    with PrefixCache(ram="50MB", codec=TurboQuant(8, 8)) as cache:

        def ring(last: int) -> list[object]:
            return [*skewed(last), *skewed(last, 4, RotatingKVCache, max_size=300)]

        cache.store(tokens[:400], ring(400), model="m")
        without(cache)
        cache.store(tokens, ring(700), model="m")
        for tail in (500, 600, 700):
            without(cache)
            cache.store(tokens[:tail], ring(tail), model="m")
            cache.check_integrity()
        assert cache.fetch(tokens, model="m", leave=0)[0] is not None


def test_a_store_whose_source_is_cleared_meanwhile_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefixcache import storing

    tokens, live = list(range(600)), skewed(600)
    with PrefixCache(ram="50MB", codec=TurboQuant(8, 8)) as cache:
        cache.store(tokens[:300], [_cut(layer, 300) for layer in live], model="m")
        without(cache)
        encode = storing.encode

        def cleared(*args: object) -> None:
            cache.clear()
            encode(*args)

        monkeypatch.setattr(storing, "encode", cleared)
        cache.store(tokens, live, model="m")
        monkeypatch.setattr(storing, "encode", encode)
        cache.check_integrity()
        assert cache.stats().pinned == 0
        assert cache.store(tokens, live, model="m").tokens == 600
        cache.check_integrity()


def test_levels_of_another_namespace_are_never_used(tmp_path: Path) -> None:
    """An index row that was damaged so that it names them is a miss, and costs the other namespace nothing."""
    import sqlite3

    settings = {"ram": "50MB", "ssd_dir": tmp_path / "ssd", "ssd": "1GB", "codec": TurboQuant()}
    tokens = list(range(600))
    with PrefixCache(**settings) as cache:
        for salt in (b"a", b"b"):
            cache.store(tokens, skewed(600, salt[0]), model="m", salt=salt)
        before = cache.fetch(tokens, model="m", salt=b"b", leave=0)[0]
    with sqlite3.connect(tmp_path / "ssd" / "index.db") as index:
        spaces = index.execute("SELECT namespace, statistics FROM image GROUP BY namespace").fetchall()
        (one, _), (_, other) = spaces
        index.execute("UPDATE image SET statistics = ? WHERE namespace = ?", (other, one))
    index.close()
    with PrefixCache(**settings) as cache:
        depths = [cache.promote(tokens, model="m", salt=salt).result(20) for salt in (b"a", b"b")]
        assert sorted(depths) == [0, 600]
        cache.check_integrity()
        for salt in (b"a", b"b"):
            cache.store(tokens, skewed(600, salt[0]), model="m", salt=salt)
            assert cache.fetch(tokens, model="m", salt=salt, leave=0)[0] is not None
        after = cache.fetch(tokens, model="m", salt=b"b", leave=0)[0]
        assert np.array_equal(np.array(before[0].keys), np.array(after[0].keys))
        cache.check_integrity()


def test_a_row_whose_levels_are_not_its_file_s_leaves_and_is_stored_anew(tmp_path: Path) -> None:
    import sqlite3

    settings = {"ram": "50MB", "ssd_dir": tmp_path / "ssd", "ssd": "1GB", "codec": TurboQuant()}
    tokens, live = list(range(600)), skewed(600)
    with PrefixCache(**settings) as cache:
        cache.store(tokens, live, model="m")
    with sqlite3.connect(tmp_path / "ssd" / "index.db") as index:
        index.execute("UPDATE image SET statistics = '' WHERE start = 0")
    index.close()
    with PrefixCache(**settings) as cache:
        assert cache.promote(tokens, model="m").result(20) == 0
        cache.store(tokens, live, model="m")
        assert cache.fetch(tokens, model="m", leave=0)[0] is not None
        cache.check_integrity()
    with PrefixCache(**settings) as cache:
        assert cache.promote(tokens, model="m").result(20) == 600


def test_windows_that_are_new_after_a_restart_have_the_namespace_s_levels(tmp_path: Path) -> None:
    settings = {"ram": "50MB", "ssd_dir": tmp_path / "ssd", "ssd": "1GB", "codec": TurboQuant()}
    tokens, whole = list(range(1000)), skewed(1000, 4)

    def ring(last: int) -> list[object]:
        """Read in chunks, so that it holds no more than its window and a chunk."""
        windowed = []
        for layer in whole:
            made = RotatingKVCache(max_size=300)
            for at in range(0, last, 100):
                made.update_and_fetch(layer.keys[..., at : at + 100, :], layer.values[..., at : at + 100, :])
            windowed.append(made)
        return [*skewed(last), *windowed]

    with PrefixCache(**settings) as cache:
        cache.store(tokens, ring(1000), model="m")
        (own,) = names(cache) - {""}
    with PrefixCache(**settings) as cache:
        cache.store(tokens[:600], ring(600), model="m")
        assert names(cache) == {own}


def test_a_measurement_that_fails_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefixcache import storing

    def fail(*args: object) -> None:
        raise MemoryError

    with PrefixCache(ram="5MB", codec=TurboQuant()) as cache:
        monkeypatch.setattr(storing, "measure_all", fail)
        with pytest.raises(MemoryError):
            cache.store(list(range(300)), skewed(300), model="m")
        held = cache.stats()
        assert (held.pinned, held.ram_reserved, held.ram_images) == (0, 0, 0)
        cache.check_integrity()


def test_a_prompt_that_repeats_a_few_tokens_brings_no_levels() -> None:
    """A warm-up's keys hardly vary: levels of them would harm all later prompts."""
    with PrefixCache(ram="50MB", codec=TurboQuant()) as cache:
        cache.store([i % 31 for i in range(600)], skewed(600), model="m")
        assert names(cache) == {""}
        cache.store([i % 32 for i in range(600)], skewed(600, 1), model="m")
        assert names(cache) - {""}


@pytest.mark.parametrize("harm", ["truncated", "folder", "link"])
def test_a_damaged_file_of_levels_is_replaced_when_they_are_written_again(tmp_path: Path, harm: str) -> None:
    live, tokens = skewed(600), list(range(600))
    settings = {"ram": "50MB", "ssd_dir": tmp_path / "ssd", "ssd": "1GB", "codec": TurboQuant()}
    with PrefixCache(**settings) as cache:
        cache.store(tokens, live, model="m")
    (file,) = (tmp_path / "ssd" / "stats").iterdir()
    whole = file.read_bytes()
    file.unlink()
    if harm == "truncated":
        file.write_bytes(whole[:100])
    elif harm == "folder":
        file.mkdir()
    else:
        file.symlink_to("/etc/hostname")
    with PrefixCache(**settings) as cache:
        cache.store(tokens, live, model="m")
        assert cache.promote(tokens, model="m").result(20) in (0, 600)
        cache.store(tokens, live, model="m")
        assert cache.fetch(tokens, model="m", leave=0)[0] is not None
    with PrefixCache(**settings) as cache:
        assert cache.promote(tokens, model="m").result(20) == 600
        assert error(live, fetched(cache, tokens), 600) < 0.02
