"""The demo's work: a tiny model, and the passes over the conversations, in processes of their own that `demo` starts.

Standard input gives a `Job`, as JSON. Each line of standard output is one event, as JSON: progress, or a pass's result.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map_with_path
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.llama import Model, ModelArgs

from prefixcache import PrefixCache, Raw, Settings, TurboQuant
from prefixcache.cli.demo_text import SYSTEM, following, opening
from prefixcache.keys import TOKEN_BYTES

ANSWER = 32  # tokens of each answer
PREFILL = 512  # mlx-lm's prefill_step_size: on a CPU it halves the work of attention, so the cold pass is at its best
SHAPE = {
    "hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 256,
}  # fmt: skip
TOKEN_NBYTES = 2 * SHAPE["num_hidden_layers"] * SHAPE["num_key_value_heads"] * SHAPE["head_dim"] * 4  # K and V, float32


@dataclass
class Job:
    """What a process is to do. `cold` has the cold pass's answers by conversation and turn, once there are any."""

    directory: str
    passes: list[str]
    seed: int
    conversations: int
    turns: int
    cold: list[list[list[int]]] = field(default_factory=list)

    @property
    def model(self) -> str:
        return f"demo-llama-{self.seed}"

    def prompt(self, conversation: int, turn: int) -> list[int]:
        """The tokens of all that was said before an answer. The answers before it are the cold pass's."""
        said = opening(conversation)
        for t in range(turn):
            said += bytes(self.cold[conversation][t]) + following(conversation, t + 1)
        return list(said)


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
    answer: list[int]
    gaps: list[float]  # for each token, how far the best was ahead of the second best, in nats


def build(seed: int) -> Model:
    """A Llama of mlx-lm with random float32 weights, scaled so that its answers vary and depend on the whole prompt."""
    mx.random.seed(seed)
    model = Model(ModelArgs(model_type="llama", rms_norm_eps=1e-5, tie_word_embeddings=False, **SHAPE))
    model.update(tree_map_with_path(_scaled, model.parameters()))
    mx.eval(model.parameters())
    return model


def _scaled(name: str, weight: mx.array) -> mx.array:
    return weight * 3 if weight.ndim > 1 and "embed" not in name else weight


def generate(
    model: Model, prompt_cache: list[Any], rest: list[int], given: list[int] | None
) -> Iterator[tuple[int, float]]:
    """The greedy tokens after `rest`, each with its lead on the second best.

    With `given`, the model reads those tokens as its answer, and what is yielded is what it would have said each time.
    """
    forced = iter(given or ())

    def sampler(logprobs: mx.array) -> mx.array:
        return mx.array([next(forced, 0)]) if given is not None else mx.argmax(logprobs, axis=-1)

    for _, logprobs in generate_step(
        mx.array(rest), model, max_tokens=ANSWER, sampler=sampler, prompt_cache=prompt_cache, prefill_step_size=PREFILL
    ):
        row = np.array(logprobs)
        second, best = np.partition(row, -2)[-2:]
        yield int(row.argmax()), float(best - second)


def take(
    job: Job, model: Model, cache: PrefixCache | None, conversation: int, turn: int, *, ssd: bool, forced: bool
) -> Turn:
    """One turn: find what is known of the prompt, generate from the rest, store the prompt with its answer.

    Without a `cache` all of the prompt is computed. With `ssd`, what only the SSD has is brought to RAM first.
    """
    prompt = job.prompt(conversation, turn)
    given = job.cold[conversation][turn] if forced else None
    prompt_cache, rest = None, prompt
    started = time.perf_counter()
    if cache is not None:
        if ssd:
            cache.promote(prompt, model=job.model).result()
        prompt_cache, rest = cache.fetch(prompt, model=job.model)
    if prompt_cache is None:
        prompt_cache = make_prompt_cache(model)
    first, said = 0.0, []
    for token in generate(model, prompt_cache, rest, given):
        first = first or time.perf_counter() - started
        said.append(token)
    answer, gaps = [token for token, _ in said], [gap for _, gap in said]
    started = time.perf_counter()
    kept = cache.store(prompt + (given or answer), prompt_cache, model=job.model).tokens if cache is not None else 0
    store = time.perf_counter() - started
    return Turn(conversation, turn, len(prompt), len(prompt) - len(rest), kept, first, store, answer, gaps)


def cold(job: Job, model: Model) -> Iterator[Turn]:
    """Every turn with the whole prompt computed: the reference."""
    for c in range(job.conversations):
        job.cold.append([])
        for t in range(job.turns):
            turn = take(job, model, None, c, t, ssd=False, forced=False)
            job.cold[c].append(turn.answer)
            yield turn


def ram(job: Job, model: Model, cache: PrefixCache, *, forced: bool = False) -> Iterator[Turn]:
    """Every turn but the last, one conversation after the other. What RAM has is used, and nothing else."""
    for c in range(job.conversations):
        for t in range(job.turns - 1):
            yield take(job, model, cache, c, t, ssd=False, forced=forced)


def ssd(job: Job, model: Model, cache: PrefixCache, directory: Path) -> Iterator[Turn]:
    """The last turn of every conversation. RAM is emptied before each, so that all of it comes from the SSD."""
    for c in range(job.conversations):
        cache.flush()
        cache.trim_to(0)
        forget(directory)
        yield take(job, model, cache, c, job.turns - 1, ssd=True, forced=False)


def forget(directory: Path) -> None:
    """Ask the system to drop what it holds of these files in memory, where it can be asked: else a read is no read."""
    if not hasattr(os, "posix_fadvise"):
        return
    for file in directory.rglob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def unique(sequences: Iterable[list[int]]) -> int:
    """How many tokens are left when every shared beginning is counted once."""
    count, before = 0, b""
    for sequence in sorted(map(bytes, sequences)):
        pairs = enumerate(zip(before, sequence, strict=False))
        shared = next((i for i, (a, b) in pairs if a != b), min(len(before), len(sequence)))
        count, before = count + len(sequence) - shared, sequence
    return count


def budget(job: Job) -> int:
    """RAM for the system prompt and a quarter of what the conversations add to it (two at least), a tenth to spare."""
    shared = len(SYSTEM.encode())
    own = [len(job.prompt(c, job.turns - 1)) + ANSWER - shared for c in range(job.conversations)]
    return (shared + max(sum(own) // 4, 2 * max(own))) * (TOKEN_NBYTES + TOKEN_BYTES) * 11 // 10


def settings(job: Job, directory: Path, codec: Raw | TurboQuant) -> Settings:
    """`spill="wait"`: a store may wait for the disk, so what a pass keeps does not hang on how fast the disk is."""
    return Settings(ram=budget(job), ssd_dir=directory, ssd="1GB", codec=codec, spill="wait")


def files(directory: Path) -> dict[str, int]:
    """The image files of a directory that nobody has open: how many, and their bytes."""
    sizes = [
        file.stat().st_size
        for kind in ("rows", "windows", "snapshots")
        for file in (directory / kind).rglob("*.safetensors")
    ]
    return {"files": len(sizes), "bytes": sum(sizes)}


def run(job: Job, name: str, model: Model) -> Iterator[dict[str, Any]]:
    """A pass: an event for each turn, then one with the result."""
    turns: list[Turn] = []
    result: dict[str, Any] = {}
    if name == "cold":
        for turn in cold(job, model):
            turns.append(turn)
            yield {"pass": name, "done": len(turns)}
        result["answers"] = job.cold
    else:
        directory = Path(job.directory) / ("turboquant" if name == "turboquant" else "raw")
        codec = TurboQuant(key_bits=4, value_bits=4) if name == "turboquant" else Raw()
        with PrefixCache(settings(job, directory, codec)) as cache:
            work = (
                ssd(job, model, cache, directory)
                if name == "ssd"
                else ram(job, model, cache, forced=name == "turboquant")
            )
            for turn in work:
                turns.append(turn)
                yield {"pass": name, "done": len(turns)}
            stats = cache.stats()
        kept = [
            [*job.prompt(t.conversation, t.turn), *job.cold[t.conversation][t.turn]][: t.kept_tokens] for t in turns
        ]
        final = [sequence for turn, sequence in zip(turns, kept, strict=True) if turn.turn == turns[-1].turn]
        result |= {
            "ram_limit": stats.ram_limit, "ram_peak": stats.ram_peak, "ram_images": stats.ram_images,
            "not_kept": stats.counters.unkept_tokens, "dropped": stats.counters.dropped, "ssd": files(directory),
            "unique_tokens": unique(kept), "plain_bytes": unique(kept) * TOKEN_NBYTES,
            "whole_bytes": sum(map(len, final)) * TOKEN_NBYTES,
        }  # fmt: skip
    hits = [turn for turn in turns if turn.reused_tokens]
    result |= {
        "hits": len(hits), "first": median(turn.first for turn in hits or turns),
        "store": median(turn.store for turn in turns),
        "prompt_tokens": sum(turn.prompt_tokens for turn in turns),
        "reused_tokens": sum(turn.reused_tokens for turn in turns), "turns": [turn._asdict() for turn in turns],
    }  # fmt: skip
    yield {"pass": name, "result": result}


def main() -> None:
    """Do the job on standard input. What libraries print goes to standard error, so that events stay readable."""
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    job = Job(**json.load(sys.stdin))
    model = build(job.seed)
    for _ in generate(model, make_prompt_cache(model), [1, 2, 3], None):  # the first call of all compiles things
        pass
    for name in job.passes:
        for event in run(job, name, model):
            print(json.dumps(event), file=events, flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
