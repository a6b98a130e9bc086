"""Machines that share one engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prefixcache import PrefixCache
from tests.remote.dict_engine import DictEngine

Machine = Callable[..., PrefixCache]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> DictEngine:
    """What every machine's remote URL leads to."""
    engine = DictEngine()
    monkeypatch.setattr("prefixcache.cache.open_engine", lambda url, **options: engine)
    return engine


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    file = tmp_path / "fleet.key"
    file.write_text("5a" * 32)
    file.chmod(0o600)
    return file


@pytest.fixture
def machine(engine: DictEngine, key_file: Path) -> Iterator[Machine]:
    """Makes a machine: its settings are `values`."""
    made = []

    def make(**values: Any) -> PrefixCache:
        given = {"ram": 50_000_000, "codec": "raw", "remote": "valkey://fleet", "remote_key_file": key_file}
        made.append(PrefixCache(**{**given, **values}))
        return made[-1]

    yield make
    for cache in made:
        cache.close()


def sent(cache: PrefixCache, seconds: float = 10) -> int:
    """Wait until nothing waits to be sent; the images that were sent so far."""
    until = time.monotonic() + seconds
    while cache.stats().remote.queued:
        assert time.monotonic() < until, cache.stats().remote
        time.sleep(0.005)
    return cache.stats().remote.written_images


def brought(cache: PrefixCache, tokens: Any, **how: Any) -> int:
    """Promote, and the depth in RAM then."""
    return cache.promote(tokens, model="m", **how).result(20)
