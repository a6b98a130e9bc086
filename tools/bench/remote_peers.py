"""prefixcache's remote tier beside LMCache's connectors, on one Valkey server: to ask for the chunks of a prompt and to get
them; and what each does when the server stops.

LMCache's code is its release's. It has an environment of its own, with the parts of its dependencies that the connectors
import. Its bytes are neither sealed nor checked.
"""

from __future__ import annotations

import json
import queue
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from prefixcache.image_format import Digest, examine
from prefixcache.keys import BLOCK, TOKEN_BYTES
from prefixcache.remote.calls import READERS
from prefixcache.remote.engine import EngineError
from prefixcache.remote.search import Gap, search
from tools.bench import engines, report
from tools.bench.peer import venv
from tools.bench.remote import SHAPES, Asking, image_of
from tools.bench.report import Beside, Figure

SIZE = "1.6 MB"
CHUNKS = {"full": (128, 7), "quick": (32, 3), "tiny": (4, 1)}
WATCHED = 20.0  # seconds that a peer may take when the server has stopped
STARTING = 120.0
NAMES = {"resp": "LMCache 0.5.6, resp://", "redis": "LMCache 0.5.6, redis://"}


class Peer:
    """LMCache's process. A task that takes too long raises TimeoutError; then it can only be ended."""

    def __init__(self, port: int, chunks: int):
        shape = SHAPES[SIZE]
        command = [str(venv.lmcache()), "-m", "tools.bench.peer.lmcache_redis"]
        self._process = subprocess.Popen(
            [*command, str(port), str(chunks), str(shape.full), str(shape.heads), str(shape.width)],
            cwd=report.ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._said: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()
        self._answer(STARTING)

    def do(self, task: str, which: str, seconds: float = 120.0) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{task} {which}\n")
        self._process.stdin.flush()
        return self._answer(seconds)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                self._said.put(line[1:])
        self._said.put("")

    def _answer(self, seconds: float) -> dict[str, Any]:
        try:
            said = self._said.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError from None
        if not said:
            raise RuntimeError(f"LMCache's process ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(said)
        if "failed" in answer:
            raise RuntimeError(answer["failed"])
        return answer


def remote_peers(scale: str) -> Iterator[Figure]:
    """Chunks of one prompt: asked for and got; and asked for when the server has stopped."""
    chunks, rounds = CHUNKS[scale]
    name = f"remote, Valkey: search and read of {chunks} images of {SIZE}"
    try:
        with engines.running("Valkey") as running:
            yield from _beside(name, running, chunks, rounds)
    except engines.Missing as missing:
        yield engines.not_measured(name, missing)
    except venv.NotInstalled as missing:
        yield Figure(name, "not measured alone", "", f"LMCache 0.5.6: {missing}", None)


def _beside(name: str, running: engines.Running, chunks: int, rounds: int) -> Iterator[Figure]:
    assert running.server is not None
    image = image_of(SHAPES[SIZE])
    keys = [number.to_bytes(32, "big") for number in range(1, chunks + 1)]
    gap = Gap(keys[-1][::-1], bytes(chunks * BLOCK * TOKEN_BYTES), keys, 0, 0, (), False, lambda block: True)
    peers = {which: Peer(running.server.port, chunks) for which in NAMES}  # one that hangs must not hold up the other
    try:
        with running.client() as client, ThreadPoolExecutor(READERS) as pool:
            asking = Asking(client, gap.root)
            for block in range(chunks):
                client.write(asking.name(gap.rows(block)), image)

            def ours(number: int) -> float:
                began = time.perf_counter()
                _, wanted = search(gap, asking)
                asked.append(time.perf_counter() - began)
                assert len(wanted) == chunks

                def read(one: Any) -> None:
                    digest = Digest()
                    data = client.read(asking.name(one), one.size, lambda nbytes: True, digest.update)
                    assert data is not None
                    examine(data, digest=digest)

                list(pool.map(read, wanted))
                return time.perf_counter() - began

            asked: list[float] = []
            ours(0)
            mine, beside, raw = [], [], {}
            for which in NAMES:
                asked_there: list[float] = []

                def theirs(number: int, which: str = which, asked_there: list[float] = asked_there) -> float:
                    found = peers[which].do("get", which)
                    assert found["found"] == found["got"] == chunks, found
                    asked_there.append(found["asking"])
                    return float(found["asking"] + found["getting"])

                try:
                    nbytes = peers[which].do("put", which)["bytes"]
                    theirs(0)
                    here, there = report.in_turns(rounds, ours, theirs)
                except (TimeoutError, RuntimeError) as error:
                    beside.append(Beside(NAMES[which], f"failed: {error or 'no answer in time'}"))
                    continue
                mine += here
                raw[which] = {"ours": here, "theirs": there, "asked": asked_there}
                ratio = report.median_ratio(there, here)
                beside.append(Beside(NAMES[which], _said(there, asked_there, chunks * nbytes), f"{ratio:.2f} x"))
            mine = mine or [ours(0)]
            yield Figure(
                f"{name}, sealed and checked",
                _said(mine, asked, chunks * image.nbytes),
                "",
                "",
                None,
                {"asked": asked, "rounds": raw},
                tuple(beside),
            )
            running.server.freeze()
            try:
                yield _stopped(client, gap, peers)
            finally:
                running.server.thaw()
    finally:
        for peer in peers.values():
            peer.close()


def _stopped(client: Any, gap: Gap, peers: dict[str, Peer]) -> Figure:
    """How long a question waits for a server that has stopped."""
    waits = []
    for _ in range(3):  # the first waits; then the client knows
        began = time.perf_counter()
        if client.calls.ready:
            with suppress(EngineError):
                client.sizes([Asking(client, gap.root).name(gap.rows(0))], 0.1)  # MIN_TIMEOUT of the tier
        waits.append(time.perf_counter() - began)
    beside = []
    for which in NAMES:
        began = time.perf_counter()
        try:
            peers[which].do("contains", which, WATCHED)
            said = f"{time.perf_counter() - began:.1f} s"
        except TimeoutError:
            said = f"no end within {WATCHED:.0f} s, when it was ended"
        except RuntimeError as error:
            said = f"after {time.perf_counter() - began:.1f} s {error}"
        beside.append(Beside(NAMES[which], said))
    return Figure(
        "remote, Valkey stopped: a lookup waits",
        f"{1e3 * waits[0]:.0f} ms, the next {1e3 * waits[1]:.1f} ms",
        "",
        "",
        None,
        {"waits": waits},
        tuple(beside),
    )


def _said(seconds: list[float], asked: list[float], nbytes: int) -> str:
    median = statistics.median(seconds)
    return f"{median:.2f} s ({nbytes / median / 1e6:,.0f} MB/s), of it asking {1e3 * statistics.median(asked):.1f} ms"


FIGURES = {"remote-peers": remote_peers}
