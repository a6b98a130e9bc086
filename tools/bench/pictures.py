"""Prompts with pictures: how deep they are hit, and whether the answer is that of an empty cache. Beside it what keys give
that see placeholders alone, and what the pictures' digests in the salt give. The models are mlx-vlm's, tiny and random.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import prefixcache
from prefixcache import PrefixCache
from tests.vlm import folders
from tests.vlm.seeing import Answer, Inputs, SeeingModel
from tools.bench import report
from tools.bench.report import Beside, Figure

TEXT = Path(prefixcache.__file__).parent / "calibration" / "corpus" / "languages" / "english_dialogue.txt"
CODECS = ("raw", "turboquant:4")
NEAR = 1e-3  # of the logits' deviation: sums in another order


class Scale(NamedTuple):
    """Characters of the text before the first picture, and a picture's pixels a side."""

    text: int
    side: int


SCALES = {"full": Scale(900, 448), "quick": Scale(900, 224), "tiny": Scale(300, 224)}


class Case(NamedTuple):
    """A prompt that is answered first, and one that is asked then: with `next_turn`, what is added to the first answer."""

    name: str
    first: Inputs
    asked: Inputs
    next_turn: bool = False


class Outcome(NamedTuple):
    """The prompt that was asked, and what was said, on what the first one left and on an empty cache."""

    asked: Inputs
    hit: Answer
    cold: Answer

    @property
    def difference(self) -> float:
        """The largest one of the logits."""
        return float(np.abs(self.hit.logits - self.cold.logits).max())

    @property
    def is_right(self) -> bool:
        return self.hit.tokens == self.cold.tokens


def cases(model: SeeingModel, scale: Scale) -> list[Case]:
    """The ways in which one prompt has the pictures of another."""
    system = model.text(TEXT.read_text(encoding="utf-8")[: scale.text])
    one, another, third = (model.picture(seed, scale.side, scale.side) for seed in (1, 2, 3))
    question = model.text("What do you see there, and what is behind it?")
    other_question, then = model.text("Who painted this one?"), model.text("And then there is this one:")
    asked = system + one + question
    return [
        Case("one picture again", asked, asked),
        Case("another picture, same text", asked, system + another + question),
        Case(
            "second of two pictures differs",
            system + one + then + another + question,
            system + one + then + third + question,
        ),
        Case("adjacent pictures swapped", system + one + another + question, system + another + one + question),
        Case("a picture in the second turn", system + question, then + one + other_question, True),
        Case("another question about the same picture", asked, system + one + other_question),
    ]


def told_apart(case: Case, model: SeeingModel, codec: str, terms: Any, cold: Answer | None = None) -> Outcome:
    """Answer both prompts of a case, and the second one on an empty cache unless that answer is given. `terms(inputs)`: the
    keywords of `prompt`.
    """

    def answer(cache: PrefixCache, inputs: Inputs) -> Answer:
        prompt = cache.prompt(inputs.tokens, model=model.family, whole_blocks=True, **terms(inputs))
        return model.answer(inputs, cache, prompt)

    def opened() -> PrefixCache:
        return PrefixCache(ram="200MB", codec=codec, memory_reserve=0)

    with opened() as cache, opened() as empty:
        first, asked = answer(cache, case.first), case.asked
        if case.next_turn:
            asked = case.first + Inputs(first.tokens) + asked
        outcome = Outcome(asked, answer(cache, asked), cold or answer(empty, asked))
        cache.check_integrity()
    return outcome


def with_media(inputs: Inputs) -> dict[str, Any]:
    return {"media": inputs.media}


def salted(inputs: Inputs) -> dict[str, Any]:
    return {"salt": b"".join(medium.digest for medium in inputs.media)}


def plain(inputs: Inputs) -> dict[str, Any]:
    return {}


def expected_hit(case: Case, outcome: Outcome, model: SeeingModel) -> int:
    """Return how deep an exact codec must be hit: as far as the prompts are the same, or as recurrent state was kept."""
    before, after = case.first, outcome.asked
    if case.next_turn:
        before = Inputs(
            after.tokens[: len(after.tokens) - len(case.asked.tokens) - 1]
        )  # the answer's last token is no row yet
    same = _common(before, after, min(len(before.tokens), len(after.tokens) - 1))
    if not model.is_recurrent:
        return same
    return max(
        place for place in (0, *model.edges(before.media), len(before.tokens) - 1, len(before.tokens)) if place <= same
    )


def _common(a: Inputs, b: Inputs, most: int) -> int:
    """Return how many tokens are the same, where a picture's are those of its contents."""
    parted = (place for place, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y)
    pictures = (y.start for x, y in zip(a.media, b.media, strict=False) if x != y)
    return min([most, *parted, *pictures])


def pictures(family: str, scale: str) -> Iterator[Figure]:
    """Each case of one family."""
    with report.scratch() as folder:
        model = SeeingModel(family, folder)
        for case in cases(model, SCALES[scale]):
            yield figure_of(case, model)


def figure_of(case: Case, model: SeeingModel) -> Figure:
    outcomes = {codec: told_apart(case, model, codec, with_media) for codec in CODECS}
    exact = outcomes["raw"]
    others = {
        "plain ids": told_apart(case, model, "raw", plain, exact.cold),
        "digests in the salt": told_apart(case, model, "raw", salted, exact.cold),
    }
    expected = expected_hit(case, exact, model)
    near = exact.difference <= NEAR * float(exact.cold.logits.std())
    return Figure(
        f"{model.family}, {case.name}: tokens hit of {len(exact.asked.tokens)}, difference of logits",
        "; ".join(f"{codec}: {said(outcome)}" for codec, outcome in outcomes.items()),
        f"raw >= {expected}, no other answer",
        "",
        exact.hit.hit >= expected and near and all(outcome.is_right for outcome in outcomes.values()),
        {name: numbers(outcome) for name, outcome in {**outcomes, **others}.items()},
        tuple(Beside(name, said(outcome)) for name, outcome in others.items()),
    )


def said(outcome: Outcome) -> str:
    wrong = "" if outcome.is_right else " (another answer)"
    return f"{outcome.hit.hit}, {outcome.difference:.2g}{wrong}"


def numbers(outcome: Outcome) -> dict[str, Any]:
    return {
        "tokens": len(outcome.asked.tokens),
        "hit": outcome.hit.hit,
        "difference": outcome.difference,
        "deviation": float(outcome.cold.logits.std()),
        "same_answer": outcome.is_right,
    }


FIGURES = {f"pictures-{family}": partial(pictures, family) for family in folders.CONFIGS}
