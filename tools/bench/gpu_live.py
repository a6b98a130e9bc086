"""Decoding on a GPU with a model of Llama 3 8B's shape and random weights: tokens a second on codes and on fp16 rows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache

from prefixcache.codecs import TurboQuant
from prefixcache.codecs.interchange import on_cpu
from prefixcache.live import TurboQuantKVCache, convert_prompt_cache
from tools.bench import report
from tools.bench.report import Figure

SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
SIZES = {
    "full": {},
    "quick": {},
    "tiny": {
        "num_hidden_layers": 2,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "vocab_size": 512,
    },
}
CONTEXT = {"full": 32768, "quick": 32768, "tiny": 512}
STEPS = {"full": 64, "quick": 32, "tiny": 4}
ROUNDS = 5
BAR = 1.0


def model_of(scale: str) -> llama.Model:
    """Random weights in fp16."""
    model = llama.Model(llama.ModelArgs.from_dict(SHAPE | SIZES[scale]))
    model.update(tree_map(lambda w: (mx.random.normal(w.shape) * 0.02).astype(mx.float16), model.parameters()))
    mx.eval(model.parameters())
    return model


def decoding(scale: str) -> Iterator[Figure]:
    """Steps as mlx-lm's generate_step takes them: the next is built while the GPU works on the last."""
    if on_cpu() and scale != "tiny":
        yield report.needs_a_gpu("live, GPU, tokens/s of an 8B model")
        return
    model = model_of(scale)
    args = model.args
    context, steps = CONTEXT[scale], STEPS[scale]
    dense = [_filled(args, context) for _ in range(args.num_hidden_layers)]
    # All grow as they go on: what that costs is part of it.
    caches = {
        "fp16": dense,
        "4 bits": convert_prompt_cache(dense, "turboquant:4", model=model),
        "4 bits, no recent rows": convert_prompt_cache(dense, "turboquant:4", model=model, recent_tokens=0),
        "3 bits": convert_prompt_cache(dense, "turboquant:3", model=model),
    }
    for cache in caches.values():
        _seconds(model, cache, 8)
    names = list(caches)
    taken = dict(
        zip(
            names,
            report.in_turns(ROUNDS, *(lambda _, own=own: _seconds(model, caches[own], steps) for own in names)),
            strict=True,
        )
    )
    rate = {name: steps / statistics.median(own) for name, own in taken.items()}
    for name in names[1:]:
        ratio = report.median_ratio(taken["fp16"], taken[name])
        yield Figure(
            f"live, GPU, 8B shape, {context} tokens, {name}: tokens/s over fp16's",
            f"{ratio:.3f}",
            f">= {BAR}",
            f"{rate[name]:.1f} and {rate['fp16']:.1f}",
            ratio >= BAR,
            {"rate": rate},
        )


def _filled(args: Any, context: int) -> KVCache:
    cache = KVCache()
    shape = (1, args.num_key_value_heads, context + 200, args.head_dim)
    cache.update_and_fetch(*(mx.random.normal(shape).astype(mx.float16) for _ in range(2)))
    mx.eval(cache.state)
    cache.trim(200)
    return cache


def _seconds(model: Any, cache: list[Any], steps: int) -> float:
    token = mx.array([[1]])
    mx.eval(token)
    mx.synchronize()
    begin = time.perf_counter()
    token = mx.argmax(model(token, cache=cache)[:, -1:], axis=-1)
    mx.async_eval(token)
    for _ in range(steps - 1):
        following = mx.argmax(model(token, cache=cache)[:, -1:], axis=-1)
        mx.async_eval(following)
        token.item()
        token = following
    token.item()
    taken = time.perf_counter() - begin
    return taken


def correct(scale: str) -> Iterator[Figure]:
    """Whole caches on this device: attention on codes against attention on what `dequantize` gives, in float32."""
    mx.random.seed(0)
    worst = 0.0
    cases = [
        (n, batch, mask) for n in (1, 4, 16, 300) for batch in (1, 3) for mask in (None, "causal", "bool", "additive")
    ]
    for count, batch, kind in cases:
        for codec, kept in (({}, {}), ({}, {"recent_tokens": 16}), ({"levelling": False}, {"recent_tokens": 0})):
            cache = TurboQuantKVCache(TurboQuant(4, 3, **codec), **kept)
            rows = lambda n: mx.random.normal((batch, 2, n, 128)).astype(mx.float16)  # noqa: E731, B023
            cache.update_and_fetch(rows(700), rows(700))
            fetched = cache.update_and_fetch(rows(count), rows(count))
            queries = mx.random.normal((batch, 8, count, 128)).astype(mx.float16)
            mask: Any = kind
            if kind in ("bool", "additive"):
                mask = mx.random.uniform(shape=(batch, 1, count, cache.offset)) < 0.7
                mask = (
                    mask if kind == "bool" else mx.where(mask, mx.random.normal(mask.shape), -mx.inf).astype(mx.float16)
                )
            got = cache.attend_to_codes(queries, *fetched, scale=0.09, mask=mask).astype(mx.float32)
            plain = cache.dequantize()
            keys, values = (own[..., : plain.offset, :].astype(mx.float32) for own in (plain.keys, plain.values))
            wanted = mx.fast.scaled_dot_product_attention(
                queries.astype(mx.float32),
                keys,
                values,
                scale=0.09,
                mask=mask.astype(mx.float32) if kind == "additive" else mask,
            )
            worst = max(worst, float((mx.linalg.norm(got - wanted) / mx.linalg.norm(wanted)).item()))
    yield Figure(
        "live: attention on codes over attention on dequantize()d fp32, worst of all masks and lengths",
        f"{worst:.1e}",
        "<= 1e-3",
        f"{3 * len(cases)} cases, fp16",
        worst <= 1e-3,
        {"worst": worst},
    )


FIGURES = {"live-decoding": decoding, "live-correct": correct}
