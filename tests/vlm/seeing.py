"""Prompts with pictures, computed by a tiny model as a server would: what is stored is fetched, what is behind it is embedded
and computed in chunks, and each chunk is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx_vlm
import numpy as np
from mlx_vlm.models.cache import ArraysCache, make_prompt_cache
from PIL import Image

from prefixcache import Media, PrefixCache, media_digest
from prefixcache.media import chunks, rope_delta
from prefixcache.servers.causality import media_are_whole
from prefixcache.tiers.prompt import Prompt
from tests.vlm import folders

KINDS = ("image", "video", "audio")  # mlx-vlm numbers them from 1 on
PLACEHOLDERS = [folders.IDS[f"<|{kind}_pad|>"] for kind in KINDS]
ARRAYS = {  # what an encoder is given
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
    "audio": ("input_features", "input_features_mask"),
}


class Inputs(NamedTuple):
    """A prompt: its tokens, its media, and of each of them what the encoder is given. Prompts can be added."""

    tokens: list[int] = []
    media: tuple[Media, ...] = ()
    arrays: tuple[dict[str, mx.array], ...] = ()

    def all_of(self, name: str, start: int = 0) -> mx.array | None:
        """Return this array of all media from a place on, or None where none has it."""
        behind = zip(self.media, self.arrays, strict=True)
        arrays = [given[name] for medium, given in behind if medium.start >= start and name in given]
        return mx.concatenate(arrays) if arrays else None

    def __add__(self, more: Any) -> Inputs:
        moved = (replace(medium, start=medium.start + len(self.tokens)) for medium in more.media)
        return Inputs(self.tokens + more.tokens, (*self.media, *moved), self.arrays + more.arrays)


class Answer(NamedTuple):
    """What a model said: how many tokens were hit, the logits of the first token, and the greedy ones."""

    hit: int
    logits: np.ndarray
    tokens: list[int]


class SeeingModel:
    """A tiny model of a family, whose pictures are told from each other."""

    def __init__(self, family: str, folder: Path):
        self.family = family
        self.model, self.processor = mlx_vlm.load(str(folders.save(family, folder)))
        self.new_layers = partial(make_prompt_cache, self.model.language_model)
        self.whole = media_are_whole(self.model, PLACEHOLDERS[0], self.new_layers)
        self.is_recurrent = any(isinstance(layer, ArraysCache) for layer in self.new_layers())

    def text(self, text: str) -> Inputs:
        return Inputs(self.processor.tokenizer(text, add_special_tokens=False).input_ids)

    def picture(self, seed: int, width: int = 448, height: int = 448) -> Inputs:
        """Return the tokens of a picture of noise, those around its placeholders included."""
        noise = np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)
        placed = folders.OF_GEMMA[self.family][0] if self.family in folders.OF_GEMMA else folders.IMAGE
        return self._medium("image", placed, images=[Image.fromarray(noise)])

    def video(self, seed: int, frames: int = 8) -> Inputs:
        noise = np.random.default_rng(seed).integers(0, 255, (frames, 3, 112, 168), np.uint8)
        return self._medium("video", folders.IMAGE.replace("image", "video"), videos=[noise])

    def sound(self, seed: int, seconds: float = 2.0) -> Inputs:
        noise = np.random.default_rng(seed).standard_normal(int(16000 * seconds)).astype(np.float32)
        return self._medium("audio", "<|audio_pad|>", audio=[noise])

    def _medium(self, kind: str, placed: str, **given: Any) -> Inputs:
        prepared = self.processor(text=[placed], add_special_tokens=False, **given)
        tokens, placeholder = np.array(prepared["input_ids"])[0].tolist(), PLACEHOLDERS[KINDS.index(kind)]
        arrays = {name: mx.array(prepared[name]) for name in ARRAYS[kind] if name in prepared}
        digest = media_digest(kind, [np.array(array) for array in arrays.values()])
        grids = [np.array(array)[0] for name, array in arrays.items() if name.endswith("grid_thw")]
        positions = max(int(grids[0][0]), *(grids[0][1:] // 2).tolist()) if grids else None
        span = tokens.index(placeholder), tokens.count(placeholder)
        return Inputs(tokens, (Media(*span, digest, positions, self.whole),), (arrays,))

    def answer(self, inputs: Inputs, cache: PrefixCache, prompt: Prompt, more: int = 12) -> Answer:
        """Answer a prompt of this cache greedily, and store it with its answer. `inputs` has its media; where the prompt has
        none, keys see placeholders alone.
        """
        layers, rest = cache.fetch(prompt)
        layers, end = layers or self.new_layers(), len(inputs.tokens) - 1
        depth = end + 1 - len(rest)
        given = self._embedded(inputs, depth)
        for first, last in self._chunks(inputs.media, depth, end):
            self._computed(layers, given, first - depth, last - depth)
            at_edge = last in (end, *self.edges(inputs.media))
            cache.store(prompt.first(last), layers, write_back_from=first, snapshot=at_edge)
        logits = self._computed(layers, given, end - depth, end - depth + 1)
        tokens, delta = [int(logits.argmax())], mx.array([[rope_delta(inputs.media, end + 1)]])
        while len(tokens) < more:
            step = self.model.language_model(mx.array([tokens[-1:]]), cache=layers, rope_deltas=delta)
            tokens.append(int(step.logits[0, -1].argmax()))
        cache.store(prompt.continued(tokens[:-1]), layers, write_back_from=end)
        return Answer(depth, logits, tokens)

    @staticmethod
    def edges(media: Sequence[Media]) -> tuple[int, ...]:
        """Return where prompts may part, and a recurrent model's state is kept: before the first picture, behind the last."""
        return (media[0].start, media[-1].end) if media else ()

    def _chunks(self, media: Sequence[Media], first: int, last: int) -> list[tuple[int, int]]:
        edges = (place for place in self.edges(media) if first < place < last)
        runs = pairwise([first, *edges, last])
        return list(chain.from_iterable(chunks(*run, step=256, media=media) for run in runs))

    def _embedded(self, inputs: Inputs, depth: int) -> dict[str, Any]:
        """Return what the language model is given of the tokens behind a hit. The encoder sees no picture that was hit."""
        language_model, ids = self.model.language_model, mx.array([inputs.tokens])
        begun = next((medium.start for medium in inputs.media if medium.start < depth < medium.end), depth)
        arrays = {name: inputs.all_of(name, begun) for names in ARRAYS.values() for name in names}
        rest, pixels = ids[:, begun:], arrays.pop("pixel_values")
        of_media = {name: array for name, array in arrays.items() if array is not None}
        given = self.model.get_input_embeddings(rest, pixels, mask=mx.ones_like(rest), **of_media).to_dict()
        given = {name: value for name, value in given.items() if value is not None} | {"ids": rest}
        given["mm_token_type_ids"] = sum(number * (rest == token) for number, token in enumerate(PLACEHOLDERS, 1))
        given.pop("attention_mask_4d", None)
        hit = depth - begun  # of the medium inside which the hit ends
        if "deepstack_visual_embeds" in given:
            given["deepstack_visual_embeds"] = [array[hit:] for array in given["deepstack_visual_embeds"]]
        for name in ("ids", "inputs_embeds", "mm_token_type_ids", "visual_pos_masks", "per_layer_inputs"):
            if name in given:
                given[name] = given[name][:, hit:]
        if hasattr(language_model, "get_rope_index"):
            grids = inputs.all_of("image_grid_thw"), inputs.all_of("video_grid_thw")
            positions, given["rope_deltas"] = language_model.get_rope_index(ids, *grids, mx.ones_like(ids))
            given["position_ids"] = positions[..., depth:]
        return given

    def _computed(self, layers: list[Any], given: dict[str, Any], first: int, last: int) -> np.ndarray:
        """Compute tokens of what was embedded; return the logits behind the last one."""
        part = {"rope_deltas": given["rope_deltas"]} if "rope_deltas" in given else {}
        for name in ("inputs_embeds", "mm_token_type_ids", "visual_pos_masks", "per_layer_inputs"):
            if name in given:
                part[name] = given[name][:, first:last]
        if "position_ids" in given:
            part["position_ids"] = given["position_ids"][..., first:last]
        if "deepstack_visual_embeds" in given:
            before, count = (int(given["visual_pos_masks"][:, a:b].sum()) for a, b in ((0, first), (first, last)))
            part["deepstack_visual_embeds"] = [a[before : before + count] for a in given["deepstack_visual_embeds"]]
        out = self.model.language_model(given["ids"][:, first:last], cache=layers, **part)
        return np.array(out.logits[0, -1].astype(mx.float32))
