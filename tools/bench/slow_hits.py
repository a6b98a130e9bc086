"""Whether a hit is slower than computing: prompts of mixed lengths that RAM has, each computed without a cache, and asked of
one that declines slow hits. On a GPU a random model of Llama 3 8B's shape in fp16, on a CPU SmolLM2-135M in float32.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache

from prefixcache import PrefixCache, chunks
from prefixcache.codecs.interchange import on_cpu
from tools.bench import report
from tools.bench.first_tokens import pretrained
from tools.bench.gpu_live import model_of
from tools.bench.report import Figure

CODECS = ("turboquant:4", "raw")
LENGTHS = {"gpu": (300, 1000, 2500, 6000, 16000), "cpu": (300, 600, 1200), "tiny": (300, 400)}
ROUNDS = {"full": 40, "quick": 10, "tiny": 2}
STEP = 2048  # tokens of a prefill's chunk, as in mlx_lm.server
BAR = 1.05


class Request(NamedTuple):
    """Seconds from a prompt to its last token's logits: computed, and asked of the cache, which gave so many tokens."""

    without: float
    with_cache: float
    hit: int


def _model(scale: str) -> tuple[Any, str, Sequence[int]]:
    if scale == "tiny" or not on_cpu():
        return (
            model_of(scale),
            "random model of Llama 3 8B's shape, fp16",
            LENGTHS["tiny" if scale == "tiny" else "gpu"],
        )
    with report.scratch() as folder:
        return load(str(pretrained(folder)))[0], "SmolLM2-135M, float32", LENGTHS["cpu"]


def _computed(model: Any, tokens: list[int], layers: list[Any], at: int) -> None:
    for first, last in chunks(at, len(tokens), STEP):
        mx.eval(model(mx.array([tokens[first:last]]), cache=layers)[:, -1])


def _stored(model: Any, tokens: list[int], cache: PrefixCache) -> None:
    layers = make_prompt_cache(model)
    _computed(model, tokens, layers, 0)
    cache.store(tokens, layers, model="m")


def _request(model: Any, tokens: list[int], cache: PrefixCache) -> Request:
    began = time.perf_counter()
    _computed(model, tokens, make_prompt_cache(model), 0)
    without = time.perf_counter() - began
    began = time.perf_counter()
    layers, rest = cache.fetch(tokens, model="m")
    fetched = time.perf_counter()
    _computed(model, tokens, layers or make_prompt_cache(model), len(tokens) - len(rest))
    ended = time.perf_counter()
    cache.learn_prefill(len(rest), ended - fetched, model="m")
    return Request(without, ended - began, len(tokens) - len(rest))


def slow_hits(scale: str) -> Iterator[Figure]:
    model, name, lengths = _model(scale)
    chance = np.random.default_rng(0)
    prompts = [chance.integers(0, 512, length).tolist() for length in lengths]
    for codec in CODECS:
        with PrefixCache(ram="20GB", codec=codec, hot=0, decline_slow_hits=True) as cache:
            for tokens in prompts:
                _stored(model, tokens, cache)
                for _ in range(2):  # kernels are compiled; some requests were computed before
                    began = time.perf_counter()
                    _computed(model, tokens, make_prompt_cache(model), 0)
                cache.learn_prefill(len(tokens), time.perf_counter() - began, model="m")
            asked: list[list[Request]] = [[] for _ in prompts]
            for _ in range(ROUNDS[scale]):
                for place in chance.permutation(len(prompts)):
                    asked[place].append(_request(model, prompts[place], cache))
            counters = cache.stats().counters
            rates = [(cache.rates.fetching("m", n), cache.rates.computing("m", n)) for n in lengths]
        ratios = [_median(of, "with_cache") / _median(of, "without") for of in asked]
        yield Figure(
            f"{name}, {codec}: {counters.fetches} requests of {lengths[0]:,} to {lengths[-1]:,} tokens in RAM, with the "
            "cache over without, medians of each length, the slowest",
            f"{max(ratios):.2f}; {counters.declined_hits} hits declined",
            f"<= {BAR}",
            "fetch, computing: "
            + "; ".join(f"{n:,}: {f:.3f}, {c:.3f} s" for n, (f, c) in zip(lengths, rates, strict=True)),
            max(ratios) <= BAR,
            {"ratios": ratios, "requests": [[request._asdict() for request in of] for of in asked]},
        )


def _median(requests: list[Request], field: str) -> float:
    return statistics.median(getattr(request, field) for request in requests)


FIGURES = {"slow-hits": slow_hits}
