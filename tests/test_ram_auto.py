"""What "auto" means of a machine's memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prefixcache.settings import ram_auto

GB = 1 << 30


def test_auto_is_a_quarter_of_the_memory() -> None:
    assert ram_auto(16 * GB) == 4 * GB
    assert ram_auto(96 * GB, 40 * GB) == 24 * GB


def test_auto_is_no_more_than_what_the_weights_and_running_requests_leave() -> None:
    assert ram_auto(16 * GB, 12 * GB) == 2 * GB
    assert 0 < ram_auto(16 * GB, 20 * GB) < GB


@given(st.integers(0, 1 << 50), st.integers(0, 1 << 50))
def test_auto_falls_as_the_weights_grow_and_is_never_more_than_a_quarter(memory: int, weights: int) -> None:
    assert 0 <= ram_auto(memory, weights) <= ram_auto(memory) <= memory // 4
    assert ram_auto(memory, weights + 1) <= ram_auto(memory, weights)
