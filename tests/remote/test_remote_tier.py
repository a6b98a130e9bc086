"""Prompts that one machine has stored are hits on others: what leaves, what lands, and what never does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from prefixcache import PrefixCache
from prefixcache.remote.client import Client
from prefixcache.remote.engine import EngineError
from prefixcache.remote.sealing import NoSeal
from tests.inside import inside
from tests.models import states
from tests.models.states import got, put
from tests.remote.dict_engine import DictEngine
from tests.remote.fleet import LONG, Machine, brought, sent, shared
from tests.waiting import until


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> DictEngine:
    """What every machine's remote URL leads to."""
    engine = DictEngine()
    monkeypatch.setattr("prefixcache.remote.client.open_engine", lambda url, **options: engine)
    return engine


@pytest.fixture
def machine(engine: DictEngine, open_machine: Callable[..., PrefixCache]) -> Machine:
    return partial(open_machine, remote="valkey://localhost")


def rows_of(engine) -> list[str]:
    return [name for name in engine.images if "/rows/" in name]


# -- what leaves ------------------------------------------------------------------------------------------------------


def test_a_prompt_leaves_at_its_second_use(machine, engine):
    cache = machine()
    put(cache, LONG)
    sent(cache)
    assert not rows_of(engine)
    got(cache, LONG)
    sent(cache)
    assert len(rows_of(engine)) == 3  # whole blocks; the tail stays


def test_always_means_when_it_is_stored_and_never_means_reading_only(machine, engine):
    put(machine(remote_admission="never"), LONG)
    cache = machine(remote_admission="never")
    shared(cache, LONG)
    assert not rows_of(engine)
    cache = machine(remote_admission="always")
    put(cache, LONG)
    sent(cache)
    assert len(rows_of(engine)) == 3
    reader = machine(remote_admission="never")
    assert brought(reader, LONG) == 768


def test_nothing_is_sent_twice(machine, engine):
    cache, other = machine(), machine()
    shared(cache, LONG)
    puts = engine.calls["put"]
    for _ in range(3):
        got(cache, LONG)
    shared(other, LONG)  # it has computed the same
    sent(cache)
    assert engine.calls["put"] == puts
    assert other.stats().remote.known == 3
    third = machine()
    brought(third, LONG)
    got(third, LONG)
    sent(third)
    assert engine.calls["put"] == puts


def test_with_an_ssd_an_image_is_durable_there_before_it_leaves(machine, engine, tmp_path):
    cache = machine(ssd_dir=tmp_path / "a", ssd=100_000_000)
    files = {}

    def look(call):
        if call == "put":
            files[len(engine.images)] = len(list((tmp_path / "a" / "rows").rglob("*.safetensors")))

    engine.at = look
    put(cache, LONG)
    got(cache, LONG)
    cache.flush(10)
    sent(cache)
    assert len(rows_of(engine)) == 3
    assert min(files.values()) >= 1


@pytest.mark.parametrize("admission", ["second", "always"])
def test_what_the_ssd_has_no_room_for_leaves_all_the_same(machine, engine, tmp_path, admission):
    """Others have filled its disk, say."""
    cache = machine(ssd_dir=tmp_path / "a", ssd=10_000, remote_admission=admission)
    put(cache, LONG)
    if admission == "second":
        got(cache, LONG)
    cache.flush(10)
    sent(cache)
    assert len(rows_of(engine)) == 3


def test_with_an_ssd_the_windows_that_another_machine_needs_leave_at_the_first_hit(machine, tmp_path):
    cache = machine(ssd_dir=tmp_path / "a", ssd=100_000_000)
    for end in (256, 512, 600):
        put(cache, LONG[:end], states.windowed)
    got(cache, [*LONG[:600], 0])  # ends inside a block; elsewhere it ends at 512
    cache.flush(10)
    sent(cache)
    assert brought(machine(), LONG[:600]) == 512


def test_after_a_restart_the_next_hit_sends_what_the_ssd_has(machine, engine, tmp_path):
    cache = machine(ssd_dir=tmp_path / "a", ssd=100_000_000)
    put(cache, LONG)
    cache.close()
    engine.images.clear()
    cache = machine(ssd_dir=tmp_path / "a", ssd=100_000_000)
    brought(cache, LONG)
    assert got(cache, LONG) == 999
    sent(cache)
    assert len(rows_of(engine)) == 3


def test_layouts_are_listed_with_every_batch(machine, engine):
    cache = machine()
    shared(cache, LONG)
    assert not engine.calls["keep_listed"]
    shared(cache, [3] * 600)
    assert engine.calls["keep_listed"]


def test_salted_prompts_leave_with_a_key_only(machine, engine):
    open_to_all = machine(remote_key_file=None)
    shared(open_to_all, LONG, salt=b"tenant")
    assert not rows_of(engine)
    cache, other = machine(), machine()
    shared(cache, LONG, salt=b"tenant")
    assert len(rows_of(engine)) == 3
    assert brought(other, LONG) == 0
    assert brought(other, LONG, salt=b"another") == 0
    assert brought(other, LONG, salt=b"tenant") == 768


def test_names_and_bytes_tell_nothing_without_the_key(machine, engine):
    shared(machine(), LONG)
    plain = machine(remote_key_file=None)
    shared(plain, LONG)
    without = rows_of(engine)[3:]
    assert len(without) == 3
    tokens = np.arange(256, dtype="<i8").tobytes()
    sealed = {name: data for name, data in engine.images.items() if name not in without}
    assert any(tokens in engine.images[name] for name in without)
    assert not any(tokens in data or b"safetensors" in data or b"prefixcache" in data for data in sealed.values())
    assert not {name.split("/")[-1] for name in without} & {name.split("/")[-1] for name in sealed}


# -- what lands -------------------------------------------------------------------------------------------------------


def test_a_machine_that_has_stored_nothing_hits_what_another_stored(machine):
    shared(machine(), LONG)
    other = machine()
    assert other.match(LONG, model="m") == (0, 0)
    assert brought(other, LONG) == 768
    assert got(other, LONG) == 768
    stats = other.stats()
    assert stats.counters.remote_hit_tokens == 768
    assert (stats.counters.ram_hit_tokens, stats.counters.ssd_hit_tokens) == (0, 0)
    got(other, LONG)
    assert other.stats().counters.ram_hit_tokens == 768


def test_only_what_is_missing_here_is_read(machine, engine):
    shared(machine(), LONG)
    other = machine()
    put(other, LONG[:600])
    assert brought(other, LONG) == 768
    assert other.stats().remote.read_images == 1  # its layout was known, and two blocks


def test_requests_at_once_read_each_image_once(machine, engine):
    shared(machine(), LONG)
    other = machine()
    put(other, [5] * 300)
    before, many = engine.calls["get"], 12
    coming = [other.promote([*LONG, *[n] * 300], model="m") for n in range(many)]
    assert [one.result(20) for one in coming] == [768] * many
    assert engine.calls["get"] - before == 3


def test_fetch_promote_waits_for_it(machine):
    shared(machine(), LONG)
    assert got(machine(), LONG, promote=True) == 768


def test_what_landed_is_spilled_and_survives_as_any_other(machine, engine, tmp_path):
    shared(machine(), LONG)
    other = machine(ssd_dir=tmp_path / "b", ssd=100_000_000)
    brought(other, LONG)
    other.close()
    engine.images.clear()
    other = machine(ssd_dir=tmp_path / "b", ssd=100_000_000)
    assert other.match(LONG, model="m") == (0, 768)
    assert got(other, LONG, promote=True) == 768


def test_a_hole_ends_the_hit_before_it(machine, engine):
    shared(machine(), LONG)
    del engine.images[rows_of(engine)[1]]
    other = machine()
    assert brought(other, LONG) == 256
    assert got(other, LONG) == 256


def test_what_vanishes_between_question_and_read_ends_the_hit(machine, engine):
    shared(machine(), LONG)
    second = rows_of(engine)[1]
    engine.at = lambda call: engine.images.pop(second, None) if call == "get" and len(engine.calls) > 3 else None
    other = machine()
    assert brought(other, LONG) <= 256
    other.check_integrity()


def test_windows_land_where_another_machine_stored_them(machine):
    tokens = list(range(2000))
    put_in_chunks(cache := machine(), tokens)
    got(cache, tokens)
    sent(cache)
    other = machine()
    depth = brought(other, tokens)
    assert depth == 1792
    assert got(other, tokens) == 1792


def put_in_chunks(cache: PrefixCache, tokens) -> None:
    """As a server does: a store after each part of a prefill, of the same live cache."""
    for end in (*range(256, len(tokens), 256), len(tokens)):
        put(cache, tokens[:end], states.windowed)


@pytest.mark.parametrize("length", [1000, 1024, 130])
def test_a_recurrent_state_lands_with_its_rows(machine, length):
    tokens = list(range(length))
    shared(machine(), tokens, states.hybrid)
    other = machine()
    longer = [*tokens, *[5] * 300]
    assert brought(other, longer) == length
    assert got(other, longer) == length


def test_of_recurrent_states_the_deepest_that_the_prompt_goes_through_lands(machine):
    cache = machine()
    tokens = list(range(3000))
    for end in (700, 1400, 1410, 2100):
        shared(cache, tokens[:end], states.hybrid)
    shared(cache, [*tokens[:1405], *[9] * 200], states.hybrid)
    other = machine()
    assert brought(other, tokens) == 2100
    assert got(other, tokens) == 2100
    diverging = [*tokens[:1500], *[3] * 600]
    third = machine()
    assert brought(third, diverging) == 1410
    assert got(third, diverging) == 1410


def test_ram_is_reserved_before_it_is_read(machine, engine):
    cache = machine()
    tokens = list(range(20_000))
    shared(cache, tokens)
    small = machine(ram=500_000)
    depth = brought(small, tokens)
    assert 0 < depth < 20_000
    assert got(small, tokens) == depth
    assert small.stats().ram_peak <= 500_000
    small.check_integrity()


# -- what never does --------------------------------------------------------------------------------------------------


def test_an_image_under_anothers_name_is_refused_counted_and_logged_once(machine, engine, caplog):
    shared(machine(), LONG)
    names = rows_of(engine)
    engine.images[names[0]], engine.images[names[1]] = engine.images[names[1]], engine.images[names[0]]
    other = machine()
    assert brought(other, LONG) == 0
    assert other.stats().remote.refused >= 1
    assert sum("was refused" in record.message for record in caplog.records) == 1


def test_another_fleets_images_are_not_even_found(machine, engine, tmp_path):
    shared(machine(), LONG)
    (tmp_path / "other.key").write_text("7b" * 32)
    other = machine(remote_key_file=tmp_path / "other.key")
    put(other, [5] * 300)  # it knows the layout
    assert brought(other, LONG) == 0
    assert other.stats().remote.refused == 0


def test_nothing_is_evicted_for_an_object_that_is_too_large_for_an_image(machine, engine):
    shared(machine(), LONG)
    other = machine()
    put(other, [5] * 5000)
    first = rows_of(engine)[0]
    engine.images[first] = bytes(20_000_000)
    evicted = other.stats().counters.evicted
    assert brought(other, LONG) == 0
    assert other.stats().counters.evicted == evicted
    assert other.stats().ram_peak < 10_000_000


def test_without_a_key_an_image_must_be_what_its_name_says(machine, engine):
    cache = machine(remote_key_file=None)
    shared(cache, LONG)
    shared(cache, [*LONG[:256], *[4] * 300])
    names = rows_of(engine)
    for wrong in (
        engine.images[names[-1]],
        engine.images[names[1]][:-1],
        b"",
        b"x" * 40,
        engine.images[names[1]] + b"1",
    ):
        images = dict(engine.images)
        engine.images[names[1]] = wrong
        other = machine(remote_key_file=None)
        assert brought(other, LONG) == 256
        assert got(other, LONG) == 256
        engine.images = images


# -- an engine that fails ---------------------------------------------------------------------------------------------


def test_an_engine_that_is_down_costs_nothing_after_two_failures_and_comes_back_by_itself(machine, engine, caplog):
    caplog.set_level("INFO")
    shared(machine(), LONG)
    other = machine()
    put(other, [5] * 300)
    engine.down = "connection refused"
    for first in range(10):
        assert brought(other, [first + 10, *LONG]) == 0
    assert engine.calls["sizes"] <= 2 + 2  # of the machine that shared, and two failures
    assert not other.stats().remote.reading
    engine.down = ""
    until(lambda: other.stats().remote.reading)
    assert brought(other, LONG) == 768
    said = [record.message for record in caplog.records if "reading" in record.message]
    assert len(said) == 2
    assert "connection refused" in said[0]
    assert "works again" in said[1]


def test_an_engine_that_is_down_at_the_start_is_told_at_once_and_asked_again(machine, engine, caplog):
    engine.down = "refused: access denied"
    cache = machine()
    until(lambda: not cache.stats().remote.reading)
    until(lambda: "reading: refused: access denied; going on without it" in caplog.text)  # said just after
    engine.down = ""
    until(lambda: cache.stats().remote.reading)
    until(lambda: "v1/key" in engine.images)


def test_an_engine_that_does_not_answer_is_waited_for_once_and_briefly(machine, engine):
    shared(machine(), LONG)
    other = machine()
    put(other, [5] * 300)
    engine.gate.clear()
    began = time.monotonic()
    assert brought(other, LONG, prefill_rate=500.0) == 0
    assert time.monotonic() - began < 1
    began = time.monotonic()
    for first in range(20):
        assert brought(other, [first + 10, *LONG], prefill_rate=500.0) == 0
    assert time.monotonic() - began < 0.5
    engine.gate.set()


@pytest.mark.parametrize("prefill_rate", [1e-9, 1e-300, 300])
def test_however_much_can_be_gained_a_prompt_takes_no_longer_than_the_setting(machine, engine, caplog, prefill_rate):
    cache = machine(remote_timeout=0.3)
    engine.gate.clear()  # of the first question, which layouts there are
    began = time.monotonic()
    assert brought(cache, list(range(100_000)), prefill_rate=prefill_rate) == 0
    assert time.monotonic() - began < 5
    assert "Error" not in caplog.text
    engine.gate.set()


@pytest.mark.parametrize("prefill_rate", [0, -1.0, "300", float("nan")])
def test_a_prefill_rate_that_is_none_is_an_error(machine, prefill_rate):
    with pytest.raises(ValueError, match=r"prefill_rate=.*: give tokens a second, more than 0"):
        machine().promote(LONG, model="m", prefill_rate=prefill_rate)


def test_match_fetch_and_store_never_ask(machine, engine):
    cache = machine()
    engine.gate.clear()
    began = time.monotonic()
    put(cache, LONG)
    assert cache.match(LONG, model="m") == (1000, 1000)
    assert got(cache, LONG) == 999
    assert time.monotonic() - began < 2
    engine.gate.set()


def test_where_computing_is_quicker_nothing_is_read(machine, engine):
    shared(machine(), LONG)
    other = machine()
    assert brought(other, LONG, prefill_rate=1e9) == 0
    assert other.stats().remote.skipped == 1
    assert brought(other, LONG, prefill_rate=100.0) == 768


def test_what_was_missing_is_not_asked_for_again_at_once(machine, engine):
    cache = machine()
    put(cache, [5] * 300)
    for _ in range(5):
        brought(cache, LONG)
    assert engine.calls["sizes"] == 1


def test_a_full_engine_stops_writing_and_not_reading(machine, engine):
    shared(machine(), LONG)

    def full(call):
        if call == "put":
            raise EngineError("full")

    engine.at = full
    cache = machine()
    shared(cache, [*[3] * 900])
    shared(cache, [*[4] * 900])
    assert not cache.stats().remote.writing
    assert brought(cache, LONG) == 768


def test_an_engine_that_refuses_whatever_is_written_is_read_and_asked_on(machine, engine):
    cache = machine()
    shared(cache, LONG)

    def read_only(call):
        if call in ("put", "keep_listed"):
            raise EngineError("refused: READONLY")

    engine.at = read_only
    for first in range(3):
        put(cache, [first] * 300)
        got(cache, [first] * 300)
        time.sleep(0.1)
        assert cache.stats().remote.reading
    assert not cache.stats().remote.writing
    assert brought(machine(), LONG) == 768


def test_what_a_hit_could_not_use_is_still_known_to_be_there(machine, engine):
    cache = machine(remote_admission="always")
    put(cache, LONG, states.windowed)  # stored once: the windows of its end only, which don't leave
    sent(cache)
    assert len(rows_of(engine)) == 3
    other = machine(remote_admission="always")
    assert brought(other, LONG) == 0
    puts = engine.calls["put"]
    put(other, LONG, states.windowed)
    sent(other)
    assert engine.calls["put"] == puts


@pytest.mark.parametrize("key", [True, False])
@pytest.mark.parametrize("damaged", [b"xx", b"\xff" * 300])
def test_a_layout_that_was_damaged_is_refused_and_sent_anew_once(machine, engine, key_file, key, damaged):
    machine = partial(machine, remote_key_file=key_file if key else None)
    cache = machine(remote_admission="always")
    put(cache, LONG)
    sent(cache)
    (layout,) = (name for name in engine.images if "/layouts/" in name)
    engine.images[layout] = damaged
    other = machine(remote_admission="always")
    assert brought(other, LONG) == 0
    assert other.stats().remote.refused == 1
    for number in range(3):
        put(other, [number] * 300)
        sent(other)
    assert engine.calls["put"] == 1 + 1 + 3 + 1 + 3  # the key's note, a layout, three blocks; the layout, three blocks
    assert brought(machine(), LONG) == 768


def test_a_rate_that_is_too_slow_is_measured_again_with_nobody_waiting(machine, engine, monkeypatch):
    shared(machine(), LONG)
    cache = machine(remote_admission="never")
    inside(cache).storage.remote._client.speed.learn_rate(1, 1.0)  # a byte a second
    began = time.monotonic()
    assert brought(cache, LONG, prefill_rate=1000.0) == 0
    assert time.monotonic() - began < 0.5
    until(lambda: cache.match(LONG, model="m").ram == 768)  # what was read to measure is kept
    assert cache.stats().remote.skipped == 1
    until(lambda: brought(cache, LONG, prefill_rate=1000.0) == 768 or cache.clear())
    inside(cache).storage.remote._client.speed.measured(1, 1.0)
    cache.clear()
    gets = engine.calls["get"]
    assert brought(cache, LONG, prefill_rate=1000.0) == 0
    time.sleep(0.05)
    assert engine.calls["get"] == gets  # not again so soon


@pytest.mark.parametrize("tokens", [LONG, LONG[:768]])
@pytest.mark.parametrize("admission", ["always", "second"])
def test_a_prompt_of_a_recurrent_model_is_hit_elsewhere_wherever_it_ends(machine, tokens, admission):
    cache = machine(remote_admission=admission)
    put(cache, tokens, states.hybrid)
    if admission == "second":
        got(cache, [*tokens, 0])
    sent(cache)
    assert brought(machine(), [*tokens, 0]) == len(tokens)


def test_layouts_that_somebody_put_there_hide_none(machine, engine):
    shared(machine(), LONG)
    (folder,) = {name.rpartition("/")[0] for name in engine.images if "/layouts/" in name}
    for number in range(50):
        engine.images = {f"{folder}/{number:032x}": bytes(1000), f"{folder}/!{number}": bytes(10), **engine.images}
    cache = machine()
    remote = inside(cache).storage.remote
    for _ in range(10):
        brought(cache, LONG)
        remote._client.missing._missing.clear()  # as after half a minute
    assert got(cache, LONG) == 768


def test_whoever_is_at_work_when_a_client_is_closed_gets_the_engines_error(engine):
    client = Client(engine, NoSeal())
    client.close()
    for call in (lambda: client.sizes(["v1/name"], 1), lambda: client.calls.read(client.read, "v1/name", None, bool)):
        with pytest.raises(EngineError, match="closed"):
            call()


def test_closing_sends_what_waits(machine, engine):
    cache = machine(remote_admission="always")
    put(cache, list(range(5000)))
    cache.close()
    assert len(rows_of(engine)) == 19
    assert engine.closed


def test_a_fetch_that_reads_ahead_ends_when_the_remote_tier_has_nothing_and_the_ssd_has_more_than_ram(
    machine, engine, tmp_path, monkeypatch
):
    monkeypatch.setattr("prefixcache.remote.promotion.MIN_TIMEOUT", 2.0)  # the SSD ends first
    tokens = list(range(4000))
    cache = machine(ssd_dir=tmp_path / "a", ssd=100_000_000)
    put(cache, tokens)
    cache.close()
    small = machine(ssd_dir=tmp_path / "a", ssd=100_000_000, ram=300_000, remote_admission="never")
    engine.gate.clear()
    depths: list[int] = []
    fetch = threading.Thread(target=lambda: depths.append(got(small, [*tokens, *[5] * 600], promote=True)), daemon=True)
    fetch.start()
    fetch.join(10)
    engine.gate.set()
    assert depths
    assert 0 < depths[0] < 4000


def test_what_is_deleted_before_its_turn_to_be_sent_leaves_no_reservation(machine, engine):
    cache = machine(remote_admission="always")
    engine.at = lambda call: cache.clear() if call == "sizes" else None  # after it was pinned
    put(cache, LONG)
    sent(cache)
    assert not rows_of(engine)
    assert cache.stats().ram_reserved == cache.stats().pinned == 0


def test_nothing_is_pinned_after_a_close_while_images_are_read(machine, engine):
    shared(machine(), LONG)
    cache = machine()
    put(cache, LONG[:300])
    engine.at = lambda call: cache.close() if call == "get" else None
    brought(cache, LONG)
    assert cache.stats().pinned == 0
