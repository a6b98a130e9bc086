"""When an engine is left alone, and when it is tried again."""

from __future__ import annotations

import logging

from prefixcache.remote.breaker import FAILURES, FIRST_DELAY, LONGEST_DELAY, Breaker


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def opened() -> tuple[Breaker, Clock]:
    clock = Clock()
    breaker = Breaker("engine", clock)
    for _ in range(FAILURES):
        breaker.failed("refused")
    return breaker, clock


def test_it_opens_after_failures_in_a_row_only():
    breaker = Breaker("engine")
    for _ in range(10):
        for _ in range(FAILURES - 1):
            breaker.failed("refused")
        breaker.succeeded()
    assert breaker.closed
    assert not opened()[0].closed


def test_probes_come_one_at_a_time_and_further_and_further_apart():
    breaker, clock = opened()
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


def test_the_first_success_closes_it_and_the_delays_begin_anew():
    breaker, clock = opened()
    for _ in range(4):
        clock.now += 100
        breaker.takes_probe()
    breaker.succeeded()
    assert breaker.closed
    assert breaker.probe_in() is None
    for _ in range(FAILURES):
        breaker.failed("refused")
    assert breaker.probe_in() == FIRST_DELAY


def test_each_change_is_logged_once(caplog):
    caplog.set_level(logging.INFO)
    breaker, _ = opened()
    for _ in range(5):
        breaker.failed("timed out")
    breaker.succeeded()
    breaker.succeeded()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
