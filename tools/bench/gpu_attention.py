"""Attention on codes on this machine's GPU, beside MLX's own on fp16 rows, held as mlx-lm's cache holds them.

One query token, as in decoding: 32 query heads on 8 heads of keys and values, width 128. Both work on caches in turn that
together are several times any cache memory. Three ways: as a model's layers have it, each result the next query, 64 at a
time; the same in steps of 32 whose next one is built while the GPU works, as mlx-lm decodes; all asked for at once, more
of them. MLX's time is the better one of whole buffers and of slices of longer ones.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np

from prefixcache.codecs.interchange import copy_out
from prefixcache.codecs.turboquant import gpu_attention as turboquant_gpu_attention
from prefixcache.codecs.turboquant import gpu_rows as turboquant_gpu
from prefixcache.codecs.turboquant.format import AttentionCall, CodedRows, form_of
from tools.bench import report
from tools.bench.report import Figure

WIDTH, HEADS, GROUP = 128, 8, 4
TOKENS = {"full": (32 << 10, 128 << 10), "quick": (32 << 10,), "tiny": (512,)}
BYTES = {"full": 600 << 20, "quick": 600 << 20, "tiny": 1 << 20}  # of each kind of caches together
CALLS = {"full": 64, "quick": 64, "tiny": 4}
ROUNDS = {"full": 9, "quick": 5, "tiny": 1}
ROOM = 256  # rows that mlx-lm's cache grows by
OF_MLX = 0.5
SCALE = WIDTH**-0.5

Attend = Callable[[int, mx.array], mx.array]


def _coded(tokens: int, bits: tuple[int, int], heads: int = HEADS, width: int = WIDTH, seed: int = 0) -> CodedRows:
    forms = [form_of(width, n, 0) for n in bits]
    rows = [
        mx.random.normal((1, heads, tokens, width), key=mx.random.key(2 * seed + n)).astype(mx.float16) for n in (0, 1)
    ]
    coded = CodedRows(*turboquant_gpu_attention.encode_pair(*rows, *forms), *forms)
    mx.eval(coded.codes, coded.scales)
    return coded


def _chained(attend: Attend, query: mx.array, calls: int) -> int:
    found = []
    for call in range(calls):
        query = attend(call, query)
        found.append(query)
    mx.eval(found)
    return calls


def _in_steps(attend: Attend, query: mx.array, calls: int) -> int:
    steps, earlier = 6, query
    for step in range(steps):
        for call in range(calls // 2):
            query = attend(step * calls // 2 + call, query)
        mx.async_eval(query)
        mx.eval(earlier)
        earlier = query
    mx.eval(query)
    return steps * (calls // 2)


def _at_once(attend: Attend, query: mx.array, calls: int) -> int:
    mx.eval([attend(call, query) for call in range(3 * calls)])
    return 3 * calls


WAYS = {"chained": _chained, "in steps": _in_steps, "at once": _at_once}


def _timed(attend: Attend, way: Callable[[Attend, mx.array, int], int], calls: int) -> Callable[[int], float]:
    """Seconds a call, from the first line of Python to the last result."""
    query = mx.random.normal((1, HEADS * GROUP, 1, WIDTH)).astype(mx.float16)
    mx.eval(query)

    def once(_: int) -> float:
        mx.synchronize()
        begin = time.perf_counter()
        done = way(attend, query, calls)
        mx.synchronize()
        return (time.perf_counter() - begin) / done

    return once


def _fp16(tokens: int, room: int, count: int) -> Attend:
    shape = (1, HEADS, tokens + room, WIDTH)
    held = [[mx.random.normal(shape).astype(mx.float16) for _ in range(2)] for _ in range(count)]
    mx.eval(held)

    def attend(call: int, query: mx.array) -> mx.array:
        keys, values = held[call % count]
        if room:
            keys, values = keys[..., :tokens, :], values[..., :tokens, :]
        return mx.fast.scaled_dot_product_attention(query, keys, values, scale=SCALE)

    return attend


def attention(scale: str) -> Iterator[Figure]:
    """4 and 3 bits, short and long contexts."""
    if not turboquant_gpu.available():
        yield report.needs_a_gpu("attention on codes", turboquant_gpu.describe())
        return
    for tokens in TOKENS[scale]:
        own = HEADS * tokens * WIDTH * 4  # bytes of a cache of fp16 rows
        whole, sliced = (_fp16(tokens, room, max(2, -(-BYTES[scale] // own))) for room in (0, ROOM))
        works = {"whole buffers": whole, "slices": sliced}
        bytes_of = {}
        for bits in (4, 3):
            first = _coded(tokens, (bits, bits))
            bytes_of[bits] = first.codes.nbytes + first.scales.nbytes
            held = [first]
            held += [_coded(tokens, (bits, bits), seed=n) for n in range(1, max(2, -(-BYTES[scale] // bytes_of[bits])))]

            def attend(call: int, query: mx.array, held: list[CodedRows] = held) -> mx.array:
                own = held[call % len(held)]
                return turboquant_gpu_attention.attend(own, AttentionCall(query, SCALE, dtype=mx.float16)).out

            works[f"{bits} bits"] = attend
        for name, way in WAYS.items():
            timed = [_timed(work, way, CALLS[scale]) for work in works.values()]
            for once in timed:
                once(0)  # compiles, and takes memory
            found = dict(zip(works, report.in_turns(ROUNDS[scale], *timed), strict=True))
            best = min("whole buffers", "slices", key=lambda held: statistics.median(found[held]))
            reference = ", ".join(
                f"{held} {statistics.median(found[held]) * 1e6:.1f}" for held in ("whole buffers", "slices")
            )
            for bits in (4, 3):
                seconds = statistics.median(found[f"{bits} bits"])
                ratio = report.median_ratio(found[f"{bits} bits"], found[best])
                yield Figure(
                    f"attention, {tokens >> 10}k tokens, {bits} bits, {name}",
                    f"{seconds * 1e6:.1f} us, {bytes_of[bits] / seconds / 1e9:.0f} GB/s of codes, {ratio:.2f} of MLX's",
                    f"<= {OF_MLX:.2f} of MLX's",
                    f"mx.fast on fp16, us: {reference}",
                    ratio <= OF_MLX,
                    {"tokens": tokens, "bits": bits, "seconds": found, "ratio": ratio},
                )


def _exact(rows: CodedRows, queries: mx.array, mask: Any, causal: bool) -> Any:
    """Float64, of the decoded rows of one sequence."""
    parts = []
    for at, form, part in ((slice(None, rows.key_words), rows.keys, 0), (slice(rows.key_words, None), rows.values, 1)):
        codes, scales = (mx.swapaxes(x, 0, 1) for x in (rows.codes[0, ..., at], rows.scales[0, ..., part]))
        parts.append(copy_out(turboquant_gpu.decode_arrays(codes, scales, "float32", form, None)))
    group = queries.shape[1] // rows.codes.shape[1]
    keys, values = (np.repeat(x.astype(np.float64), group, 0) for x in parts)
    length, tokens = queries.shape[2], keys.shape[1]
    scores = copy_out(queries.astype(mx.float32))[0].astype(np.float64) @ keys.swapaxes(1, 2) * rows.keys.width**-0.5
    if mask is not None:
        scores = np.where(mask, scores, -np.inf) if mask.dtype == np.bool_ else scores + mask
    if causal:
        scores = np.where(np.arange(tokens) <= tokens - length + np.arange(length)[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights @ values / weights.sum(-1, keepdims=True)


# Name: width, bits of keys and values, length, how far logits spread, mask, causal.
CASES: dict[str, tuple[int, tuple[int, int], int, float, str, bool]] = {
    "plain": (128, (4, 4), 1, 1.0, "", False),
    "peaked": (128, (4, 4), 1, 10.0, "", False),
    "3 bits": (128, (3, 3), 1, 3.0, "", False),
    "8 and 2 bits": (128, (8, 2), 1, 3.0, "", False),
    "1 and 4 bits": (64, (1, 4), 1, 3.0, "", False),
    "width 80": (80, (4, 4), 1, 3.0, "", False),
    "width 96": (96, (3, 4), 1, 3.0, "", False),
    "width 192": (192, (4, 4), 1, 3.0, "", False),
    "width 256": (256, (4, 8), 1, 3.0, "", False),
    "3 queries": (128, (4, 4), 3, 3.0, "", True),
    "8 queries": (128, (4, 3), 8, 3.0, "", True),
    "16 queries": (128, (4, 4), 16, 3.0, "", True),
    "mask of columns": (128, (4, 4), 1, 3.0, "columns", False),
    "mask of queries": (128, (4, 4), 4, 3.0, "queries", False),
    "added": (128, (4, 4), 4, 3.0, "added", False),
}


def correct(scale: str) -> Iterator[Figure]:
    """How far results are from exact ones on the same decoded rows: the worst query row."""
    if not turboquant_gpu.available():
        yield report.needs_a_gpu("attention on codes: error", turboquant_gpu.describe())
        return
    tokens, heads = (5000, 2) if scale != "tiny" else (200, 1)
    random = np.random.default_rng(0)
    for name, (width, bits, length, spread, kind, causal) in CASES.items():
        rows = _coded(tokens, bits, heads, width)
        queries = (mx.random.normal((1, heads * GROUP, length, width)) * spread).astype(mx.float16)
        mask = None
        if kind == "columns":
            mask = random.random((1, 1, 1, tokens)) < 0.5
        elif kind:
            mask = random.random((1, 1, length, tokens)) < 0.5
            if kind == "added":
                mask = np.where(mask, random.standard_normal(mask.shape), -np.inf).astype(np.float32)
        given = None if mask is None else mx.array(mask)
        out, _ = turboquant_gpu_attention.attend(rows, AttentionCall(queries, width**-0.5, given, causal))
        want = _exact(rows, queries, None if mask is None else mask[0], causal)
        error = np.linalg.norm(copy_out(out)[0] - want, axis=-1) / np.linalg.norm(want, axis=-1)
        yield Figure(
            f"error, {name}",
            f"{error.max():.1e}",
            "<= 1.0e-04",
            "float64 on decoded rows",
            bool(error.max() <= 1e-4),
            {"error": float(error.max())},
        )


FIGURES = {"attention-gpu": attention, "attention-gpu-correct": correct}
