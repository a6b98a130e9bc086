"""The prompt cache under `prefixcache serve`: whose prompt mlx-lm's loop looks up or stores, and under which salt.

mlx-lm's loop passes tokens and layers to the prompt cache, and nothing of the request. Between a request's `_tokenize` and
its entry in a batch, or as long as it is served by itself, `TenantPromptCache.request` says which it is; what a batch gives
out says it itself (`RequestCache`). Without a request nothing is looked up or kept.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from prefixcache.cache import PrefixCache
from prefixcache.keys import as_tokens
from prefixcache.layers import CacheError
from prefixcache.servers.admission import Space
from prefixcache.servers.mlx_lm.prompt_cache import TieredPromptCache, identity_of

log = logging.getLogger("prefixcache")


class TokenizedRequest(NamedTuple):
    """A request's tokens as the cache has them, and what mlx-lm's `_tokenize` gave.

    `ids`: (n,) int64, empty for a prompt that can't be kept. `boundaries`: ascending, where its state will be stored.
    """

    tokenizer: Any
    tokenized: Any
    ids: np.ndarray
    space: Space
    boundaries: tuple[int, ...]


class RequestCache(list[Any]):
    """A prompt cache on its way from a batch to `insert_cache`: the layers, and the request whose they are."""

    def __init__(self, layers: list[Any], request: TokenizedRequest | None):
        super().__init__(layers)
        self.request = request


class TenantPromptCache(TieredPromptCache):
    """The prompt cache of one server. Who waits for a prompt is told when it is stored.

    `request`: the one that mlx-lm begins, on the thread that generates. `hit`: the tokens of its prompt that its lookup has
    given the state of.
    """

    def __init__(
        self,
        cache: PrefixCache,
        on_stored: Callable[[np.ndarray, Space, int, bool], None],
        name_suffix: str = "",
        exact_prefill: bool = False,
    ):
        """`on_stored` gets the tokens, how many of them are kept, and whether recurrent state is. `name_suffix`: of models'
        names, for a server whose rows are others than the model's. `exact_prefill`: rows stay as they are computed until they
        are fetched.
        """
        super().__init__(cache, identify=lambda model: identity_of(model) + name_suffix, whole_blocks=not exact_prefill)
        self.exact_prefill = exact_prefill
        self.request: TokenizedRequest | None = None
        self.hit: Sequence[int] = ()
        self._on_stored = on_stored

    def fetch_nearest_cache(  # type: ignore[override]
        self, model: Any, tokens: Sequence[int]
    ) -> tuple[list[Any] | None, Sequence[int]]:
        prompt_cache, rest = None, tokens
        if self.request is not None and len(self.request.ids):
            prompt_cache, rest = super().fetch_nearest_cache(model, tokens, salt=self.request.space[1])
        if not len(rest):  # mlx-lm's batches need a token to go on from
            prompt_cache, rest = None, tokens
        self.hit = tokens[: len(tokens) - len(rest)]
        return prompt_cache, rest

    def insert_cache(  # type: ignore[override]
        self, model: Any, tokens: Sequence[int], prompt_cache: list[Any], *, cache_type: str = "assistant"
    ) -> None:
        request = prompt_cache.request if isinstance(prompt_cache, RequestCache) else self.request
        if request is None or not len(request.ids):
            return
        kept = super().insert_cache(model, tokens, list(prompt_cache), cache_type=cache_type, salt=request.space[1])
        self._on_stored(as_tokens(tokens), request.space, kept, True)

    def keep_blocks(
        self, request: TokenizedRequest | None, tokens: Sequence[int], layers: list[Any], since: int, state: bool
    ) -> None:
        """Keep whole blocks in the middle of a prefill; from token `since` on their rows become what a hit will give."""
        if request is None or not len(request.ids):
            return
        with self._turn:
            try:
                ids, (name, salt) = as_tokens(tokens), request.space
                stored = self.cache.store(
                    ids, layers, model=name, salt=salt, label="user", write_back=True, since=since, state=state
                )
                self._on_stored(ids, request.space, stored.tokens, state)
            except CacheError as error:
                log.debug("blocks stay as they are computed: %s", error)
            except Exception as error:
                self._fail(error)

    def _wait_for_ssd(self, ids: np.ndarray, name: str, salt: bytes) -> None:
        """Requests wait before their turn."""
