"""The cache between RAM and SSD: spilled, promoted, evicted, restarted, with files that went bad."""

import asyncio

import pytest

from tests.inside import inside
from tests.models import states
from tests.models.states import got, put

LONG = list(range(1000))


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
    cache = opened(ram=260_000, spill="wait", spill_wait=60)
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
    (first,) = next(iter(inside(cache).storage.graph.trees.values())).root.children
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
    monkeypatch.setattr(inside(cache).ssd, "write", lambda *a: False)
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
