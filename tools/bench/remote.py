"""How fast a remote tier's images leave and come, and what a lookup there takes, against the client library alone.

Through `Client`: an image is sealed and put, or got, unsealed and checked, as the tier does it. The servers run on this
machine, so both sides and the server share its cores, and no network is in the way.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from prefixcache import PrefixCache, Raw
from prefixcache.image_format import Digest, examine
from prefixcache.keys import BLOCK, TOKEN_BYTES
from prefixcache.remote.calls import READERS
from prefixcache.remote.client import Client
from prefixcache.remote.sealing import image_name
from prefixcache.remote.search import Gap, SoughtImage, search
from prefixcache.remote.uploads import UPLOADERS
from tools.bench import engines, report
from tools.bench.engines import Running
from tools.bench.prompts import MODEL, Shape, filled
from tools.bench.report import Figure

BAR = 0.8


class Sizes(NamedTuple):
    """Rounds of one image at a time, and of several at once; images put and got in a round of these, in one of those half as
    many; how many of `SHAPES`; `names` of a prompt that is looked for. (SeaweedFS keeps what was overwritten: 2 GB in all.)
    """

    alone: int
    together: int
    put: int
    got: int
    shapes: int
    names: int


SIZES = {"full": Sizes(15, 5, 4, 8, 2, 128), "quick": Sizes(9, 3, 2, 8, 2, 128), "tiny": Sizes(1, 1, 1, 1, 1, 8)}
SHAPES = {"1.6 MB": Shape(full=4, heads=3, width=128), "16 MB": Shape(full=40, heads=3, width=128)}


def rates(scale: str) -> Iterator[Figure]:
    """Put and get through `Client`, over a plain put and get of as many bytes, by turns: images one after the other, and as
    many at once as the tier sends and reads."""
    for kind in engines.KINDS:
        for size, shape in list(SHAPES.items())[: SIZES[scale].shapes]:
            try:
                with engines.running(kind) as running:
                    yield from _rates(running, size, image_of(shape), SIZES[scale])
            except engines.Missing as missing:
                yield engines.not_measured(f"remote, {kind}, images of {size}", missing)


def image_of(shape: Shape) -> np.ndarray:
    """One image of a cache that holds rows as they are."""
    with PrefixCache(codec=Raw(), ram=1 << 30) as cache:
        cache.store(range(BLOCK), filled(shape, BLOCK), model=MODEL)
        (slot,) = cache._storage.graph.slots.values()
        return np.array(slot.image.data)


def _rates(running: Running, size: str, image: np.ndarray, sizes: Sizes) -> Iterator[Figure]:
    with running.client() as client:
        plain, data, sealed = running.plain(), image.tobytes(), image.nbytes + client.seal.overhead
        plain_data = data + bytes(client.seal.overhead)

        def get(number: int) -> None:
            digest = Digest()
            read = client.read(f"v1/{number}", sealed, lambda nbytes: True, digest.update)
            assert read is not None
            examine(read, digest=digest)

        works = {
            "put": (
                UPLOADERS,
                sizes.put,
                lambda n: client.write(f"v1/{n}", image),
                lambda n: plain.put(f"plain/{n}", plain_data),
            ),
            "get": (READERS, sizes.got, get, lambda n: plain.get(f"plain/{n}")),
        }
        for n in range(sizes.put, sizes.got):
            client.write(f"v1/{n}", image)
            plain.put(f"plain/{n}", plain_data)
        for what, (threads, images, ours, theirs) in works.items():
            one = _compared(ours, theirs, 1, sizes.alone, max(images // 2, 1))
            many = _compared(ours, theirs, threads, sizes.together, images)
            library = engines.LIBRARIES[running.kind]
            yield Figure(
                f"remote, {running.kind}, {what} of images of {size}, sealed and checked, over plain bytes through {library}",
                f"one at a time {one.ratio:.2f} ({_rate(image, one.ours)}); "
                f"{threads} at once {many.ratio:.2f} ({_rate(image, many.ours)})",
                f">= {BAR}, one at a time",
                f"{library}: {_rate(image, one.theirs)}; {threads} at once {_rate(image, many.theirs)}",
                one.ratio >= BAR,
                {"bytes": image.nbytes, "alone": one._asdict(), "together": many._asdict(), "threads": threads},
            )


class Compared(NamedTuple):
    """Seconds an image in each round, and the median of the rounds' ratios: over 1, ours is quicker."""

    ours: list[float]
    theirs: list[float]
    ratio: float


Work = Callable[[int], object]


def _compared(ours: Work, theirs: Work, threads: int, rounds: int, images: int) -> Compared:
    with ThreadPoolExecutor(threads) as pool:

        def timed(work: Work) -> Callable[[int], float]:
            def one(n: int) -> None:  # what is got is let go of
                work(n)

            spread = map if threads == 1 else pool.map
            return lambda number: report.seconds(lambda: deque(spread(one, range(images)), 0)) / images

        for work in (ours, theirs):  # connections are made, and each name is there
            for n in range(images):
                work(n)
        mine, other = report.in_turns(rounds, timed(ours), timed(theirs))
    return Compared(mine, other, report.median_ratio(other, mine))


def _rate(image: np.ndarray, seconds: Sequence[float]) -> str:
    return f"{image.nbytes / statistics.median(seconds) / 1e6:,.0f} MB/s"


# -- lookups -----------------------------------------------------------------------------------------------------------


class Asking:
    """What a search asks, of a client; how many round trips it took."""

    def __init__(self, client: Client, root: bytes):
        self._client, self._root = client, root
        self.at_once = client.engine.names_at_once
        self.trips = 0

    def sizes(self, wanted: Sequence[SoughtImage]) -> list[int | None]:
        self.trips += 1
        return self._client.sizes([self.name(one) for one in wanted], engines.TIMEOUT)

    def name(self, wanted: SoughtImage) -> str:
        return image_name(self._client.seal, self._root, wanted.kind, wanted.key, wanted.parent)

    def snapshots(self, parents: Sequence[bytes]) -> list[set[str]]:
        raise AssertionError("a model without recurrent layers has none")

    def snapshot_id(self, key: bytes) -> str:
        raise AssertionError("a model without recurrent layers has none")


def lookup(scale: str) -> Iterator[Figure]:
    """Which blocks of a prompt an engine has: all, the first half, none."""
    sizes = SIZES[scale]
    for kind in ("Valkey", "S3"):
        name = f"remote, {kind}, lookup of a prompt of {sizes.names * BLOCK:,} tokens ({sizes.names} names)"
        try:
            with engines.running(kind) as running:
                yield _lookup(name, running, sizes)
        except engines.Missing as missing:
            yield engines.not_measured(name, missing)


def _lookup(name: str, running: Running, sizes: Sizes) -> Figure:
    with running.client() as client:
        plain, small = running.plain(), np.zeros(1000, np.uint8)
        found: dict[str, Any] = {}
        plain.put("plain/one", small.tobytes())
        for what, there in (("all there", sizes.names), ("half", sizes.names // 2), ("none", 0)):
            keys = [bytes([there % 251]) + number.to_bytes(31, "big") for number in range(1, sizes.names + 1)]
            tokens = bytes(sizes.names * BLOCK * TOKEN_BYTES)
            gap = Gap(keys[0][::-1], tokens, keys, 0, 0, (), False, lambda block: True)
            asking = Asking(client, gap.root)
            for block in range(there):
                client.write(asking.name(gap.rows(block)), small)
            assert search(gap, asking)[0] == there * BLOCK
            trips = asking.trips

            def ask(number: int, gap: Gap = gap, asking: Asking = asking) -> float:
                return report.seconds(lambda: search(gap, asking))

            one, times = report.in_turns(
                sizes.alone, lambda number: report.seconds(lambda: plain.get("plain/one")), ask
            )
            found[what] = {"trips": trips, "seconds": times, "one": one}
    said = [
        f"{what} {1e3 * statistics.median(one['seconds']):.1f} ms, {_trips(one['trips'])}"
        for what, one in found.items()
    ]
    one = statistics.median([seconds for part in found.values() for seconds in part["one"]])
    return Figure(
        name,
        "; ".join(said),
        "none: 1 round trip",
        f"{engines.LIBRARIES[running.kind]}: one get of 1 kB {1e3 * one:.1f} ms",
        found["none"]["trips"] == 1,
        found,
    )


def _trips(count: int) -> str:
    return f"{count} round trip{'s' if count > 1 else ''}"


FIGURES = {"remote-rates": rates, "remote-lookup": lookup}
