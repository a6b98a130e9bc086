"""The servers of the tests, each started once, and engines that are closed at the end of a test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from prefixcache import PrefixCache
from prefixcache.remote.engine import Engine
from prefixcache.remote.url import open_engine
from tests.inside import inside

from .servers import BUCKET, LOOPBACK, S3_ENVIRONMENT, Server, moto, redis_server, seaweedfs, valkey_server

TIMEOUT = 5.0

Open = Callable[..., Engine]


class Place(NamedTuple):
    """Where an engine of one kind is. `server`: None for a folder. Each test has a prefix of its own there."""

    kind: str
    server: Server | None
    folder: Path

    def url(self, port: int | None = None) -> str:
        """The engine's, or through a proxy on `port`."""
        if self.server is None:
            return f"file://{self.folder}"
        port = port or self.server.port
        if self.kind in ("valkey", "redis"):
            return f"{self.kind}://{LOOPBACK}:{port}/tests/{self.folder.parent.name}/{self.folder.name}"
        return f"s3://{BUCKET}/tests/{self.folder.parent.name}/{self.folder.name}?endpoint=http://{LOOPBACK}:{port}"


@pytest.fixture
def open_machine(key_file: Path) -> Iterator[Callable[..., PrefixCache]]:
    """Opens the cache of a machine. At the end each is checked and closed."""
    caches: list[PrefixCache] = []

    def open_one(**values: Any) -> PrefixCache:
        given = {"ram": 50_000_000, "codec": "raw", "remote_key_file": key_file}
        caches.append(PrefixCache(**{**given, **values}))
        return caches[-1]

    yield open_one
    for cache in caches:
        if not inside(cache).closed:
            cache.check_integrity()
            cache.close()


@pytest.fixture(autouse=True)
def s3_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in S3_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NO_PROXY", f"{LOOPBACK},localhost")


@pytest.fixture(scope="session")
def servers() -> Iterator[Callable[[str], Server]]:
    """Starts a server when it is first asked for; it runs until the tests end."""
    makers = {"seaweedfs": seaweedfs, "moto": moto, "valkey": valkey_server, "redis": redis_server}
    running: dict[str, tuple[object, Server]] = {}

    def of_kind(kind: str) -> Server:
        if kind not in running:
            context = makers[kind]()
            running[kind] = (context, context.__enter__())
        return running[kind][1]

    yield of_kind
    for context, _ in running.values():
        context.__exit__(None, None, None)  # type: ignore[attr-defined]


@pytest.fixture
def open_it() -> Iterator[Open]:
    """Opens engines, with a timeout of 5 seconds unless it is told another."""
    engines: list[Engine] = []

    def opened(url: str, timeout: float = TIMEOUT, ca_file: Path | None = None) -> Engine:
        engines.append(open_engine(url, timeout=timeout, connect_timeout=min(1.0, timeout), ca_file=ca_file))
        return engines[-1]

    yield opened
    for engine in engines:
        engine.close()


@pytest.fixture(params=["file", "seaweedfs", "moto", "valkey", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path, servers: Callable[[str], Server]) -> Place:
    """Each kind of engine in turn, empty."""
    kind: str = request.param
    (tmp_path / "engine").mkdir()
    return Place(kind, None if kind == "file" else servers(kind), tmp_path / "engine")


@pytest.fixture(params=["seaweedfs", "moto", "valkey", "redis"])
def remote_place(request: pytest.FixtureRequest, tmp_path: Path, servers: Callable[[str], Server]) -> Place:
    """Each kind of engine that is behind a network."""
    return Place(request.param, servers(request.param), tmp_path / "engine")


@pytest.fixture
def engine(place: Place, open_it: Open) -> Engine:
    return open_it(place.url())
