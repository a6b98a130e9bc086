"""The prefill of a request with pictures, which vllm-mlx computes whole: with `reusing` around it, only what a hit leaves is
computed, the encoder runs for the pictures in that alone, and the prompt is stored.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from prefixcache.codecs import Raw
from prefixcache.media import chunks
from prefixcache.servers.causality import NotCausal, media_are_whole
from prefixcache.servers.media_inputs import media_inputs, placeholders_of
from prefixcache.servers.vllm_mlx.prefix_cache import PromptHit, TieredPrefixCache
from prefixcache.tiers.prompt import Prompt

KINDS = ("mm_token_type_ids", "token_type_ids")  # of each token: whether it is text, a picture, a sound

log = logging.getLogger("prefixcache")


def tried(init: Callable[..., None]) -> Callable[..., None]:
    """Return `MLLMBatchGenerator`'s constructor, which then tries the model, where it takes media. One whose prompts can't be
    hit is served without a prefix cache, and that is said.
    """

    @functools.wraps(init)
    def begun(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        placeholders = placeholders_of(getattr(self.model, "config", None))
        if not placeholders.kinds or not isinstance(self.prefix_cache, TieredPrefixCache):
            return
        try:
            media_are_whole(self.model, min(placeholders.kinds), lambda: empty_layers(self))
        except NotCausal as error:
            log.warning("without a prefix cache: %s", error)
            self.prefix_cache = None

    return begun


def empty_layers(generator: Any) -> list[Any]:
    """Return the layer caches of a prompt that nothing has been computed of."""
    layers: list[Any] = make_prompt_cache(generator.language_model, max_kv_size=generator.max_kv_size or None)
    return layers


def reusing(encode: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Return `MLLMBatchGenerator._run_vision_encoding`, which fills `cache` with a request's whole prompt and returns logits,
    of which the caller uses the last token's. What can't be keyed or kept is computed as by vllm-mlx.
    """

    @functools.wraps(encode)
    def reused(self: Any, request: Any, cache: list[Any] | None = None) -> mx.array:
        whole = functools.partial(encode, self, request, cache)
        if cache is None or not isinstance(self.prefix_cache, TieredPrefixCache):
            return whole()
        if 0 < self.max_kv_size < request.input_ids.size:  # in parts, tokens would see more of the window than at once
            return whole()
        try:
            prefill = MediaPrefill(self, request, cache)
        except Exception as error:
            self.prefix_cache.reports.warn_once(
                "a prompt with pictures is not kept: %s: %s", type(error).__name__, error
            )
            return whole()
        return prefill.run(whole)

    return reused


class MediaPrefill:
    """One request's prefill into `cache`, the list of layer caches that the generator goes on with."""

    def __init__(self, generator: Any, request: Any, cache: list[Any]):
        """Raise what `media_inputs` raises for pictures that can't be named."""
        self.generator, self.request, self.cache = generator, request, cache
        self.kept: TieredPrefixCache = generator.prefix_cache
        self.ids: mx.array = request.input_ids.reshape(1, -1)
        tokens = self.ids[0].tolist()
        arrays = {
            "pixel_values": request.pixel_values,
            "image_grid_thw": request.image_grid_thw,
            **request.extra_kwargs,
        }
        self.inputs = media_inputs(tokens, arrays, placeholders_of(generator.model.config))
        self.prompt: Prompt = self.kept.prompt(tokens, self.inputs.media)
        self.recurrent: bool = generator._needs_prefill_checkpoint(cache)
        self.kinds = {name: arrays[name] for name in KINDS if arrays.get(name) is not None}
        self.lossless = isinstance(self.kept.cache.codec, Raw)
        # Pictures that can't be told apart are computed together or not at all: a hit is behind them.
        self.first = 0 if self.inputs.parts is not None else self.inputs.media[-1].end

    def run(self, whole: Callable[[], mx.array]) -> mx.array:
        """Compute the prompt behind a hit, or all of it by `whole`, and store it. Returns logits, of the last token last."""
        in_parts = None
        try:
            in_parts = self._in_parts()
        except Exception as error:
            self.kept.reports.warn_once("a hit is not used: %s: %s", type(error).__name__, error)
            self.cache[:] = empty_layers(self.generator)
        logits, since = (whole(), 0) if in_parts is None else in_parts
        auxiliary = {"last_logits": logits[:, -1, :]} if self.recurrent else {}
        self.kept.keep(self.prompt, self.cache, auxiliary, write_back_from=since)
        self.request.vision_encoded = True
        self.generator._release_preprocessed_inputs(self.request)
        if self.request.rope_deltas is not None:  # which the generator asks the model for
            self.generator.language_model._rope_deltas = self.request.rope_deltas
        return logits

    def _in_parts(self) -> tuple[mx.array, int] | None:
        """Compute what a hit leaves, in the parts between which the state is stored. Returns the last part's logits, and the
        token that it begins with; None where all of the prompt is one part.
        """
        exact = self.kept.fetch_exact_auxiliary(self.prompt)
        hit = self.kept.look_up(self.prompt, self.first)
        if hit.prompt_cache is not None and self.generator._prepare_rotating_caches(hit.prompt_cache):
            self.cache[:] = hit.prompt_cache
            if exact is not None:
                return exact["last_logits"][:, None], hit.depth
        else:
            hit = PromptHit("miss")
        edges = [hit.depth, *self._boundaries(hit.depth), len(self.prompt)]
        if edges == [0, len(self.prompt)]:
            return None
        for start, end in pairwise(edges):
            logits = self._computed(start, end)
            if end < len(self.prompt):
                self.kept.keep(self.prompt.first(end), self.cache, write_back_from=start)
        return logits, start

    def _boundaries(self, depth: int) -> list[int]:
        """Return where the state is stored on the way, behind a hit: with a lossy codec in steps that end with blocks, since
        the next is computed on what is stored; where other prompts part from this one; recurrent state before the first
        picture, and before the tokens that make the model think, which the next turn doesn't have.
        """
        end, places = len(self.prompt), set()
        if not self.lossless:
            step = self.generator.prefill_step_size
            places = {last for _, last in chunks(depth, end - 1, step, self.prompt.media) if last < end - 1}
        places.add(self.kept.cache.branch_point(self.prompt))
        if self.recurrent:
            places |= {end - self.generator._think_suffix_len, *(medium.start for medium in self.prompt.media[:1])}
        return sorted(place for place in places if max(depth, self.first - 1) < place < end)

    def _computed(self, start: int, end: int) -> mx.array:
        model, ids, arrays = self.generator.model, self.ids[:, start:end], self.inputs.between(start, end)
        about = self.generator._language_model_kwargs(self.request, start, end)
        if arrays:
            embedded = model.get_input_embeddings(ids, mask=mx.ones_like(ids), **arrays).to_dict()
            kinds = {name: self.kinds[name][:, start:end] for name in self.kinds}
            about = kinds | {name: value for name, value in embedded.items() if value is not None} | about
        output = model.language_model(ids, cache=self.cache, **about)
        logits: mx.array = getattr(output, "logits", output)
        return logits
