"""How fast the C kernel attends to coded rows, beside MLX's own attention on float16 and float32 rows, on the same CPU."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import mlx.core as mx
import numpy as np

from prefixcache.codecs.packing import words_of
from prefixcache.codecs.turboquant import c_attention as turboquant_c_attention
from prefixcache.codecs.turboquant import c_rows as turboquant_c
from prefixcache.codecs.turboquant.format import AttentionCall, CodedRows, form_of
from tools.bench import report
from tools.bench.report import Figure

GROUP, WIDTH, BITS = 4, 128, 4  # queries a head, channels, bits of keys and of values
# Queries, columns, heads: of the long ones fewer, because MLX takes its time.
CASES = [(1, 4096, 8), (1, 32768, 8), (512, 4096, 2), (512, 32768, 1)]
SHORTER = {"full": 1, "quick": 8, "tiny": 64}  # so many times fewer columns
ROUNDS = {"full": 3, "quick": 3, "tiny": 1}
CALLS_OF_ONE = 7  # calls of which the median counts, for one query
SCALE = WIDTH**-0.5
REFERENCES = ("float16", "float32")


def attention_cpu(scale: str) -> Iterator[Figure]:
    """Decoding (one query) and prefill (512 queries, causal), with as many threads as the codec has."""
    with mx.stream(mx.cpu):
        for length, tokens, heads in CASES:
            yield _figure(length, max(length, tokens // SHORTER[scale]), heads, ROUNDS[scale])


def _figure(length: int, tokens: int, heads: int, rounds: int) -> Figure:
    queries = f"{length} {'query' if length == 1 else 'queries'}"
    name = f"attention, CPU, {BITS} bits, {queries}, {tokens} tokens, {heads} heads x {GROUP}"
    reference = "mx.fast.scaled_dot_product_attention"
    if not turboquant_c_attention.available():
        return Figure(name, f"C kernel: {turboquant_c.describe()}", "", reference, None)
    rng = np.random.default_rng(length)
    rows = _coded(rng, heads, tokens)
    asked = mx.array(rng.standard_normal((1, heads * GROUP, length, WIDTH)).astype(np.float32))
    works: list[Callable[[], object]] = [
        lambda: turboquant_c_attention.attend(rows, AttentionCall(asked, SCALE, None, True))
    ]
    works += [_theirs(rng, asked, heads, tokens, dtype) for dtype in REFERENCES]
    calls = CALLS_OF_ONE if length == 1 else 1
    for work in works if length == 1 else works[:1]:
        work()
    ours, *theirs = report.in_turns(rounds, *(lambda _, work=work: _median(work, calls) for work in works))
    seconds = statistics.median(ours)
    visible = sum(tokens - length + i + 1 for i in range(length))
    flops = 4 * heads * GROUP * WIDTH * visible / seconds
    ratios = [report.median_ratio(of, ours) for of in theirs]
    return Figure(
        name,
        f"{seconds * 1e3:.2f} ms, {flops / 1e9:.0f} GFLOP/s, {rows.codes.nbytes / seconds / 1e9:.2f} GB/s of codes; "
        + ", ".join(f"{ratio:.1f} x {dtype}" for ratio, dtype in zip(ratios, REFERENCES, strict=True)),
        "",
        f"{reference}: "
        + ", ".join(
            f"{statistics.median(t) * 1e3:.1f} ms {dtype}" for t, dtype in zip(theirs, REFERENCES, strict=True)
        ),
        None,
        {"seconds": ours, "references": dict(zip(REFERENCES, theirs, strict=True)), "path": turboquant_c.describe()},
    )


def decoding(tokens: int, heads: int, rounds: int) -> list[float] | None:
    """Seconds of one query's attention to the codes of so many tokens, by round; None without the C kernel."""
    if not turboquant_c_attention.available():
        return None
    rng = np.random.default_rng(1)
    rows = _coded(rng, heads, tokens)
    asked = mx.array(rng.standard_normal((1, heads * GROUP, 1, WIDTH)).astype(np.float32))
    work = lambda: turboquant_c_attention.attend(rows, AttentionCall(asked, SCALE, None, True))  # noqa: E731
    work()
    return [_median(work, CALLS_OF_ONE) for _ in range(rounds)]


def _coded(rng: np.random.Generator, heads: int, tokens: int) -> CodedRows:
    """Any codes: no row takes longer than another."""
    form, words = form_of(WIDTH, BITS, 0), 2 * words_of(WIDTH, BITS)
    codes = mx.array(rng.integers(0, 1 << 32, (1, heads, tokens, words), np.uint32))
    return CodedRows(codes, mx.full((1, heads, tokens, 2), 0x3F80, mx.uint16), form, form)


def _theirs(rng: np.random.Generator, queries: mx.array, heads: int, tokens: int, dtype: str) -> Callable[[], object]:
    kind = getattr(mx, dtype)
    keys, values = (mx.array(rng.standard_normal((1, heads, tokens, WIDTH), np.float32)).astype(kind) for _ in range(2))
    asked = queries.astype(kind)
    mx.eval(keys, values, asked)
    mask = "causal" if queries.shape[2] > 1 else None

    def attend() -> None:
        mx.eval(mx.fast.scaled_dot_product_attention(asked, keys, values, scale=SCALE, mask=mask))

    return attend


def _median(work: Callable[[], object], calls: int) -> float:
    return statistics.median(report.seconds(work) for _ in range(calls))


FIGURES = {"attention-cpu": attention_cpu}
