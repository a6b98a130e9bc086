"""What stores cost a prefill: as `serve` computes a prompt, whose chunks are stored behind it and written back, beside
mlx_lm.server's own way, and beside `serve`'s without stores. A random model of Llama 3 8B's shape, chunks of 2,048 tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from prefixcache import PrefixCache
from prefixcache.codecs.interchange import on_cpu
from prefixcache.media import chunks
from prefixcache.servers.buffer_pool import pool_kept
from tools.bench import report
from tools.bench.gpu_live import model_of
from tools.bench.report import Figure

TOKENS = {"full": 16384, "quick": 8192, "tiny": 600}
ROUNDS = {"full": 5, "quick": 3, "tiny": 1}
STEP = 2048
BARS = {"turboquant:4": 1.05, "raw": 1.15}


def compute(model: Any, tokens: list[int], layers: list[Any], since: int = 0, cache: PrefixCache | None = None) -> None:
    """Compute the tokens from `since` on, as mlx_lm.server does: in chunks, each of which a cache stores behind the next."""
    prompt = cache.prompt(tokens, model="m") if cache is not None else None
    kept = since // 256 * 256
    for first, last in chunks(since, len(tokens), STEP):
        model(mx.array([tokens[first:last]]), cache=layers)
        mx.eval([layer.state for layer in layers])
        mx.clear_cache()
        if cache is not None and prompt is not None:
            cache.store_behind(prompt.first(last), layers, write_back_from=kept, snapshot=False)
            kept = last // 256 * 256


def _prefill(model: Any, tokens: list[int], cache: PrefixCache | None, *, served: bool) -> float:
    """Seconds of a prefill, until its last chunk is stored. `served`: as under `serve`, else as under mlx_lm.server."""
    layers = make_prompt_cache(model)
    mx.clear_cache()
    began = time.perf_counter()
    with pool_kept() if served else nullcontext():
        compute(model, tokens, layers, 0, cache)
        if cache is not None:
            cache.match(tokens, model="m")  # waits for the stores behind
        mx.synchronize()
    return time.perf_counter() - began


def prefill(scale: str) -> Iterator[Figure]:
    if on_cpu() and scale != "tiny":
        yield report.needs_a_gpu("prefill of an 8B model with its stores")
        return
    model, chance = model_of(scale), np.random.default_rng(0)
    count = TOKENS[scale]
    with ExitStack() as caches:
        opened: dict[str, PrefixCache | None] = {"mlx_lm.server's": None, "alone": None}
        for codec in BARS:
            opened[codec] = caches.enter_context(PrefixCache(ram="20GB", ssd_dir=None, codec=codec, hot=0))
        times: dict[str, list[float]] = {name: [] for name in opened}
        for turn in range(ROUNDS[scale] + 1):
            for name, cache in opened.items():
                tokens = chance.integers(0, 512, count).tolist()
                seconds = _prefill(model, tokens, cache, served=name != "mlx_lm.server's")
                if cache is not None:
                    cache.clear()
                if turn:  # the first compiles kernels
                    times[name].append(seconds)
    of_each = ", ".join(f"{name} {statistics.median(of):.3f} s" for name, of in times.items())
    for codec, bar in BARS.items():
        beside_stock = report.median_ratio(times[codec], times["mlx_lm.server's"])
        ratio = report.median_ratio(times[codec], times["alone"])
        yield Figure(
            f"prefill of {count:,} tokens with its stores behind it, {codec}, over mlx_lm.server's; over `serve`'s alone",
            f"{beside_stock:.2f}; {ratio:.2f}",
            f"the latter <= {bar}",
            of_each,
            ratio <= bar,
            {"times": times},
        )


FIGURES = {"prefill": prefill}
