"""Prompts with pictures: another picture is another prompt, and no boundary lies inside of one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from prefixcache import Media, PrefixCache, TurboQuant, media_digest
from prefixcache.keys import as_tokens
from prefixcache.media import with_pseudo_ids
from tests.models import states

PAD = 9
CAT, DOG = (media_digest("image", name) for name in (b"cat", b"dog"))


def pictured(*parts: int | bytes, length: int = 200, **options) -> tuple[list[int], list[Media]]:
    """Tokens and media: an int is so many tokens of text, bytes are a digest."""
    tokens: list[int] = []
    media = []
    for part in parts:
        if isinstance(part, bytes):
            media.append(Media(len(tokens), length, part, **options))
            tokens += [PAD] * length
        else:
            tokens += [*range(100, 100 + part)]
    return tokens, media


@pytest.fixture(params=["raw", "turboquant:4"])
def cache(request) -> Iterator[PrefixCache]:
    with PrefixCache(ram="20MB", codec=request.param, memory_reserve=0) as opened:
        yield opened
        opened.check_integrity()


def put(cache: PrefixCache, tokens: list[int], media: list[Media], seen: int | None = None) -> int:
    """Store a state made of what the tokens stand for, of the first `seen`."""
    return cache.store(cache.prompt(tokens, model="m", media=media), states.uneven(keyed(tokens, media)[:seen])).tokens


def keyed(tokens: list[int], media: list[Media]) -> list[int]:
    return with_pseudo_ids(as_tokens(tokens), media).tolist()


def depth(cache: PrefixCache, tokens: list[int], media: list[Media], **options) -> int:
    prompt = cache.prompt(tokens, model="m", media=media, **options)
    rest = cache.fetch(prompt)[1]
    assert list(rest) == tokens[len(tokens) - len(rest) :]
    return len(tokens) - len(rest)


def test_another_picture_in_the_same_text_is_another_prompt(cache: PrefixCache) -> None:
    tokens, media = pictured(300, CAT, 100)
    assert put(cache, tokens, media) == 600
    assert depth(cache, tokens, media) == 599
    assert depth(cache, *pictured(300, DOG, 100)) == 300
    assert depth(cache, tokens, []) == 300


def test_of_two_pictures_that_trade_places_neither_is_hit(cache: PrefixCache) -> None:
    put(cache, *pictured(50, CAT, DOG, 100))
    assert depth(cache, *pictured(50, DOG, CAT, 100)) == 50
    assert depth(cache, *pictured(50, CAT, CAT, 100)) == 250


@pytest.mark.parametrize("stored_at_its_end", [True, False])
def test_with_whole_blocks_a_hit_ends_with_a_picture_where_a_store_did(cache: PrefixCache, stored_at_its_end) -> None:
    """There the rows are as they were computed, also once the block is coded."""
    tokens, media = pictured(150, CAT, 300)
    if stored_at_its_end:
        put(cache, tokens, media, 350)
    put(cache, tokens, media)
    other = [*tokens[:353], 1, 2, 3]
    prompt = cache.prompt(other, model="m", media=media, whole_blocks=True)
    layers, rest = cache.fetch(prompt)
    is_lossy = isinstance(cache.codec, TurboQuant)
    assert len(rest) == 356 - ((350 if stored_at_its_end else 0) if is_lossy else 353)
    if stored_at_its_end:
        own = states.held(states.uneven(keyed(other, media)))
        for given, computed in zip(states.held(layers), own, strict=True):
            for part, rows in given.items():
                assert [token for token in rows if token >= 256 and rows[token] != computed[part][token]] == []
    assert depth(cache, other, media) == 353
    assert depth(cache, *pictured(150, DOG, 7)) == 150


@pytest.mark.parametrize("seen", [150, 151, 256, 349, 350])
@pytest.mark.parametrize("whole", [True, False])
def test_rows_inside_of_a_whole_picture_are_never_stored(cache: PrefixCache, seen: int, whole: bool) -> None:
    tokens, media = pictured(150, CAT, 50, whole=whole)
    wanted = 150 if whole and seen < 350 else seen
    assert put(cache, tokens, media, seen) == wanted
    assert depth(cache, tokens, media) == wanted
    prompt = cache.prompt(tokens, model="m", media=media)
    assert cache.match(prompt.first(seen)).ram == wanted


def test_a_prompt_that_ends_with_a_picture_leaves_all_of_it_to_compute(cache: PrefixCache) -> None:
    tokens, media = pictured(150, CAT)
    put(cache, tokens, media)
    assert depth(cache, tokens, media) == 150
    assert cache.parting(cache.prompt(tokens, model="m", media=media), 150).reason == "whole_medium"


def test_first_and_continued_keep_the_callers_tokens_and_the_media(cache: PrefixCache) -> None:
    tokens, media = pictured(150, CAT, 50)
    prompt = cache.prompt(tokens, model="m", media=media)
    longer = prompt.continued([1, 2])
    assert longer.given.tolist() == [*tokens, 1, 2]
    assert longer.media == prompt.media == tuple(media)
    assert prompt.first(150).media == ()
    cut = prompt.first(151)
    assert (cut.given.tolist(), cut.media) == (tokens[:151], tuple(media))
    with pytest.raises(ValueError, match="151 tokens end inside a medium of tokens 150 to"):
        cut.continued([1])


def test_positions_follow_from_the_media_before(cache: PrefixCache) -> None:
    tokens, media = pictured(10, CAT, 20, DOG, 30, positions=15)
    prompt = cache.prompt(tokens, model="m", media=media)
    assert [prompt.rope_delta(at) for at in (0, 10, 209, 210, 229, 430, 460)] == [0, 0, 0, -185, -185, -370, -370]


def test_a_placeholder_without_a_medium_is_refused_where_the_model_s_are_known(cache: PrefixCache) -> None:
    cache.set_placeholders({PAD}, model="m")
    tokens, media = pictured(10, CAT, 20)
    cache.prompt(tokens, model="m", media=media)
    cache.prompt(tokens, model="another")
    with pytest.raises(ValueError, match="token 10 is 9, a placeholder of this model, and in no medium"):
        cache.match(tokens, model="m")
    with pytest.raises(ValueError, match=r"media\[0\], tokens 9 to 210: only 200 of them"):
        cache.prompt(tokens, model="m", media=[Media(9, 201, CAT)])
