"""mlx-vlm's TurboQuant, asked through its own layer cache: how fast it codes rows, attends to codes, and what that costs.

Its kernels are Metal's; on a CPU it runs the same arithmetic by MLX's operations. That is what is measured here.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

import mlx.core as mx
import numpy as np

from tools.bench import report
from tools.bench.attention import heads, kl
from tools.bench.peer.vllm_mlx import without_start

HEADS, WIDTH, GROUP = 8, 128, 4


def _cache(bits: int) -> Any:
    from mlx_vlm.turboquant import TurboQuantKVCache

    return TurboQuantKVCache(bits=bits)


def _rows(tokens: int, count: int) -> list[mx.array]:
    rows = [mx.random.normal((1, HEADS, tokens, WIDTH)).astype(mx.float16) for _ in range(count)]
    mx.eval(rows)
    return rows


def rates(bits: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Seconds to code and to decode keys and values of so many tokens, 8 heads of 128, and the bytes that a token takes."""
    keys, values = _rows(tokens, 2)
    cache = _cache(bits)

    def encode() -> None:
        nonlocal cache
        cache = _cache(bits)
        cache.update_and_fetch(keys, values)
        mx.eval(cache.keys, cache.values)

    def decode() -> None:
        mx.eval(cache.dequantize())

    encode()
    decode()
    encoded, decoded = report.in_turns(rounds, lambda _: report.seconds(encode), lambda _: report.seconds(decode))
    return {
        "bytes": keys.nbytes + values.nbytes,
        "encode_s": encoded,
        "decode_s": decoded,
        "a_token": cache.nbytes / tokens,
    }


def attention(bits: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Seconds of attention of one token, 8 heads x 4 queries, to so many tokens' codes."""
    cache, queries = _cache(bits), mx.random.normal((1, HEADS * GROUP, 1, WIDTH))
    fetched = cache.update_and_fetch(*_rows(tokens, 2))

    def attend() -> None:
        mx.eval(cache.decode_attention(queries, *fetched, scale=WIDTH**-0.5))

    attend()
    return {"seconds": [statistics.median(report.seconds(attend) for _ in range(3)) for _ in range(rounds)]}


def quality(bits: int) -> dict[str, float]:
    """The mean KL of attention on keys that were coded and decoded, by the trouble that the keys have."""
    found: dict[str, list[float]] = {}
    for name, head in heads():
        cache = _cache(bits)
        keys = mx.array(head.keys)[None, None]
        cache.update_and_fetch(keys, keys)
        back, _ = cache.dequantize()
        found.setdefault(name, []).append(kl(head, np.array(back)[0, 0].astype(np.float64)))
    return {name: float(np.mean(each)) for name, each in found.items()}


TASKS = {"rates": rates, "attention": attention, "quality": quality}

if __name__ == "__main__":
    without_start("mlx_vlm")
    print(json.dumps([TASKS[name](**plan) for name, plan in json.loads(sys.argv[2])]))
