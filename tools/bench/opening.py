"""How long it takes to open a directory of many blocks, each time in a fresh process.

The directory is written through the product, one small image a block (4 kB on disk: opening reads the index and no image).
Only while it is being built, fsync does nothing and one thread writes: that is not what is measured, and it takes minutes.
"""

from __future__ import annotations

import sqlite3
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from prefixcache import PrefixCache, Raw
from tools.bench import report
from tools.bench.lookup import fill  # and with it mlx_lm, which a server has imported before it opens a cache
from tools.bench.report import Figure

BLOCKS = {"full": 100_000, "quick": 10_000, "tiny": 256}
ROUNDS = {"full": 3, "quick": 3, "tiny": 1}
LIMIT = 2.0


def opening(scale: str) -> Iterator[Figure]:
    """The constructor of PrefixCache, and reading the same rows of the index with nothing done to them."""
    blocks = BLOCKS[scale]
    with report.scratch() as folder:
        built = report.in_child("opening", "build", str(folder), blocks)
        opened, rows = report.in_turns(
            ROUNDS[scale],
            lambda _: report.in_child("opening", "open_once", str(folder), blocks, False),
            lambda _: report.in_child("opening", "read_rows", str(folder), blocks),
        )
        cold = report.in_child("opening", "open_once", str(folder), blocks, True)
        index = (folder / "index.db").stat().st_size
    median = statistics.median(opened)
    yield Figure(
        f"opening a directory of {blocks} blocks",
        f"{median:.2f} s (index.db not in the page cache: {cold:.2f} s)",
        "<= 2 s",
        f"SELECT of the same rows: {statistics.median(rows):.2f} s; index.db {index / 1e6:.0f} MB",
        median <= LIMIT,
        {"opened_s": opened, "cold_s": cold, "rows_s": rows, "index_bytes": index, "built_s": built},
    )


def _settings(folder: str) -> dict[str, object]:
    return {"ram": "4GB", "ssd_dir": folder, "ssd": "40GB", "codec": Raw(), "spill_queue": "1GB"}


def build(folder: str, blocks: int) -> float:
    """Fill the directory; how long that took."""
    begin = time.perf_counter()
    quick = mock.patch("os.fsync", return_value=None), mock.patch("prefixcache.ssd.writer.SYNCERS", 1)
    with quick[0], quick[1], PrefixCache(**_settings(folder)) as cache:
        fill(cache, blocks, 21)
        assert cache.flush(300)
        assert cache.stats().images_on_ssd == blocks
    return time.perf_counter() - begin


def open_once(folder: str, blocks: int, cold: bool) -> float:
    """Open the directory in this process; how long that took."""
    if cold:
        report.forget_pages([Path(folder, "index.db")])
    begin = time.perf_counter()
    cache = PrefixCache(**_settings(folder))
    taken = time.perf_counter() - begin
    assert cache.stats().blocks == blocks, cache.stats()
    cache.close()
    return taken


def read_rows(folder: str, blocks: int) -> float:
    """Read every row of the index and its tokens, through SQLite alone; how long that took."""
    connection = sqlite3.connect(Path(folder, "index.db"))
    begin = time.perf_counter()
    rows = connection.execute("SELECT * FROM image JOIN tokens USING (id) ORDER BY id").fetchall()
    taken = time.perf_counter() - begin
    connection.close()
    assert len(rows) == blocks
    return taken


FIGURES = {"opening": opening}
