"""TurboQuant's kernels on this machine's GPU: rows of fp16 to codes and back, beside a copy and MLX's own quantisation.

Each works on inputs in turn that together are several times any cache, and gives its output away. Rows that are decoded
count as bytes of fp16 written; traffic is all that is read and written. The bars are for plain rows; levelled ones, whose
every channel has a mean and a weight, are measured beside them, with those on the GPU already.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from prefixcache import PrefixCache, TurboQuant
from prefixcache.codecs.levels import Levels
from prefixcache.codecs.turboquant import gpu_rows as turboquant_gpu
from prefixcache.codecs.turboquant.format import form_of
from tools.bench import report
from tools.bench.report import Figure

WIDTH, HEADS = 128, 8
BYTES = {"full": 512 << 20, "quick": 128 << 20, "tiny": 1 << 20}
INPUTS = 5  # as many as are worked on in turn
CALLS = {"full": 15, "quick": 10, "tiny": 2}
ROUNDS = {"full": 9, "quick": 5, "tiny": 1}
OF_A_COPY = 0.75
ENCODED = 1000.0

Work = Callable[[int], Any]


def timed(work: Work, calls: int) -> Callable[[int], float]:
    """Seconds a call, of calls that follow each other as fast as the GPU takes them."""

    def once(_: int) -> float:
        mx.synchronize()
        begin = time.perf_counter()
        kept = []
        for call in range(calls):
            out = work(call % INPUTS)
            mx.async_eval(out)
            kept.append(out)
        mx.synchronize()
        return (time.perf_counter() - begin) / calls

    return once


def _levels() -> Levels:
    random = np.random.default_rng(1)
    mean, root = random.standard_normal((2, HEADS, WIDTH))
    return Levels(mean.astype(np.float32), (1 + np.abs(root)).astype(np.float32))


def kernels(scale: str) -> Iterator[Figure]:
    """Encoding and decoding at 4 and 3 bits, plain and levelled."""
    if not turboquant_gpu.available():
        yield report.needs_a_gpu("TurboQuant on a GPU: decoding and encoding", turboquant_gpu.describe())
        return
    tokens = BYTES[scale] // (2 * WIDTH * HEADS)
    rows = [mx.random.normal((tokens, HEADS, WIDTH)).astype(mx.float16) for _ in range(INPUTS)]
    mx.eval(rows)
    for bits in (4, 3):
        yield from _of_bits(bits, rows, scale)


def _of_bits(bits: int, rows: list[mx.array], scale: str) -> Iterator[Figure]:
    form, calls = form_of(WIDTH, bits, 0), CALLS[scale]
    levels = _levels()
    to, back = turboquant_gpu.for_encoding(levels), turboquant_gpu.for_decoding(levels, form)
    forms: dict[str, tuple[mx.array | None, mx.array | None]] = {"plain": (None, None), "levelled": (to, back)}
    coded = {name: [turboquant_gpu.encode_arrays(x, form, to) for x in rows] for name, (to, _) in forms.items()}
    quantised = [mx.quantize(x, group_size=64, bits=bits) for x in rows]
    mx.eval(coded, quantised, to, back)

    works: dict[str, Work] = {
        "copy": lambda i: mx.negative(rows[i].view(mx.uint32)),  # MLX's fastest way to read and write as much
        "mx.quantize": lambda i: mx.quantize(rows[i], group_size=64, bits=bits),
        "mx.dequantize": lambda i: mx.dequantize(*quantised[i], group_size=64, bits=bits),
    }
    for name, (to, back) in forms.items():
        works[f"encode {name}"] = lambda i, to=to: turboquant_gpu.encode_arrays(rows[i], form, to)
        works[f"decode {name}"] = lambda i, name=name, back=back: turboquant_gpu.decode_arrays(
            *coded[name][i], "float16", form, back
        )
    clocks = [timed(work, calls) for work in works.values()]
    for once in clocks:
        once(0)  # compiles, and takes memory
    found = dict(zip(works, report.in_turns(ROUNDS[scale], *clocks), strict=True))

    size = rows[0].nbytes / 1e9
    traffic = size + sum(array.nbytes for array in coded["plain"][0]) / 1e9
    rate = {name: size / statistics.median(times) for name, times in found.items()}
    copy = 2 * rate["copy"]
    kind = turboquant_gpu.describe()
    for name in forms:
        of_copy = report.median_ratio(found["copy"], found[f"decode {name}"]) * traffic / (2 * size)
        yield Figure(
            f"decode, {bits} bits, {name} rows ({kind})",
            f"{rate[f'decode {name}']:.0f} GB/s of fp16, traffic {of_copy:.0%} of a copy's",
            f">= {OF_A_COPY:.0%} of a copy's" if name == "plain" else "",
            f"copy {copy:.0f} GB/s read + written, mx.dequantize {rate['mx.dequantize']:.0f} of fp16",
            of_copy >= OF_A_COPY if name == "plain" else None,
            {"bits": bits, "of_copy": of_copy, "rate": rate},
        )
        encoded = rate[f"encode {name}"]
        yield Figure(
            f"encode, {bits} bits, {name} rows ({kind})",
            f"{encoded:.0f} GB/s of fp16",
            f">= {ENCODED:.0f} GB/s on an H200" if name == "plain" else "",
            f"mx.quantize {rate['mx.quantize']:.0f} GB/s of fp16",
            encoded >= ENCODED if name == "plain" else None,
            {"bits": bits, "rate": rate},
        )


SHAPE = {"full": (32, 32 << 10), "quick": (4, 8 << 10), "tiny": (1, 512)}  # layers, tokens; 8 heads of 128


def fetch(scale: str) -> Iterator[Figure]:
    """From images in RAM to a prompt cache that a model can use, beside copying the same rows, uncompressed, from memory."""
    layers, tokens = SHAPE[scale]
    if not turboquant_gpu.available() and scale != "tiny":
        yield report.needs_a_gpu(
            f"fetch of {tokens} tokens x {layers} layers x {HEADS} x {WIDTH}", turboquant_gpu.describe()
        )
        return
    prompt, live = list(range(tokens)), []
    for _ in range(layers):
        layer = KVCache()
        layer.update_and_fetch(*(mx.random.normal((1, HEADS, tokens, WIDTH)).astype(mx.float16) for _ in range(2)))
        mx.eval(layer.keys, layer.values)
        live.append(layer)
    nbytes = layers * 2 * live[0].keys.nbytes
    copied, how = _host_copy(nbytes // layers // 2)
    for bits in (4, 3):
        with PrefixCache(ram=nbytes, codec=TurboQuant(bits, bits)) as cache:
            begin = time.perf_counter()
            cache.store(prompt, live, model="bench")
            stored = time.perf_counter() - begin

            def once(_: int, cache: PrefixCache = cache) -> float:
                begin = time.perf_counter()
                made, _rest = cache.fetch(prompt, model="bench", leave=0)
                mx.synchronize()
                assert made is not None
                return time.perf_counter() - begin

            def copy(_: int) -> float:
                return layers * 2 * copied()

            once(0)
            fetched, plain = report.in_turns(5 if scale == "full" else 2, once, copy)
        seconds = statistics.median(fetched)
        yield Figure(
            f"fetch, {bits} bits, {tokens} tokens x {layers} layers x {HEADS} x {WIDTH}",
            f"{seconds * 1e3:.0f} ms, {nbytes / seconds / 1e9:.1f} GB/s of fp16; store {nbytes / stored / 1e9:.1f}",
            "",
            f"{how}: {statistics.median(plain) * 1e3:.0f} ms, {nbytes / statistics.median(plain) / 1e9:.1f} GB/s",
            None,
            {"fetch": fetched, "copy": plain, "store": stored, "bytes": nbytes},
        )


def _host_copy(nbytes: int) -> tuple[Callable[[], float], str]:
    """Seconds that `nbytes` take from the host's memory to the GPU's: pinned where CuPy is at hand, else as MLX copies."""
    try:
        import cupy
    except ImportError:
        host = np.zeros(nbytes, np.uint8)
        return lambda: report.seconds(lambda: mx.eval(mx.array(host))), "mx.array of the fp16 rows"
    pinned = np.frombuffer(cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)
    pinned[:] = 1
    there = cupy.empty(nbytes, cupy.uint8)

    def once() -> float:
        begin = time.perf_counter()
        there.set(pinned)
        cupy.cuda.get_current_stream().synchronize()
        return time.perf_counter() - begin

    once()
    return once, "a copy of the fp16 rows from pinned memory"


FIGURES = {"kernels": kernels, "fetch": fetch}
