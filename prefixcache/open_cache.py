"""`OpenCache`: the parts of a `PrefixCache`. Opening makes them of the settings and starts their threads, and what fails then
undoes what was opened before; closing ends them in order. What the public calls do with them is not here.
"""

from __future__ import annotations

import atexit
import logging
import os
import sqlite3
import threading
import time
from functools import partial
from typing import Any

import mlx.core as mx

from prefixcache.blocks.budget import Budget
from prefixcache.byte_sizes import size
from prefixcache.codecs import Codec
from prefixcache.codecs.interchange import device_memory
from prefixcache.codecs.transform.bases import Bases
from prefixcache.codecs.turboquant import backends as turboquant_backends
from prefixcache.memory import machine_memory, trim_process_memory
from prefixcache.metrics.stats import Stats
from prefixcache.ranks.agreement import Ranks
from prefixcache.remote.client import Client, open_client
from prefixcache.remote.tier import RemoteTier
from prefixcache.settings import Settings
from prefixcache.ssd import Entry, NamespaceRow, Ssd, WriterEvents
from prefixcache.ssd.awaited import AwaitedDisk, why_absent
from prefixcache.ssd.directory import rank_folder, rank_folders, refusal
from prefixcache.store_fetch_remove.collect_stats import collect_stats
from prefixcache.store_fetch_remove.leases import Leases
from prefixcache.store_fetch_remove.live_stores import StoresBehind
from prefixcache.store_fetch_remove.namespaces import Namespaces
from prefixcache.store_fetch_remove.pins import Pins
from prefixcache.tiers.hot import HotPrompts
from prefixcache.tiers.idle import Idle
from prefixcache.tiers.memory_pressure import Pressure
from prefixcache.tiers.promotion import Promoter
from prefixcache.tiers.storage import Storage
from prefixcache.tiers.tier_in_graph import TierInGraph
from prefixcache.trace.recording import Recorder

log = logging.getLogger("prefixcache")

LAST_UPLOADS = 5.0  # seconds that close() gives to what waits for the remote tier
INTERRUPTED_CLOSE = 5.0  # seconds that an interrupted close() gives the SSD
ANY_LIMIT = 1 << 62  # bytes of an SSD, where its size doesn't matter

_open: set[OpenCache] = set()  # those that have a directory or a remote tier, until they are closed


def open_cache(settings: Settings, codec: Codec, ranks: Ranks | None) -> OpenCache:
    """Open a cache, with `ranks` on all of them or none: each then has a directory of its own in `ssd_dir`."""
    if ranks is None:
        return OpenCache(settings, codec)
    here: list[OpenCache] = []
    try:
        ranks.done_by_all(
            lambda: here.append(OpenCache(_of_rank(settings, ranks), codec, ranks.on_this_machine)), "open a cache"
        )
    except BaseException:
        for cache in here:  # it is open on this rank, but not on all
            cache.close()
        raise
    return here[0]


class OpenCache:
    """What a cache consists of while it is open.

    `ssd` is None without one, and until the disk is there that `disk` waits for. `closed` changes under a lock of its own.
    """

    def __init__(self, settings: Settings, codec: Codec, sharing: int = 1):
        """Open it. `sharing`: the processes of one model on this machine; what "auto" gives is divided by it."""
        self.settings, self.sharing = settings, sharing
        ram = settings.ram_bytes(usable_memory() // sharing)
        self.has_ssd = settings.ssd_dir is not None and settings.ssd != 0
        self.storage = Storage(settings, ram, tiers=1 + self.has_ssd)
        if (memory := device_memory()) is not None:
            limit = settings.hot_bytes(ram, memory)
            self.storage.hot = HotPrompts(Budget(limit), limit)
        self.namespaces = Namespaces(self.storage, codec, Bases(settings.basis_dir))
        self.pins = Pins(self.storage)
        self.leases = Leases(self.storage)
        self.behind = StoresBehind()
        self.promoter = Promoter(self.storage)
        self.pressure = Pressure(self.storage, settings.reserve_bytes(machine_memory()))
        self.idle = Idle(self.storage)
        self.ssd: Ssd | None = None
        self.disk: AwaitedDisk | None = None
        self.remote: RemoteTier | None = None
        self.recorder = Recorder(settings.trace) if settings.trace is not None else None
        self.closed = False
        self._codec, self._kernels = str(codec), turboquant_backends.describe()
        self._close_lock = threading.RLock()  # a signal's handler may close what is being closed
        self._pid = os.getpid()
        try:
            self._open_tiers()
            self._start()
        except BaseException:
            self.close()
            raise

    def _open_tiers(self) -> None:
        client = self._remote_client()  # what is wrong with its settings is said before a directory is made
        if self.has_ssd and not self._waits_for_disk():
            self._open_ssd()
        if client is not None:
            settings = self.settings
            self.remote = self.storage.remote = RemoteTier(
                self.storage, client, self.namespaces, settings.remote_admission, settings.remote_timeout
            )
        self.storage.ram.warn_if_useless()

    def _start(self) -> None:
        if self.settings.memory_reserve != 0:
            self.pressure.start()
        if self.has_ssd and self.settings.idle_bytes(ANY_LIMIT):  # its disk may have room, or be there, only later
            self.idle.start()
        if self.has_ssd or self.remote is not None:
            _open.add(self)
        if self.disk is not None:
            self.disk.start()  # the cache is complete: what it opens may be used at once

    def _remote_client(self) -> Client | None:
        """Return the remote tier's engine, which is not asked yet. ValueError for a bad URL or key file, or a missing
        package.
        """
        settings = self.settings
        if settings.remote is None:
            return None
        return open_client(
            settings.remote.get_secret_value(),
            settings.remote_key_file,
            settings.remote_ca_file,
            timeout=settings.remote_timeout,
        )

    def _waits_for_disk(self) -> bool:
        """Tell whether the directory's disk is not there yet, and is waited for: then the SSD is opened when it is."""
        directory = self.settings.ssd_dir
        if self.settings.ssd_missing == "error" or directory is None or not (why := why_absent(directory)):
            return False
        log.warning("SSD %s: %s; RAM only until then", directory, why)

        def open_ssd() -> None:
            with self._close_lock:
                if not self.closed:
                    self._open_ssd()

        self.disk = AwaitedDisk(directory, open_ssd)
        return True

    def _open_ssd(self) -> None:
        settings, storage, directory = self.settings, self.storage, self.settings.ssd_dir
        assert directory is not None
        ranks = rank_folders(directory.parent) if self.sharing > 1 else {}
        limit = settings.ssd_bytes(directory, [folder for folder in ranks.values() if folder != directory])
        tier = storage.add_tier()
        ssd = Ssd(
            directory,
            limit=limit // self.sharing if settings.ssd == "auto" else limit,
            reserve=settings.ssd_reserve_bytes(directory),
            queue_bytes=settings.queue_bytes(storage.ram.configured),  # a disk that was awaited may find another
            readers=settings.readers,
            events=WriterEvents(partial(storage.written, tier), partial(self._reopened, tier), tier.shrunk),
        )
        try:
            namespaces = self.namespaces.from_rows(ssd.namespaces())  # without the lock
            storage.open_tier(tier, ssd, namespaces, loaded=partial(self.leases.outlast, ssd))
        except BaseException as error:
            ssd.close(0)
            if isinstance(error, (OSError, sqlite3.Error)):
                raise refusal(directory, error) from error
            raise
        self.ssd = ssd

    def _reopened(self, tier: TierInGraph, namespaces: list[NamespaceRow], entries: list[Entry]) -> None:
        self.storage.reopened(tier, self.namespaces.from_rows(namespaces), entries)

    # -- while it is open ---------------------------------------------------------------------------------------------

    def check_process(self) -> None:
        """Raise RuntimeError in a fork of the process that opened it."""
        if self._pid != os.getpid():  # its locks may be held by threads that the fork left behind
            raise RuntimeError(
                f"this PrefixCache is of process {self._pid}, and this is a fork of it: open another here"
            )

    def check_open(self) -> None:
        """Raise RuntimeError when it is closed, or in a fork; wait for stores behind. Not to be called under a lock."""
        self.check_process()
        if self.closed:
            raise RuntimeError("this PrefixCache is closed: open another")
        self.behind.wait()

    def stats(self) -> Stats:
        """Return where everything is now, and what has happened since it was opened."""
        return collect_stats(self.storage, self.leases, self.ssd, self.remote, self._codec, self._kernels)

    def resize_ram(self, nbytes: int, wait: float) -> None:
        """Give RAM, and what takes a share of it, another limit. What must leave waits so many seconds for the SSD."""
        if self.ssd is not None:
            self.ssd.resize_queue(self.settings.queue_bytes(nbytes))
        if device_memory() is None:
            with self.storage.lock:
                self.storage.hot.resize(self.settings.hot_bytes(nbytes))
        self.storage.ram.resize(nbytes, wait, asked=True)
        trim_process_memory()

    # -- closing ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the threads, write what RAM alone has, let go of the directory, give RAM back. May be called again."""
        if self._pid != os.getpid():
            return
        with self._close_lock:
            if self.closed:
                return
            self.closed = True
            end, whole = time.monotonic() + self.settings.close_timeout, False
            try:
                self._end_work(end)
                whole = True
            finally:
                if self.remote is not None and not whole:
                    self.remote.close(0.0)
                if self.ssd is not None:
                    self.ssd.close(_left(end) if whole else min(INTERRUPTED_CLOSE, _left(end)))
                _open.discard(self)
                with self.storage.lock:
                    self.storage.counters.denied += self.storage.budget.denied  # of a budget that ends here
                    self.leases.release()
                    self.storage.release()
                if self.recorder is not None:
                    self.recorder.close()
                trim_process_memory()

    def _end_work(self, end: float) -> None:
        self.behind.close()
        for thread in (self.pressure, self.disk, self.idle):
            if thread is not None:
                thread.stop()
        self.promoter.close(_left(end))
        if self.ssd is not None:
            self._write_out(self.ssd, _left(end))
        if self.remote is not None:
            self.remote.close(min(LAST_UPLOADS, _left(end)))

    def _write_out(self, ssd: Ssd, timeout: float) -> None:
        spilling = self.storage.spilling
        spilling.flush_recency()
        failed = ssd.failed
        if not self.settings.spill_on_close:
            return
        is_done = spilling.drain(timeout)
        if not (left := spilling.unwritten()):
            return
        what = f"{len(left)} images ({size(sum(slot.nbytes for slot in left))}) that only RAM has are not written"
        if is_done:
            log.info("SSD %s: %s: its limit of %s has no room for more", ssd.directory, what, size(ssd.stats().limit))
        elif ssd.failed > failed:
            log.warning("SSD %s: closed with a disk that fails: %s: %s", ssd.directory, what, ssd.stats().last_error)
        else:
            log.warning(
                "SSD %s: %s: close_timeout=%s s were not enough", ssd.directory, what, self.settings.close_timeout
            )


@atexit.register
def _close_all() -> None:
    """Those that nobody closed. Threads can't be started any more; those of the SSD's writer still run."""
    for cache in list(_open):
        try:
            cache.close()
        except Exception:
            log.exception("ssd_dir=%r: not closed cleanly at the end of the program", str(cache.settings.ssd_dir))


def _left(end: float) -> float:
    return max(end - time.monotonic(), 0.0)


def _of_rank(settings: Settings, ranks: Ranks) -> Settings:
    """Return the settings of one rank: a directory of its own. All see the same prompts, so only the first records them."""
    own: dict[str, Any] = {}
    if settings.ssd_dir is not None:
        own["ssd_dir"] = rank_folder(settings.ssd_dir, ranks.rank)
    if not ranks.is_first:
        own["trace"] = None
    return settings.model_copy(update=own)


def usable_memory() -> int:
    """Return the bytes that "auto" takes a share of: on a Mac Metal's recommended working set, else the machine's memory."""
    if mx.metal.is_available():
        return int(mx.device_info(mx.gpu)["max_recommended_working_set_size"])
    return machine_memory()
