"""What PrefixCache promises, call by call, with real caches, real files and real threads."""

import asyncio
import gc
import os
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from prefixcache import DirectoryError, DirectoryHeld, PrefixCache, Settings, TurboQuant
from tests import states

LONG = list(range(1000))


def put(cache, tokens, make=states.sliceable, **kw):
    return cache.store(tokens, make(tokens), model="m", **kw)


def got(cache, tokens, **kw):
    """What a fetch gives, checked; the depth."""
    made, rest = cache.fetch(tokens, model="m", **kw)
    depth = len(tokens) - len(rest)
    if made is not None:
        states.check(made, tokens[:depth])
    return depth


# -- sharing ------------------------------------------------------------------------------------------------------------


def test_a_shared_prompt_is_stored_once(opened):
    cache = opened()
    put(cache, LONG)
    for i in range(10):
        stored = put(cache, LONG[:768] + [5000 + i] * 256)
        assert (stored.tokens, stored.new_tokens) == (1024, 256)
    assert cache.stats().blocks == 4 + 10


def test_a_turn_adds_its_new_tokens_only(opened):
    cache = opened()
    put(cache, LONG)
    before = cache.stats().counters.stored_bytes
    stored = put(cache, [*LONG, *range(2000, 2100)])
    assert stored.new_tokens == 100
    assert cache.stats().counters.stored_bytes - before < before / 2
    assert put(cache, LONG[:500]).new_tokens == 0


def test_a_tail_that_grows_is_extended_and_its_shorter_twin_leaves(opened):
    cache = opened()
    put(cache, LONG[:300])
    images = cache.stats().images_in_ram
    put(cache, LONG[:400])
    assert cache.stats().images_in_ram == images
    assert cache.flush(10)
    put(cache, LONG[:500])
    assert cache.flush(10)
    assert cache.flush(10)  # the twin's deletion was queued by the write's completion
    stats = cache.stats()
    assert stats.images_on_ssd == stats.ssd.files == images


def test_a_block_is_coded_once_when_it_is_whole(opened):
    """Turns of fetch and store: a tail's rows are the first ones, a block's are the codes of those, ever after."""
    cache = opened(codec=TurboQuant(key_bits=2, value_bits=2))
    rng = np.random.default_rng(0)

    def rows(n):
        return mx.array(rng.standard_normal((1, 2, n, 64)).astype(np.float16))

    live = [KVCache()]
    live[0].update_and_fetch(rows(100), rows(100))
    exact = np.array(live[0].keys[:, :, :100])
    cache.store(LONG[:100], live, model="m")
    coded = None
    for n in range(150, 600, 50):
        made, rest = cache.fetch(LONG[:n], model="m")
        made[0].update_and_fetch(rows(len(rest)), rows(len(rest)))
        cache.store(LONG[:n], made, model="m")
        now = np.array(cache.fetch(LONG[:n], model="m", leave=0)[0][0].keys[:, :, :100])
        if n < 256:
            assert np.array_equal(now, exact)
        else:
            coded = now if coded is None else coded
            assert np.array_equal(now, coded)
            assert not np.array_equal(now, exact)
    assert cache.stats().counters.recoded_tokens == 0


def test_a_diverging_prompt_hits_inside_a_block(opened):
    cache = opened()
    put(cache, LONG)
    assert got(cache, LONG[:777] + [9] * 50) == 777


def test_hits_with_a_hybrid_are_at_stored_boundaries(opened):
    cache = opened()
    for end in (100, 400, 700):
        assert put(cache, LONG[:end], states.hybrid).snapshot
    assert got(cache, LONG) == 700
    assert got(cache, LONG[:700]) == 400  # one token is left
    assert got(cache, LONG[:700], leave=0) == 700
    assert got(cache, LONG[:300]) == 100
    assert got(cache, LONG[:99]) == 0


def test_a_window_is_hit_wherever_its_rows_were_held(opened):
    cache = opened()
    tokens: list[int] = []
    for turn in range(6):
        tokens = tokens + [turn] * 150
        put(cache, tokens, lambda t: states.windowed(t, size=200, chunk=150))
    assert got(cache, tokens[:880] + [77] * 10) == 880
    assert got(cache, tokens[:520] + [77] * 10) == 520
    cache.trim_to(0)
    assert cache.match(tokens, model="m") == (0, 900)
    assert cache.promote(tokens, model="m").result(10) == 900


# -- tiers --------------------------------------------------------------------------------------------------------------


def test_what_ram_evicts_the_ssd_has_also_after_a_restart(opened):
    cache = opened()
    put(cache, LONG)
    cache.trim_to(0)
    assert cache.match(LONG, model="m").ram == 0
    assert got(cache, LONG) == 0
    assert cache.promote(LONG, model="m").result(10) == 1000
    assert got(cache, LONG) == 999
    cache.close()
    cache = opened()
    assert cache.match(LONG, model="m") == (0, 1000)
    assert cache.promote(LONG, model="m").result(10) == 1000
    assert got(cache, LONG) == 999


def test_close_writes_what_ram_holds_if_the_setting_says_so(opened):
    cache = opened(spill_on_close=False)
    put(cache, LONG)
    cache.close()
    cache = opened()
    assert cache.match(LONG, model="m").ssd == 0
    put(cache, LONG)
    cache.close()
    assert opened().match(LONG, model="m").ssd == 1000


def test_eviction_of_a_promoted_block_writes_nothing(opened):
    cache = opened()
    put(cache, LONG)
    cache.flush(10)
    written = cache.stats().ssd.written_bytes
    for _ in range(3):
        cache.trim_to(0)
        cache.promote(LONG, model="m").result(10)
    cache.flush(10)
    assert cache.stats().ssd.written_bytes == written


def test_storing_what_the_ssd_has_writes_and_encodes_nothing(opened):
    cache = opened()
    put(cache, LONG)
    cache.trim_to(0)
    cache.flush(10)
    written = cache.stats().ssd.written_files
    stored = put(cache, LONG)
    assert (stored.tokens, stored.new_tokens) == (1000, 0)
    cache.flush(10)
    assert cache.stats().ssd.written_files == written


def test_promotion_makes_room_by_evicting_colder_blocks(opened):
    cache = opened(ram=260_000, spill="wait")
    put(cache, LONG)
    for i in range(5):
        put(cache, [7000 + i] * 700)
    assert cache.match(LONG, model="m").ram < 1000
    assert cache.promote(LONG, model="m").result(10) == 1000
    assert got(cache, LONG) == 999
    cache.check_integrity()


def test_when_only_part_fits_the_leading_part_is_promoted(opened):
    cache = opened()
    put(cache, list(range(5000)))
    cache.close()
    cache = opened(ram=150_000)
    depth = cache.promote(list(range(5000)), model="m").result(10)
    assert 256 <= depth < 5000
    assert got(cache, list(range(5000))) == depth
    cache.check_integrity()


def test_promotions_of_one_path_at_once_read_each_file_once(opened):
    cache = opened()
    put(cache, LONG)
    cache.trim_to(0)
    cache.flush(10)
    before = cache.stats().ssd.read_files
    results = [cache.promote(LONG, model="m") for _ in range(8)]
    assert [r.result(10) for r in results] == [1000] * 8
    assert cache.stats().ssd.read_files - before == 4


def test_promote_async(opened):
    cache = opened()
    put(cache, LONG)
    cache.trim_to(0)
    assert asyncio.run(cache.promote_async(LONG, model="m")) == 1000


def test_a_file_that_went_bad_is_a_miss_and_the_rest_heals_when_stored_again(opened, tmp_path):
    cache = opened()
    put(cache, LONG)
    cache.trim_to(0)
    cache.flush(10)
    files = sorted((tmp_path / "ssd" / "rows").rglob("*.safetensors"), key=lambda f: f.stat().st_mtime_ns)
    raw = bytearray(files[1].read_bytes())
    raw[len(raw) // 2] ^= 4
    files[1].write_bytes(raw)
    depth = cache.promote(LONG, model="m").result(10)
    assert depth < 1000
    assert got(cache, LONG) == depth
    cache.check_integrity()
    assert cache.stats().counters.corrupt == 1
    assert cache.stats().ram_reserved == 0
    assert put(cache, LONG).new_tokens == 256 or put(cache, LONG).tokens == 1000
    assert cache.promote(LONG, model="m").result(10) == 1000
    assert got(cache, LONG) == 999
    cache.check_integrity()


def test_a_long_prompt_whose_first_file_vanished_is_stored_again_from_there(opened, tmp_path):
    """Its later blocks are known; there are more than one batch of them."""
    tokens = [i % 50_000 for i in range(18 * 256)]
    cache = opened(ram="20MB")
    put(cache, tokens)
    cache.flush(20)
    cache.trim_to(0, wait=10)
    (first,) = next(iter(cache._storage.graph.trees.values())).root.children
    (tmp_path / "ssd" / "rows" / first.key.hex()[:2] / f"{first.key.hex()}.safetensors").unlink()
    assert cache.promote(tokens, model="m").result(20) == 0
    assert put(cache, tokens).tokens == len(tokens)
    cache.promote(tokens, model="m").result(20)
    assert got(cache, tokens, leave=0) == len(tokens)
    cache.check_integrity()


def test_a_vanished_file_does_not_stop_anything(opened, tmp_path):
    cache = opened()
    put(cache, LONG)
    cache.trim_to(0)
    cache.flush(10)
    for file in (tmp_path / "ssd" / "rows").rglob("*.safetensors"):
        file.unlink()
    assert cache.promote(LONG, model="m").result(10) == 0
    assert put(cache, LONG).tokens == 1000
    cache.check_integrity()


def test_ssd_only_keeps_ram_for_transit(opened):
    cache = opened(ram=0, transit="2MB")
    put(cache, LONG)
    assert cache.flush(10)
    assert cache.stats().images_in_ram == 0
    assert cache.promote(LONG, model="m").result(10) == 1000
    assert got(cache, LONG) == 999


def test_ram_only_works_without_a_directory(opened):
    cache = opened(disk=False, ram=100_000)
    for i in range(10):
        put(cache, [i] * 600)
    assert cache.match([9] * 600, model="m") == (600, 600)
    assert cache.match([0] * 600, model="m").ssd < 600
    assert cache.promote([0] * 600, model="m").result(1) < 600
    assert cache.flush(1)


def test_a_full_queue_drops_the_coldest_and_counts_it(opened, monkeypatch):
    cache = opened(ram=200_000, spill="drop", spill_queue=1)
    monkeypatch.setattr(cache._ssd, "write", lambda *a: False)
    for i in range(10):
        assert put(cache, [i] * 600).tokens == 600
    assert cache.stats().counters.dropped > 0
    assert cache.match([9] * 600, model="m").ram == 600
    cache.check_integrity()


def test_waiting_for_the_disk_is_bounded_and_loses_nothing_meanwhile(opened):
    cache = opened(ram=600_000, spill="wait", spill_wait=10, spill_queue="100kB")
    for i in range(20):
        assert put(cache, [i] * 600).tokens == 600
    assert cache.stats().counters.dropped == 0
    for i in range(20):
        assert cache.match([i] * 600, model="m").ssd == 600


def test_the_ssd_limit_holds_and_the_coldest_leave_it(opened, tmp_path):
    cache = opened(ram="3MB", ssd="9MB", spill="wait")
    for i in range(150):
        put(cache, [i] * 600)
    cache.flush(20)
    assert cache.stats().ssd.used <= 9_000_000
    assert cache.stats().counters.ssd_evicted > 0
    assert cache.match([149] * 600, model="m").ssd == 600
    held = sum(f.stat().st_blocks * 512 for f in (tmp_path / "ssd").rglob("*"))
    assert held <= 9_000_000
    cache.close()
    cache = opened(ram="3MB", ssd="9MB", spill="wait")
    assert cache.match([149] * 600, model="m").ssd == 600
    for i in range(150, 200):
        put(cache, [i] * 600)
    cache.flush(20)
    assert cache.stats().ssd.used <= 9_000_000
    cache.check_integrity()


def test_a_limit_that_was_lowered_holds_from_the_opening_on(opened, tmp_path, caplog):
    cache = opened()
    for i in range(60):
        put(cache, [i] * 600)
    cache.close()
    cache = opened(ssd="3MB")
    cache.flush(10)
    assert cache.stats().ssd.used <= 3_000_000
    assert sum(f.stat().st_blocks * 512 for f in (tmp_path / "ssd").rglob("*")) <= 3_000_000
    assert "limit" in caplog.text
    assert cache.match([59] * 600, model="m").ssd == 600
    cache.check_integrity()
    cache.close()
    opened(ssd="100kB")
    assert "give it more" in caplog.text


def test_namespaces_that_hold_nothing_are_forgotten(opened):
    cache = opened()
    for i in range(30):
        cache.store([i] * 300, states.sliceable([i] * 300), model="m", salt=b"%d" % i)
    cache.clear()
    cache.store([1] * 300, states.sliceable([1] * 300), model="m", salt=b"x")
    cache.close()
    cache = opened()
    assert cache.stats().namespaces == 1
    cache.close()
    assert opened().match([1] * 300, model="m", salt=b"x").ssd == 300


def test_remove_of_nothing_removes_nothing(opened):
    cache = opened()
    put(cache, LONG)
    assert cache.remove([], model="m") == 0
    assert got(cache, LONG) == 999


def test_a_directory_larger_than_the_ram_can_index_opens_with_its_newest(opened):
    cache = opened()
    for i in range(60):
        put(cache, [i] * 600)
    cache.close()
    cache = opened(ram=200_000)
    assert cache.stats().ram_held <= 200_000
    assert cache.match([59] * 600, model="m").ssd == 600
    assert cache.match([0] * 600, model="m").ssd == 0
    cache.check_integrity()
    cache.close()
    assert opened().match([0] * 600, model="m").ssd == 600  # it was not lost


@pytest.mark.parametrize("ram", [20_000, 60_000, 130_000, 300_000, 700_000])
def test_of_a_prompt_too_long_for_ram_the_leading_part_is_kept(opened, ram):
    cache = opened(disk=False, ram=ram)
    tokens = list(range(9000))
    for make in (states.sliceable, states.windowed):
        stored = cache.store(tokens, make(tokens), model=make.__name__)
        cache.check_integrity()
        assert stored.tokens < 9000
        made, rest = cache.fetch(tokens, model=make.__name__)
        assert len(tokens) - len(rest) == stored.tokens
        if made is not None:
            states.check(made, tokens[: stored.tokens])
    assert cache.stats().counters.unkept_tokens > 0


# -- the request path ---------------------------------------------------------------------------------------------------


def test_match_and_fetch_open_no_file(opened):
    cache = opened()
    put(cache, LONG)
    cache.flush(10)
    got(cache, LONG)
    opens, me = [], threading.get_ident()

    def hook(event, args):
        if (
            event in ("open", "os.listdir", "os.scandir", "sqlite3.connect")
            and threading.get_ident() == me
            and watching
        ):
            opens.append((event, args))

    watching = True
    sys.addaudithook(hook)
    cache.match(LONG, model="m")
    got(cache, LONG)
    cache.match([4] * 700, model="m")
    watching = False
    assert not opens


def test_fetched_and_stored_share_no_memory(opened):
    cache = opened()
    live = states.sliceable(LONG)
    cache.store(LONG, live, model="m")
    live[0].keys[:, :, :50] = 0
    mx.eval(live[0].keys)
    made, _ = cache.fetch(LONG, model="m")
    made[0].keys[:, :, :50] = 1
    made[1].update_and_fetch(*states.rows([3] * 300, 1))
    mx.eval(made[0].keys, made[1].keys)
    assert got(cache, LONG) == 999


def test_fetch_leaves_room_to_grow_without_a_copy(opened):
    cache = opened()
    put(cache, LONG)
    made, rest = cache.fetch(LONG + [1] * 200, model="m")
    before = made[0].keys.shape[2]
    made[0].update_and_fetch(*states.rows(rest, 0))
    assert made[0].keys.shape[2] == before >= 1200 + 256 - 256


def test_lookup_gives_wrappers_that_copy_trim_and_decode(opened):
    cache = opened()
    put(cache, LONG)
    entry = cache.lookup(LONG, model="m")
    assert entry.tokens == 1000
    assert entry.is_trimmable()
    other = entry.copy()
    assert other.trim(300) == 300
    assert (entry.tokens, other.tokens) == (1000, 700)
    states.check(entry.dequantize(), LONG)
    states.check(other.dequantize(), LONG[:700])
    layer = entry.layers[1]
    assert layer.class_name == "mlx_lm.models.cache.KVCache"
    assert layer.nbytes == 1000 * states.WIDTH * 4 * 2
    copied = layer.copy()
    copied.trim(990)
    assert (copied.dequantize().offset, layer.dequantize().offset) == (10, 1000)
    cache.clear()
    states.check(entry.dequantize(), LONG)
    assert cache.lookup(LONG, model="m") is None
    with pytest.raises(ValueError, match="trim"):
        entry.trim(-1)


# -- pins, removal, namespaces ------------------------------------------------------------------------------------------


def test_a_pinned_path_stays_until_unpinned(opened):
    cache = opened(ram=200_000, disk=False)
    put(cache, LONG)
    assert cache.pin(LONG, model="m") == 1000
    assert cache.pin(LONG, model="m") == 1000
    for i in range(20):
        put(cache, [7000 + i] * 600)
    assert got(cache, LONG) == 999
    assert cache.unpin(LONG, model="m")
    assert cache.unpin(LONG, model="m")
    assert not cache.unpin(LONG, model="m")
    for i in range(20):
        put(cache, [8000 + i] * 600)
    assert cache.match(LONG, model="m").ram == 0
    assert cache.pin([1, 2, 3], model="m") == 0


def test_remove_forgets_a_prompt_and_spares_what_others_share(opened):
    cache = opened()
    put(cache, LONG)
    put(cache, LONG[:512] + [3] * 300)
    cache.flush(10)
    assert cache.remove(LONG, model="m") > 0
    assert cache.match(LONG, model="m").ssd == 512
    assert got(cache, LONG[:512] + [3] * 300) == 811
    assert cache.remove([1, 2, 3], model="m") == 0
    cache.flush(10)
    cache.check_integrity()
    assert cache.remove(LONG[:512] + [3] * 300, model="m") > 0
    cache.flush(10)
    assert cache.stats().blocks == cache.stats().ssd.files == 0


def test_clear_leaves_nothing_anywhere(opened, tmp_path):
    cache = opened()
    for i in range(5):
        put(cache, [i] * 600)
    cache.pin([1] * 600, model="m")
    cache.clear()
    cache.flush(10)
    stats = cache.stats()
    assert (stats.blocks, stats.ram_held, stats.ssd.files, stats.pinned) == (0, 0, 0, 0)
    assert not list((tmp_path / "ssd" / "rows").rglob("*.safetensors"))
    assert put(cache, [1] * 600).tokens == 600


@pytest.mark.parametrize("boundary", [256, 300, 512])
def test_remove_spares_the_shorter_boundaries_of_recurrent_state(opened, boundary):
    cache = opened()
    put(cache, LONG[:boundary], states.hybrid)
    put(cache, LONG[:700], states.hybrid)
    assert cache.remove(LONG[:700], model="m") > 0
    cache.check_integrity()
    assert got(cache, LONG) == boundary
    assert cache.remove(LONG[:boundary], model="m") > 0
    assert got(cache, LONG) == 0


def test_namespaces_of_salts_that_hold_nothing_are_dropped_when_there_are_many(opened, monkeypatch):
    monkeypatch.setattr("prefixcache.operations.namespaces.SWEEP_AT", 20)
    cache = opened(disk=False, ram="200KB")
    put(cache, LONG, salt=b"keep")
    held = cache.pin(LONG, model="m", salt=b"keep")
    for i in range(500):
        put(cache, [i, *LONG[:200]], salt=str(i).encode())
    cache.check_integrity()
    assert cache.stats().namespaces < 100
    assert got(cache, LONG, salt=b"keep", leave=0) == held > 0
    assert got(cache, [499, *LONG[:200]], salt=b"499", leave=0) == 201
    cache.clear()
    put(cache, LONG, salt=b"0")
    assert got(cache, LONG, salt=b"0") == 999


def test_trim_to_without_a_wait_lets_the_coldest_be_written_and_the_hot_stay(opened):
    cache = opened()
    hot = [7, *LONG[:500]]
    put(cache, hot)
    assert cache.flush(10)
    for i in range(4):
        put(cache, [9000 + i, *LONG[:500]])
    assert got(cache, hot) == 500  # the hottest now, and on SSD already
    cache.trim_to(cache.stats().ram_held - 1000, wait=0)
    assert cache.match(hot, model="m").ram == 501


def test_removed_while_it_waits_for_the_ssd_and_stored_again(opened):
    cache = opened(spill="wait")
    for _ in range(20):
        put(cache, LONG)
        with cache._storage.lock:
            for slot in list(cache._storage.graph.order[0]):
                cache._storage.next.spill(slot)
        cache.remove(LONG, model="m")
        cache.check_integrity()
        assert cache.match(LONG, model="m") == (0, 0)
    put(cache, LONG)
    assert cache.flush(10)
    cache.check_integrity()
    cache.close()
    cache = opened()
    assert cache.promote(LONG, model="m").result(10) == 1000
    assert got(cache, LONG) == 999


def test_models_salts_codecs_and_layouts_never_meet(opened):
    cache = opened()
    cache.store(LONG, states.sliceable(LONG), model="a", salt=b"one")
    for model, salt in (("b", b"one"), ("a", b""), ("a", b"two"), ("a", b"one\0")):
        assert cache.match(LONG, model=model, salt=salt) == (0, 0)
        assert cache.fetch(LONG, model=model, salt=salt)[0] is None
    cache.store(LONG[:300], states.sliceable(LONG[:300], layers=3), model="a", salt=b"one")
    assert len(cache.fetch(LONG, model="a", salt=b"one")[0]) == 2  # the deeper of two layouts
    cache.close()
    cache = opened(codec="affine:8")
    assert cache.match(LONG, model="a", salt=b"one") == (0, 0)
    cache.close()
    cache = opened()
    assert cache.match(LONG, model="a", salt=b"one") == (0, 1000)
    assert cache.match(LONG, model="a", salt=b"") == (0, 0)


def test_a_salt_is_written_nowhere(opened, tmp_path):
    cache = opened()
    cache.store(LONG, states.sliceable(LONG), model="a", salt=b"tenant-secret-8c1d")
    cache.flush(10)
    for file in (tmp_path / "ssd").rglob("*"):
        if file.is_file():
            assert b"tenant-secret" not in file.read_bytes()


def test_a_forced_collision_of_keys_is_a_miss_never_another_prompts_state(opened, monkeypatch):
    from prefixcache import keys
    from prefixcache.blocks import graph
    from prefixcache.operations import store as storing

    def weak(parent, tokens):
        return keys.xxhash.xxh3_128_digest(parent + tokens)[:1] + bytes(15)

    monkeypatch.setattr(storing, "chain", weak)
    monkeypatch.setattr(graph, "chain", weak)
    monkeypatch.setattr("prefixcache.ssd.entries.keys.chain", weak)
    cache = opened()
    prompts = [[i] * 700 for i in range(150)]
    for prompt in prompts:
        put(cache, prompt)
    for prompt in prompts:
        got(cache, prompt)
    assert cache.stats().counters.collisions > 0
    cache.close()  # before keys are what they were


# -- threads and ends ---------------------------------------------------------------------------------------------------


def test_many_threads_at_once(opened):
    cache = opened(ram=400_000, spill="wait", spill_wait=5)
    prompts = [[i % 3] * 300 + [i] * 400 + [i % 5] * 100 for i in range(12)]
    over = []

    def work(seed):
        rng = random.Random(seed)
        for _ in range(25):
            tokens = rng.choice(prompts)[: rng.choice([300, 555, 700, 800])]
            act = rng.random()
            if act < 0.4:
                put(cache, tokens)
            elif act < 0.75:
                got(cache, tokens)
            elif act < 0.85:
                cache.promote(tokens, model="m").result(30)
            elif act < 0.9:
                cache.trim_to(200_000)
            elif act < 0.95:
                cache.remove(tokens, model="m")
            else:
                cache.pin(tokens, model="m")
                cache.unpin(tokens, model="m")
            held = cache._storage.budget.held()
            if held.total > cache._storage.budget.limit:
                over.append(held)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert not over
    cache.check_integrity()
    assert cache.flush(20)
    stats = cache.stats()
    assert (stats.ram_reserved, stats.ram_queued, stats.pinned) == (0, 0, 0)
    cache.check_integrity()


def test_a_closed_cache_says_so_and_closes_twice(opened):
    cache = opened()
    put(cache, LONG)
    cache.close()
    cache.close()
    for call in (cache.match, cache.fetch, cache.promote, cache.pin, cache.remove):
        with pytest.raises(RuntimeError, match="closed"):
            call(LONG, model="m")


def test_a_process_that_ends_without_close_leaves_what_was_flushed(tmp_path):
    script = f"""
import os
from prefixcache import PrefixCache
from tests import states
cache = PrefixCache(ram="10MB", ssd_dir={str(tmp_path / "ssd")!r}, ssd="50MB", codec="raw")
cache.store(list(range(1000)), states.sliceable(range(1000)), model="m")
assert cache.flush(10)
cache.store([5] * 600, states.sliceable([5] * 600), model="m")
os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", script], cwd=os.getcwd()).returncode == 9
    with PrefixCache(ram="10MB", ssd_dir=tmp_path / "ssd", ssd="50MB", codec="raw") as cache:
        assert cache.promote(LONG, model="m").result(10) == 1000
        assert got(cache, LONG) == 999
        cache.check_integrity()


def test_an_interpreter_that_ends_without_close_does_not_hang(tmp_path):
    script = f"""
from prefixcache import PrefixCache
from tests import states
cache = PrefixCache(ram="10MB", ssd_dir={str(tmp_path / "ssd")!r}, ssd="50MB", codec="raw")
cache.store(list(range(1000)), states.sliceable(range(1000)), model="m")
cache.promote(list(range(1000)), model="m").result()
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=os.getcwd(), timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_nothing_is_reserved_or_pinned_after_an_encode_that_fails(opened, monkeypatch):
    cache = opened()

    def fail(*a):
        raise RuntimeError("no memory on the device")

    monkeypatch.setattr("prefixcache.operations.making.encode", fail)
    with pytest.raises(RuntimeError, match="device"):
        put(cache, LONG)
    monkeypatch.undo()
    stats = cache.stats()
    assert (stats.ram_reserved, stats.pinned, stats.blocks) == (0, 0, 0)
    assert put(cache, LONG).tokens == 1000
    cache.check_integrity()


def test_no_array_of_mlx_outlives_a_call(opened):
    cache = opened()
    live = states.sliceable(LONG)
    gc.collect()
    seen = []
    for _ in range(5):
        cache.store(LONG, live, model="m")
        cache.fetch(LONG, model="m")
        gc.collect()
        seen.append(mx.get_active_memory())
    assert len(set(seen)) == 1


# -- bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens",
    [[[1, 2]], [1.0, 2.0], [True], [2**63], "text", b"bytes", None, 5, {1, 2}, (i for i in range(5)), np.ones(3)],
)
def test_bad_tokens_are_an_error_at_every_call(opened, tokens):
    cache = opened(disk=False)
    for call in (cache.match, cache.fetch, cache.lookup, cache.promote, cache.pin, cache.unpin, cache.remove):
        with pytest.raises((TypeError, ValueError), match="token"):
            call(tokens, model="m")
    with pytest.raises((TypeError, ValueError), match="token"):
        cache.store(tokens, states.sliceable([1]), model="m")


def test_no_tokens(opened):
    cache = opened(disk=False)
    assert cache.match([], model="m") == (0, 0)
    assert cache.fetch([], model="m") == (None, [])
    assert cache.promote([], model="m").result(1) == 0
    with pytest.raises(ValueError, match="empty"):
        cache.store([], states.sliceable([]), model="m")


def test_negative_and_60_bit_ids_are_valid(opened):
    cache = opened()
    tokens = [-(2**60) - i for i in range(300)] + [2**40 + i for i in range(300)]
    put(cache, tokens)
    cache.trim_to(0)
    cache.promote(tokens, model="m").result(10)
    assert got(cache, tokens) == 599


def test_tokens_may_be_arrays_and_rest_is_of_their_kind(opened):
    cache = opened(disk=False)
    put(cache, LONG)
    for kind in (np.array, mx.array, tuple, lambda t: np.array(t, np.uint32)):
        tokens = kind([*LONG, 5, 6])
        made, rest = cache.fetch(tokens, model="m")
        states.check(made, LONG)
        assert type(rest) is type(tokens)
        assert [int(t) for t in rest] == [5, 6]


@pytest.mark.parametrize(
    ("model", "error"), [(None, TypeError), (b"m", TypeError), ("", ValueError), ("x" * 10_000, ValueError)]
)
def test_bad_models(opened, model, error):
    cache = opened(disk=False)
    with pytest.raises(error, match="model"):
        cache.match(LONG, model=model)
    with pytest.raises(error, match="model"):
        cache.store(LONG, states.sliceable(LONG), model=model)


@pytest.mark.parametrize("salt", ["text", None, 5])
def test_bad_salts(opened, salt):
    cache = opened(disk=False)
    with pytest.raises(TypeError, match="salt"):
        cache.fetch(LONG, model="m", salt=salt)


@pytest.mark.parametrize("leave", [-1, 1.5, True, "1"])
def test_bad_leave(opened, leave):
    with pytest.raises(ValueError, match="leave"):
        opened(disk=False).fetch(LONG, model="m", leave=leave)


def test_tokens_and_cache_of_different_lengths_are_stored_to_the_shorter(opened):
    cache = opened(disk=False)
    assert cache.store(LONG, states.sliceable(LONG[:400]), model="m").tokens == 400
    assert cache.store([1] * 300, states.sliceable([1] * 500), model="m").tokens == 300
    assert got(cache, [1] * 500) == 300
    # A state that can't be cut is kept only for the boundary that it belongs to.
    assert not cache.store([2] * 300, states.hybrid([2] * 500), model="m").snapshot
    assert cache.store([3] * 500, states.hybrid([3] * 300), model="m").snapshot
    assert got(cache, [3] * 500) == 300


def test_a_second_cache_on_a_directory_is_refused_by_name(opened):
    opened()
    with pytest.raises(DirectoryHeld, match=str(os.getpid())):
        opened()


def test_a_directory_that_is_a_file_or_of_a_newer_format(tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(DirectoryError, match="file"):
        PrefixCache(ram="1MB", ssd_dir=file, ssd="50MB")
    (tmp_path / "cache").mkdir()
    with PrefixCache(ram="1MB", ssd_dir=tmp_path / "cache", ssd="50MB"):
        pass
    (tmp_path / "cache" / "index.db").unlink()
    (tmp_path / "cache" / "index.db").mkdir()
    with pytest.raises(DirectoryError, match=r"index\.db"):
        PrefixCache(ram="1MB", ssd_dir=tmp_path / "cache", ssd="50MB")


def test_settings_of_a_wrong_type():
    with pytest.raises(TypeError, match="settings of type str"):
        PrefixCache("8MB")


@pytest.mark.parametrize("ram", ["20QB", "-1", "1e400", "", None, "0"])
def test_bad_sizes_are_errors_at_construction(ram):
    with pytest.raises(ValueError, match="ram"):
        Settings(ram=ram)


def test_ram_auto_says_what_it_took():
    with PrefixCache() as cache:
        stats = cache.stats()
        assert stats.ram_setting == "auto"
        assert stats.ram_limit > 100_000_000
