"""Where much is made that lives on, Python's collector of cycles neither runs nor visits it at the end."""

from __future__ import annotations

import gc

import pytest

from prefixcache.memory import collector_at_rest


@pytest.fixture
def collections():
    """The generations that the collector has visited since."""
    visited: list[int] = []

    def watch(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            visited.append(info["generation"])

    gc.callbacks.append(watch)
    yield visited
    gc.callbacks.remove(watch)


def test_what_is_made_within_is_not_visited(collections):
    with collector_at_rest():
        assert not gc.isenabled()
        made = [[number] for number in range(100_000)]
    assert gc.isenabled()
    more = [[number] for number in range(100)]
    assert not collections
    assert (len(made), len(more)) == (100_000, 100)


def test_what_the_program_froze_stays_frozen():
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with collector_at_rest():
            pass
        assert gc.get_freeze_count() > frozen // 2  # some end meanwhile
    finally:
        gc.unfreeze()


def test_a_collector_that_is_off_stays_off():
    gc.disable()
    try:
        with collector_at_rest():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
