"""Pictures, sound and video in a prompt: where they stand among its tokens, what they are, the ids that keys see there, and
where boundaries may be.

A prompt's tokens have the same placeholders for every picture. `tiers.prompt.Prompt` replaces them, in what keys are made of,
by ids that follow from the medium's digest; what the model is given stays the caller's. Decision 0049 says why.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np

from prefixcache.keys import BLOCK, PSEUDO_IDS, TOKEN_BYTES, canonical

DIGEST_BYTES = 32
_MOST = 1 << 48  # tokens or positions; below it nothing overflows


@dataclass(frozen=True)
class Media:
    """One picture, sound or group of video frames: the `length` placeholder tokens of a prompt from `start` on, and the
    `digest` (32 bytes, see `media_digest`) of what the encoder is given for them.

    `positions`: how many RoPE positions it takes (M-RoPE); None: as many as tokens. `whole`: its tokens attend to each other,
    so nothing is stored or hit up to a place inside it; with False, where each attends to those before it alone, that may be.

    Raises TypeError or ValueError for what these can't be.
    """

    start: int
    length: int
    digest: bytes
    positions: int | None = None
    whole: bool = True

    def __post_init__(self) -> None:
        for name, least in (("start", 0), ("length", 1), ("positions", 0)):
            if name != "positions" or self.positions is not None:
                object.__setattr__(self, name, _count(getattr(self, name), name, least))
        if not isinstance(self.digest, (bytes, bytearray)) or len(self.digest) != DIGEST_BYTES:
            has = f"of {len(self.digest)} bytes" if isinstance(self.digest, (bytes, bytearray)) else repr(self.digest)
            raise ValueError(f"Media: digest {has}: give the {DIGEST_BYTES} bytes that media_digest returns")
        object.__setattr__(self, "digest", bytes(self.digest))
        if not isinstance(self.whole, bool):
            raise TypeError(f"Media: whole={self.whole!r}: give True or False")

    @property
    def end(self) -> int:
        """Return the first token behind it."""
        return self.start + self.length

    def pseudo_ids(self) -> np.ndarray:
        """Return what stands for its placeholders in keys: SHAKE-256 of all that it is, 62 bits a token. The place in the
        prompt is not among it: keys are chained over what comes before.
        """
        shake = hashlib.shake_256(
            b"prefixcache.media" + self.digest + canonical([self.length, self.positions]).encode()
        )
        return np.frombuffer(shake.digest(self.length * TOKEN_BYTES), "<i8") & (PSEUDO_IDS - 1) | PSEUDO_IDS


def media_digest(kind: str, data: Any, settings: str = "") -> bytes:
    """Return the digest of a medium: SHA-256 over its kind ("image"), what its encoder is given, and settings.

    `data`: a NumPy array (or what `np.asarray` makes one of), bytes, or a sequence of these, such as pixels and their grid;
    arrays count with shape and dtype. Where it is a file's bytes, `settings` must name the processor, its version and all
    else that decides what the encoder makes of them.

    Raises TypeError for data that is none of these, or an array of objects.
    """
    parts = data if isinstance(data, (list, tuple)) else [data]
    digest = hashlib.sha256(canonical(["prefixcache.media", kind, settings, len(parts)]).encode())
    for part in parts:
        about: list[Any]
        if isinstance(part, (bytes, bytearray, memoryview)):
            content, about = bytes(part), ["bytes"]
        elif hasattr(part, "dtype") and hasattr(part, "shape"):
            array = _contiguous(part)
            if array.dtype.hasobject:
                raise TypeError(f"media_digest: an array of dtype {array.dtype}: give numbers")
            content, about = array.tobytes(), [array.dtype.str, list(np.shape(part))]
        else:
            raise TypeError(
                f"media_digest: data of type {type(part).__name__}: give an array, bytes, or a list of these"
            )
        digest.update(canonical([len(content), *about]).encode())
        digest.update(content)
    return digest.digest()


def _contiguous(part: Any) -> np.ndarray:
    try:
        return np.ascontiguousarray(part)
    except ValueError as error:  # MLX's bfloat16
        raise TypeError(f"media_digest: an array of dtype {part.dtype}: give it as float32 ({error})") from None


def as_media(media: Iterable[Media], tokens: int) -> tuple[Media, ...]:
    """Return the media of a prompt of so many tokens. Raise TypeError for what is no Media, ValueError where they overlap,
    are not in order, or are not in the prompt.
    """
    if isinstance(media, Media):
        raise TypeError("media of type Media: give a list of them")
    spans, end = tuple(media), 0
    for number, medium in enumerate(spans):
        if not isinstance(medium, Media):
            raise TypeError(f"media[{number}] of type {type(medium).__name__}: give prefixcache.Media")
        if medium.start < end:
            raise ValueError(
                f"media[{number}] begins at token {medium.start}, before the end of media[{number - 1}] at {end}: give them "
                "in the prompt's order, none inside another"
            )
        end = medium.end
        if end > tokens:
            raise ValueError(
                f"media[{number}], tokens {medium.start} to {end}, goes beyond the prompt's {tokens} tokens"
            )
    return spans


def check_placeholders(ids: np.ndarray, media: Sequence[Media], placeholders: np.ndarray) -> None:
    """Raise ValueError unless the tokens of the media are the prompt's placeholders, all of them."""
    is_placeholder = np.isin(ids, placeholders)
    for number, medium in enumerate(media):
        count = int(is_placeholder[medium.start : medium.end].sum())
        if count < medium.length:
            raise ValueError(
                f"media[{number}], tokens {medium.start} to {medium.end}: only {count} of them are placeholders of this "
                "model; give start and length of its placeholders"
            )
        is_placeholder[medium.start : medium.end] = False
    if is_placeholder.any():
        at = int(is_placeholder.argmax())
        raise ValueError(
            f"token {at} is {int(ids[at])}, a placeholder of this model, and in no medium: give media= what stands there, "
            "since all pictures have the same placeholder"
        )


def with_pseudo_ids(ids: np.ndarray, media: Sequence[Media]) -> np.ndarray:
    """Return the tokens that keys are made of."""
    keyed = ids.copy()
    for medium in media:
        keyed[medium.start : medium.end] = medium.pseudo_ids()
    return keyed


def chunks(first: int, last: int, step: int = 2048, media: Sequence[Media] = ()) -> Iterator[tuple[int, int]]:
    """Yield the chunks of a prefill: pairs (first, last), `last` not included, of at most `step` tokens.

    Each ends where a block of 256 tokens does, if it can: then `PrefixCache.store(write_back_from=first)` after each leaves
    whole blocks in the prompt cache as a fetch gives them. The last one ends at `last`. With `step=256` a block is always
    computed on the same rows, wherever a hit ended. None ends inside a whole medium of `media`: one that is longer than
    `step` is a chunk by itself, and where `last` is inside one, the last chunk ends before it. One ends with the last medium:
    what is stored there serves who asks something else about it. Raises ValueError for a step below 1.
    """
    if step < 1:
        raise ValueError(f"chunks: step={step}: give a number of tokens, 1 or more")
    last_medium = last_end(media, last)
    while first < last:
        limit = min(first + step, last)
        end = limit // BLOCK * BLOCK
        end = end if end > first else limit
        end = outside_media(media, last_medium if first < last_medium < end else end)
        if end <= first:
            end = next(medium.end for medium in media if medium.end > first)
            if end > last:
                return
        yield first, end
        first = end


def outside_media(media: Sequence[Media], place: int) -> int:
    """Return the last place at or before this one that is not inside of a whole medium."""
    number = bisect_left(media, place, key=lambda medium: medium.start) - 1
    if number >= 0 and media[number].whole and place < media[number].end:
        return media[number].start
    return place


def last_end(media: Sequence[Media], place: int) -> int:
    """Return the end of the last medium that ends at or before a place, 0 where there is none."""
    number = bisect_right(media, place, key=lambda medium: medium.end)
    return media[number - 1].end if number else 0


def rope_delta(media: Sequence[Media], depth: int) -> int:
    """Return what to add to a token's place to have its RoPE position, behind all media that end at or before `depth`."""
    ended = media[: bisect_right(media, depth, key=lambda medium: medium.end)]
    return sum(medium.positions - medium.length for medium in ended if medium.positions is not None)


def _count(value: Any, name: str, least: int) -> int:
    if isinstance(value, (bool, np.bool_)) or not hasattr(value, "__index__"):
        raise TypeError(f"Media: {name}={value!r}: give an int")
    number = index(value)
    if not least <= number < _MOST:
        named = number if number.bit_length() < 256 else f"a number of {number.bit_length()} bits"
        raise ValueError(f"Media: {name}={named}: give an int of at least {least}, below 2**48")
    return number
