"""Fixtures of the SSD tests: a directory, and tiers on it that are closed at the end."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prefixcache.ssd import queue

from .images import Opened


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: a kill of the process leaves its files all the same."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="prefixcache-", dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "ssd"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer tries again soon after a failure."""
    monkeypatch.setattr(queue, "FIRST_DELAY", 0.02)
    monkeypatch.setattr(queue, "LONGEST_DELAY", 0.1)


@pytest.fixture
def open_tier(root: Path) -> Iterator[Callable[..., Opened]]:
    """Opens a tier on `root`; whatever is open at the end of the test is closed."""
    tiers: list[Opened] = []

    def open_one(directory: Path = root, **more: object) -> Opened:
        tiers.append(Opened(directory, **more))  # type: ignore[arg-type]
        return tiers[-1]

    yield open_one
    for tier in tiers:
        tier.close(10)


@pytest.fixture
def ssd(open_tier: Callable[..., Opened]) -> Opened:
    return open_tier()
