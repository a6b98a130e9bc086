"""The engine of a soak with a remote tier: a real one, and what is done to it and to its objects behind everybody's back."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from tools.soak.schedule import ENGINE, OBJECTS

KINDS = ("valkey", "s3", "file")
MEMORY = 12 << 20  # bytes that Valkey may take: it evicts what was used least recently
SECONDS = 10.0  # that the engine may take for one of the soak's own calls


class Unavailable(Exception):
    """An engine of this kind can't be had on this machine; the text says what is missing."""


class Objects(Protocol):
    """What is in an engine, past the package's own client. None for an object that is gone."""

    def names(self) -> list[str]: ...
    def get(self, name: str) -> bytes | None: ...
    def put(self, name: str, data: bytes) -> None: ...
    def delete(self, name: str) -> None: ...
    def clear(self) -> None: ...


class _Valkey:
    def __init__(self, port: int):
        import valkey

        self._client: Any = valkey.Valkey("127.0.0.1", port, socket_timeout=SECONDS)
        self.delete = self._client.delete
        self.clear = self._client.flushall

    def names(self) -> list[str]:
        """Without the sets of names, which end in a slash."""
        return sorted(name.decode() for name in self._client.scan_iter(count=1000) if not name.endswith(b"/"))

    def get(self, name: str) -> bytes | None:
        return self._client.get(name)

    def put(self, name: str, data: bytes) -> None:
        self._client.set(name, data)

    def evicted(self) -> int:
        return self._client.info("stats")["evicted_keys"]


class _Store:
    """An object store, or a folder."""

    def __init__(self, url: str, folder: Path | None = None, **config: Any):
        import obstore
        from obstore.store import LocalStore, from_url

        make: Any = from_url
        self._calls, self._folder = obstore, folder
        self._store: Any = LocalStore(folder, mkdir=True) if folder is not None else make(url, **config)

    def names(self) -> list[str]:
        with suppress(FileNotFoundError):
            return sorted(found["path"] for page in self._calls.list(self._store) for found in page)
        return []

    def get(self, name: str) -> bytes | None:
        try:
            return bytes(self._calls.get(self._store, name).bytes())
        except FileNotFoundError:
            return None

    def put(self, name: str, data: bytes) -> None:
        with suppress(FileNotFoundError):
            self._calls.put(self._store, name, data, use_multipart=False)

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._calls.delete(self._store, name)

    def clear(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        else:
            self._calls.delete(self._store, self.names())


class Engine:
    """`server`: the process (`tests.remote.servers.Server`), None for a folder. `kinds`: the faults that it can have."""

    def __init__(self, url: str, objects: Objects, server: Any = None):
        self.url, self.objects, self.server = url, objects, server
        self.kinds = ENGINE if server is not None else tuple(kind for kind in ENGINE if kind not in ("kill", "stall"))
        self.evicted = 0

    def stop(self, kind: str) -> None:
        """kill or stall; `go_on` ends it."""
        if kind == "kill":
            self.count_evicted()
            self.server.kill()
        else:
            self.server.freeze()

    def go_on(self, kind: str) -> None:
        if kind == "kill":
            self.server.start()
        else:
            self.server.thaw()

    def harm(self, kind: str, share: float, chance: random.Random) -> int:
        """A word of OBJECTS, to a share of the objects: how many. They may go away meanwhile."""
        names = self.objects.names()
        chosen = chance.sample(names, int(len(names) * share))
        for one, other in zip(chosen, chosen[1:] + chosen[:1], strict=True):
            if kind == "delete":
                self.objects.delete(one)
            elif kind == "swap":
                data = self.objects.get(other)
                if data is not None:
                    self.objects.put(one, data)
            elif data := self.objects.get(one):
                self.objects.put(one, _harmed(kind, data, chance))
        return len(chosen)

    def count_evicted(self) -> None:
        """Before it dies: it forgets the number."""
        if isinstance(self.objects, _Valkey):
            self.evicted += self.objects.evicted()


def _harmed(kind: str, data: bytes, chance: random.Random) -> bytes:
    assert kind in OBJECTS
    if kind == "truncate":
        return data[: int(len(data) * chance.random() ** 2)]
    at = chance.choice((chance.randrange(len(data)), 0, len(data) - 1))
    return data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))]) + data[at + 1 :]


@contextmanager
def running(kind: str, where: Path) -> Iterator[Engine]:
    """An engine of one of KINDS, empty, until the end. Unavailable where there is none."""
    if kind == "file":
        folder = where / "engine"
        folder.mkdir(parents=True)
        yield Engine(f"file://{folder}", _Store("", folder))
        return
    try:
        import pytest

        from tests.remote.servers import BUCKET, S3_ENVIRONMENT, seaweedfs, valkey_server
    except ImportError as error:
        raise Unavailable(f"{error.name} is not installed; pip install -e '.[dev]'") from None
    try:
        if kind == "valkey":
            with valkey_server(MEMORY, "allkeys-lru") as server:
                yield Engine(f"valkey://127.0.0.1:{server.port}", _Valkey(server.port), server)
            return
        for name in [name for name in os.environ if name.startswith("AWS_ENDPOINT")]:
            del os.environ[name]
        os.environ.update(S3_ENVIRONMENT, NO_PROXY="127.0.0.1,localhost")  # of the machines, too
        with seaweedfs() as server:
            config = {"endpoint": server.url, "virtual_hosted_style_request": False}
            objects = _Store(f"s3://{BUCKET}/soak", client_options={"allow_http": True, "timeout": "10s"}, **config)
            yield Engine(f"s3://{BUCKET}/soak?endpoint={server.url}", objects, server)
    except pytest.skip.Exception as skipped:
        raise Unavailable(str(skipped)) from None
