"""What `prefixcache evaluate` reads, and how much: windows of a text, and haystacks, which are texts with numbers hidden in
them.

The default text is `pydoc_data.topics`, the Python reference that every interpreter carries for `help()`. What leaves here
is tokens; no model and no cache is known.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from prefixcache.calibration import texts
from prefixcache.cli.text import Refused

_NAMES = """
Anna Boris Carla David Elena Felix Greta Hugo Irene Jonas Karin Louis Maria Nadia Oscar Paula Robert Sofia Thomas
Victor
"""
NAMES = tuple(_NAMES.split())
DIGITS = 5
NEAR = 400  # characters within which a line's end is looked for
OTHER = "Why?"  # a question that no needle answers: what a prompt shares with it doesn't depend on the question


@dataclass(frozen=True)
class EvaluationSize:
    """How much is measured. Lengths are in tokens."""

    prefix: Annotated[int, typer.Option(min=1, help="Tokens that are stored and restored.")] = 2048
    tokens: Annotated[int, typer.Option(min=1, help="Tokens that are read after them.")] = 256
    windows: Annotated[int, typer.Option(min=1, help="Places in the text where that is done.")] = 8
    needles: Annotated[int, typer.Option(min=0, help="Texts in which numbers are hidden; 0: none.")] = 8
    depths: Annotated[
        int, typer.Option(min=1, max=len(NAMES), help="Numbers hidden in each, from beginning to end.")
    ] = 5
    seed: Annotated[int, typer.Option(min=0, help="Seed of the hidden numbers.")] = 0

    @property
    def haystack_depths(self) -> list[float]:
        """Return where numbers are hidden, from the beginning of a text (0) to its end (1); one alone is in the middle."""
        if not self.needles:
            return []
        return [i / (self.depths - 1) for i in range(self.depths)] if self.depths > 1 else [0.5]


class Excerpt(NamedTuple):
    """A piece of text: the prompt that is cached, the tokens read after it, and the token that follows each of those."""

    prompt: list[int]
    inputs: list[int]
    targets: list[int]


class Excerpts(NamedTuple):
    """A first prompt, which is stored and not measured, and the windows that are measured."""

    first: list[int]
    windows: list[Excerpt]


class NeedleQuestion(NamedTuple):
    """What is computed on a restored cache, and the number that should come."""

    tokens: list[int]
    number: str


class Haystack(NamedTuple):
    """The cached part of a prompt, and one question for each depth."""

    cached: list[int]
    questions: list[NeedleQuestion]


def default_text() -> str:
    """Return the topics in the order of their names."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def read_texts(paths: Sequence[Path]) -> str:
    """Return the files' texts as one. Refused for a file that can't be read or isn't UTF-8."""
    try:
        return "\n\n".join(text.text for text in texts.read_texts(paths))
    except ValueError as error:
        raise Refused(str(error)) from None


def cut(tokenizer: Any, ids: list[int], job: EvaluationSize) -> Excerpts:
    """Return excerpts of a text, evenly spaced; none overlaps another.

    Each begins with what the tokenizer puts at the beginning of a text.
    """
    opening, prefix, tokens, windows = opening_of(tokenizer), job.prefix, job.tokens, job.windows
    length = prefix - len(opening) + tokens + 1
    needed = (windows + 1) * length
    if not ids:
        raise Refused("the tokenizer makes no tokens of the text: see that the model's folder has its tokenizer files")
    if len(ids) < needed:
        raise Refused(
            f"the text has {len(ids):,} tokens, and {windows} windows and the first prompt of {length:,} tokens each "
            f"need {needed:,}: give more text (--text), or smaller --windows, --prefix or --tokens"
        )
    starts = [i * (len(ids) - length) // windows for i in range(windows + 1)]
    pieces = [opening + ids[start : start + length] for start in starts]
    return Excerpts(pieces[0][:prefix], [Excerpt(p[:prefix], p[prefix:-1], p[prefix + 1 :]) for p in pieces[1:]])


def opening_of(tokenizer: Any) -> list[int]:
    """Return the tokens that the tokenizer puts before a text."""
    whole, bare = list(tokenizer.encode("a")), list(tokenizer.encode("a", add_special_tokens=False))
    places = [i for i in range(len(whole) - len(bare) + 1) if whole[i : i + len(bare)] == bare]
    return whole[: places[0]] if bare and places else []


def haystacks(tokenizer: Any, ids: list[int], job: EvaluationSize) -> list[Haystack]:
    """Make prompts of at most `job.prefix` cached tokens: each has text from another place, a number hidden at each depth."""
    chance = random.Random(job.seed)
    prompts = []
    for i in range(job.needles):
        start = (2 * i + 1) * max(len(ids) - job.prefix, 0) // (2 * job.needles)
        names = chance.sample(NAMES, len(job.haystack_depths))
        numbers = {name: str(chance.randrange(10 ** (DIGITS - 1), 10**DIGITS)) for name in names}
        text = ids[start : start + job.prefix]
        prompts.append(_haystack(tokenizer, text, job.prefix, numbers, job.haystack_depths))
    return prompts


def _haystack(
    tokenizer: Any, ids: list[int], prefix: int, numbers: dict[str, str], depths: Sequence[float]
) -> Haystack:
    """Take text away until the cached part has its length: how many tokens a template and the needles take is known only
    when the prompt is made.
    """
    needles = [f"The secret number of {name} is {number}." for name, number in numbers.items()]
    questions = [f"What is the secret number of {name}?" for name in numbers]
    length = len(ids)
    while length > 0:
        text = hide(tokenizer.decode(ids[:length]), needles, depths)
        prompts = [_prompt(tokenizer, text, question) for question in (*questions, OTHER)]
        cached = _shared_length(prompts)
        if cached <= prefix:
            answers = zip(prompts[:-1], numbers.values(), strict=True)
            return Haystack(
                prompts[0][:cached], [NeedleQuestion(prompt[cached:], number) for prompt, number in answers]
            )
        length -= cached - prefix
    raise Refused(
        f"--prefix {prefix}: no room for {len(depths)} numbers in a prompt; give a longer --prefix, fewer --depths, or "
        "--needles 0"
    )


def hide(text: str, needles: Sequence[str], depths: Sequence[float]) -> str:
    """Return the text with each needle on its own line near its depth: at the next line's end, else after the next word."""
    size = len(text)
    for needle, depth in sorted(zip(needles, depths, strict=True), key=lambda pair: -pair[1]):  # the last goes in first
        place = int(depth * size)
        if place == 0:
            text = f"{needle}\n{text}"
            continue
        ends = [text.find(mark, place, place + NEAR) for mark in "\n "]
        place = next((end for end in ends if end >= 0), place)
        text = f"{text[:place]}\n{needle}\n{text[place:].removeprefix(chr(10))}"
    return text


def _prompt(tokenizer: Any, text: str, question: str) -> list[int]:
    if getattr(tokenizer, "has_chat_template", False):
        messages = [{"role": "user", "content": f"{text}\n\n{question}"}]
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=False))
    return list(tokenizer.encode(f"{text}\n\nQuestion: {question}\nAnswer:"))


def _shared_length(prompts: Sequence[list[int]]) -> int:
    """Return how many leading tokens all have. They differ before their ends, or the question would make no difference."""
    return next(i for i, column in enumerate(zip(*prompts, strict=False)) if len(set(column)) > 1)
