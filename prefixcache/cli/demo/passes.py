"""The demo's work: the model, and the passes over the conversations, in processes of their own that `command` starts.

Standard input gives a `DemoRun`, standard output gets the results by name, both as JSON. Progress is on standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from prefixcache import PrefixCache, Raw, Settings, Transform, TurboQuant, model_identity
from prefixcache.cli.calibrate import making
from prefixcache.cli.calibrate.options import Calibration
from prefixcache.cli.demo.text import CALIBRATED, TITLES, Chat, question
from prefixcache.cli.evaluate.measuring import load
from prefixcache.cli.progress import bar
from prefixcache.cli.text import Refused, complain
from prefixcache.codecs import Codec
from prefixcache.keys import TOKEN_BYTES, common_prefix

ANSWER = 32  # tokens that an answer may have
PREFILL = 512  # mlx-lm's prefill_step_size: on a CPU it halves the work of attention, so the cold pass is at its best
PROBE = 256  # tokens with which the size of a token's state is measured: caches grow by this many, so none is spare
CODECS: dict[str, Codec] = {  # the other passes use Raw
    "turboquant4": TurboQuant(),
    "turboquant3": TurboQuant(3, 3),
    CALIBRATED: Transform(4),
}
CALIBRATED_RAM = "64MB"  # a basis may take a quarter of it

Turn = dict[str, Any]


@dataclass
class DemoRun:
    """What a process is to do. `cold` has the cold pass's answers by conversation and turn, as far as there are any."""

    directory: str
    model: str
    passes: list[str]
    conversations: int
    turns: int
    cold: list[list[list[int]]] = field(default_factory=list)


class Model:
    """The model of a run, and the prompts in its tokens."""

    def __init__(self, job: DemoRun) -> None:
        self.job = job
        loaded = load(job.model)
        self.net, tokenizer = loaded.model, loaded.tokenizer
        self.net.set_dtype(mx.float32)  # no token leads by so little that the order of a sum could decide
        self.chat = Chat(tokenizer)
        self.name = model_identity(job.model)  # by which a basis is found
        self._warm_up()

    def _warm_up(self) -> None:
        """Call the model once: that compiles what would else slow a pass, and shows the size of a token's state."""
        probe = self.chat.opening(0)[:PROBE]
        prompt_cache = make_prompt_cache(self.net)
        self.net(mx.array([probe]), cache=prompt_cache)
        state = [leaf for _, leaf in tree_flatten([c.state for c in prompt_cache]) if isinstance(leaf, mx.array)]
        self.token_nbytes = sum(leaf.nbytes for leaf in state) // len(probe)
        list(self.generate(prompt_cache, probe[:1]))

    def prompt(self, conversation: int, turn: int) -> list[int]:
        """Return the tokens of all that was said before an answer. The answers before it are the cold pass's."""
        tokens = self.chat.opening(conversation)
        for t in range(turn):
            answer = self.job.cold[conversation][t]
            tokens += answer + self.chat.following(conversation, t + 1, answer)
        return tokens

    def generate(self, prompt_cache: list[Any], rest: list[int], given: list[int] | None = None) -> Iterator[int]:
        """Yield the greedy tokens after `rest` to the end of the answer.

        With `given` the model reads those tokens as its answer, and what it would have said each time is yielded.
        """
        forced = iter(given or ())

        def sampler(logprobs: mx.array) -> mx.array:
            return mx.array([next(forced, 0)]) if given is not None else mx.argmax(logprobs, axis=-1)

        for _, logprobs in generate_step(
            mx.array(rest),
            self.net,
            max_tokens=ANSWER if given is None else len(given),
            sampler=sampler,
            prompt_cache=prompt_cache,
            prefill_step_size=PREFILL,
        ):
            token = int(mx.argmax(logprobs))
            yield token
            if given is None and token in self.chat.ends:
                return


def take(model: Model, cache: PrefixCache | None, name: str, conversation: int, turn: int) -> Turn:
    """Take one turn of a pass: fetch what is known of the prompt, generate from the rest, store the prompt with its answer.
    In the cold pass there is no cache. Lossy passes are given cold's answers, so that all passes store the same tokens.
    """
    prompt = model.prompt(conversation, turn)
    given = model.job.cold[conversation][turn] if name in CODECS else None
    prompt_cache, rest = None, prompt
    started = time.perf_counter()
    if cache is not None:
        prompt_cache, rest = cache.fetch(prompt, model=model.name, promote=name == "ssd")
    if prompt_cache is None:
        prompt_cache = make_prompt_cache(model.net)
    first, answer = 0.0, []
    for token in model.generate(prompt_cache, rest, given):
        first = first or time.perf_counter() - started
        answer.append(token)
    started = time.perf_counter()
    stored = cache.store(prompt + (given or answer), prompt_cache, model=model.name).tokens if cache is not None else 0
    store = time.perf_counter() - started
    asked, said = question(conversation, turn), model.chat.text(answer)
    return {
        "conversation": conversation,
        "turn": turn,
        "prompt_tokens": len(prompt),
        "reused_tokens": len(prompt) - len(rest),
        "kept_tokens": stored,
        "first": first,  # seconds to the first token
        "store": store,  # seconds of the store
        "question": asked.text,
        "wanted": asked.wanted,
        "said": said,
        "found": bool(asked.wanted) and asked.wanted in said,
        "answer": answer,
    }


def empty(cache: PrefixCache, directory: Path) -> None:
    """Empty RAM, and the system's cache of the files where that can be asked for: else a read would not reach the disk."""
    cache.flush()
    cache.trim_to(0)
    for path in directory.rglob("*.safetensors") if hasattr(os, "posix_fadvise") else ():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def unique_tokens(sequences: Iterable[list[int]]) -> int:
    """Count the tokens of sequences, those of every shared beginning once."""
    count, before = 0, list[int]()
    for sequence in sorted(sequences):
        count, before = count + len(sequence) - common_prefix(before, sequence), sequence
    return count


def budget(model: Model) -> int:
    """Return RAM for the system prompt and a quarter of what the conversations add to it (two at least), a tenth to
    spare.
    """
    system = common_prefix(model.prompt(0, 0), model.prompt(1, 0))
    lengths = [len(model.prompt(c, model.job.turns - 1)) + ANSWER for c in range(model.job.conversations)]
    added = [length - system for length in lengths]
    return (system + max(sum(added) // 4, 2 * max(added))) * (model.token_nbytes + TOKEN_BYTES) * 11 // 10


def run_cold(model: Model) -> dict[str, Any]:
    """Run every turn without a cache. Its answers become `model.job.cold`, from which all passes go on."""
    places = list(product(range(model.job.conversations), range(model.job.turns)))
    model.job.cold = [[] for _ in range(model.job.conversations)]
    turns: list[Turn] = []
    with bar(TITLES["cold"], len(places)) as show:
        for conversation, turn in places:
            turns.append(take(model, None, "cold", conversation, turn))
            model.job.cold[conversation].append(turns[-1]["answer"])
            show(len(turns))
    return {"turns": turns}


def basis_dir(job: DemoRun) -> Path:
    return Path(job.directory) / "bases"


def calibrate(job: DemoRun) -> None:
    with bar("calibrating the model") as show:
        basis_dir(job).mkdir()
        # It takes seconds: a model of use wants the command's own numbers.
        making.make(Calibration(job.model, windows=8, tokens=256, draws=6), basis_dir(job), show)


def run_cached(model: Model, name: str) -> dict[str, Any]:
    """Run a pass through a cache: all turns but the last come from RAM, the last one from SSD.

    `spill="wait"`: a store may wait for the disk, so what a pass keeps does not depend on how fast the disk is.
    """
    last = model.job.turns - 1
    places = list(product(range(model.job.conversations), [last] if name == "ssd" else range(last)))
    directory = Path(model.job.directory) / (name if name in CODECS else "raw")
    codec = CODECS.get(name, Raw())
    ram = budget(model) if name != CALIBRATED else CALIBRATED_RAM
    settings = Settings(
        ram=ram, ssd_dir=directory, ssd="1GB", codec=codec, basis_dir=basis_dir(model.job), spill="wait"
    )
    turns: list[Turn] = []
    with bar(TITLES[name], len(places)) as show, PrefixCache(settings) as cache:
        for conversation, turn in places:
            if name == "ssd":
                empty(cache, directory)
            turns.append(take(model, cache, name, conversation, turn))
            show(len(turns))
        stats = cache.stats()
    cold = model.job.cold
    sequences = [model.prompt(c, t) + cold[c][t] for c, t in places]
    kept = [tokens[: turn["kept_tokens"]] for tokens, turn in zip(sequences, turns, strict=True)]
    whole = [len(tokens) for t, tokens in zip(turns, kept, strict=True) if t["turn"] == places[-1][1]]
    sizes = [file.stat().st_size for file in directory.rglob("*.safetensors")]
    return {
        "turns": turns,
        "ram_limit": stats.ram_limit,
        "ram_peak": stats.ram_peak,
        "ram_images": stats.ram_images,
        "not_kept": stats.counters.unkept_tokens,
        "dropped": stats.counters.dropped,
        "ssd": {"files": len(sizes), "bytes": sum(sizes)},
        "unique_tokens": unique_tokens(kept),
        "plain_bytes": unique_tokens(kept) * model.token_nbytes,
        "whole_bytes": sum(whole) * model.token_nbytes,
    }


def main() -> None:
    """Do the job on standard input. What libraries print goes to standard error, so that the results stay readable."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    model = Model(DemoRun(**json.load(sys.stdin)))
    if CALIBRATED in model.job.passes:
        calibrate(model.job)
    passes = {name: run_cold(model) if name == "cold" else run_cached(model, name) for name in model.job.passes}
    json.dump(passes, results)
    results.close()


if __name__ == "__main__":
    try:
        main()
    except Refused as error:  # the model can't be loaded
        complain(str(error))
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
