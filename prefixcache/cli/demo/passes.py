"""The demo's work: the model, and the passes over the conversations, in processes of their own that `demo` starts.

Standard input gives a `Job`, standard output gets the results by name, both as JSON. Progress is on standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from prefixcache import PrefixCache, Raw, Settings, TurboQuant
from prefixcache.cli.demo.text import TITLES, Chat, holds, question
from prefixcache.cli.evaluate.measuring import load
from prefixcache.cli.progress import bar
from prefixcache.cli.text import Refused, complain
from prefixcache.codecs import Codec
from prefixcache.keys import TOKEN_BYTES

ANSWER = 32  # tokens that an answer may have
PREFILL = 512  # mlx-lm's prefill_step_size: on a CPU it halves the work of attention, so the cold pass is at its best
PROBE = 256  # tokens with which the size of a token's state is measured: caches grow by this many, so none is spare
CODECS: dict[str, Codec] = {"turboquant4": TurboQuant(), "turboquant3": TurboQuant(3, 3)}  # the others' is Raw


@dataclass
class Job:
    """What a process is to do. `cold` has the cold pass's answers by conversation and turn, once there are any."""

    directory: str
    model: str
    passes: list[str]
    conversations: int
    turns: int
    cold: list[list[list[int]]] = field(default_factory=list)


class Workplace:
    """A job with its model at hand, and the prompts in that model's tokens."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.model, tokenizer, _ = load(job.model)
        if mx.default_device() == mx.Device(mx.cpu):  # there float16 is the slower one
            self.model.set_dtype(mx.float32)
        self.chat = Chat(tokenizer)
        self.name = Path(job.model).name
        self._warm_up()

    def _warm_up(self) -> None:
        """A first call, which compiles things that would else slow a pass; it shows the size of a token's state."""
        probe = self.chat.opening(0)[:PROBE]
        prompt_cache = make_prompt_cache(self.model)
        self.model(mx.array([probe]), cache=prompt_cache)
        state = [leaf for _, leaf in tree_flatten([c.state for c in prompt_cache]) if isinstance(leaf, mx.array)]
        self.token_nbytes = sum(leaf.nbytes for leaf in state) // len(probe)
        self.dtype = str(state[0].dtype).removeprefix("mlx.core.")
        for _ in self.generate(prompt_cache, probe[:1], None):
            pass

    def prompt(self, conversation: int, turn: int) -> list[int]:
        """The tokens of all that was said before an answer. The answers before it are the cold pass's."""
        said = self.chat.opening(conversation)
        for t in range(turn):
            answer = self.job.cold[conversation][t]
            said += answer + self.chat.following(conversation, t + 1, answer)
        return said

    def generate(
        self, prompt_cache: list[Any], rest: list[int], given: list[int] | None
    ) -> Iterator[tuple[int, float]]:
        """The greedy tokens after `rest`, each with its lead on the second best, to the end of the answer.

        With `given`, the model reads those tokens as its answer, and what is yielded is what it would have said each
        time.
        """
        forced = iter(given or ())

        def sampler(logprobs: mx.array) -> mx.array:
            return mx.array([next(forced, 0)]) if given is not None else mx.argmax(logprobs, axis=-1)

        for _, logprobs in generate_step(
            mx.array(rest), self.model, max_tokens=ANSWER if given is None else len(given), sampler=sampler,
            prompt_cache=prompt_cache, prefill_step_size=PREFILL,
        ):  # fmt: skip
            row = np.array(logprobs.astype(mx.float32))
            second, best = np.partition(row, -2)[-2:]
            token = int(row.argmax())
            yield token, float(best - second)
            if given is None and token in self.chat.ends:
                return


class Turn(NamedTuple):
    """One answer. `reused_tokens` of its prompt came from the cache; `kept_tokens` of prompt and answer went into it.

    `first` and `store` are seconds: to the first token, and of the store after the last one.
    """

    conversation: int
    turn: int
    prompt_tokens: int
    reused_tokens: int
    kept_tokens: int
    first: float
    store: float
    question: str
    wanted: str  # what a right answer holds, "" where nothing is right or wrong
    said: str
    found: bool
    answer: list[int]
    gaps: list[float]  # for each token, how far the best was ahead of the second best, in nats


def take(at: Workplace, cache: PrefixCache | None, name: str, conversation: int, turn: int) -> Turn:
    """One turn of a pass: find what is known of the prompt, generate from the rest, store the prompt with its answer.

    In the cold pass there is no cache. In the pass from SSD, RAM is empty before; lossy ones are given cold's answers.
    """
    prompt = at.prompt(conversation, turn)
    given = at.job.cold[conversation][turn] if name in CODECS else None
    prompt_cache, rest = None, prompt
    started = time.perf_counter()
    if cache is not None:
        prompt_cache, rest = cache.fetch(prompt, model=at.name, promote=name == "ssd")
    if prompt_cache is None:
        prompt_cache = make_prompt_cache(at.model)
    first, tokens = 0.0, []
    for token in at.generate(prompt_cache, rest, given):
        first = first or time.perf_counter() - started
        tokens.append(token)
    answer, gaps = [token for token, _ in tokens], [gap for _, gap in tokens]
    started = time.perf_counter()
    kept = cache.store(prompt + (given or answer), prompt_cache, model=at.name).tokens if cache is not None else 0
    store = time.perf_counter() - started
    asked, said = question(conversation, turn), at.chat.text(answer)
    return Turn(
        conversation, turn, len(prompt), len(prompt) - len(rest), kept, first, store, asked.text, asked.wanted, said,
        bool(asked.wanted) and holds(said, asked.wanted), answer, gaps,
    )  # fmt: skip


def empty(cache: PrefixCache, directory: Path) -> None:
    """RAM, and what the system holds of the files in memory, where it can be asked: else a read is no read."""
    cache.flush()
    cache.trim_to(0)
    for file in directory.rglob("*.safetensors") if hasattr(os, "posix_fadvise") else ():
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def unique(sequences: Iterable[list[int]]) -> int:
    """How many tokens are left when every shared beginning is counted once."""
    count, before = 0, list[int]()
    for sequence in sorted(sequences):
        count, before = count + len(sequence) - shared(before, sequence), sequence
    return count


def shared(one: list[int], other: list[int]) -> int:
    """How many tokens two sequences have in common at their beginnings."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def budget(at: Workplace) -> int:
    """RAM for the system prompt and a quarter of what the conversations add to it (two at least), a tenth to spare."""
    system = shared(at.prompt(0, 0), at.prompt(1, 0))
    own = [len(at.prompt(c, at.job.turns - 1)) + ANSWER - system for c in range(at.job.conversations)]
    return (system + max(sum(own) // 4, 2 * max(own))) * (at.token_nbytes + TOKEN_BYTES) * 11 // 10


def run(at: Workplace, name: str) -> dict[str, Any]:
    """A pass, and its result. All turns but the last come from RAM, the last one from SSD; the cold pass has all of them.

    `spill="wait"`: a store may wait for the disk, so what a pass keeps does not hang on how fast the disk is.
    """
    last = at.job.turns - 1
    wanted = list(product(range(at.job.conversations), {"cold": range(last + 1), "ssd": [last]}.get(name, range(last))))
    directory = Path(at.job.directory) / (name if name in CODECS else "raw")
    turns = []
    if name == "cold":
        at.job.cold = [[] for _ in range(at.job.conversations)]
    with ExitStack() as stack:
        show, cache = stack.enter_context(bar(TITLES[name])), None
        if name != "cold":
            codec = CODECS.get(name, Raw())
            own = Settings(ram=budget(at), ssd_dir=directory, ssd="1GB", codec=codec, spill="wait")
            cache = stack.enter_context(PrefixCache(own))
        for conversation, turn in wanted:
            if name == "ssd" and cache is not None:
                empty(cache, directory)
            turns.append(take(at, cache, name, conversation, turn))
            if name == "cold":
                at.job.cold[conversation].append(turns[-1].answer)
            if show is not None:
                show(len(turns), len(wanted))
        stats = cache.stats() if cache is not None else None
    hits = [turn for turn in turns if turn.reused_tokens]
    result = {
        "hits": len(hits), "first": median(turn.first for turn in hits or turns),
        "store": median(turn.store for turn in turns),
        "prompt_tokens": sum(turn.prompt_tokens for turn in turns),
        "reused_tokens": sum(turn.reused_tokens for turn in turns),
        "needles": sum(bool(turn.wanted) for turn in turns), "found": sum(turn.found for turn in turns),
        "turns": [turn._asdict() for turn in turns],
    }  # fmt: skip
    if stats is None:
        return {**result, "answers": at.job.cold, "dtype": at.dtype}
    kept = [[*at.prompt(t.conversation, t.turn), *at.job.cold[t.conversation][t.turn]][: t.kept_tokens] for t in turns]
    final = [tokens for turn, tokens in zip(turns, kept, strict=True) if turn.turn == turns[-1].turn]
    sizes = [file.stat().st_size for file in directory.rglob("*.safetensors")]
    return {
        **result, "ram_limit": stats.ram_limit, "ram_peak": stats.ram_peak, "ram_images": stats.ram_images,
        "not_kept": stats.counters.unkept_tokens, "dropped": stats.counters.dropped,
        "ssd": {"files": len(sizes), "bytes": sum(sizes)},
        "unique_tokens": unique(kept), "plain_bytes": unique(kept) * at.token_nbytes,
        "whole_bytes": sum(map(len, final)) * at.token_nbytes,
    }  # fmt: skip


def main() -> None:
    """Do the job on standard input. What libraries print goes to standard error, so that the results stay readable."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    at = Workplace(Job(**json.load(sys.stdin)))
    json.dump({name: run(at, name) for name in at.job.passes}, results)
    results.close()


if __name__ == "__main__":
    try:
        main()
    except Refused as error:  # the model can't be loaded
        complain(str(error))
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
