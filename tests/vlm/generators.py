"""mlx-vlm's thread that generates, in this process: with a PrefixCache, and as mlx-vlm has it, whose answers are right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from mlx_vlm.server import generation
from PIL import Image

from prefixcache import PrefixCache
from prefixcache.servers.mlx_vlm import upstream
from prefixcache.servers.mlx_vlm.serve import prompts_of
from prefixcache.servers.salts import Salts
from prefixcache.servers.web_access import WebAccess
from tests.vlm import folders

SIZES = ((280, 224), (252, 252), (140, 308), (56, 56))  # of pictures, by number


@cache
def picture(number: int) -> Image.Image:
    """One of some pictures of noise, of several sizes."""
    width, height = SIZES[number % len(SIZES)]
    return Image.fromarray(np.random.default_rng(number).integers(0, 255, (height, width, 3), np.uint8))


class Video(NamedTuple):
    """A video of so many frames of noise; those of the same seed begin alike."""

    seed: int
    frames: int = 6

    def pixels(self) -> np.ndarray:
        frames = [
            np.random.default_rng([self.seed, frame]).integers(0, 255, (3, 56, 84)) for frame in range(self.frames)
        ]
        return np.stack(frames).astype(np.uint8)


class Sound(NamedTuple):
    """A second of noise, or less."""

    seed: int
    seconds: float = 0.5

    def samples(self) -> np.ndarray:
        return np.random.default_rng(self.seed).standard_normal(int(16000 * self.seconds)).astype(np.float32)


Part = str | int | Video | Sound  # a text, a picture by its number, a video, a sound


class Question(NamedTuple):
    """A request's parts."""

    parts: tuple[Part, ...]

    def text(self, family: str) -> str:
        marks = {
            int: folders.OF_GEMMA[family][0] if family in folders.OF_GEMMA else folders.IMAGE,
            Video: "<|video_pad|>" if family in folders.OF_GEMMA else folders.IMAGE.replace("image", "video"),
            Sound: "<|audio_pad|>",
        }
        placed = "".join(part if isinstance(part, str) else marks[type(part)] for part in self.parts)
        return f"<|im_start|>user\n{placed}<|im_end|>\n<|im_start|>assistant\n"

    @property
    def media(self) -> dict[str, list[Any] | None]:
        return {
            "images": [picture(part) for part in self.parts if isinstance(part, int)] or None,
            "videos": [part.pixels() for part in self.parts if isinstance(part, Video)] or None,
            "audio": [part.samples() for part in self.parts if isinstance(part, Sound)] or None,
        }


class Answer(NamedTuple):
    """The tokens of an answer, and how many of the prompt's were hit."""

    tokens: list[int]
    hit: int


def begin(generator: Any, question: Question, most: int = 8, **options: Any) -> Iterator[Any]:
    """Have a question answered; give its tokens as they come."""
    args = generation.GenerationArguments(max_tokens=most, temperature=0, **options)
    text = question.text(generator.config.model_type)
    return generator.generate(text, **question.media, args=args)[1]


def end(tokens: Iterator[Any]) -> Answer:
    answer = [*tokens]
    return Answer([token.token for token in answer], answer[-1].cached_tokens)


def ask(generator: Any, question: Question, **options: Any) -> Answer:
    return end(begin(generator, question, **options))


@contextmanager
def generating(folder: Path, prefix_cache: PrefixCache | None = None, **options: Any) -> Iterator[Any]:
    if prefix_cache is None:
        generator = generation.ResponseGenerator(str(folder), **options)
        generator.wait_until_ready()
        yield generator
        generator.stop_and_join()
        return
    manager = upstream.Manager(prefix_cache, partial(prompts_of, prefix_cache))
    with upstream.serving_with(manager, upstream.Rules(Salts(), WebAccess(), lambda: b"")):
        generator = upstream.VlmGenerator(str(folder), apc_manager=manager, **options)
        try:
            generator.wait_until_ready()
            yield generator
        finally:
            generator.stop_and_join()


def at_once(generator: Any, questions: Sequence[Question], **options: Any) -> list[Answer]:
    with ThreadPoolExecutor(len(questions)) as clients:
        begun = [*clients.map(lambda question: begin(generator, question, **options), questions)]
    return [end(tokens) for tokens in begun]
