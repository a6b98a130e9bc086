"""When an engine is left alone, and when it is tried again."""

from __future__ import annotations

import logging

import pytest

from prefixcache.remote import breaker as module
from prefixcache.remote.breaker import FAILURES, FIRST_DELAY, LONGEST_DELAY, Breaker


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "monotonic", clock)
    return clock


def opened() -> Breaker:
    breaker = Breaker("engine")
    for _ in range(FAILURES):
        breaker.failed("refused")
    return breaker


def test_it_opens_after_failures_in_a_row_only():
    breaker = Breaker("engine")
    for _ in range(10):
        for _ in range(FAILURES - 1):
            breaker.failed("refused")
        breaker.succeeded()
    assert breaker.closed
    assert not opened().closed


def test_probes_come_one_at_a_time_and_further_and_further_apart(clock):
    breaker = opened()
    assert not breaker.takes_probe()
    waits = []
    for _ in range(12):
        wait = breaker.probe_in()
        assert wait is not None
        clock.now += wait
        assert breaker.takes_probe()
        assert not breaker.takes_probe()
        breaker.failed("refused")
        waits.append(wait)
    assert waits[0] == FIRST_DELAY
    assert waits == sorted(waits)
    assert waits[-1] == LONGEST_DELAY


def test_the_first_success_closes_it_and_the_delays_begin_anew_when_it_has_worked_for_as_long(clock):
    breaker = opened()
    for _ in range(4):
        clock.now += 100
        breaker.takes_probe()
    breaker.succeeded(question=True)
    assert not breaker.closed
    breaker.succeeded(question=True, probe=True)
    assert breaker.closed
    assert breaker.probe_in() is None
    for _ in range(FAILURES):
        breaker.failed("refused")
    assert breaker.probe_in() == 16 * FIRST_DELAY
    clock.now += 100
    breaker.succeeded()
    clock.now += 17 * FIRST_DELAY
    for _ in range(FAILURES):
        breaker.failed("refused")
    assert breaker.probe_in() == FIRST_DELAY


def test_an_engine_that_answers_questions_and_gives_no_image_is_left_alone(clock):
    breaker = Breaker("engine")
    waits = []
    for _ in range(600):
        clock.now += 1
        if not breaker.closed:
            if breaker.takes_probe():
                breaker.succeeded(question=True, probe=True)
            continue
        breaker.succeeded(question=True)
        breaker.failed("cut off")
        waits.append(breaker.probe_in())
    assert len([wait for wait in waits if wait is not None]) < 16


def test_questions_that_fail_now_and_then_are_not_in_a_row():
    breaker = Breaker("engine")
    for _ in range(10):
        breaker.failed("timed out", question=True)
        breaker.failed("timed out")
        breaker.succeeded(question=True)
        breaker.succeeded()
    assert breaker.closed


def test_each_change_is_logged_once(caplog):
    caplog.set_level(logging.INFO)
    breaker = opened()
    for _ in range(5):
        breaker.failed("timed out")
    breaker.succeeded()
    breaker.succeeded()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
