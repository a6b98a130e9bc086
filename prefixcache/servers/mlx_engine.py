"""LM Studio's mlx-engine on a PrefixCache: what its two model kits ask of their prompt caches, as one would offer it there.

Written against github.com/lmstudio-ai/mlx-engine at commit 08f0c0758a804168e258c4cfb80891a8fc9eccb1, of which nothing is
imported. In `BatchedVisionModelKit.__init__` these stand where a `VlmPromptCacheStore` and a coordinator are made,

    self._prompt_cache_store = VisionPromptCache(cache, model_path, build_prefix_cache_chunks)
    self._prompt_cache_coordinator = self._prompt_cache_store

and in `BatchedModelKit.__init__`, in the place of `LRUPromptCache()`:

    self._prompt_cache = text_prompt_cache(cache, model_path)

`cache` is the process's PrefixCache, which its owner closes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from prefixcache.cache import PrefixCache
from prefixcache.identity import folder_of, mlx_vlm_identity, model_identity, version_of
from prefixcache.media import Media, media_digest
from prefixcache.servers.causality import check_family
from prefixcache.servers.mlx_lm.prompt_cache import TieredPromptCache
from prefixcache.servers.read_or_compute import ReadOrCompute, quietly
from prefixcache.tiers.prompt import Prompt

LONGEST_WAIT = 30.0  # seconds that one lookup waits for the SSD
MOST_GOING = 64  # prompts that may be computed at once
CHUNK = 256  # tokens; mlx-engine's prefill ends where so many times n are computed


def text_prompt_cache(cache: PrefixCache, model_path: str | Path) -> TieredPromptCache:
    """Return what `BatchedModelKit` takes for its `LRUPromptCache`: every key of it means this model."""
    name = model_identity(model_path)
    return TieredPromptCache(cache, identify=lambda key: name, longest_wait=LONGEST_WAIT)


class RestoredPromptCache(NamedTuple):
    """What `restore` gives: layer caches of so many leading tokens of the prompt, the caller's own."""

    cached_prefix_len: int
    prompt_cache: list[Any]
    rope_deltas: Any | None = None  # None: positions follow from the prompt


class VisionPromptCache:
    """The calls that `BatchedVisionModelKit` makes to its `VlmPromptCacheCoordinator` and to its `VlmPromptCacheStore`.

    Nothing here raises on the way of a request: what can't be kept is logged, what can't be read is a miss. `restore` is
    called by mlx-engine's thread for I/O, the rest by the thread that generates.
    """

    def __init__(
        self, cache: PrefixCache, model_path: str | Path, chunks_of: Callable[[list[int], Sequence[Any]], list[Any]]
    ):
        """`chunks_of`: mlx-engine's `build_prefix_cache_chunks`, which names the beginnings of a prompt. Raises NotCausal for
        a family whose prompts can't be hit, and what `model_identity` raises.
        """
        check_family(str(json.loads((folder_of(model_path) / "config.json").read_text()).get("model_type")))
        self._cache = cache
        self._model = f"{mlx_vlm_identity(model_path)}|mlx-engine"
        # Its processor makes pixels of a picture's bytes: other code for that makes others of them.
        self._processor = f"mlx-vlm {version_of('mlx-vlm')}, transformers {version_of('transformers')}"
        self._chunks_of = chunks_of
        self._promotions = ReadOrCompute(cache, LONGEST_WAIT)
        self._going: dict[str, Prompt] = {}  # those that are computed, by the names of their last chunks

    # -- VlmPromptCacheCoordinator ------------------------------------------------------------------------------------

    def restore(self, *, prompt_input_ids: list[int], image_spans: Sequence[Any]) -> RestoredPromptCache | None:
        """Return what is kept of this prompt, all but its last token at most, evaluated for any thread; None on a miss."""
        restored = None
        with quietly("a lookup"):
            prompt = self._prompt(prompt_input_ids, image_spans)
            self._remember(prompt, self._chunks_of(prompt_input_ids, image_spans))
            self._promotions.wait(prompt)
            prompt_cache, rest = self._cache.fetch(prompt)
            self._promotions.began(prompt, len(rest))
            if prompt_cache is not None:
                mx.eval([layer.state for layer in prompt_cache])
                restored = RestoredPromptCache(len(prompt) - len(rest), prompt_cache)
        return restored

    def save_prompt_cache_snapshot(
        self,
        prompt_cache: list[Any],
        prefix_chunks: Sequence[Any],
        start_chunk_idx: int,
        end_chunk_idx: int,
        snapshot_len: int,
    ) -> None:
        """Keep what a prefill has computed: of the prompt, as far as its chunks tell that it is this one. Recurrent state is
        kept where the next chunk ends behind the first picture, behind the place where another prompt parts from this one, or
        behind the prompt.
        """
        with quietly("a store"):
            last = next((chunk for chunk in reversed(prefix_chunks) if chunk.key in self._going), None)
            if last is None:
                return
            prompt = self._going[last.key]
            done = min(snapshot_len, last.end)
            parting = self._cache.branch_point(prompt)
            wanted = {parting, len(prompt), *(medium.start for medium in prompt.media[:1])}
            step = (end_chunk_idx - start_chunk_idx) * CHUNK  # the next one ends behind such a place
            snapshot = done == snapshot_len and any(0 <= place - done < step for place in wanted)
            self._cache.store(prompt.first(done), prompt_cache, snapshot=snapshot)

    def store_hot_prompt_cache(
        self,
        *,
        prompt_input_ids: list[int],
        image_spans: Sequence[Any],
        prompt_cache: list[Any],
        rope_deltas: Any | None,
    ) -> None:
        """Keep a prompt with its answer, and its arrays for the next turn. Positions are not kept: they follow."""
        with quietly("a store"):
            prompt = self._prompt(prompt_input_ids, image_spans)
            self._promotions.ended(prompt)
            self._cache.store(prompt, prompt_cache)
            self._cache.keep_hot(prompt, prompt_cache)

    def clear_hot_prompt_cache(self) -> None:
        """Do nothing: arrays are kept within the PrefixCache's budget, and are the first to leave."""

    # -- VlmPromptCacheStore, as the kit and its thread for I/O use it -------------------------------------------------

    def can_store_records(self) -> bool:
        """Return True: prefills are to tell what they have computed."""
        return True

    def budget_update_from_completed_cache(self, prompt_cache: list[Any]) -> None:
        """Return None: the budget is the PrefixCache's."""

    def ensure_max_kv_size(self, max_kv_size: int) -> None:
        """Do nothing, for the same reason."""

    def close(self) -> None:
        """Let go of the prompts; the PrefixCache is its owner's."""
        self._going.clear()

    def _prompt(self, tokens: list[int], spans: Sequence[Any]) -> Prompt:
        media = [
            Media(span.start, span.end - span.start, media_digest("image", span.image_hash.encode(), self._processor))
            for span in spans
        ]
        return self._cache.prompt(tokens, model=self._model, media=media)

    def _remember(self, prompt: Prompt, chunks: list[Any]) -> None:
        if chunks:
            self._going.pop(chunks[-1].key, None)
            self._going[chunks[-1].key] = prompt
        while len(self._going) > MOST_GOING:
            del self._going[next(iter(self._going))]
