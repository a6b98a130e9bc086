"""What a request takes on a GPU with a cache and without: the next turn of a chat, from hot and from images, and many
requests of mixed lengths, none of which should be slower. A random model of Llama 3 8B's shape.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from prefixcache import PrefixCache
from prefixcache.codecs.interchange import on_cpu
from prefixcache.servers.buffer_pool import pool_kept
from tools.bench import report
from tools.bench.gpu_live import model_of
from tools.bench.prefill import compute
from tools.bench.report import Figure

TOKENS = {"full": 20_000, "quick": 8000, "tiny": 600}
ROUNDS = {"full": 5, "quick": 3, "tiny": 1}
MORE = 40  # tokens of the next turn
HOT_BAR = 0.05
REQUESTS = {"full": 200, "quick": 40, "tiny": 6}
SLOWER = 1.05


def first_token(model: Any, tokens: list[int], cache: PrefixCache | None, *, stored: bool) -> list[Any]:
    """Compute a request's first token behind what `cache` has, as `serve` does, and return its layers."""
    layers, since = None, 0
    if cache is not None:
        layers, rest = cache.fetch(cache.prompt(tokens, model="m", whole_blocks=True), room=256)
        since = len(tokens) - len(rest)
    if layers is None:
        layers = make_prompt_cache(model)
    began = time.perf_counter()
    compute(model, tokens[:-1], layers, since, cache if stored else None)
    if cache is not None:
        cache.learn_prefill(len(tokens) - since, time.perf_counter() - began, model="m")
    mx.eval(model(mx.array([tokens[-1:]]), cache=layers)[:, -1].argmax())
    return layers


def without_cache(model: Any, tokens: list[int], kept: list[Any]) -> float:
    """Seconds to the first token behind layers of an earlier turn that are kept as they are: mlx_lm.server's own way."""
    mx.synchronize()
    began = time.perf_counter()
    layers = copy.deepcopy(kept)
    compute(model, tokens[:-1], layers, layers[0].offset)
    mx.eval(model(mx.array([tokens[-1:]]), cache=layers)[:, -1].argmax())
    return time.perf_counter() - began


def answer(model: Any, tokens: list[int], cache: PrefixCache | None) -> float:
    """Seconds to the first token of a request, as `serve` answers it: what it then keeps is not among them."""
    mx.synchronize()
    with pool_kept() if cache is not None else nullcontext():
        began = time.perf_counter()
        layers = first_token(model, tokens, cache, stored=True)
        seconds = time.perf_counter() - began
    if cache is not None:
        prompt = cache.prompt(tokens, model="m", whole_blocks=True)
        prompt.given_rows.tokens = len(tokens)
        cache.store(prompt, layers)
        cache.keep_hot(prompt, layers)
    return seconds


def meet_shapes(model: Any, tokens: list[int], cache: PrefixCache) -> None:
    """Compute a request without the cache and behind its hit, as `answer` will: MLX takes some 80 ms to plan attention for
    each length of a chunk, of what is before it and of the buffers, and keeps the plan.
    """
    for with_it in (None, cache):
        first_token(model, tokens, with_it, stored=False)


def turns(scale: str) -> Iterator[Figure]:
    """The first token of a chat's next turn, from hot and from images in RAM, over a cold one's."""
    count = TOKENS[scale]
    if on_cpu() and scale != "tiny":
        yield report.needs_a_gpu(f"first token of the next turn, {count:,} tokens")
        return
    model, chance = model_of(scale), np.random.default_rng(0)
    for codec in ("turboquant:4", "raw"):
        times: dict[str, list[float]] = {"cold": [], "mlx-lm's own": [], "hot": [], "images": []}
        with PrefixCache(ram="40GB", ssd_dir=None, codec=codec) as cache:
            for turn in range(ROUNDS[scale] + 1):
                tokens = chance.integers(0, 512, count + 2 * MORE).tolist()
                found = {"cold": answer(model, tokens[:count], cache)}
                kept, _ = cache.fetch(cache.prompt(tokens[: count + 1], model="m"))
                found["mlx-lm's own"] = without_cache(model, tokens[: count + MORE], kept)
                del kept
                found["hot"] = answer(model, tokens[: count + MORE], cache)
                cache._storage.hot.clear()
                found["images"] = answer(model, tokens, cache)
                for name, seconds in found.items():
                    times[name] += [seconds] * bool(turn)
        cold = statistics.median(times["cold"])
        for name, bar in (("hot", HOT_BAR), ("images", None)):
            ratio = statistics.median(times[name]) / cold
            yield Figure(
                f"first token of the next turn from {name}, {count:,} tokens, {codec}, over a cold one's",
                f"{ratio:.3f}",
                f"<= {bar}" if bar else "",
                ", ".join(f"{name} {statistics.median(of):.3f} s" for name, of in times.items()),
                ratio <= bar if bar else None,
                {"times": times},
            )


def never_slower(scale: str) -> Iterator[Figure]:
    """Requests of mixed lengths, two thirds of which begin as an earlier one did: each with and without a cache."""
    if on_cpu() and scale != "tiny":
        yield report.needs_a_gpu("requests of mixed lengths, none slower")
        return
    model, chance = model_of(scale), np.random.default_rng(1)
    ratios: list[float] = []
    before: list[list[int]] = []
    hits = 0
    with PrefixCache(ram="40GB", ssd_dir=None, codec="turboquant:4", decline_slow_hits=True) as cache:
        for number in range(REQUESTS[scale] + 4):
            count = int(np.exp(chance.uniform(np.log(TOKENS[scale] / 100), np.log(TOKENS[scale]))))
            tokens = chance.integers(0, 512, count).tolist()
            if before and chance.random() < 2 / 3:
                known = before[chance.integers(len(before))]
                tokens = known[: int(len(known) * chance.uniform(0.3, 1))] + tokens[: max(count // 4, 2)]
            _, rest = cache.fetch(cache.prompt(tokens, model="m", whole_blocks=True))
            hits += len(rest) < len(tokens)
            meet_shapes(model, tokens, cache)
            both = [answer(model, tokens, with_it) for with_it in ((None, cache) if number % 2 else (cache, None))]
            ours, alone = reversed(both) if number % 2 else both
            before.append(tokens)
            if number >= 4:  # the first compile kernels
                ratios.append(ours / alone)
    slower = sum(ratio > SLOWER for ratio in ratios)
    lengths = f"{TOKENS[scale] // 100:,} to {TOKENS[scale]:,} tokens"
    yield Figure(
        f"requests of {lengths} that are slower with a cache than without, by over 5 %",
        f"{slower} of {len(ratios)}",
        "0",
        f"{hits} hits; with a cache over without: median {statistics.median(ratios):.2f}, worst {max(ratios):.2f}",
        slower == 0,
        {"ratios": ratios},
    )


FIGURES = {"gpu-turns": turns, "never-slower": never_slower}
