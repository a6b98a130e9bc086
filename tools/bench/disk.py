"""How fast images reach the SSD and come back, against plain files of the same bytes in the same file system.

Through `PrefixCache` only: `flush` after a `store` (what was encoded is ready, the disk alone is timed), `promote` after a
restart with the page cache emptied of the files.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from prefixcache import PrefixCache, Raw
from prefixcache.tree import BLOCK
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


def _open(folder: Path) -> PrefixCache:
    return PrefixCache(ram="4GB", ssd_dir=folder, ssd="40GB", codec=Raw(), readers=READERS, spill_queue="2GB")


def _write(path: Path, data: Any) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        assert os.write(fd, data) == len(data)
        os.fsync(fd)
    finally:
        os.close(fd)


def spill(scale: str) -> Iterator[Figure]:
    """`flush` of images that a store has just made, and a loop of write + fsync of the same bytes into one folder."""
    sizes = SIZES[scale]
    for name, shape in IMAGES.items():
        count = sizes.images[name]
        tokens, prompt_cache = draw(11), filled(shape, count * BLOCK)
        prompts = [tokens(count * BLOCK) for _ in range(sizes.rounds)]
        with report.scratch() as folder:
            plain_folder, wide_folder = folder / "plain", folder / "wide"
            plain_folder.mkdir()
            wide_folder.mkdir()
            with _open(folder / "cache") as cache:
                written = {}

                def product(number: int) -> float:
                    cache.store(prompts[number], prompt_cache, model=MODEL)  # noqa: B023
                    before = cache.stats().ssd.written_bytes  # noqa: B023
                    os.sync()
                    taken = report.seconds(lambda: cache.flush(300))  # noqa: B023
                    written[number] = cache.stats().ssd.written_bytes - before  # noqa: B023
                    cache.trim_to(0)  # noqa: B023
                    return taken

                images = _images(prompts[0], prompt_cache)

                def plain(number: int) -> float:
                    os.sync()
                    return report.seconds(lambda: [_write(plain_folder / f"{number}-{i}", d) for i, d in enumerate(images)])  # noqa: B023

                product_s, plain_s, wide_s = report.in_turns(sizes.rounds, product, plain, wide)
