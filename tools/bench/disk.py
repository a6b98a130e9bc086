"""How fast images reach the SSD and come back, against plain files of the same bytes in the same file system.

Through `PrefixCache`: `flush` after a `store` (what was encoded is ready, the disk alone is timed), `promote` after a
restart with the page cache emptied of the files. And `reconcile --deep`, which reads and checks every file.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from prefixcache import PrefixCache, Raw
from prefixcache.keys import BLOCK
from prefixcache.ssd import SsdStats, reconcile
from tools.bench import report
from tools.bench.prompts import MODEL, Shape, draw, filled
from tools.bench.report import Figure

# name -> (model, rows of Raw fp16): images of 1.6 MB and of 100 kB
IMAGES = {"1.6 MB": Shape(full=4, heads=3, width=128), "100 kB": Shape(full=1, heads=1, width=96)}
BARRED = "1.6 MB"
BAR = 0.7


class Sizes(NamedTuple):
    """`images` by name, in each of `rounds`."""

    images: dict[str, int]
    rounds: int


SIZES = {
    "full": Sizes({"1.6 MB": 96, "100 kB": 512}, 5),
    "quick": Sizes({"1.6 MB": 32, "100 kB": 128}, 3),
    "tiny": Sizes({"1.6 MB": 2, "100 kB": 4}, 1),
}
WIDE = 8  # threads of the second reference for writes: as many as the product's writer has
READERS = 4


def spill(scale: str) -> Iterator[Figure]:
    """`flush` of images that a store has just made, and a loop of write + fsync of the same bytes into one folder."""
    sizes = SIZES[scale]
    for name, shape in IMAGES.items():
        with report.scratch() as folder:
            nbytes, product, plain, wide = _spill(folder, shape, sizes.images[name], sizes.rounds)
        ratio = report.median_ratio(plain, product)
        yield Figure(
            f"spill, fsync included, {sizes.images[name]} images of {name}, over plain write + fsync",
            f"{ratio:.2f} ({_rate(nbytes, product)})",
            f">= {BAR}" if name == BARRED else "",
            f"one after the other {_rate(nbytes, plain)}; {WIDE} threads {_rate(nbytes, wide)}",
            ratio >= BAR if name == BARRED else None,
            {"ratio": ratio, "bytes": nbytes, "product_s": product, "plain_s": plain, "wide_s": wide},
        )


def _spill(folder: Path, shape: Shape, count: int, rounds: int) -> tuple[int, list[float], list[float], list[float]]:
    """Bytes of a round, and the seconds of each: through the product, plain, plain from several threads."""
    tokens, prompt_cache = draw(11), filled(shape, count * BLOCK)
    stored: dict[int, list[np.ndarray]] = {}
    (folder / "plain").mkdir()
    with _open(folder / "cache") as cache, ThreadPoolExecutor(WIDE) as pool:

        def images(number: int) -> list[np.ndarray]:
            if number not in stored:
                stored[number] = _store(cache, tokens(count * BLOCK), prompt_cache)
            os.sync()
            return stored[number]

        def product(number: int) -> float:
            images(number)
            before = _ssd(cache).written_files
            taken = report.seconds(lambda: cache.flush(300))
            assert _ssd(cache).written_files - before == count
            return taken

        def plain(number: int) -> float:
            work = [(folder / "plain" / f"{number}-{i}", data) for i, data in enumerate(images(number))]
            return report.seconds(lambda: [_write(job) for job in work])

        def wide(number: int) -> float:
            work = [(folder / "plain" / f"{number}-{i}-wide", data) for i, data in enumerate(images(number))]
            return report.seconds(lambda: list(pool.map(_write, work)))

        times = report.in_turns(rounds, product, plain, wide)
        return sum(data.nbytes for data in stored[0]), *times


def promote(scale: str) -> Iterator[Figure]:
    """`promote` of a prompt after a restart, and `open().read()` of the same files, all of them cold."""
    sizes = SIZES[scale]
    for name, shape in IMAGES.items():
        with report.scratch() as folder:
            nbytes, product, plain, wide = _promote(folder, shape, sizes.images[name], sizes.rounds)
        ratio = report.median_ratio(plain, product)
        yield Figure(
            f"promote, checksum included, {sizes.images[name]} images of {name}, over a plain cold read",
            f"{ratio:.2f} ({_rate(nbytes, product)})",
            f">= {BAR}" if name == BARRED else "",
            f"one after the other {_rate(nbytes, plain)}; {READERS} threads {_rate(nbytes, wide)}",
            ratio >= BAR if name == BARRED else None,
            {"ratio": ratio, "bytes": nbytes, "product_s": product, "plain_s": plain, "wide_s": wide},
        )


def _promote(folder: Path, shape: Shape, count: int, rounds: int) -> tuple[int, list[float], list[float], list[float]]:
    prompt = draw(12)(count * BLOCK)
    with _open(folder) as cache:
        cache.store(prompt, filled(shape, count * BLOCK), model=MODEL)
    files = sorted((folder / "rows").rglob("*.safetensors"))
    assert len(files) == count
    with _open(folder) as cache, ThreadPoolExecutor(READERS) as pool:

        def product(number: int) -> float:
            cache.trim_to(0)
            report.forget_pages(files)
            assert cache.match(prompt, model=MODEL).ram == 0
            taken = report.seconds(lambda: cache.promote(prompt, model=MODEL).result())
            assert cache.match(prompt, model=MODEL).ram == len(prompt)
            return taken

        def plain(number: int) -> float:
            report.forget_pages(files)
            return report.seconds(lambda: [len(file.read_bytes()) for file in files])

        def wide(number: int) -> float:
            report.forget_pages(files)
            return report.seconds(lambda: [len(data) for data in pool.map(Path.read_bytes, files)])

        times = report.in_turns(rounds, product, plain, wide)
    return sum(file.stat().st_size for file in files), *times


def verify(scale: str) -> Iterator[Figure]:
    """`reconcile --deep` of a directory, and `open().read()` of its files one after the other: both cold, both warm."""
    sizes = SIZES[scale]
    for name, shape in IMAGES.items():
        with report.scratch() as folder:
            times = _verify(folder, shape, sizes.images[name], sizes.rounds)
        for state, (nbytes, product, plain) in times.items():
            ratio = report.median_ratio(plain, product)
            barred = state == "cold"
            yield Figure(
                f"reconcile --deep, {sizes.images[name]} {state} images of {name}, over a plain read",
                f"{ratio:.2f} ({_rate(nbytes, product)})",
                f">= {BAR}" if barred else "",
                f"one after the other {_rate(nbytes, plain)}",
                ratio >= BAR if barred else None,
                {"ratio": ratio, "bytes": nbytes, "product_s": product, "plain_s": plain},
            )


def _verify(folder: Path, shape: Shape, count: int, rounds: int) -> dict[str, tuple[int, list[float], list[float]]]:
    """By the state of the page cache: bytes of a round, and the seconds of each, through the product and plain."""
    with _open(folder) as cache:
        cache.store(draw(13)(count * BLOCK), filled(shape, count * BLOCK), model=MODEL)
    files = sorted((folder / "rows").rglob("*.safetensors"))
    assert len(files) == count

    def product() -> None:
        found = reconcile(folder, deep=True)
        assert found.clean
        assert found.images == count

    def plain() -> None:
        assert sum(len(file.read_bytes()) for file in files) == nbytes

    def timed(work: Callable[[], None], cold: bool) -> float:
        plain()
        if cold:
            report.forget_pages(files)
        return report.seconds(work)

    nbytes = sum(file.stat().st_size for file in files)
    product()  # the first one gives the index's free pages back
    found = {}
    for state in ("cold", "warm"):
        cold = state == "cold"
        times = report.in_turns(rounds, lambda _, c=cold: timed(product, c), lambda _, c=cold: timed(plain, c))
        found[state] = nbytes, *times
    return found


def _open(folder: Path) -> PrefixCache:
    return PrefixCache(ram="4GB", ssd_dir=folder, ssd="40GB", codec=Raw(), readers=READERS, spill_queue="2GB")


def _ssd(cache: PrefixCache) -> SsdStats:
    found = cache.stats().ssd
    assert found is not None
    return found


def _store(cache: PrefixCache, prompt: np.ndarray, prompt_cache: list[Any]) -> list[np.ndarray]:
    """Store a prompt; the bytes of its images."""
    known = set(cache._storage.graph.slots)
    cache.store(prompt, prompt_cache, model=MODEL)
    return [slot.image.data for address, slot in cache._storage.graph.slots.items() if address not in known]


def _write(job: tuple[Path, np.ndarray]) -> None:
    path, data = job
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        assert os.write(fd, data.data) == data.nbytes
        os.fsync(fd)
    finally:
        os.close(fd)


def _rate(nbytes: int, times: list[float]) -> str:
    return f"{nbytes / statistics.median(times) / 1e6:.0f} MB/s"


FIGURES = {"spill": spill, "promote": promote, "verify": verify}
