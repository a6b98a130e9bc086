"""The prompt cache under `prefixcache serve`, which knows whose prompt mlx-lm's loop looks up or stores, and its salt.

mlx-lm's loop passes tokens and layers to the prompt cache, and nothing of the request: the tokens say whose they are
(`upstream.RequestTokens`). Those of no request are neither looked up nor kept.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from operator import attrgetter
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from prefixcache.cache import PrefixCache
from prefixcache.keys import BLOCK, as_tokens
from prefixcache.layers import CacheError
from prefixcache.layers.form import CacheForm
from prefixcache.servers.keeping import WantedLease
from prefixcache.servers.mlx_lm.answers import Answers
from prefixcache.servers.mlx_lm.prompt_cache import TieredPromptCache, identity_of, images_of
from prefixcache.servers.mlx_lm.upstream import request_of
from prefixcache.store_fetch_remove.store import Stored
from prefixcache.tiers.parting import states_on_the_way
from prefixcache.tiers.prompt import Prompt

log = logging.getLogger("prefixcache")


class TokenizedRequest(NamedTuple):
    """A request's prompt as the cache has it, and what mlx-lm's `_tokenize` gave.

    `prompt`: empty where it can't be kept. `boundaries`: ascending, where its state will be stored. `answers`: the queue of
    its answer. `leases`: those that it asks for; None: nothing of it is stored.
    """

    tokenizer: Any
    tokenized: Any
    prompt: Prompt
    boundaries: tuple[int, ...]
    answers: Answers | None
    leases: Sequence[WantedLease] | None

    @property
    def is_stored(self) -> bool:
        """Tell whether what is computed for it is kept."""
        return self.leases is not None and len(self.prompt) > 0


class TenantSequences(NamedTuple):
    """What `cache` has stored of one model and tenant, as `as_written` asks for it."""

    cache: PrefixCache
    prompt_of: Callable[[Sequence[int]], Prompt]

    def known(self, tokens: Sequence[int]) -> int:
        return self.cache.known(self.prompt_of(tokens))

    def beyond(self, tokens: Sequence[int], start: int, limit: int, most: int) -> list[list[int]]:
        return self.cache.continuations(self.prompt_of(tokens[:start]), start, limit, most)


class ChunkBehind(NamedTuple):
    """The store of a prefill's chunk, which a thread of the cache ends. `state`: whether it stores recurrent state, too."""

    prompt: Prompt
    stored: Future[Stored]
    state: bool

    def has(self, prompt: Prompt) -> bool:
        """Tell whether it stores all that there is of these tokens."""
        what = attrgetter("model", "salt", "token_bytes")
        return self.state and bool(what(self.prompt) == what(prompt))


class TenantPromptCache(TieredPromptCache):
    """The prompt cache of one server. Who waits for a prompt is told when it is stored."""

    def __init__(
        self,
        cache: PrefixCache,
        on_stored: Callable[[Prompt, int, bool], None],
        shared_under_way: Callable[[Prompt], int],
        name_suffix: str,
        exact_prefill: bool,
    ):
        """`on_stored` is told what was stored, how many tokens of it found room, and whether recurrent state was stored.
        `shared_under_way` gives how many tokens a prompt shares with another that is computed now. `name_suffix`: of models'
        names, for a server whose rows are others than the model's. `exact_prefill`: rows stay as they are computed until they
        are fetched.
        """
        super().__init__(cache, identify=lambda model: identity_of(model) + name_suffix + self.rank_part)
        # Hears how many tokens of a prompt a lookup has found.
        self.heard_hit: Callable[[Prompt, int], None] = lambda prompt, depth: None
        self.rank_part = ""  # of the name of the model that is loaded, where ranks share it
        self.exact_prefill = exact_prefill
        self._on_stored, self._shared_under_way = on_stored, shared_under_way
        self._behind: deque[ChunkBehind] = deque()

    def fetch_nearest_cache(  # type: ignore[override]
        self, model: Any, tokens: Sequence[int]
    ) -> tuple[list[Any] | None, Sequence[int]]:
        request: TokenizedRequest | None = request_of(tokens)
        if request is None or not len(request.prompt):
            return None, tokens
        prompt_cache, rest = super().fetch_nearest_cache(model, request.prompt)
        self._note_hit(request, len(request.prompt) - len(rest))
        if not len(rest):  # mlx-lm's batches need a token to go on from
            request.prompt.given_rows.tokens = 0
            return None, tokens
        return prompt_cache, tokens[len(tokens) - len(rest) :]

    def _note_hit(self, request: TokenizedRequest, hit: int) -> None:
        """Tell `heard_hit`; of a request that hit little note where it parted, before it is stored itself."""
        try:
            self.heard_hit(request.prompt, hit)
            if request.answers is not None and hit < self.cache.settings.cold_below * (len(request.prompt) - 1):
                request.answers.part(self.cache.parting(request.prompt, hit))
        except Exception as error:
            self._fail(error)

    def insert_cache(  # type: ignore[override]
        self, model: Any, tokens: Sequence[int], prompt_cache: list[Any], *, cache_type: str = "assistant"
    ) -> None:
        request: TokenizedRequest | None = request_of(tokens)
        if request is None or not request.is_stored:
            return
        stored = self._seen(request, tokens)
        if cache_type != "assistant" and any(chunk.has(stored) for chunk in self._behind):
            self.promotions.ended(stored)
            return  # before the first token, which is not to wait for the store
        self.hear_of_chunks(all_of_them=True)
        is_answered = cache_type == "assistant" and self.cache.settings.hot != 0
        kept = super().insert_cache(
            model,
            stored,
            prompt_cache,
            cache_type=cache_type,
            write_back_from=stored.given_rows.tokens if is_answered else None,
        )
        self._on_stored(stored, kept, True)
        self._lease(request)

    def _lease(self, request: TokenizedRequest) -> None:
        """Keep the beginnings of a stored prompt for as long as it asked."""
        for lease in request.leases or ():
            try:
                self.cache.lease(request.prompt.first(lease.tokens), ttl=lease.seconds)
            except Exception as error:
                self._fail(error)

    def prompt_of(self, ids: np.ndarray, name: str, salt: bytes, form: CacheForm | None) -> Prompt:
        """Return the prompt of a model with this name: answered the same again, unless rows stay as they are computed."""
        whole, media = not self.exact_prefill, images_of(ids)
        return self.cache.prompt(ids, model=name, salt=salt, like=form, whole_blocks=whole, media=media)

    def branch_points(self, request: TokenizedRequest | None, depth: int) -> list[int]:
        """Return where the prefill of a request, whose hit has `depth` tokens, keeps a snapshot or a tail for prompts that
        part from it, ascending. Decisions 0046 and 0056 say why there.
        """
        if request is None or not len(request.prompt) or self.exact_prefill:
            return []
        points = {end for end in request.boundaries if end > depth and end % BLOCK == 0}
        point = max(self.cache.branch_point(request.prompt), self._shared_under_way(request.prompt) // BLOCK * BLOCK)
        is_recurrent = request.prompt.form is not None and request.prompt.form.is_recurrent
        if point - depth >= (BLOCK if is_recurrent else 1):
            points.add(point)
        if is_recurrent:
            points |= set(states_on_the_way(depth, len(request.prompt)))
        return sorted(points)

    def keep_blocks(
        self, request: TokenizedRequest | None, tokens: Sequence[int], layers: list[Any], since: int, state: bool
    ) -> None:
        """Keep whole blocks in the middle of a prefill; from token `since` on their rows become what a hit will give."""
        if request is None or not request.is_stored:
            return
        if self.cache.ranks is not None:
            mx.eval([layer.state for layer in layers])  # a peer that is gone ends the request, not this store alone
        self.hear_of_chunks(all_of_them=False)
        with self._turn:
            try:
                seen = self._seen(request, tokens)
                chunk = seen.labelled("user")
                future = self.cache.store_behind(chunk, layers, write_back_from=since, snapshot=state)
                self._behind.append(ChunkBehind(seen, future, state))
            except CacheError as error:
                log.debug("blocks stay as they are computed: %s", error)
            except Exception as error:
                self._fail(error)

    def hear_of_chunks(self, *, all_of_them: bool) -> None:
        """Tell `on_stored` how the stores of chunks ended: of those that have ended, or wait for all."""
        while self._behind and (all_of_them or self._behind[0].stored.done()):
            chunk = self._behind.popleft()
            try:
                self._on_stored(chunk.prompt, chunk.stored.result().tokens, chunk.state)
            except Exception as error:
                self._fail(error)

    def drop_hit(self, request: TokenizedRequest, depth: int, error: Exception) -> None:
        """Delete a hit of `depth` tokens that the model could not go on from, so that nobody is given it again, and have the
        request's answer say that nothing was hit.
        """
        log.warning(
            "a hit of %d tokens is deleted, since the model fails on it: %s: %s", depth, type(error).__name__, error
        )
        if request.answers is not None:
            request.answers.begin_without_hit()
        with self._turn:
            try:
                self.drop_live()  # it may have been one of those that are kept as they are
                self.cache.drop_hit(request.prompt, depth)
            except Exception as failure:
                self._fail(failure)

    def _seen(self, request: TokenizedRequest, tokens: Sequence[int]) -> Prompt:
        """Return the prompt of the tokens that layers have seen: the beginning of a request's, or all of it and an answer."""
        prompt, ids = request.prompt, as_tokens(tokens)
        common = min(len(ids), len(prompt))
        if not np.array_equal(ids[:common], prompt.given[:common]):
            return self.prompt_of(ids, prompt.model, prompt.salt, prompt.form).in_session(prompt.terms.session)
        return prompt.continued(ids[common:]) if len(ids) > common else prompt.first(common)

    def _wait_for_ssd(self, prompt: Prompt) -> None:
        """Don't wait: requests have waited before their turn."""
