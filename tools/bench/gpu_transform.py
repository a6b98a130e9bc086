"""Codec transform on this machine's GPU: rows to codes and back, beside the product alone, and beside the prefill that they
follow and save, of a model of Llama 3 8B's shape.

Rows and bases are those of `transform_rows`. Rows that are decoded count as bytes of fp16: from codes in the GPU's memory,
and from the host's, whose blocks are joined and brought over first.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from prefixcache.codecs.transform import backends, gpu_coding
from prefixcache.codecs.transform.coding import GroupCoder
from prefixcache.keys import BLOCK, chunks
from tools.bench import report, transform_rows
from tools.bench.gpu import timed
from tools.bench.gpu_live import model_of
from tools.bench.report import Figure

QUALITY = 4.0
LAYERS = 32  # of the model
JOINED = (1, 2, 4)  # layers of a group
TOKENS = {"full": 4096, "quick": 4096, "tiny": 256}
CALLS = {"full": 8, "quick": 4, "tiny": 1}  # groups one after the other, as a prompt's
ROUNDS = {"full": 9, "quick": 5, "tiny": 1}
STEP = 2048
DECODED, OF_PREFILL, SOONER = 60.0, 0.1, 30.0


def rows(scale: str) -> Iterator[Figure]:
    """Groups of one, two and four layers: their rates, and what all of a model's layers take beside its prefill."""
    if not gpu_coding.available():
        yield report.needs_a_gpu("codec transform on a GPU: decoding and encoding", backends.describe())
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
    of = transform_rows.group(0, joined)
    coder = GroupCoder(of, transform_rows.tables(joined), QUALITY, transform_rows.DTYPE)
    gpu = gpu_coding.GpuCoder(coder)
    streams = [mx.array(np.ascontiguousarray(s.swapaxes(0, 1))) for s in transform_rows.rows(of, tokens, 1)]
    blocks = [gpu_coding.Rows(first, first + BLOCK) for first in range(0, tokens, BLOCK)]
    codes = gpu.encode(streams, blocks)
    pairs = [(block.first, own) for block, own in zip(blocks, codes, strict=True)]
    batch = gpu.brought_in(pairs)
    vectors = of.on_gpu.vectors[:, : len(coder.classes)].astype(mx.float32)
    values = mx.random.normal((len(coder.classes), tokens))
    mx.eval(batch.heads, batch.first, batch.words, batch.offsets, batch.offset_steps, vectors, values)
    works = {
        "product": lambda _: values.T @ vectors.T,
        "decode": lambda _: gpu.decode_batch(batch),
        "decode from the host": lambda _: gpu.decode(pairs),
        "encode": lambda _: mx.array([len(own.words) for own in gpu.encode(streams, blocks)]),
    }
    clocks = [timed(work, CALLS[scale]) for work in works.values()]
    for once in clocks:
        once(0)
    found = dict(zip(works, report.in_turns(ROUNDS[scale], *clocks), strict=True))
    took = {name: statistics.median(times) for name, times in found.items()}
    nbytes = tokens * of.channels * 2
    rate = {name: nbytes / seconds / 1e9 for name, seconds in took.items()}
    whole = {name: seconds * LAYERS / joined for name, seconds in took.items()}
    shape = f"{of.channels:,} channels ({joined} of Llama 3 8B's layers), {tokens:,} tokens ({backends.describe()})"
    raw = {"joined": joined, "components": len(coder.classes), "rate": rate, "prefill": prefill, "whole": whole}
    yield Figure(
        f"transform decode: {shape}", f"{rate['decode']:.0f} GB/s of fp16", f">= {DECODED:.0f} on an H200",
        f"the product alone {rate['product']:.0f}, from codes of the host {rate['decode from the host']:.0f} GB/s",
        rate["decode"] >= DECODED, raw,
    )  # fmt: skip
    sooner = prefill / whole["decode from the host"]
    yield Figure(
        f"transform decode of all {LAYERS} layers, from codes of the host: {shape}",
        f"{whole['decode from the host'] * 1e3:.1f} ms, {sooner:.0f} times sooner than prefill", f">= {SOONER:.0f} times",
        f"prefill {prefill * 1e3:.0f} ms", sooner >= SOONER, raw,
    )  # fmt: skip
    share = whole["encode"] / prefill
    yield Figure(
        f"transform encode of all {LAYERS} layers: {shape}", f"{whole['encode'] * 1e3:.1f} ms, {share:.1%} of prefill",
        f"<= {OF_PREFILL:.0%}", f"prefill {prefill * 1e3:.0f} ms; {rate['encode']:.0f} GB/s of fp16",
        share <= OF_PREFILL, raw,
    )  # fmt: skip


FIGURES = {"transform-gpu": rows}
