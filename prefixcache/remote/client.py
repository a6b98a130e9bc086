"""`Client`: an engine as the cache uses it, with sealed images under names. Its `calls` have the threads that ask and read,
and say when the engine is to be left alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prefixcache.remote.calls import EngineCalls
from prefixcache.remote.engine import Engine, EngineError, Sink
from prefixcache.remote.missing_names import MissingNames
from prefixcache.remote.sealing import VERSION, FleetKey, KeySeal, NoSeal, NotSealed, Seal, Unsealing
from prefixcache.remote.speed import Speed
from prefixcache.remote.stats import RemoteCounters, RemoteStats
from prefixcache.remote.url import check_url, open_engine

log = logging.getLogger("prefixcache")

CONNECT_TIMEOUT = 1.0  # seconds for a connection; less where a call has less
MISSING = f"{VERSION}/missing"  # a name that nobody has
PROBE = f"{VERSION}/probe"  # what is written to see whether an engine takes images again
KEY_CHECK = f"{VERSION}/key"  # what stands here tells which key the images are sealed with
KEY_TEXT = np.frombuffer(b"prefixcache", np.uint8)


def open_client(
    url: str, key_file: Path | None, ca_file: Path | None, *, timeout: float, key_setting: str = "remote_key_file"
) -> Client:
    """Return a client of the engine that a URL names; it is not asked yet. `timeout`: seconds of a call.

    Raises ValueError for a bad URL or key file (`key_setting` is what the user knows it by), and for a missing package.
    """
    check_url(url, key_file is not None)
    seal = KeySeal(FleetKey.read(key_file, key_setting)) if key_file is not None else NoSeal()
    try:
        engine = open_engine(url, timeout=timeout, connect_timeout=min(CONNECT_TIMEOUT, timeout), ca_file=ca_file)
    except ImportError as error:
        raise ValueError(str(error)) from error
    return Client(engine, seal)


class Client:
    """Thread-safe: its parts guard themselves."""

    def __init__(self, engine: Engine, seal: Seal):
        self.engine, self.seal = engine, seal
        self.counters = RemoteCounters()
        self.speed = Speed()
        self.missing = MissingNames()
        self.calls = EngineCalls(engine.label, self.counters)
        self._sealing = threading.local()  # `memory`: per thread, a buffer used again for the next seal
        self.probe_bytes = 0  # of the last image that could not be written, sealed

    # -- asking and reading, which raise EngineError -------------------------------------------------------------------

    def sizes(self, names: Sequence[str], timeout: float | None = None) -> list[int | None]:
        """Return the bytes under each name; None for those that are missing, or are taken for missing. Raises EngineError
        after `timeout` seconds.
        """
        asked = [name for name in names if name not in self.missing]
        if not asked:
            return [None] * len(names)
        sizes = dict(zip(asked, self.calls.wait(self.calls.ask(self._sizes, asked), timeout), strict=True))
        return [sizes.get(name) for name in names]

    def _sizes(self, names: Sequence[str]) -> list[int | None]:
        began = time.monotonic()
        sizes = self.engine.sizes(names)
        seconds = time.monotonic() - began
        self.counters.add(asks=1)
        self.counters.ask_seconds.observe(seconds)
        self.speed.learn_trip(seconds)
        return sizes

    def ids_under(self, folders: Sequence[str], timeout: float) -> list[list[str]]:
        """Return the last parts of the names in each of a few folders."""
        asking = [self.calls.ask(self.engine.names_under, folder) for folder in folders]
        self.counters.add(asks=len(folders))
        until = time.monotonic() + timeout
        try:
            listed = [self.calls.wait(future, max(until - time.monotonic(), 0.0)) for future in asking]
        except EngineError:
            for future in asking:
                self.calls.give_up(future)
            raise
        return [[name.rpartition("/")[2] for name in names] for names in listed]

    def read(
        self, name: str, size: int | None, reserve_room: Callable[[int], bool], watch: Sink | None = None
    ) -> np.ndarray | None:
        """Return the unsealed bytes under a name, on this thread; None where there are none, or what is there was not sealed
        under this name. `room(nbytes)` reserves memory before the read; if it returns False, the result is None.
        `watch` is shown each piece once it is unsealed, while the processor's cache has it.
        """
        began = time.monotonic()
        try:
            data = self._unsealed(name, size, reserve_room, watch)
        except NotSealed:
            self.refuse(name, "it was not sealed under this key and name")
            return None
        if data is not None:
            self.counters.add(read_images=1, read_bytes=data.nbytes + self.seal.overhead)
            self.counters.read_seconds.observe(time.monotonic() - began)
        return data

    def _unsealed(
        self, name: str, size: int | None, reserve_room: Callable[[int], bool], watch: Sink | None = None
    ) -> np.ndarray | None:
        unsealing: list[Unsealing] = []

        def sink(piece: memoryview) -> None:
            unsealed = unsealing[0].take(piece)
            if watch is not None:
                watch(unsealed)

        def accept(nbytes: int) -> Sink | None:
            if not reserve_room(nbytes):
                return None
            unsealing.append(self.seal.unseal(name, nbytes))
            return sink

        return unsealing[0].finish() if self.engine.get(name, size, accept) else None

    def has_our_key(self) -> bool | None:
        """Tell whether images there are sealed as here, with this key or without one; None if no key-check
        text is stored. On this thread.
        """

        def ask() -> bool | None:
            try:
                text = self._unsealed(KEY_CHECK, None, lambda nbytes: nbytes <= 1024)
            except NotSealed:
                return False
            return None if text is None else np.array_equal(text, KEY_TEXT)

        began = time.monotonic()
        is_ours = self.calls.guarded(self.calls.reading, ask, question=True)
        self.speed.learn_trip(time.monotonic() - began)
        return is_ours

    def compare_keys(self, writes: bool) -> None:
        """Warn where images are sealed with another key; if the client `writes`, write ours if none is stored. On this
        thread.
        """
        ours = self.has_our_key()
        if ours is None and writes:
            self.write(KEY_CHECK, KEY_TEXT)
            ours = self.has_our_key()  # another may have begun at the same time
        if ours is False:
            log.warning(
                "remote %s: its images are sealed with another key, or without one, and can't be hit here; give all machines "
                "the same remote_key_file",
                self.engine.label,
            )

    # -- writing ------------------------------------------------------------------------------------------------------

    def write(self, name: str, data: np.ndarray, listed: bool = False) -> None:
        """Seal bytes and put them under a name, on this thread. Raises EngineError, and `writing` hears of it.

        The memory that they are sealed in is kept for the thread's next image, until it calls `forget_memory`.
        """
        began = time.monotonic()
        memory = getattr(self._sealing, "memory", None)
        self.forget_memory()  # unless the engine is done with it
        if memory is not None and memory.nbytes < data.nbytes + self.seal.overhead:
            memory = None  # before more is taken: RAM was reserved for the larger one
        sealed = self.seal.seal(name, data, memory)
        try:
            self.calls.guarded(self.calls.writing, self.engine.put, name, sealed.data, listed)
        except EngineError:
            self.probe_bytes = sealed.nbytes
            raise
        if self.seal.overhead:
            self._sealing.memory = sealed if memory is None else memory
        self.counters.add(written_images=1, written_bytes=data.nbytes + self.seal.overhead)
        self.counters.write_seconds.observe(time.monotonic() - began)
        self.missing.discard(name)

    def keep_listed(self, names: Sequence[str]) -> None:
        """List names again that are there, since an engine may have evicted its list. On this thread."""
        if names:
            self.calls.guarded(self.calls.writing, self.engine.keep_listed, names, question=True)

    def forget_memory(self) -> None:
        """Let go of the memory that this thread seals in: it has nothing to write for now."""
        self._sealing.memory = None

    def probe(self) -> None:
        """Look whether an engine that failed works again, if it is time for it; the caller has reserved `probe_bytes`. On
        this thread.
        """
        for breaker in (self.calls.reading, self.calls.writing):
            if breaker.takes_probe():
                try:
                    self._sizes([MISSING])
                    if breaker is self.calls.writing:
                        # As large as what failed: a full engine still takes what is small.
                        self.engine.put(PROBE, np.zeros(self.probe_bytes, np.uint8).data)
                        self.engine.put(PROBE, b"probe")  # then small: it need not stay large
                except EngineError as error:
                    breaker.failed(str(error))
                else:
                    breaker.succeeded(question=True, probe=True)

    def refuse(self, name: str, reason: str) -> None:
        """Take a name for missing for a while: what is under it is not to be believed. The first is logged."""
        self.missing.refuse(name)
        if self.counters.add(refused=1) == 1:
            log.warning(
                "remote %s: an image was refused: %s; others that are will be counted only", self.engine.label, reason
            )

    # -- the client itself --------------------------------------------------------------------------------------------

    def stats(self, queued: int) -> RemoteStats:
        counters = self.counters
        with counters.lock:
            counts: dict[str, Any] = {
                name: value for name, value in vars(counters).items() if isinstance(value, (int, str))
            }
        return RemoteStats(
            engine=self.engine.label,
            reading=self.calls.reading.closed,
            writing=self.calls.writing.closed,
            queued=queued,
            **counts,
            ask_seconds=counters.ask_seconds.read(),
            read_seconds=counters.read_seconds.read(),
            write_seconds=counters.write_seconds.read(),
        )

    def close(self) -> None:
        """Begin nothing more, and let go of the engine."""
        self.calls.close()
        self.engine.close()
