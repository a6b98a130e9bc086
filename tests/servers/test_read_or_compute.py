"""When waiting for the SSD pays: a wait that ends, and what is learnt from requests."""

from concurrent.futures import Future

import pytest

from prefixcache import PrefixCache
from prefixcache.metrics.rates import DECODE_TOKENS
from prefixcache.servers import read_or_compute
from prefixcache.servers.read_or_compute import ReadOrCompute
from tests.given_rates import computing_is
from tests.models import states
from tests.servers.slow_disk import slow_disk

LONG = list(range(1000))


@pytest.fixture
def cache():
    with PrefixCache(ram="1MB", codec="raw", memory_reserve=0) as opened:
        yield opened


def test_a_request_teaches_once_at_the_end_of_its_prefill_or_of_its_answer(cache, monkeypatch):
    now, reading = [0.0], ReadOrCompute(cache)
    prompt, answered = (cache.prompt(range(n), model="m") for n in (1000, 1100))
    monkeypatch.setattr(read_or_compute.time, "monotonic", lambda: now[0])
    reading.began(prompt, 500)
    now[0] = 1.0
    reading.ended(prompt.first(256))  # an earlier boundary
    now[0] = 2.0
    reading.ended(prompt.first(999))
    assert reading.rates.computing("m", 500) == pytest.approx(2.0)
    now[0] = 100.0
    reading.ended(answered)
    assert reading.rates.computing("m", 500) == pytest.approx(2.0)
    others = cache.prompt(range(1100), model="n")
    reading.began(others.first(1000), 500)
    now[0] = 110.0
    reading.ended(others.first(1000 + 1000 // DECODE_TOKENS))
    assert 2.0 < reading.rates.computing("n", 500) < 5.0


@pytest.fixture
def on_ssd(tmp_path, request):
    """A cache whose SSD alone has LONG. `request.param`: whether it declines slow hits."""
    declines = getattr(request, "param", False)
    with PrefixCache(ram="10MB", codec="raw", ssd_dir=tmp_path, ssd="50MB", decline_slow_hits=declines) as cache:
        cache.store(LONG, states.sliceable(LONG), model="m")
        cache.flush(10)
        cache.trim_to(0)
        assert cache.match(LONG, model="m") == (0, 1000)
        assert cache.unread(LONG, model="m") > 1000 * states.WIDTH * 4
        yield cache


def test_what_the_ssd_has_is_waited_for(on_ssd):
    reading = ReadOrCompute(on_ssd)
    reading.wait(on_ssd.prompt(LONG, model="m"))
    assert on_ssd.match(LONG, model="m").ram == 1000
    assert (reading.waited, reading.late, reading.passed) == (1, 0, 0)
    assert on_ssd.unread(LONG, model="m") == 0
    reading.wait(on_ssd.prompt(LONG, model="m"))  # all of it is in RAM
    assert reading.waited == 1


def test_what_is_quicker_computed_is_not_waited_for_but_comes_for_the_next(on_ssd):
    reading = ReadOrCompute(on_ssd)
    for _ in range(20):
        reading.rates.learn_prefill("m", 10_000, 0.001)
    reading.wait(on_ssd.prompt(LONG, model="m"))
    assert (reading.waited, reading.passed) == (0, 1)
    assert on_ssd.promote(LONG, model="m").result(10) == 1000


@pytest.mark.parametrize("on_ssd", [True, False], indirect=True)
def test_a_hit_that_would_be_declined_is_not_waited_for(on_ssd):
    on_ssd.rates = computing_is("quicker")  # than decoding; what is read is nothing beside it
    reading = ReadOrCompute(on_ssd)
    reading.wait(on_ssd.prompt(LONG, model="m"))
    assert (reading.waited, reading.passed) == ((0, 1) if on_ssd.declines_slow_hits else (1, 0))


def test_a_wait_is_never_longer_than_the_longest(on_ssd):
    with slow_disk(on_ssd):
        reading = ReadOrCompute(on_ssd, longest=0.1)
        for _ in range(20):
            reading.rates.learn_prefill("m", 100, 1000.0)
        assert reading.rates.computing("m", 1000) > 1000
        reading.wait(on_ssd.prompt(LONG, model="m"))
        assert reading.late == 1


def test_a_failed_read_is_a_shorter_hit(on_ssd, monkeypatch, caplog):
    failed = Future()
    failed.set_exception(OSError("the disk is gone"))
    monkeypatch.setattr(on_ssd, "promote_local", lambda *args, **kw: failed)
    ReadOrCompute(on_ssd).wait(on_ssd.prompt(LONG, model="m"))
    assert "the disk is gone" in caplog.text


def test_salts_and_models_are_read_apart(on_ssd):
    reading = ReadOrCompute(on_ssd)
    for prompt in (on_ssd.prompt(LONG, model="m", salt=b"other"), on_ssd.prompt(LONG, model="n")):
        assert reading.begin(prompt, on_ssd.match(prompt, leave=1)) is None
    assert on_ssd.unread(LONG, model="n") == 0


@pytest.mark.parametrize("longest", [-1, float("nan")])
def test_a_bad_longest_wait_is_named(on_ssd, longest):
    with pytest.raises(ValueError, match="longest="):
        ReadOrCompute(on_ssd, longest)
