"""The process under test: client threads that replay the trace on one PrefixCache, as the handlers of a server would.

Each answer is checked here, row by row. What happens is told to the judge in lines of JSON on one pipe, orders come on
another. The process is forked from one that has imported MLX and never used it, so that a restart costs little.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import logging
import os
import random
import resource
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx

from prefixcache import PrefixCache, Settings
from prefixcache.blocks.node import RAM
from prefixcache.memory import trim_process_memory
from prefixcache.ssd.directory import Directory
from prefixcache.ssd.index import Index
from tools.faults.disk import Clock, Disk
from tools.soak import states
from tools.soak.prompts import Request, Tenant, Trace, digest
from tools.soak.watch import Watch

SAMPLE = 50  # requests between two looks at memory, descriptors and threads
RECHECK = 10  # every so many requests the judge checks the answer, too
FLUSHES = 6  # of 20 seconds each: so long the writer may take to be done once the disk works again
PATIENCE = 120.0  # seconds that a promotion may take
REMOTE_TIMEOUT = 2.0  # seconds
STALLED = 20.0  # seconds that a request waits for the remote tier at most: clients wait for each other, too
PINS = 3  # that one client holds at once


class Orders(NamedTuple):
    """One life of the server. Sizes in bytes; `first`: the number of the request to begin with."""

    life: int
    seed: int
    directory: str
    ram: int
    ssd: int
    spill: str
    policy: str
    admission: str
    threads: int
    first: int
    run: int
    plant: str = ""  # a fault of the soak's own that the judge must find: "answer" or "log"
    codec: str = "raw"
    bases: str = ""  # the folder of the models' bases, for codec transform
    remote: str = ""  # the URL of a fleet's engine
    key: str = ""
    remote_admission: str = "second"
    machines: int = 1  # each takes every so-many-th request

    @property
    def exact(self) -> bool:
        return self.codec == "raw"


class Pipe:
    """Lines to the judge; each is one write of less than PIPE_BUF, so that a kill never tears one."""

    def __init__(self, fd: int, life: int):
        self._fd, self._life = fd, life
        self._write = os.write
        self._lock = threading.Lock()

    def tell(self, what: str, *values: Any) -> None:
        line = json.dumps([self._life, what, *values], separators=(",", ":")).encode() + b"\n"
        if len(line) > 4096:
            line = json.dumps([self._life, what, str(values)[:2000]]).encode() + b"\n"
        with self._lock:
            while line:
                line = line[self._write(self._fd, line) :]


class Server:
    """`_gate` guards `_busy`, the count of clients in a request, and `_held`, which keeps them from beginning one."""

    def __init__(self, orders: Orders, trace: Trace, pipe: Pipe):
        self.orders, self.trace, self.pipe = orders, trace, pipe
        self.disk, self.clock = Disk(orders.directory), Clock()
        self.stop = threading.Event()  # clients begin no more requests
        self.ending = threading.Event()  # errors are no errors any more: the cache may be closed at any moment
        self.over = threading.Event()  # the main thread goes on to the end
        self.end = "close"
        self._gate = threading.Condition()
        self._busy, self._held = 0, False
        self._next = orders.first
        self._waited = 0.0  # the longest that a request did for the remote tier, in seconds
        self._exact = True  # nothing was done to the directory behind the cache's back
        self._clients: list[threading.Thread] = []

    def run(self) -> None:
        self.disk.install()
        self.disk.install_transactions(Index)
        self.clock.install()
        Watch(self.pipe.tell).install()
        signal.signal(signal.SIGTERM, self._terminated)
        o = self.orders
        remote: dict[str, Any] = {}
        if o.remote:
            remote = {
                "remote": o.remote,
                "remote_key_file": o.key,
                "remote_admission": o.remote_admission,
                "remote_timeout": REMOTE_TIMEOUT,
            }
        self.cache = PrefixCache(
            Settings(
                ram=o.ram,
                ssd_dir=o.directory,
                ssd=o.ssd,
                codec=o.codec,
                spill=o.spill,
                spill_wait=0.2,
                policy=o.policy,
                ssd_admission=o.admission,
                close_timeout=20.0,
                basis_dir=o.bases or o.directory,
                **remote,
            )
        )
        self.pipe.tell("ready")
        if not self.cache.flush(60):
            self.pipe.tell("problem", "flush", "the first flush of an opened cache was not done")
        self.pipe.tell("settled")
        self._clients = [
            threading.Thread(target=self._client, args=(number,), name=f"client-{number}", daemon=True)
            for number in range(o.threads)
        ]
        for client in self._clients:
            client.start()
        threading.Thread(target=self._sample, name="soak-samples", daemon=True).start()
        while not self.over.wait(0.5):  # a signal just before a wait without an end would not be heard
            pass
        self._finish()

    # -- clients ------------------------------------------------------------------------------------------------------

    def _client(self, number: int) -> None:
        chance = random.Random(f"{self.orders.seed}:{self.orders.life}:{number}")
        pins: list[tuple[Any, Tenant]] = []
        while not self.stop.is_set():
            with self._request() as request:
                if request is None:
                    return
                try:
                    self._serve(request, chance, pins)
                except Exception as error:
                    if not self.ending.is_set():
                        # Not its text: the soak's own arrays of tokens may be in it.
                        where = "".join(traceback.format_tb(error.__traceback__)[-4:])
                        self.pipe.tell("problem", "error", f"{type(error).__name__}: {str(error)[:300]}\n{where}")
                    return

    @contextmanager
    def _request(self) -> Iterator[Request | None]:
        with self._gate:
            self._gate.wait_for(lambda: not self._held or self.stop.is_set())
            if self.stop.is_set():
                number = -1
            else:
                number, self._next = self._next, self._next + self.orders.machines
                self._busy += 1
        try:
            yield self.trace.request(number) if number >= 0 else None
        finally:
            if number >= 0:
                with self._gate:
                    self._busy -= 1
                    self._gate.notify_all()

    def _serve(self, request: Request, chance: random.Random, pins: list[tuple[Any, Tenant]]) -> None:
        cache, tenant, prompt = self.cache, request.tenant, request.prompt
        who: dict[str, Any] = {"model": tenant.model, "salt": tenant.salt}
        match = cache.match(prompt, **who)
        if self.orders.remote:
            self._promote_remote(prompt, who, chance)
        if match.ssd > match.ram and chance.random() < 0.9:
            cache.promote(prompt, **who).result(PATIENCE)
        state, rest = cache.fetch(prompt, **who)
        depth = len(prompt) - len(rest)
        if state is None:
            state, depth = states.empty(tenant), 0
        else:
            if self.orders.plant == "answer" and request.number % 7 == 5:
                state[0].keys = state[0].keys + 1
            self._check(request, state, depth, rest)
        if tenant.kind == "hybrid" or chance.random() < 0.3:
            states.prefill(state, tenant, prompt, depth)
            cache.store(prompt, state, **who)
            depth = len(prompt)
        states.prefill(state, tenant, request.tokens, depth)
        stored = cache.store(request.tokens, state, **who)
        if stored.tokens > len(request.tokens):
            self.pipe.tell("wrong", request.number, f"store says {stored.tokens} of {len(request.tokens)} tokens")
        self._strangers(request)
        self._now_and_then(request, chance, pins, who)
        self._count(request, len(prompt) - len(rest))

    def _promote_remote(self, prompt: Any, who: dict[str, Any], chance: random.Random) -> None:
        """What other machines have, now and then only while that is quicker than a prefill of some tokens a second."""
        began = time.monotonic()
        asked = self.cache.promote_remote(
            self.cache.prompt(prompt, **who), prefill_rate=chance.choice((None, None, 1000.0, 50_000.0))
        )
        if asked is None:
            return
        asked.result(PATIENCE)
        waited = time.monotonic() - began
        self._waited = max(self._waited, waited)
        if waited > STALLED:
            self.pipe.tell("problem", "stall", f"a request waited {waited:.1f} s for the remote tier")

    def _check(self, request: Request, state: list[Any], depth: int, rest: Any) -> None:
        known = request.prompt[:depth]
        wrong = states.faults(state, request.tenant, known, self.orders.exact)
        if not 0 < depth < len(request.prompt) or not (rest == request.prompt[depth:]).all():
            wrong.append(f"depth {depth} of {len(request.prompt)} with {len(rest)} tokens left")
        if wrong:
            self.pipe.tell("wrong", request.number, f"{request.tenant.kind}, {depth} tokens: {'; '.join(wrong)}")
        elif request.number % RECHECK == 0 and self.orders.exact:
            self.pipe.tell("answer", request.number, depth, digest(states.first_keys(state, depth)))

    def _strangers(self, request: Request) -> None:
        """The same tokens of another tenant or model are unknown."""
        tenant = request.tenant
        for model, salt in ((tenant.model, tenant.salt + b"?"), (tenant.model + "?", tenant.salt)):
            if self.cache.match(request.prompt, model=model, salt=salt) != (0, 0):
                self.pipe.tell("wrong", request.number, "another tenant's tokens match")
        if request.number % 8 == 0:
            got, _ = self.cache.fetch(request.prompt, model=tenant.model, salt=tenant.salt + b"?")
            if got is not None:
                self.pipe.tell("wrong", request.number, "another tenant's state was given out")

    def _now_and_then(
        self, request: Request, chance: random.Random, pins: list[tuple[Any, Tenant]], who: dict[str, Any]
    ) -> None:
        cache, tenant, draw = self.cache, request.tenant, chance.random()
        if draw < 0.03:
            cache.flush(5)
        elif draw < 0.08:
            if cache.pin(request.prompt, **who):
                pins.append((request.prompt, tenant))
        elif draw < 0.11:
            cache.remove(request.tokens, **who)
        elif draw < 0.13:
            cache.trim_to(self.orders.ram // chance.choice((2, 4, 8)), wait=0.1)
        elif draw < 0.14:
            cache.resize(ram=self.orders.ram * chance.choice((2, 3, 4)) // 4, wait=0.1)
        elif draw < 0.15:
            cache.resize(ssd=self.orders.ssd * chance.choice((2, 3, 4)) // 4)
        elif draw < 0.151:
            cache.clear()
        elif draw < 0.16:
            prompt = cache.lookup(request.tokens, **who)
            if prompt is not None and tenant.kind == "sliceable":
                part = prompt.copy()
                part.trim(chance.randrange(prompt.tokens))
        if len(pins) > PINS or (pins and chance.random() < 0.1):
            prompt, owner = pins.pop(0)
            cache.unpin(prompt, model=owner.model, salt=owner.salt)

    def _count(self, request: Request, hit: int) -> None:
        self.pipe.tell("done", request.number, len(request.prompt), hit, len(request.tokens))
        if self.orders.plant == "log" and request.number % 50 == 9:
            logging.getLogger("prefixcache").warning("planted: %s", list(map(int, request.prompt[:2])))
        stats = self.cache.stats()
        if stats.remote is not None:
            told = stats.remote
            counts = {
                "images read": told.read_images,
                "images written": told.written_images,
                "images refused": told.refused,
                "calls failed": told.errors,
                "reads late": told.timeouts,
                "hit tokens": stats.counters.remote_hit_tokens,
            }
            self.pipe.tell("remote", counts, round(self._waited, 3))
        if stats.ram_held > stats.ram_limit:
            self.pipe.tell("problem", "budget", f"{stats.ram_held} bytes held of {stats.ram_limit}")

    def _sample(self) -> None:
        """Look at what the process holds, again and again, while nobody is served: prompts at work would hide the rest."""
        due = self.orders.first
        while True:
            due += SAMPLE * self.orders.machines
            with self._gate:
                self._gate.wait_for(lambda due=due: self._next >= due or self.stop.is_set())
            if self.stop.is_set():
                return
            with self._still():
                self.pipe.tell("sample", self._next // self.orders.machines, *_resources())

    # -- orders -------------------------------------------------------------------------------------------------------

    def obey(self, line: str) -> None:
        life, name, *rest = line.split()
        if int(life) != self.orders.life:
            return
        if name == "disk":
            self._exact = False
            self.disk.kind = rest[0] if rest else ""
        elif name == "clock":
            self.clock.offset = float(rest[0])
        elif name == "tampered":
            self._exact = False
        elif name == "idle":
            threading.Thread(target=self._idle, name="soak-idle").start()
        elif name == "fork":
            threading.Thread(target=self._fork, name="soak-fork").start()
        elif name in ("close", "exit"):
            self.end = name
            self.over.set()

    def _terminated(self, *_: Any) -> None:
        self.end = "term"
        self.over.set()

    def _idle(self) -> None:
        """Nobody is served for a moment, and everything must add up."""
        try:
            with self._still():
                self._settle()
        except RuntimeError:
            if self.over.is_set():  # at the end of a program that does not close it, the cache is closed all the same
                return
            raise
        self.pipe.tell("idle", self._exact)

    @contextmanager
    def _still(self) -> Iterator[None]:
        with self._gate:
            self._gate.wait_for(lambda: not self._held)
            self._held = True
            self._gate.wait_for(lambda: not self._busy)  # clients end the request that they are in
        try:
            yield
        finally:
            with self._gate:
                self._held = False
                self._gate.notify_all()

    def _settle(self) -> None:
        cache = self.cache
        for _ in range(FLUSHES):
            if self.disk.kind or self.ending.is_set() or cache.flush(20):
                break
        else:
            stats = cache.stats().ssd
            said = stats.last_error if stats is not None else ""
            self.pipe.tell("problem", "flush", f"the writer was not done after {FLUSHES} flushes; last error: {said}")
            return
        if self.disk.kind or self.ending.is_set():
            return
        try:
            cache.check_integrity()
            self._check_flushed()
            ssd = cache._opened.ssd
            assert ssd is not None
            assert ssd._writer._thread.is_alive(), "the writer's thread is gone"
            if self._exact and ssd._queue.drained:
                ssd.check_integrity()
            held, limit, pinned = Directory(self.orders.directory).size(), ssd.limit, self._pinned_on_ssd()
            if self.orders.ssd > limit:  # pins stay when a limit is lowered
                limit = min(limit + pinned, self.orders.ssd)
            assert held <= limit, f"the directory takes {held} bytes of {limit}, {pinned} of them pinned"
        except AssertionError as error:
            if self.end == "exit" and cache._opened.closed:  # meanwhile, as where a program ends that does not close it
                return
            frames = "".join(traceback.format_tb(error.__traceback__)[-2:])
            self.pipe.tell("problem", "integrity", f"{str(error)[:1500]}\n{frames}")
        self.pipe.tell("settled")

    def _pinned_on_ssd(self) -> int:
        tiers = self.cache._storage
        with tiers.lock:
            return sum(slot.disk for slot in tiers.graph.slots.values() if slot.pins)

    def _check_flushed(self) -> None:
        """A flush that succeeded has left nothing in RAM that the SSD has room for."""
        tiers, ssd = self.cache._storage, self.cache._opened.ssd
        assert ssd is not None
        with tiers.lock:
            room = ssd.limit - ssd.used
            dirty = [slot for slot in tiers.graph.orders[RAM] if not slot.disk and not slot.pending]
            fit = [slot for slot in dirty if ssd.footprint(slot.nbytes) <= room // 4]
            assert not fit, f"{len(fit)} of {len(dirty)} unwritten images fit into the {room} bytes left on SSD"

    def _fork(self) -> None:
        """A forked child must be told that the cache is not its own, whatever its threads held."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if not pid:
            code = 9
            try:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(60)
                code = self._in_fork()
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code:
            what = {-signal.SIGALRM: "hung", 3: "was answered"}.get(code, f"ended with {code}")
            self.pipe.tell("problem", "fork", f"a forked child that used the cache {what}")
        self.pipe.tell("forked")

    def _in_fork(self) -> int:
        request = self.trace.request(self.orders.first)
        calls = (
            lambda: self.cache.match(request.prompt, model=request.tenant.model),
            lambda: self.cache.promote(request.prompt, model=request.tenant.model),
            lambda: self.cache.flush(1),
            lambda: self.cache.stats(),
        )
        for call in calls:
            try:
                call()
                return 3
            except RuntimeError:
                continue
        self.cache.close()  # touches nothing
        return 0

    # -- the end ------------------------------------------------------------------------------------------------------

    def _finish(self) -> None:
        """close: all is served, flushed and checked before. term: closed under the clients' hands. exit: not closed."""
        if self.end == "term":
            self.ending.set()
            self.cache.close()
            self.stop.set()
        else:
            self.stop.set()
        with self._gate:
            self._gate.notify_all()
        for client in self._clients:
            client.join()
        if self.end == "close":
            self._settle()
            self.ending.set()
            self.cache.close()
        self.pipe.tell("ended", self.end)


def _resources() -> tuple[int, int, int]:
    """Resident bytes, open descriptors, threads. What the allocator has free is given back first, as far as it can be."""
    gc.collect()
    mx.clear_cache()
    trim_process_memory()
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return resident, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    except OSError:  # not Linux: the most that it ever was
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak, len(os.listdir("/dev/fd")), threading.active_count()


def serve(orders: Orders, trace: Trace, telling: int, ordered: int) -> None:
    """One life, until it is told to end or killed."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(threadName)s %(levelname)s %(message)s")
    pipe = Pipe(telling, orders.life)
    server = Server(orders, trace, pipe)
    excepthook = threading.excepthook

    def thread_died(args: Any) -> None:
        pipe.tell("problem", "thread", f"{args.thread.name if args.thread else '?'} died of {args.exc_type.__name__}")
        excepthook(args)

    threading.excepthook = thread_died

    def listen() -> None:
        rest = ""
        while chunk := os.read(ordered, 4096).decode():
            *lines, rest = (rest + chunk).split("\n")
            for line in lines:
                server.obey(line)
        os._exit(1)  # nobody is left to tell anything

    threading.Thread(target=listen, name="soak-orders", daemon=True).start()
    server.run()


def main(telling: int, ordered: int) -> None:
    """The process from which the servers are forked: a line with orders on stdin begins a life, one at a time; its pid
    and its status go to stdout. Where there is no /proc (MLX on a Mac does not survive a fork) it is the server itself.
    """
    traces: dict[int, Trace] = {}
    for line in sys.stdin:
        said = json.loads(line)
        log = said.pop("log")
        orders = Orders(**said)
        if orders.run not in traces:
            traces[orders.run] = Trace(run=orders.run)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads that NumPy may have
            pid = os.fork() if sys.platform == "linux" else 0
        if not pid:
            fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(fd, 2)
            if sys.platform == "linux":
                os.dup2(fd, 1)
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            serve(orders, traces[orders.run], telling, ordered)
            return
        print(json.dumps({"pid": pid}), flush=True)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"status": os.waitstatus_to_exitcode(status)}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
