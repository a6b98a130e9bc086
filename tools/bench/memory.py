"""What the process really takes, beside what `stats()` says: while images are held, after `clear()`, while threads promote,
and per node and slot.

Each case in a fresh process, because a heap has a past.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np

from prefixcache import PrefixCache, Raw, TurboQuant, image_memory
from prefixcache.blocks.budget import Budget
from prefixcache.blocks.graph import NODE_BYTES, SLOT_BYTES, Graph
from prefixcache.blocks.node import BLOCK_BYTES, RAM, Node, Slot, Tree
from prefixcache.image_format import Image
from prefixcache.keys import BLOCK
from tools.bench import report
from tools.bench.prompts import MODEL, Shape, draw, filled
from tools.bench.report import Figure

HELD = {"full": 1_000_000_000, "quick": 300_000_000, "tiny": 8_000_000}
# name -> (codec, model, tokens a prompt): how images of three sizes are made
CASES: dict[str, tuple[Any, Shape, int]] = {
    "raw, images of 1.6 MB": (Raw(), Shape(full=4, heads=3, width=128), 4096),
    "raw, images of 100 kB": (Raw(), Shape(full=1, heads=1, width=96), 16384),
    "turboquant, images of 420 kB": (TurboQuant(), Shape(full=4, heads=3, width=128), 4096),
}
# Of TurboQuant less, because encoding is slow and not what is measured.
CODED = {"full": 300_000_000, "quick": 100_000_000, "tiny": 2_000_000}
# RAM budget, seconds of a round, rounds; and models by the sizes of their images
PROMOTING = {"full": (150_000_000, 8.0, 4), "quick": (150_000_000, 4.0, 2), "tiny": (8_000_000, 0.3, 1)}
SIZES = {
    "2 MB": {"2 MB": Shape(full=5, heads=3, width=128)},
    ".1 to 2 MB": {
        ".1 MB": Shape(full=1, heads=1, width=96),
        ".5 MB": Shape(full=3, heads=2, width=80),
        "2 MB": Shape(full=5, heads=3, width=128),
    },
}
PROMPT, THREADS = 8 * BLOCK, 16
MOST = 300  # prompts of a size, so many that they make up four budgets
OVER = 20_000_000
NODES = {"full": 100_000, "quick": 20_000, "tiny": 500}
GROWTH, REMAINS = 1.05, 50_000_000


def resident(scale: str) -> Iterator[Figure]:
    """Growth of the process over what `stats()` accounts for, and what is left of it after `clear()`."""
    for name, (codec, _, tokens) in CASES.items():
        nbytes = CODED[scale] if isinstance(codec, TurboQuant) else HELD[scale]
        found = report.in_child("memory", "hold", name, nbytes, tokens // 8 if scale == "tiny" else tokens)
        growth, remains = found["growth"] / found["held"], found["remains"]
        yield Figure(
            f"RAM ({name}): growth of RSS over bytes accounted",
            f"{growth:.3f}",
            f"<= {GROWTH}",
            f"accounted: {found['held'] / 1e6:.0f} MB",
            growth <= GROWTH,
            found,
        )
        trimmed = f"after malloc_trim(0) too: {found['trimmed'] / 1e6:.0f} MB" if found["trimmed"] is not None else ""
        yield Figure(
            f"RAM ({name}): what remains after clear()",
            f"{remains / 1e6:.0f} MB",
            f"<= {REMAINS / 1e6:.0f} MB",
            trimmed,
            remains <= REMAINS,
            found,
        )


def hold(case: str, nbytes: int, count: int) -> dict[str, Any]:
    """In a process of its own: hold so many bytes of prompts of `count` tokens, then none."""
    codec, shape, _ = CASES[case]
    tokens, prompt_cache = draw(31), filled(shape, count)
    cache = PrefixCache(ram="4GB", codec=codec)
    cache.store(tokens(count), prompt_cache, model=MODEL)
    gc.collect()
    before, accounted = report.rss(), cache.stats().ram_held
    while cache.stats().ram_held - accounted < nbytes:
        stored = cache.store(tokens(count), prompt_cache, model=MODEL)
        assert stored.new_tokens == count, stored
    gc.collect()
    held, after = cache.stats().ram_held - accounted, report.rss()
    cache.clear()
    gc.collect()
    cleared = report.rss()
    trimmed = report.rss() if report.trim_heap() else None
    return {
        "held": held,
        "growth": after - before,
        "remains": cleared - before,
        "before": before,
        "trimmed": trimmed - before if trimmed is not None else None,
    }


def promoting(scale: str) -> Iterator[Figure]:
    """Growth of RSS over the RAM budget while threads promote from four times as much on the SSD, and how many bytes a second
    of processor time brings: images in memory of ours, and in the C library's heap.
    """
    budget, seconds_each, rounds = PROMOTING[scale]
    for said, sizes in SIZES.items():
        with report.scratch() as folder:
            report.in_child("memory", "fill", str(folder), said, 4 * budget)
            ours: list[dict[str, float]] = []
            heap: list[dict[str, float]] = []
            for number in range(rounds):
                for found in (ours, heap) if number % 2 == 0 else (heap, ours):
                    found.append(
                        report.in_child("memory", "promote", str(folder), said, budget, seconds_each, found is ours)
                    )
        over, over_heap = (max(found["over"] for found in runs) for runs in (ours, heap))
        rate, rate_heap = ([found["rate"] for found in runs] for runs in (ours, heap))
        yield Figure(
            f"RSS over a budget of {budget / 1e6:.0f} MB, {THREADS} threads promote images of {said}",
            f"{over / 1e6:.0f} MB",
            f"<= {OVER / 1e6:.0f} MB",
            f"in the C library's heap: {over_heap / 1e6:.0f} MB",
            over <= OVER,
            {"ours": ours, "heap": heap, "models": len(sizes)},
        )
        ratio = report.median_ratio(rate, rate_heap)
        yield Figure(
            f"bytes promoted a second of processor time, images of {said}, over those into the C library's heap",
            f"{ratio:.2f} ({statistics.median(rate) / 1e6:.0f} MB/s)",
            "",
            f"{statistics.median(rate_heap) / 1e6:.0f} MB/s",
            None,
            {"ratio": ratio, "ours": rate, "heap": rate_heap},
        )


def fill(folder: str, said: str, nbytes: int) -> int:
    """In a process of its own: a directory with so many bytes of prompts of 8 blocks, in images of these sizes."""
    with PrefixCache(ram="1GB", ssd_dir=folder, ssd="40GB", codec=Raw(), memory_reserve=0) as cache:
        made = 0
        for name, shape in SIZES[said].items():
            prompt_cache, size = filled(shape, PROMPT), shape.row_bytes(shape.layers) * PROMPT
            for number in range(min(nbytes // len(SIZES[said]) // size, MOST)):
                cache.store(_prompt(name, number), prompt_cache, model=name)
                made += size
        assert cache.flush(300)
    return made


def promote(folder: str, said: str, budget: int, seconds: float, pool: bool) -> dict[str, float]:
    """In a process of its own: threads promote prompts by chance for so many seconds. The most that RSS was over what it was
    before and the budget, in bytes; bytes that came, a second of processor time.
    """
    image_memory.enabled = image_memory.enabled and pool
    with PrefixCache(ram=budget, ssd_dir=folder, ssd="40GB", codec=Raw(), memory_reserve=0) as cache:
        prompts = [(name, n) for name in SIZES[said] for n in range(MOST) if _is_stored(cache, name, n)]
        before, end, most = report.rss() - cache.stats().ram_held, time.monotonic() + seconds, 0

        def work(seed: int) -> None:
            choose = random.Random(seed)
            while time.monotonic() < end:
                name, number = choose.choice(prompts)
                cache.promote(_prompt(name, number), model=name).result()

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(THREADS)]
        began = time.process_time()
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            most = max(most, report.rss())
            time.sleep(0.02)
        passed = time.process_time() - began
        return {"over": most - before - budget, "rate": cache.stats().counters.promoted_bytes / passed}


def _prompt(name: str, number: int) -> np.ndarray:
    return np.random.default_rng([len(name), sum(name.encode()), number]).integers(0, 150_000, PROMPT)


def _is_stored(cache: PrefixCache, name: str, number: int) -> bool:
    return cache.match(_prompt(name, number), model=name).ssd == PROMPT


def nodes(scale: str) -> Iterator[Figure]:
    """RAM of a node and of a slot beside their tokens, where each has a place in RAM and on SSD; what the graph reckons."""
    count = NODES[scale]
    by_rss = report.in_child("memory", "grow", count, False)
    traced = report.in_child("memory", "grow", count, True)
    for what, reckoned in (("node", NODE_BYTES), ("slot", SLOT_BYTES)):
        measured = max(by_rss[what], traced[what])
        yield Figure(
            f"RAM of a {what} beside its tokens, {count} of them",
            f"{measured:.0f} B",
            f"<= {reckoned} B, as reckoned",
            f"RSS {by_rss[what]:.0f}, tracemalloc {traced[what]:.0f}",
            measured <= reckoned,
            {"rss": by_rss[what], "traced": traced[what], "reckoned": reckoned},
        )


def grow(count: int, trace: bool) -> dict[str, float]:
    """In a process of its own: bytes that a node takes, and a slot in RAM and on SSD with an image of no bytes."""
    if trace:
        tracemalloc.start()

    def taken() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0] if trace else report.rss()

    graph = Graph(Budget(count * 100_000))
    reservation = graph.budget.reserve(count * 90_000)
    assert reservation is not None
    made: list[Node] = []
    before = taken()
    _chains(graph, graph.tree(b"\0" * 32), count, reservation, made)
    with_nodes = taken()
    kept = sys.getsizeof(made)
    for node in made:
        slot = Slot("rows", node, node.key, 0)
        slot.checksum, slot.created, slot.tick = os.urandom(16).hex(), float(id(slot)), graph.recency.clock
        graph.attach(slot, reservation)
        graph.place(slot, RAM, image=Image(np.empty(0, np.uint8)), reservation=reservation)
        graph.place(slot, 1, disk=int(node.start) + 100_000)
    with_slots = taken()
    if trace:
        tracemalloc.stop()
    return {"node": (with_nodes - before - kept) / count - BLOCK_BYTES, "slot": (with_slots - with_nodes) / count}


def _chains(graph: Graph, tree: Tree, count: int, reservation: Any, made: list[Node]) -> None:
    """Prompts of 128 blocks, as a directory or a store makes them."""
    node = tree.root
    for i in range(count):
        node = tree.root if i % 128 == 0 else node
        grown = graph.grow(node, os.urandom(BLOCK_BYTES), reservation)
        assert grown is not None
        made.append(node := grown)


FIGURES = {"resident": resident, "promoting": promoting, "nodes": nodes}
