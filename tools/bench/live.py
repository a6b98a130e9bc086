"""Live compressed caches: bytes a token, what the process grows by, and how near a model's answers stay, alone and in
batches."""

from __future__ import annotations

import copy
import gc
import resource
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if not __package__:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from prefixcache.live import TurboQuantKVCache, convert_prompt_cache, hook
from tools.bench import report
from tools.bench.report import Figure

LAYERS, HEADS, WIDTH, PREFILL = 32, 8, 128, 2048
TOKENS = {"full": 32768, "quick": 16384, "tiny": 2048}
STEPS = 16
BYTES_BAR, AGREEMENT_BAR, APART_BAR, LOGITS_BAR = 0.27, 0.99, 0.002, 1e-3
MODEL = report.ROOT / "tests" / "fixtures" / "tiny-llama"
PROMPT, BATCH = 1500, 8
# Texts, and tokens after each prompt.
TEXTS = {"full": (8, 150), "quick": (8, 60), "tiny": (2, 8)}


def memory(scale: str) -> Iterator[Figure]:
    """Of a cache that is filled as a prefill fills it and then generated on, beside mlx-lm's KVCache."""
    tokens = TOKENS[scale]
    fp16 = LAYERS * HEADS * tokens * WIDTH * 2 * 2
    ours = report.in_child("live", "grow", tokens, True)
    theirs = report.in_child("live", "grow", tokens, False)
    # What both hold beside the rows: the rows being appended, the allocator's own.
    for what, said in (("held", "bytes held, slack counted"), ("peak", "growth of the process's peak")):
        ratio = ours[what] / fp16
        yield Figure(
            f"live, 4 bits, {tokens} tokens x {LAYERS} layers: {said}, over fp16's bytes", f"{ratio:.4f}",
            f"<= {BYTES_BAR}", f"KVCache: {theirs[what] / fp16:.4f} (ours is {ours[what] / theirs[what]:.4f} of it)", ratio <= BYTES_BAR, {"ours": ours, "theirs": theirs},
        )  # fmt: skip


def grow(tokens: int, coded: bool) -> dict[str, int]:
    """In a process of its own: fill caches, generate a little, and say what they hold and how far the peak went."""
    mx.random.seed(0)
    hook.install()
    _fill(PREFILL + STEPS, coded)  # what is loaded and compiled at the first call is nobody's
    mx.clear_cache()
    gc.collect()
    report.trim_heap()
    before = report.rss()
    begun = _peak()
    caches = _fill(tokens, coded)
    # The peak of the process before counts only where it was passed.
    return {"held": sum(cache.nbytes for cache in caches), "peak": max(_peak(), begun) - before}


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _fill(tokens: int, coded: bool) -> list[Any]:
    caches: list[Any] = [TurboQuantKVCache() if coded else KVCache() for _ in range(LAYERS)]
    rows = mx.random.normal((1, HEADS, PREFILL, WIDTH)).astype(mx.float16)
    queries = mx.random.normal((1, 4 * HEADS, 1, WIDTH)).astype(mx.float16)
    prefill = [PREFILL] * ((tokens - STEPS) // PREFILL) + [(tokens - STEPS) % PREFILL]
    for count in [count for count in prefill if count] + [1] * STEPS:
        for cache in caches:
            keys, values = cache.update_and_fetch(rows[:, :, :count], rows[:, :, -count:])
            if count == 1:  # prefill's own attention is not what is measured
                attention = cache.attend_to_codes if coded else mx.fast.scaled_dot_product_attention
                mx.eval(attention(queries, keys, values, scale=WIDTH**-0.5, mask=None))
            mx.eval(cache.state)
        mx.clear_cache()
    return caches


def agreement(scale: str) -> Iterator[Figure]:
    """The model's own greedy answers, given token by token: is the next token the same on codes as on fp16?"""
    from prefixcache.cli.evaluate_text import default_text
    from prefixcache.cli.evaluating import Reference, load

    subject = load(str(MODEL))
    ids = list(subject.tokenizer.encode(default_text(), add_special_tokens=False))
    reference = Reference(subject.model)
    count, steps = TEXTS[scale]
    apart = len(ids) // (count + 1)
    # Ragged: no two prompts of a batch have the same length.
    prompts = [[0, *ids[i * apart :][: PROMPT - 101 * i]] for i in range(1, count + 1)]
    dense = [reference.fill(prompt[:-1]) for prompt in prompts]
    answers = [_answer(subject.model, copy.deepcopy(cache), prompt[-1], steps) for cache, prompt in zip(dense, prompts, strict=True)]
    inputs = [[prompt[-1], *said[:-1]] for prompt, said in zip(prompts, answers, strict=True)]
    for recent in (None, 0):
        chosen = {} if recent is None else {"recent_tokens": recent}
        live = [convert_prompt_cache(cache, "turboquant:4", model=subject.model, **chosen) for cache in dense]
        together = [layer[0].merge(list(layer)) for layer in zip(*live, strict=True)]
        alone = [
            [subject.model(mx.array([[token]]), cache=cache)[0, -1] for token in own]
            for cache, own in zip(live, inputs, strict=True)
        ]
        batched = []
        for step in range(steps):
            logits = subject.model(mx.array([[own[step]] for own in inputs]), cache=together)[:, -1]
            mx.eval(logits)
            batched.append(logits)
        hits = [
            (mx.argmax(alone[b][step]).item() == answers[b][step], mx.argmax(batched[step][b]).item() == answers[b][step])
            for b in range(count) for step in range(steps)
        ]  # fmt: skip
        single, many = (statistics.mean(own[i] for own in hits) for i in range(2))
        off = max(
            (mx.linalg.norm((alone[b][0] - batched[0][b]).astype(mx.float32)) / mx.linalg.norm(alone[b][0].astype(mx.float32))).item()
            for b in range(count)
        )
        which = "the last 64 rows as they are" if recent is None else "all rows by their codes"
        bar = (single >= AGREEMENT_BAR, many >= AGREEMENT_BAR) if recent is None else (None, None)
        yield Figure(
            f"live, 4 bits, {which}: next token as on fp16, alone", f"{100 * single:.2f} %", f">= {100 * AGREEMENT_BAR:.0f} %"
            if recent is None else "", f"{len(hits)} tokens, tiny-llama", bar[0], {"agreement": single},
        )  # fmt: skip
        yield Figure(
            f"live, 4 bits, {which}: in a batch of {count} ragged", f"{100 * many:.2f} %",
            f">= {100 * AGREEMENT_BAR:.0f} %, within {100 * APART_BAR:.1f} points" if recent is None else "", "", bar[1]
            and abs(many - single) <= APART_BAR if recent is None else None, {"agreement": many},
        )  # fmt: skip
        yield Figure(
            f"live, 4 bits, {which}: logits of the batch over those alone, same codes", f"{off:.1e}", f"<= {LOGITS_BAR}",
            "relative, worst sequence", off <= LOGITS_BAR, {"off": off},
        )  # fmt: skip


def _answer(model: Any, cache: list[Any], token: int, steps: int) -> list[int]:
    said = []
    for _ in range(steps):
        token = mx.argmax(model(mx.array([[token]]), cache=cache)[0, -1]).item()
        said.append(token)
    return said


FIGURES = {"live_memory": memory, "live_agreement": agreement}

if __name__ == "__main__":
    sys.exit(report.main({"live": FIGURES}))
