"""Codec transform on this machine's GPU: rows to codes and back, beside the product alone, and beside the prefill that they
follow and save, of a model of Llama 3 8B's shape.

Rows and bases are those of `transform_rows`. Rows that are decoded count as bytes of fp16: from codes in the GPU's memory,
and from the host's, whose blocks are joined and brought over first.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from prefixcache.codecs.transform import gpu_coding, gpu_entropy
from prefixcache.codecs.transform.coding import Codes, GroupCoder
from prefixcache.keys import BLOCK
from prefixcache.media import chunks
from tools.bench import report, transform_rows
from tools.bench.gpu_live import model_of
from tools.bench.report import Figure

QUALITY = 4.0
LAYERS = 32  # of the model
JOINED = (1, 2, 4)  # layers of a group
DISTINCT = 2  # groups, which are taken in turn
TOKENS = {"full": 4096, "quick": 4096, "tiny": 256}
ROUNDS = {"full": 9, "quick": 5, "tiny": 1}
STEP = 2048
DECODED, OF_PREFILL, SOONER = 60.0, 0.1, 30.0


def rows(scale: str) -> Iterator[Figure]:
    """Groups of one, two and four layers: their rates, and what all of a model's layers take beside its prefill."""
    if not gpu_coding.available():
        yield report.needs_a_gpu("codec transform on a GPU: decoding and encoding", gpu_coding.describe())
        return
    tokens = TOKENS[scale]
    prefill = _prefill(tokens, scale)
    for joined in JOINED:
        yield from _of_groups(joined, tokens, prefill, scale)


def _prefill(tokens: int, scale: str) -> float:
    """Seconds of a prompt's, by a random model."""
    model = model_of(scale)
    prompt = mx.random.randint(0, model.args.vocab_size, (1, tokens))

    def read() -> None:
        layers = make_prompt_cache(model)
        for first, last in chunks(0, tokens, STEP):
            model.model(prompt[:, first:last], cache=layers)
            mx.eval([layer.state for layer in layers])

    read()
    return statistics.median(report.seconds(read) for _ in range(ROUNDS[scale]))


def _of_groups(joined: int, tokens: int, prefill: float, scale: str) -> Iterator[Figure]:
    layers = LAYERS if scale != "tiny" else 2 * joined
    found = [transform_rows.group(number, joined) for number in range(DISTINCT)]
    of, tables = found[0], transform_rows.tables(joined)
    coders = [GroupCoder(group, tables, QUALITY, transform_rows.DTYPE) for group in found]
    streams = [
        [mx.array(np.ascontiguousarray(s.swapaxes(0, 1))) for s in transform_rows.rows(group, tokens, number)]
        for number, group in enumerate(found)
    ]
    mx.eval(streams)
    blocks = [gpu_coding.BlockSpan(first, first + BLOCK) for first in range(0, tokens, BLOCK)]
    of_model = [number % DISTINCT for number in range(layers // joined)]
    rowed = [gpu_coding.GroupRows(coders[i], streams[i], [None] * len(blocks)) for i in of_model]
    step = gpu_coding.at_once([coders[i] for i in of_model], tokens)
    together = [slice(at, at + step) for at in range(0, len(of_model), step)]

    def encode() -> list[list[Codes]]:
        return [codes for part in together for codes in gpu_coding.encode(rowed[part], blocks)]

    def begin_encoding() -> Iterator[Any]:  # a thread of the cache waits for the codes
        for part in together:
            yield gpu_coding.begin_encoding(rowed[part], blocks).decoded

    coded = [gpu_coding.GroupCodes(coders[i], codes) for i, codes in zip(of_model, encode(), strict=True)]
    firsts = [block.first for block in blocks]
    batches = [gpu_coding.brought_in(coded[part], firsts) for part in together]
    count = gpu_entropy.padded_count(len(coders[0].classes))
    vectors = [group.on_gpu.vectors[:count] for group in found]
    values = mx.random.normal((count, tokens)).astype(mx.float16)
    mx.eval(
        vectors,
        values,
        [(batch.heads, batch.first, batch.words, [of[:2] for of in batch.beside]) for batch in batches],
    )

    def timed(work: Callable[[], Iterable[Any]]) -> Callable[[int], float]:
        def once(_: int) -> float:
            mx.synchronize()
            begin = time.perf_counter()
            kept = []
            for made in work():
                mx.async_eval(made)
                kept.append(made)
            mx.synchronize()
            return time.perf_counter() - begin

        return once

    works: dict[str, Callable[[], Iterable[Any]]] = {
        "product": lambda: (values.T @ vectors[i] for i in of_model),
        "decode": lambda: (gpu_coding.decode_batch(batch) for batch in batches),
        "decode from the host": lambda: (gpu_coding.decode(coded[part], firsts) for part in together),
        "encode": begin_encoding,
        "encode to the host": lambda: (mx.array(len(encode())) for _ in range(1)),
    }
    clocks = [timed(work) for work in works.values()]
    for once in clocks:
        once(0)
    turns = dict(zip(works, report.in_turns(ROUNDS[scale], *clocks), strict=True))
    whole = {name: statistics.median(times) for name, times in turns.items()}
    nbytes = tokens * of.channels * 2 * len(of_model)
    rate = {name: nbytes / seconds / 1e9 for name, seconds in whole.items()}
    shape = f"{of.channels:,} channels ({joined} of Llama 3 8B's layers), {tokens:,} tokens ({gpu_coding.describe()})"
    raw = {"joined": joined, "components": len(coders[0].classes), "rate": rate, "prefill": prefill, "whole": whole}
    yield Figure(
        f"transform decode: {shape}",
        f"{rate['decode']:.0f} GB/s of fp16",
        f">= {DECODED:.0f} on an H200",
        f"the product alone {rate['product']:.0f}, from codes of the host {rate['decode from the host']:.0f} GB/s",
        rate["decode"] >= DECODED,
        raw,
    )
    sooner = prefill / whole["decode"]
    from_host = whole["decode from the host"]
    yield Figure(
        f"transform decode of all {layers} layers: {shape}",
        f"{whole['decode'] * 1e3:.1f} ms, {sooner:.0f} times sooner than prefill",
        f">= {SOONER:.0f} times",
        f"prefill {prefill * 1e3:.0f} ms; from codes of the host {from_host * 1e3:.1f} ms, {prefill / from_host:.1f} times",
        sooner >= SOONER,
        raw,
    )
    share = whole["encode"] / prefill
    yield Figure(
        f"transform encode of all {layers} layers: {shape}",
        f"{whole['encode'] * 1e3:.1f} ms, {share:.1%} of prefill",
        f"<= {OF_PREFILL:.0%}",
        f"prefill {prefill * 1e3:.0f} ms; {rate['encode']:.0f} GB/s of fp16; until codes are in the host's memory "
        f"{whole['encode to the host'] * 1e3:.1f} ms",
        share <= OF_PREFILL,
        raw,
    )


FIGURES = {"transform-gpu": rows}
