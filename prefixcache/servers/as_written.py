"""Answers in a chat's history as the model wrote them: a history that says the same gets the very tokens that are stored.

A template writes an answer its own way: with another line break before a call, `True` for `true`, or what a tokenizer makes
of the same text. Where a prompt parts from what is stored within an answer, and a stored answer in that place says the same,
its tokens take the place of the template's. The graph of blocks is the memory: nothing else is kept, it belongs to one model
and tenant, and it survives a restart (decision 0047). Nothing here knows MLX.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple, Protocol

MOST = 16  # stored answers that are compared with one of a prompt
HEAD = 32  # tokens that the opening of a turn may have
LONGER = 256  # tokens that a stored answer may have beyond twice those of the prompt's


class StoredSequences(Protocol):
    """What is stored of one model and tenant."""

    def known(self, tokens: Sequence[int]) -> int:
        """Return how many leading tokens a stored sequence begins with."""

    def beyond(self, tokens: Sequence[int], start: int, limit: int, most: int) -> Iterable[list[int]]:
        """Return how stored sequences go on that begin with the first `start` tokens: up to `limit` tokens of each."""


class AnswerReader(Protocol):
    """How a model's answers are read. `ends`: the tokens that end one. `thought`: the text that begins a thought, or ""."""

    ends: frozenset[int]
    thought: str

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, with all marks in it."""

    def meaning(self, text: str) -> Any:
        """Return what a client is told by an answer of this text: equal for answers that say the same."""


class Rewriting(NamedTuple):
    """An answer that was written anew: it began at token `begin`, and ended before `end`, now before `new_end`."""

    begin: int
    end: int
    new_end: int

    def moved(self, place: int) -> int:
        """Return where a place between tokens is now; one within the answer is at its beginning."""
        return place + self.new_end - self.end if place >= self.end else min(place, self.begin)


class AsWritten(NamedTuple):
    """A prompt's tokens, and what was written anew in them, in this order."""

    tokens: list[int]
    rewritings: list[Rewriting]


def as_written(tokens: Sequence[int], stored: StoredSequences, reader: AnswerReader) -> AsWritten:
    """Return a chat's tokens with the answers in it as they are stored, as far as they say the same."""
    written, rewritings = array("q", tokens), list[Rewriting]()
    opening = _opening(written, reader)
    while opening and (known := stored.known(written)) < len(written):
        begin = _after_end(written, known, reader)
        end = next((place for place in range(known, len(written)) if written[place] in reader.ends), None)
        if end is None or (rewritings and begin <= rewritings[-1].begin):
            break
        answer = _stored_answer(written, begin, end, opening, stored, reader)
        if answer is None:
            break
        written = written[:begin] + array("q", answer) + written[end:]
        rewritings.append(Rewriting(begin, end, begin + len(answer)))
    return AsWritten(written.tolist(), rewritings)


def _opening(tokens: Sequence[int], reader: AnswerReader) -> str:
    """Return the text with which turns of the model begin, as the end of a prompt has it; "" where that can't be told."""
    begin = _after_end(tokens, len(tokens), reader)
    text = reader.text(tokens[begin:]) if begin else ""
    return (text.partition(reader.thought)[0] if reader.thought else text).rstrip()


def _after_end(tokens: Sequence[int], before: int, reader: AnswerReader) -> int:
    """Return the place behind the last end of a turn before this place; 0 where there is none."""
    return next((place + 1 for place in range(before - 1, -1, -1) if tokens[place] in reader.ends), 0)


def _stored_answer(
    tokens: Sequence[int], begin: int, end: int, opening: str, stored: StoredSequences, reader: AnswerReader
) -> list[int] | None:
    """Return the stored turn that says what the prompt's turn says in other tokens, or None."""
    if not reader.text(tokens[begin : min(end, begin + HEAD)]).startswith(opening):
        return None  # it is no turn of the model
    turn = list(tokens[begin:end])
    sequences = stored.beyond(tokens, begin, 2 * len(turn) + LONGER, MOST)
    answers = [list(takewhile(lambda token: token not in reader.ends, sequence)) for sequence in sequences]
    if turn in answers:
        return None
    meaning = reader.meaning(reader.text(turn).removeprefix(opening))
    for answer in answers:
        text = reader.text(answer)
        if text.startswith(opening) and reader.meaning(text.removeprefix(opening)) == meaning:
            return answer
    return None
