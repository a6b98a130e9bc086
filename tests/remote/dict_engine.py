"""An engine in a dict, for what the real ones can't be made to do at a given moment: fail, hang, forget, lie."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence

from prefixcache.remote.engine import EngineError, Sink


class DictEngine:
    """`images` may be changed by tests. `down` makes all calls fail, `gate` holds them while it is clear. `at` is called
    before each call, with its name.
    """

    label = "dict://"

    def __init__(self, names_at_once: int = 1 << 16):
        self.names_at_once = names_at_once
        self.images: dict[str, bytes] = {}
        self.calls: Counter[str] = Counter()
        self.down = ""
        self.gate = threading.Event()
        self.gate.set()
        self.at: Callable[[str], None] = lambda call: None
        self.closed = False

    def _call(self, name: str) -> None:
        self.calls[name] += 1
        self.at(name)
        if not self.gate.wait(20):
            raise EngineError("timed out")
        if self.down:
            raise EngineError(self.down)

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        for _ in range(-(-len(names) // self.names_at_once)):
            self._call("sizes")
        return [len(self.images[name]) if name in self.images else None for name in names]

    def get(self, name: str, size: int | None, accept: Callable[[int], Sink | None]) -> bool:
        self._call("get")
        data = self.images.get(name)
        if data is None or (sink := accept(len(data) if size is None else size)) is None:
            return False
        sink(memoryview(data)[:size])
        return True

    def put(self, name: str, data: bytes | memoryview, listed: bool = False) -> None:
        self._call("put")
        self.images[name] = bytes(data)

    def keep_listed(self, names: Sequence[str]) -> None:
        self._call("keep_listed")

    def names_under(self, folder: str) -> list[str]:
        self._call("names_under")
        return [name for name in self.images if name.rpartition("/")[0] == folder]

    def about(self) -> dict[str, str]:
        return {"engine": "dict"}

    def close(self) -> None:
        self.closed = True
