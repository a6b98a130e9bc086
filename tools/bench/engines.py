"""Engines of a remote tier for a bench: the servers of the tests, started here, a client of prefixcache on one, and the same
client library used plainly.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import obstore
import pytest
from obstore.store import from_url
from valkey.connection import Connection, PythonRespSerializer

from prefixcache.remote.client import Client
from prefixcache.remote.sealing import FleetKey, KeySeal
from prefixcache.remote.url import open_engine
from tests.remote import servers
from tools.bench import report
from tools.bench.report import Figure

KINDS = ("Valkey", "S3", "file://")
LIBRARIES = {"Valkey": "valkey-py", "S3": "obstore", "file://": "obstore"}
KEY = b"fleet of a bench" * 2
TIMEOUT = 60.0

Missing = pytest.skip.Exception


@dataclass(frozen=True)
class Running:
    """An engine that answers. `server`: None for a folder."""

    kind: str
    folder: Path
    server: servers.Server | None = None

    def url(self, port: int | None = None) -> str:
        """The engine's, or through a proxy on `port`."""
        if self.server is None:
            return f"file://{self.folder / 'ours'}"
        port = port or self.server.port
        if self.kind == "Valkey":
            return f"valkey://{servers.LOOPBACK}:{port}/ours"
        return f"s3://{servers.BUCKET}/ours?endpoint=http://{servers.LOOPBACK}:{port}"

    @contextmanager
    def client(self) -> Iterator[Client]:
        """As the cache has one, with AES-256-GCM."""
        engine = open_engine(self.url(), timeout=TIMEOUT, connect_timeout=TIMEOUT, ca_file=None)
        client = Client(engine, KeySeal(FleetKey(KEY)))
        try:
            yield client
        finally:
            client.close()

    def plain(self) -> Plain:
        return _PlainValkey(self) if self.kind == "Valkey" else _PlainObjects(self)


class Plain:
    """The client library alone: no seal, no check, its quickest settings. From any thread."""

    put: Callable[[str, bytes], object]
    get: Callable[[str], object]


class _PlainValkey(Plain):
    """A connection for each thread, large reads, and the packer that does not copy the value."""

    def __init__(self, running: Running):
        assert running.server is not None
        self._port, self._own = running.server.port, threading.local()

    def put(self, name: str, data: bytes) -> object:  # type: ignore[override]
        return self._ask("SET", name, memoryview(data))

    def get(self, name: str) -> object:  # type: ignore[override]
        return self._ask("GET", name)

    def _ask(self, *command: object) -> object:
        if not hasattr(self._own, "connection"):
            made = Connection(host=servers.LOOPBACK, port=self._port, socket_read_size=1 << 18)
            made._command_packer = PythonRespSerializer(made._buffer_cutoff, made.encoder.encode)
            made.connect()
            self._own.connection = made
        self._own.connection.send_command(*command)
        return self._own.connection.read_response()


class _PlainObjects(Plain):
    def __init__(self, running: Running):
        if running.server is None:
            folder = running.folder / "plain"
            folder.mkdir(exist_ok=True)
            self._store = from_url(f"file://{folder}")
        else:
            options = {"allow_http": True}
            self._store = from_url(
                f"s3://{servers.BUCKET}/plain",
                endpoint=running.server.url,
                virtual_hosted_style_request=False,
                client_options=options,
            )

    def put(self, name: str, data: bytes) -> object:  # type: ignore[override]
        return obstore.put(self._store, name, data, use_multipart=False)

    def get(self, name: str) -> object:  # type: ignore[override]
        return obstore.get(self._store, name).bytes()


@contextmanager
def running(kind: str) -> Iterator[Running]:
    """An engine, empty. Raises `Missing` where its server is not on this machine."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("AWS_")
    } | servers.S3_ENVIRONMENT
    environment["NO_PROXY"] = f"{servers.LOOPBACK},localhost"
    with mock.patch.dict(os.environ, environment, clear=True), report.scratch() as folder:
        if kind == "file://":
            (folder / "ours").mkdir()
            yield Running(kind, folder)
            return
        with servers.valkey_server() if kind == "Valkey" else servers.seaweedfs() as server:
            yield Running(kind, folder, server)


def not_measured(name: str, missing: BaseException) -> Figure:
    """The row of a figure whose engine this machine does not have."""
    return Figure(name, f"not measured: {missing}", "", "", None)
