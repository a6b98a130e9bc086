"""One rank of a run: requests drawn at random, with evictions, damaged files, slow disks and failures on single ranks."""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from prefixcache import PrefixCache, Raw
from prefixcache.layers.stored import StoredPrompt
from prefixcache.ranks import rank_identity
from prefixcache.ssd import files
from prefixcache.store_fetch_remove.store import StoreCall
from tools.ranks.models import VOCABULARY, Case, build, shard

STEP = 512  # tokens of a prefill in one call
LENGTH = 3  # tokens that are generated
SAME = 2e-3  # logits that differ by less are of the same answer
LONGEST = 900  # tokens of a prompt


class Run(NamedTuple):
    how: str
    family: str
    requests: int
    seed: int
    folder: str
    agree: bool
    gpu: bool


class Faults:
    """What goes wrong on this rank: as many times as was asked for, then no more."""

    def __init__(self) -> None:
        self.left: Counter[str] = Counter()
        self._wrap(StoreCall, "run", "store")
        self._wrap(StoredPrompt, "dequantize", "decode")
        self._wrap(files, "read_image", "read", slow=True)

    def _wrap(self, owner: Any, name: str, what: str, slow: bool = False) -> None:
        inner = getattr(owner, name)

        def outer(*args: Any, **options: Any) -> Any:
            if slow and self._strikes("slow"):
                time.sleep(0.03)
            if self._strikes(what):
                raise OSError(f"{what} fails on purpose")
            return inner(*args, **options)

        setattr(owner, name, outer)

    def _strikes(self, what: str) -> bool:
        if self.left[what] <= 0:
            return False
        self.left[what] -= 1
        return True


class Prompts:
    """Prompts as chats have them: new ones on a few system prompts, and ones that go on, are asked again or branch off."""

    def __init__(self, draw: random.Random):
        self._draw = draw
        self._systems = [self._tokens(draw.randint(120, 560)) for _ in range(3)]
        self._said: list[list[int]] = []

    def _tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(VOCABULARY) for _ in range(count)]

    def next(self) -> list[int]:
        draw = self._draw
        kind = draw.random()
        if not self._said or kind < 0.2:
            return draw.choice(self._systems) + self._tokens(draw.randint(5, 200))
        earlier = draw.choice(self._said[-12:])
        if kind < 0.6:
            more = earlier + self._tokens(draw.randint(3, 120))
            return more if len(more) <= LONGEST else draw.choice(self._systems) + self._tokens(40)
        if kind < 0.8:
            return list(earlier)
        return earlier[: draw.randint(1, len(earlier))] + self._tokens(draw.randint(1, 60))

    def said(self, tokens: list[int]) -> None:
        self._said.append(tokens)


class Answer(NamedTuple):
    """The logits after a prompt, the greedy tokens that follow, and how much better each was than the next best."""

    logits: np.ndarray
    tokens: list[int]
    margins: list[float]


def answer(model: Any, prompt_cache: list[Any], rest: list[int]) -> Answer:
    """What a model answers to a prompt whose tokens before `rest` are in the prompt cache, which then has the answer, too."""
    pieces = [rest[at : at + STEP] for at in range(0, len(rest), STEP)]
    for piece in pieces[:-1]:
        model(mx.array([piece]), cache=prompt_cache)
        mx.eval([layer.state for layer in prompt_cache])
    logits = model(mx.array([pieces[-1]]), cache=prompt_cache)[0, -1]
    first, tokens, margins = np.array(logits), [], []
    for _ in range(LENGTH):
        best = np.sort(np.array(logits))[-2:]
        margins.append(float(best[1] - best[0]))
        tokens.append(int(mx.argmax(logits).item()))
        logits = model(mx.array([tokens[-1:]]), cache=prompt_cache)[0, -1]
        mx.eval(logits, [layer.state for layer in prompt_cache])
    return Answer(first, tokens, margins)


def deviates(hit: Answer, cold: Answer) -> bool:
    """Whether an answer is another one, and not by the last bits only: where the best two are as good, either may win."""
    if np.abs(hit.logits - cold.logits).max() > SAME:
        return True
    at = next((i for i, (a, b) in enumerate(zip(hit.tokens, cold.tokens, strict=True)) if a != b), None)
    return at is not None and cold.margins[at] > SAME


def damage(folder: Path, draw: random.Random) -> int:
    """Flip a bit of some files."""
    found = sorted(
        Path(where, name) for where, _, names in os.walk(folder) for name in names if name.endswith(".safetensors")
    )
    hurt = draw.sample(found, min(len(found), 2)) if found else []
    for path in hurt:
        try:
            with path.open("r+b") as file:
                at = draw.randrange(max(path.stat().st_size, 1))
                file.seek(at)
                byte = file.read(1)[0] ^ (1 << draw.randrange(8))
                file.seek(at)
                file.write(bytes([byte]))
        except (OSError, IndexError):  # deleted meanwhile, or not yet written
            pass
    return len(hurt)


def main(run: Run) -> None:
    logging.basicConfig(level=logging.CRITICAL)
    group = mx.distributed.init()
    rank, size = group.rank(), group.size()
    model = shard(build(Case(run.how, run.family)), run.how, group)
    faults, draw = Faults(), random.Random(run.seed)
    prompts, counts = Prompts(draw), Counter[str]()
    options: dict[str, Any] = {"ram": "3MB", "ssd": "24MB", "ssd_dir": run.folder, "codec": Raw(), "memory_reserve": 0}
    cache = PrefixCache(group=group if run.agree else None, **own(options, run, rank))
    name = rank_identity("tiny@0", model, cache.ranks) if cache.ranks is not None else f"tiny@0|{rank}"
    for number in range(run.requests):
        for what, whom in drawn_faults(draw, size):
            counts[what] += 1
            if whom == rank:
                strike(what, cache, faults, Path(run.folder) / f"rank-{rank}", random.Random(run.seed * 7 + number))
        tokens, promote = prompts.next(), draw.random() < 0.7
        if draw.random() < 0.01:  # all start again
            cache.close()
            cache = PrefixCache(group=group if run.agree else None, **own(options, run, rank))
            counts["restart"] += 1
        found, rest = cache.fetch(tokens, model=name, leave=1, promote=promote)
        depth = len(tokens) - len(rest)
        if found is None:
            found = make_prompt_cache(model)
        got = answer(model, found, tokens[depth:])
        cold = answer(model, make_prompt_cache(model), tokens)
        counts["hit" if depth else "miss"] += 1
        counts["tokens hit"] += depth
        counts["tokens"] += len(tokens)
        if deviates(got, cold):
            counts["deviation"] += 1
            print(f"rank {rank}: request {number}, {len(tokens)} tokens, hit {depth}: another answer", flush=True)
        said = [*tokens, *got.tokens]
        prompts.said(said)
        if draw.random() < 0.9:
            try:
                if draw.random() < 0.3:  # the prompt, as a server stores it that goes on from there
                    held = make_prompt_cache(model)
                    model(mx.array([tokens]), cache=held)
                    mx.eval([layer.state for layer in held])
                    cache.store(tokens, held, model=name)
                cache.store(said, found, model=name)
            except OSError:
                counts["failed store"] += 1
        if number % 50 == 0:
            cache.check_integrity()
            print(json.dumps({"rank": rank, "at": number}), flush=True)
    cache.check_integrity()
    cache.close()
    print(json.dumps({"rank": rank, "done": run.requests, **counts}), flush=True)


def own(options: dict[str, Any], run: Run, rank: int) -> dict[str, Any]:
    """What a rank opens its cache with where nobody makes its directory for it."""
    return options if run.agree else {**options, "ssd_dir": Path(run.folder) / f"rank-{rank}"}


def drawn_faults(draw: random.Random, size: int) -> Iterator[tuple[str, int]]:
    """What happens before a request, and on which rank."""
    for what, often in (
        ("evict", 0.15),
        ("damage", 0.08),
        ("slow", 0.08),
        ("store", 0.04),
        ("decode", 0.04),
        ("read", 0.05),
    ):
        if draw.random() < often:
            yield what, draw.randrange(size)


def strike(what: str, cache: PrefixCache, faults: Faults, folder: Path, draw: random.Random) -> None:
    if what == "evict":
        cache.trim_to(draw.choice([0, 200_000, 1_000_000]), wait=1.0)
    elif what == "damage":
        damage(folder, draw)
    else:
        faults.left[what] += draw.randint(1, 3)


if __name__ == "__main__":
    given = Run(**json.loads(sys.argv[1]))
    if not given.gpu:
        mx.set_default_device(mx.cpu)
    main(given)
    sys.stdout.flush()
    os._exit(0)  # not the interpreter's own end: MLX may abort it
