"""The text that a model reads while it is calibrated, and the windows cut from it.

The default is of many kinds, since a basis that was calibrated on English prose alone is worse on code and on other
languages: the files of `corpus/`, a folder for each kind. All were written for this project, and nothing else is read, so
the default text is the same bytes everywhere (decision 0019). `prefixcache evaluate` measures on none of it. No model is
known here; a tokenizer is a function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import NamedTuple, TypeVar

Part = TypeVar("Part")

CORPUS = Path(__file__).with_name("corpus")

# The kinds, each a folder of CORPUS, and the shares of the windows. A kind not named here counts 1.
WEIGHTS = {"languages": 2, "code": 1, "prose": 1}


class Text(NamedTuple):
    """A text, where it is from, and its kind: windows are shared out over kinds first, then over the texts of a kind."""

    name: str
    text: str
    kind: str = "given"


def default_texts() -> list[Text]:
    """Return the files of the corpus, kind by kind."""
    return [
        Text(path.stem, path.read_text(encoding="utf-8"), kind)
        for kind in WEIGHTS
        for path in sorted((CORPUS / kind).glob("*.txt"))
    ]


def read_texts(paths: Sequence[Path]) -> list[Text]:
    """Return one text for each file. Raises ValueError for a file that can't be read or isn't UTF-8."""
    texts = []
    for path in paths:
        try:
            texts.append(Text(str(path), path.read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            raise ValueError(f"--text {path}: not UTF-8; convert it, or give another text") from None
        except OSError as error:
            raise ValueError(f"--text {path}: can't be read ({error.strerror}); give a text file") from None
    return texts


class Windows(NamedTuple):
    """Tokens: the windows that a model is calibrated on, and those that it must not be."""

    read: list[list[int]]
    held_back: list[list[int]]


def windows(
    texts: Sequence[Text],
    encode: Callable[[str], list[int]],
    count: int,
    length: int,
    opening: Sequence[int] = (),
    held_back: int = 0,
) -> Windows:
    """Cut `count` windows of `length` tokens, each of which begins with the tokens of `opening`, and `held_back` others,
    fewer where the text ends, but one at least. No token of a text is in two.

    `encode` makes a text's tokens and adds none of its own. Kinds take turns by their WEIGHTS, so that the first few
    windows are a mix already; a kind whose text is used up leaves its turns to the others. The windows held back are as
    mixed, and evenly spaced among those of their kind. Raises ValueError where there is too little text.
    """
    size = length - len(opening)
    if count < 1 or size < 1:
        raise ValueError(
            f"{count} windows of {length} tokens, {len(opening)} of which open it: ask for at least one window, and for "
            "longer ones than that"
        )
    tokens: dict[str, list[list[int]]] = {}
    for text in texts:
        tokens.setdefault(text.kind, []).append(encode(text.text))
    pieces = {kind: _pieces(of_kind, size) for kind, of_kind in tokens.items()}
    room = {kind: sum(map(len, of_kind)) for kind, of_kind in pieces.items()}
    least = count + min(held_back, 1)
    if sum(room.values()) < least:
        has = sum(len(ids) for of_kind in tokens.values() for ids in of_kind)
        raise ValueError(
            f"{count} windows of {length:,} tokens{' and one to hold back' * (least > count)} need {least * size:,} tokens "
            f"of text; the text has {has:,}, which makes {sum(room.values())} windows: ask for fewer or shorter windows, "
            "or give more text"
        )
    turns = _turns(room, min(count + held_back, sum(room.values())))
    apart = _spread_over_kinds(turns, len(turns) - count)
    chosen = {kind: iter(_spread(of_kind, turns.count(kind))) for kind, of_kind in pieces.items()}
    cut = [[*opening, *next(chosen[kind])] for kind in turns]
    return Windows([w for i, w in enumerate(cut) if i not in apart], [w for i, w in enumerate(cut) if i in apart])


# -- which windows ----------------------------------------------------------------------------------------------------------


def _pieces(texts: list[list[int]], size: int) -> list[list[list[int]]]:
    """Return each text cut into pieces of `size` tokens; at the end, as one more text, the rest of all, joined and cut."""

    def cut(ids: list[int]) -> list[list[int]]:
        return [ids[i : i + size] for i in range(0, len(ids) - size + 1, size)]

    rest = chain.from_iterable(ids[len(ids) // size * size :] for ids in texts)
    return [cut(ids) for ids in texts] + [cut(list(rest))]


def _turns(room: dict[str, int], count: int) -> list[str]:
    """Return the kinds of `count` windows: the next is always of the kind furthest behind its share that has some left."""
    given = dict.fromkeys(room, 0)
    turns = []
    for _ in range(count):
        open_kinds = [kind for kind in room if given[kind] < room[kind]]
        turns.append(min(open_kinds, key=lambda kind: (given[kind] + 0.5) / WEIGHTS.get(kind, 1)))
        given[turns[-1]] += 1
    return turns


def _spread_over_kinds(turns: list[str], count: int) -> set[int]:
    """Choose `count` turns: as many of each kind as the first `count` have, evenly spaced among all turns of that kind.
    Return their places.
    """
    chosen: set[int] = set()
    for kind in dict.fromkeys(turns[:count]):
        places = [place for place, of_kind in enumerate(turns) if of_kind == kind]
        chosen.update(_evenly(places, turns[:count].count(kind)))
    return chosen


def _spread(texts: list[list[list[int]]], count: int) -> list[list[int]]:
    """Take `count` pieces, equally many of each text that has them, evenly spaced. The first of each text come first."""
    given = [0] * len(texts)
    while sum(given) < count:
        open_texts = [i for i, pieces in enumerate(texts) if given[i] < len(pieces)]
        for i in _evenly(open_texts, min(count - sum(given), len(open_texts))):
            given[i] += 1
    rounds = zip_longest(*(_evenly(pieces, number) for pieces, number in zip(texts, given, strict=True)))
    return [piece for pieces in rounds for piece in pieces if piece is not None]


def _evenly(items: list[Part], count: int) -> list[Part]:
    """Return of each of `count` equal parts the item in the middle."""
    return [items[(2 * i + 1) * len(items) // (2 * count)] for i in range(count)]
