"""What it costs that a prompt is computed on what is stored: a prefill whose chunks are stored and written back, beside the
same prefill stored once at its end. A random model of Llama 3 8B's shape, chunks of 2,048 tokens as in mlx_lm.server.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from prefixcache import PrefixCache
from prefixcache.codecs.interchange import on_cpu
from prefixcache.keys import chunks
from tools.bench import report
from tools.bench.gpu_live import model_of
from tools.bench.report import Figure

TOKENS = {"full": 16384, "quick": 8192, "tiny": 600}
ROUNDS = {"full": 5, "quick": 3, "tiny": 1}
STEP = 2048
BAR = 0.03


def _prefill(model: Any, tokens: list[int], cache: PrefixCache | None, write_back: bool) -> float:
    """Seconds of a prefill, its store included."""
    layers = make_prompt_cache(model)
    began = time.perf_counter()
    for first, last in chunks(0, len(tokens), STEP):
        model(mx.array([tokens[first:last]]), cache=layers)
        mx.eval([layer.state for layer in layers])
        mx.clear_cache()
        if write_back and cache is not None:
            cache.store(tokens[:last], layers, model="m", write_back_from=first, snapshot=False)
    if cache is not None and not write_back:
        cache.store(tokens, layers, model="m")
    return time.perf_counter() - began


def prefill(scale: str) -> Iterator[Figure]:
    if on_cpu() and scale != "tiny":
        yield report.needs_a_gpu("prefill of an 8B model on what is stored")
        return
    model, chance = model_of(scale), np.random.default_rng(0)
    count = TOKENS[scale]
    times: dict[str, list[float]] = {"alone": [], "stored": [], "written back": []}
    with PrefixCache(ram="20GB", ssd_dir=None) as cache:
        for turn in range(ROUNDS[scale] + 1):
            for name, own in times.items():
                tokens = chance.integers(0, 512, count).tolist()
                seconds = _prefill(model, tokens, None if name == "alone" else cache, name == "written back")
                cache.clear()
                if turn:  # the first compiles kernels
                    own.append(seconds)
    alone, stored, back = (statistics.median(own) for own in times.values())
    cost = (back - stored) / alone
    yield Figure(
        f"prefill of {count:,} tokens on what is stored (chunks written back), over the same stored at its end",
        f"{cost:+.1%} of the prefill",
        f"<= {BAR:.0%}",
        f"prefill {alone:.3f} s; stored at the end {stored:.3f} s; chunks written back {back:.3f} s",
        cost <= BAR,
        {"alone": alone, "stored": stored, "written_back": back, "times": times},
    )


FIGURES = {"prefill": prefill}
