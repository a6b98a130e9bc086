"""`Client`: an engine as the cache uses it. Calls run on threads of the client, so that whoever waits can stop waiting; the
engine is left alone while it fails.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FuturesTimeout
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from prefixcache.remote.breaker import Breaker
from prefixcache.remote.engine import Engine, EngineError, Sink
from prefixcache.remote.missing_names import MissingNames
from prefixcache.remote.sealing import VERSION, FleetKey, KeySeal, NoSeal, NotSealed, Seal, Unsealing
from prefixcache.remote.speed import Speed
from prefixcache.remote.stats import RemoteCounters, RemoteStats
from prefixcache.remote.threads import DaemonThreads
from prefixcache.remote.url import check_url, open_engine

log = logging.getLogger("prefixcache")

CONNECT_TIMEOUT = 1.0  # seconds for a connection; less where a call has less
READERS = 8  # images that are read at once
ASKERS = 8  # questions
MISSING = f"{VERSION}/missing"  # a name that nobody has
PROBE = f"{VERSION}/probe"  # what is written to see whether an engine takes images again
KEY_CHECK = f"{VERSION}/key"  # what stands here tells which key the images are sealed with
KEY_TEXT = np.frombuffer(b"prefixcache", np.uint8)

Result = TypeVar("Result")


def open_client(
    url: str, key_file: Path | None, ca_file: Path | None, *, timeout: float, key_setting: str = "remote_key_file"
) -> Client:
    """A client of the engine that a URL names; it is not asked yet. `timeout`: seconds of a call.

    ValueError for a bad URL or key file (`key_setting` is what the user knows it by), and for a missing package.
    """
    check_url(url, key_file is not None)
    seal = KeySeal(FleetKey.read(key_file, key_setting)) if key_file is not None else NoSeal()
    try:
        engine = open_engine(url, timeout=timeout, connect_timeout=min(CONNECT_TIMEOUT, timeout), ca_file=ca_file)
    except ImportError as error:
        raise ValueError(str(error)) from error
    return Client(engine, seal)


class Client:
    """Thread-safe: `_lock` guards the count of late calls and when something was lost; its parts guard themselves.

    Its engine may be asked while it is `ready`: it doesn't fail, and no call is late. Writing may fail by itself, where the
    engine is full.
    """

    def __init__(self, engine: Engine, seal: Seal):
        self.engine, self.seal = engine, seal
        self.counters = RemoteCounters()
        self.speed = Speed()
        self.missing = MissingNames()
        self.reading = Breaker(f"remote {engine.label}, reading")
        self.writing = Breaker(f"remote {engine.label}, writing")
        self._lock = threading.Lock()
        self._askers = DaemonThreads(ASKERS, "prefixcache-remote-ask")  # questions don't wait behind images
        self._readers = DaemonThreads(READERS, "prefixcache-remote-read")
        self._sealing = threading.local()  # its `memory`: what the thread has sealed its last image in
        self._late = 0
        self._lost_at = 0.0
        self.probe_bytes = 0  # of the last image that could not be written
        self._closed = False

    @property
    def ready(self) -> bool:
        return self.reading.closed and not self._late

    @property
    def takes_writes(self) -> bool:
        """Whether images may be sent: neither reading nor writing has failed. To send, it is asked first what it has."""
        return self.writing.closed and self.reading.closed

    @property
    def believed_since(self) -> float:
        """What the engine had before this time, by time.monotonic(), it may have lost: it failed since, or was emptied."""
        return max(self.reading.closed_at, self._lost_at)

    def note_loss(self, since: float) -> None:
        """Something that the engine had is gone: it was missing at `since`."""
        with self._lock:
            self._lost_at = max(self._lost_at, since)

    # -- asking and reading: raise EngineError ------------------------------------------------------------------------

    def sizes(self, names: Sequence[str], timeout: float | None = None) -> list[int | None]:
        """The bytes under each name; None of those that are missing, or are taken for missing. EngineError after `timeout`
        seconds.
        """
        asked = [name for name in names if name not in self.missing]
        if not asked:
            return [None] * len(names)
        found = dict(zip(asked, self.wait(self._ask(self._sizes, asked), timeout), strict=True))
        return [found.get(name) for name in names]

    def _sizes(self, names: Sequence[str]) -> list[int | None]:
        began = time.monotonic()
        found = self.engine.sizes(names)
        seconds = time.monotonic() - began
        self.counters.add(asks=1)
        self.counters.ask_seconds.observe(seconds)
        self.speed.learn_trip(seconds)
        return found

    def ids_under(self, folders: Sequence[str], timeout: float) -> list[list[str]]:
        """The last parts of the names in each of a few folders."""
        asking = [self._ask(self.engine.names_under, folder) for folder in folders]
        self.counters.add(asks=len(folders))
        until = time.monotonic() + timeout
        try:
            found = [self.wait(future, max(until - time.monotonic(), 0.0)) for future in asking]
        except EngineError:
            for future in asking:
                self.give_up(future)
            raise
        return [[name.rpartition("/")[2] for name in names] for names in found]

    def begin_read(self, call: Callable[..., Result], *arguments: object) -> Future[Result]:
        """A call that reads an image, by way of `read`, on a thread of the client."""
        return self._submit(self._readers, False, call, arguments)

    def read(
        self, name: str, size: int | None, room: Callable[[int], bool], watch: Sink | None = None
    ) -> np.ndarray | None:
        """The unsealed bytes under a name, on this thread. None where there are none, or what is there was not sealed under
        this name. `room` is asked once whether there is some for so many bytes, before they are read; where not, None, too.
        `watch` is shown each piece once it is unsealed, while the processor's cache has it.
        """
        began = time.monotonic()
        try:
            data = self._unsealed(name, size, room, watch)
        except NotSealed:
            self.refuse(name, "it was not sealed under this key and name")
            return None
        if data is not None:
            self.counters.add(read_images=1, read_bytes=data.nbytes + self.seal.overhead)
            self.counters.read_seconds.observe(time.monotonic() - began)
        return data

    def _unsealed(
        self, name: str, size: int | None, room: Callable[[int], bool], watch: Sink | None = None
    ) -> np.ndarray | None:
        unsealing: list[Unsealing] = []

        def sink(piece: memoryview) -> None:
            unsealed = unsealing[0].take(piece)
            if watch is not None:
                watch(unsealed)

        def accept(nbytes: int) -> Sink | None:
            if not room(nbytes):
                return None
            unsealing.append(self.seal.unseal(name, nbytes))
            return sink

        return unsealing[0].finish() if self.engine.get(name, size, accept) else None

    def _ask(self, call: Callable[..., Result], *arguments: object) -> Future[Result]:
        return self._submit(self._askers, True, call, arguments)

    def _submit(
        self, threads: DaemonThreads, question: bool, call: Callable[..., Result], arguments: tuple[object, ...]
    ) -> Future[Result]:
        try:
            return threads.submit(self._guarded, self.reading, question, call, *arguments)
        except RuntimeError:  # whoever is still at work when the cache is closed
            raise EngineError("closed") from None

    def wait(self, future: Future[Result], timeout: float | None) -> Result:
        """The call's result. EngineError, too, when it has none in time: until it ends, the engine is not `ready`."""
        try:
            return future.result(timeout)
        except CancelledError:
            raise EngineError("closed") from None
        except FuturesTimeout:
            self.give_up(future)
            self.counters.add(timeouts=1)
            raise EngineError(f"no answer within {timeout:.2g} s") from None

    def give_up(self, future: Future[Result]) -> None:
        """Nobody waits for a call any more, since it took too long."""
        if not future.cancel():
            with self._lock:
                self._late += 1
            future.add_done_callback(self._ended)

    def _ended(self, future: Future[Result]) -> None:
        with self._lock:
            self._late -= 1

    def has_our_key(self) -> bool | None:
        """Tell whether images there are sealed as here, with this key or without one; None where nobody has told. On this
        thread.
        """

        def ask() -> bool | None:
            try:
                text = self._unsealed(KEY_CHECK, None, lambda nbytes: nbytes <= 1024)
            except NotSealed:
                return False
            return None if text is None else np.array_equal(text, KEY_TEXT)

        began = time.monotonic()
        is_ours = self._guarded(self.reading, True, ask)
        self.speed.learn_trip(time.monotonic() - began)
        return is_ours

    def compare_keys(self, writes: bool) -> None:
        """Warn where images are sealed with another key; note ours where nobody has told, if the client `writes`. On this
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
        """Seal bytes and put them under a name, on this thread. EngineError, and `writing` hears of it.

        The memory that they are sealed in is kept for the thread's next image, until it calls `forget_memory`.
        """
        began = time.monotonic()
        memory = getattr(self._sealing, "memory", None)
        self.forget_memory()  # unless the engine is done with it
        if memory is not None and memory.nbytes < data.nbytes + self.seal.overhead:
            memory = None  # before more is taken: RAM was reserved for the larger one
        sealed = self.seal.seal(name, data, memory)
        try:
            self._guarded(self.writing, False, self.engine.put, name, sealed.data, listed)
        except EngineError:
            self.probe_bytes = sealed.nbytes
            raise
        if self.seal.overhead:
            self._sealing.memory = sealed if memory is None else memory
        self.counters.add(written_images=1, written_bytes=data.nbytes + self.seal.overhead)
        self.counters.write_seconds.observe(time.monotonic() - began)
        self.missing.discard(name)

    def keep_listed(self, names: Sequence[str]) -> None:
        """Names that are there, and whose list an engine may have evicted: they are listed again. On this thread."""
        if names:
            self._guarded(self.writing, True, self.engine.keep_listed, names)

    def forget_memory(self) -> None:
        """This thread has nothing to write for now."""
        self._sealing.memory = None

    def probe(self) -> None:
        """Look whether an engine that failed works again, if it is time for it; the caller has reserved `probe_bytes`. On
        this thread.
        """
        for breaker in (self.reading, self.writing):
            if breaker.takes_probe():
                try:
                    self._sizes([MISSING])
                    if breaker is self.writing:
                        # As large as what failed: a full engine still takes what is small.
                        self.engine.put(PROBE, np.zeros(self.probe_bytes, np.uint8).data)
                        self.engine.put(PROBE, b"probe")
                except EngineError as error:
                    breaker.failed(str(error))
                else:
                    breaker.succeeded(question=True, probe=True)

    def probe_in(self) -> float | None:
        """Seconds until `probe` has something to do; None while nothing fails."""
        due = [wait for breaker in (self.reading, self.writing) if (wait := breaker.probe_in()) is not None]
        return min(due) if due else None

    def _guarded(self, breaker: Breaker, question: bool, call: Callable[..., Result], *arguments: object) -> Result:
        try:
            result = call(*arguments)
        except EngineError as error:
            if not self._closed:
                self.counters.failed(str(error))
                breaker.failed(str(error), question)
            raise
        breaker.succeeded(question)
        return result

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
            reading=self.reading.closed,
            writing=self.writing.closed,
            queued=queued,
            **counts,
            ask_seconds=counters.ask_seconds.read(),
            read_seconds=counters.read_seconds.read(),
            write_seconds=counters.write_seconds.read(),
        )

    def close(self) -> None:
        """Nothing more is begun. What an engine that hangs is doing ends with its timeout, and says nothing of the engine."""
        self._closed = True
        for threads in (self._askers, self._readers):
            threads.close()
        self.engine.close()
