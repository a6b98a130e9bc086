"""Prompts with pictures for the state machines: lists of ints in which a picture's tokens tell what it is.

Equal lists are equal prompts, and states are made of them; `PicturedCache` makes of each what a caller has: placeholders, and
media beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from prefixcache import Media, PrefixCache, media_digest
from prefixcache.tiers.prompt import Prompt

PAD = 9
FIRST = 10_000  # ints from here on are tokens of pictures
LONGEST = 1000


class Picture(NamedTuple):
    name: int
    length: int
    whole: bool

    def tokens(self) -> list[int]:
        first = FIRST + ((self.name * LONGEST + self.length) * 2 + self.whole) * LONGEST
        return [*range(first, first + self.length)]


def media_of(tokens: Sequence[int]) -> list[Media]:
    """The pictures of a list; the last one may go on beyond it."""
    media: list[Media] = []
    at = 0
    while at < len(tokens):
        if tokens[at] < FIRST:
            at += 1
            continue
        rest, place = divmod(tokens[at] - FIRST, LONGEST)
        rest, whole = divmod(rest, 2)
        name, length = divmod(rest, LONGEST)
        shown = list(tokens[at : at + length])
        assert not place, "a picture without its beginning"
        assert shown == Picture(name, length, bool(whole)).tokens()[: len(shown)], "a picture without its end"
        media.append(Media(at, length, media_digest("image", bytes([name, whole])), whole=bool(whole)))
        at += length
    return media


def may_end(tokens: Sequence[int], place: int) -> bool:
    return not any(medium.whole and medium.start < place < medium.end for medium in media_of(tokens))


def picture_end(tokens: Sequence[int], place: int) -> int:
    """Where the picture ends that the place is inside of, if any."""
    return next((medium.end for medium in media_of(tokens) if medium.start < place < medium.end), place)


def cut(tokens: Sequence[int], count: int) -> list[int]:
    """The first tokens, at most so many, and of no picture a part."""
    inside = [medium.start for medium in media_of(tokens) if medium.start < count < medium.end]
    return list(tokens[: inside[0] if inside else count])


class PicturedCache(PrefixCache):
    """Takes such lists in the place of tokens. Its prompts remember them as `spelled`."""

    def prompt(self, tokens: Any, **options: Any) -> Any:
        media = media_of(tokens)
        given = [PAD if token >= FIRST else token for token in tokens]
        beyond = max(media[-1].end - len(given), 0) if media else 0
        prompt = super().prompt([*given, *[PAD] * beyond], media=media, **options)
        prompt = prompt.first(len(given)) if beyond else prompt
        prompt.spelled = tokens  # type: ignore[attr-defined]
        return prompt

    def fetch(self, tokens: Any, **options: Any) -> tuple[list[Any] | None, Any]:
        prompt = tokens if isinstance(tokens, Prompt) else self.prompt(tokens, model=options.pop("model"))
        prompt_cache, rest = super().fetch(prompt, **options)
        depth = len(prompt) - len(rest)
        assert list(rest) == list(prompt.given)[depth:]
        assert may_end(prompt.spelled, depth)
        return prompt_cache, prompt.spelled[depth:]
