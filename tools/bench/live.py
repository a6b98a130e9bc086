"""Live compressed caches: bytes a token, what the process grows by, and how near a model's answers stay, alone and in
batches."""

from __future__ import annotations

import copy
import gc
import resource
import statistics
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from prefixcache import PrefixCache, TurboQuant
from prefixcache.codecs.turboquant.coding import RECENT
from prefixcache.live import TurboQuantKVCache, convert_prompt_cache
from prefixcache.upstream import hook_attention
from tools.bench import report
from tools.bench.report import Figure

LAYERS, HEADS, WIDTH, PREFILL = 32, 8, 128, 2048
TOKENS = {"full": 32768, "quick": 16384, "tiny": 2048}
STEPS = 16
FETCHED = 8  # layers of the prompt that is fetched
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
    for what, said in (("held", "bytes held, slack counted"), ("peak", "growth of the process's peak")):
        ratio = ours[what] / fp16
        yield Figure(
            f"live, 4 bits, {tokens} tokens x {LAYERS} layers: {said}, over fp16's bytes",
            f"{ratio:.4f}",
            f"<= {BYTES_BAR}",
            f"KVCache: {theirs[what] / fp16:.4f}",
            ratio <= BYTES_BAR,
            {"ours": ours, "theirs": theirs},
        )


def grow(tokens: int, coded: bool) -> dict[str, int]:
    """In a process of its own: fill caches, generate a little, and say what they hold and how far the peak went."""
    mx.random.seed(0)
    hook_attention()
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
            if count == 1 and coded:  # MLX's own attention on the CPU takes its time, and holds nothing
                mx.eval(cache.attend_to_codes(queries, keys, values, scale=WIDTH**-0.5, mask=None))
            mx.eval(cache.state)
        mx.clear_cache()
    return caches


class Answers(NamedTuple):
    """Prompts' caches, and for each what the model goes on with: inputs one by one, and the token that follows each."""

    model: Any
    caches: list[list[Any]]
    inputs: list[list[int]]
    tokens: list[list[int]]


def agreement(scale: str) -> Iterator[Figure]:
    """The model's own greedy answers, given token by token: is the next token the same on codes as on fp16?"""
    answers = _answers(*TEXTS[scale])
    for recent, said in ((RECENT, f"the last {RECENT} rows as they are"), (0, "all rows by their codes")):
        alone, together, off = _asked(answers, recent)
        bars = recent > 0
        name, percent = f"live, 4 bits, {said}", f">= {100 * AGREEMENT_BAR:.0f} %"
        count = sum(map(len, answers.inputs))
        yield Figure(
            f"{name}: next token as on fp16, alone",
            f"{100 * alone:.2f} %",
            percent if bars else "",
            f"{count} tokens, tiny-llama",
            alone >= AGREEMENT_BAR if bars else None,
            {"agreement": alone},
        )
        near = together >= AGREEMENT_BAR and abs(together - alone) <= APART_BAR
        yield Figure(
            f"{name}: in a ragged batch of {len(answers.inputs)}",
            f"{100 * together:.2f} %",
            f"{percent}, within {100 * APART_BAR:.1f} points" if bars else "",
            "",
            near if bars else None,
            {"agreement": together},
        )
        yield Figure(
            f"{name}: logits of the batch over those alone",
            f"{off:.1e}",
            f"<= {LOGITS_BAR}" if bars else "",
            "relative, same codes, worst sequence",
            off <= LOGITS_BAR if bars else None,
            {"off": off},
        )


def _answers(count: int, steps: int) -> Answers:
    from prefixcache.cli.evaluate.measuring import load
    from prefixcache.cli.evaluate.texts import default_text
    from prefixcache.cli.evaluate.trials import Reference

    subject = load(str(MODEL))
    ids = list(subject.tokenizer.encode(default_text(), add_special_tokens=False))
    apart = len(ids) // (count + 1)
    # No two prompts have the same length.
    prompts = [[0, *ids[i * apart :][: PROMPT - 101 * i]] for i in range(1, count + 1)]
    reference = Reference(subject.model)
    caches, inputs, tokens = [], [], []
    for prompt in prompts:
        caches.append(reference.fill(prompt[:-1]))
        said = _answer(subject.model, copy.deepcopy(caches[-1]), prompt[-1], steps)
        inputs.append([prompt[-1], *said[:-1]])
        tokens.append(said)
    return Answers(subject.model, caches, inputs, tokens)


def _asked(answers: Answers, recent: int) -> tuple[float, float, float]:
    """The share of tokens that are the same on codes, alone and in one batch; how far the first logits are apart."""
    model, sequences, steps = answers.model, range(len(answers.inputs)), range(len(answers.inputs[0]))
    live = [convert_prompt_cache(own, "turboquant:4", model=model, recent_tokens=recent) for own in answers.caches]
    batch = [layer[0].merge(list(layer)) for layer in zip(*live, strict=True)]
    alone = [[model(mx.array([[token]]), cache=live[b])[0, -1] for token in answers.inputs[b]] for b in sequences]
    mx.eval(alone)
    together = []
    for step in steps:
        together.append(model(mx.array([[own[step]] for own in answers.inputs]), cache=batch)[:, -1])
        mx.eval(together[-1])
    same = [
        (
            mx.argmax(alone[b][i]).item() == answers.tokens[b][i],
            mx.argmax(together[i][b]).item() == answers.tokens[b][i],
        )
        for b in sequences
        for i in steps
    ]
    off = max(_apart(together[0][b], alone[b][0]) for b in sequences)
    return statistics.mean(one for one, _ in same), statistics.mean(both for _, both in same), off


def _apart(got: mx.array, wanted: mx.array) -> float:
    got, wanted = got.astype(mx.float32), wanted.astype(mx.float32)
    return float((mx.linalg.norm(got - wanted) / mx.linalg.norm(wanted)).item())


def _answer(model: Any, cache: list[Any], token: int, steps: int) -> list[int]:
    said = []
    for _ in range(steps):
        token = mx.argmax(model(mx.array([[token]]), cache=cache)[0, -1]).item()
        said.append(token)
    return said


def fetch(scale: str) -> Iterator[Figure]:
    """A hit that stays codes, beside one that is decoded: of the same prompt, in turns."""
    tokens = TOKENS[scale] // (1 if scale != "tiny" else 4)
    shape = (1, HEADS, tokens, WIDTH)
    caches = [KVCache() for _ in range(FETCHED)]
    for own in caches:
        own.update_and_fetch(*(mx.random.normal(shape).astype(mx.bfloat16) for _ in range(2)))
    prompt = list(range(tokens))
    with PrefixCache(codec=TurboQuant(), ram="4GB", ssd_dir=None, ssd=0) as cache:
        cache.store(prompt, caches, model="m")

        def compressed(_: int) -> float:
            return report.seconds(lambda: cache.lookup(prompt, model="m", leave=1).live(1))

        def plain(_: int) -> float:
            return report.seconds(lambda: cache.fetch(prompt, model="m"))

        compressed(0), plain(0)
        ours, decoded = report.in_turns(5 if scale != "tiny" else 1, compressed, plain)
    yield Figure(
        f"fetch of {tokens} tokens x {FETCHED} layers x {HEADS} heads of {WIDTH}, compressed",
        f"{statistics.median(ours):.3f} s",
        "",
        f"decoded {statistics.median(decoded):.3f} s, {report.median_ratio(decoded, ours):.1f} x",
        None,
        {"compressed": ours, "decoded": decoded},
    )


FIGURES = {"live-memory": memory, "live-agreement": agreement, "live-fetch": fetch}
