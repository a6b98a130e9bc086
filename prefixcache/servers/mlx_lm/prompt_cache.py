"""mlx-lm's prompt cache on a PrefixCache: `TieredPromptCache` stands where `mlx_lm.server` has its `LRUPromptCache`.

It names models by their identity, promotes from the SSD as long as that is quicker than computing, and never raises into
the thread that generates. `prefixcache serve` uses the subclass in `tenant_cache`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np
from mlx_lm.models.cache import LRUPromptCache

from prefixcache.blocks.budget import Reservation
from prefixcache.cache import PrefixCache
from prefixcache.identity import folder_of, identity_or_nameless, model_identity
from prefixcache.keys import Tokens, as_tokens
from prefixcache.layers import CacheError
from prefixcache.layers.form import CacheForm
from prefixcache.media import Media, media_digest
from prefixcache.ranks import OutOfStep
from prefixcache.servers.read_or_compute import ReadOrCompute
from prefixcache.tiers.prompt import Prompt

log = logging.getLogger("prefixcache")

RESTORED = "restored"  # the type of sequences that came from the SSD after a restart, which doesn't keep types
ROOM = 2048  # tokens that a hit can grow by before its layers do: mlx_lm.server's step of a prefill


Stamp = tuple[tuple[str, int, int], ...]  # path, bytes and time of change of files


class TieredPromptCache:
    """mlx-lm's prompt cache, bounded in bytes, on RAM and SSD: the interface of `LRUPromptCache`.

    What a hit gives is the caller's own, and leaves at least one token to compute. Model keys are mlx_lm.server's (model,
    adapter, draft model), each a folder or a repository's name; blocks belong to the weights found there, not to the name. A
    prompt cache that a PrefixCache can't keep (a class of the server's own) is kept as it is and given as `LRUPromptCache`
    gives it, by the same names and salts, its bytes reserved in the same budget. Nothing here raises on the way of a request:
    what can't be kept is logged, what can't be read is a miss. But ranks of one model that look different prompts up get
    `OutOfStep`.

    Thread-safe: calls take turns.
    """

    CacheEntry, CacheOrder = LRUPromptCache.CacheEntry, LRUPromptCache.CacheOrder  # mlx-lm asks for them

    def __init__(
        self,
        cache: PrefixCache,
        max_size: int | None = None,
        max_bytes: int | None = None,
        *,
        identify: Callable[[Any], str] | None = None,
        like: Callable[[Any], list[Any] | CacheForm | None] | None = None,
        longest_wait: float = 30.0,
    ):
        """`cache`: the caller's, who closes it. `max_size`: sequences in all tiers, beyond which the least recently used are
        deleted; None: as many as the bytes allow. `max_bytes`: of prompt caches in RAM; None: the cache's budget. `identify`:
        the name of a model key's weights (default: `identity_of`). `like`: a prompt cache as the caller makes it for a model
        key, or its `CacheForm`: what was stored in another form is then a miss, see `PrefixCache.prompt`. `longest_wait`:
        seconds that a lookup waits for the SSD at most; it waits as long as that is quicker than computing.
        """
        self.max_size = 1 << 62 if max_size is None else max_size
        self.max_bytes = 1 << 62 if max_bytes is None else max_bytes
        self._live = LRUPromptCache(self.max_size, self.max_bytes)  # objects that are kept as they are
        self.cache = cache
        self.promotions = ReadOrCompute(cache, longest_wait)
        self.failed = 0  # inserts that could not be kept
        self._identify = identify or identity_of
        self._like = like or (lambda model: None)
        self._names: dict[Any, tuple[str, Stamp]] = {}
        self._last_model: Any = None
        self._turn = threading.RLock()
        self._live_room: list[Reservation] = []  # what objects kept as they are take of the budget

    # -- LRUPromptCache's interface -----------------------------------------------------------------------------------

    def fetch_nearest_cache(
        self, model: Any, tokens: Sequence[int] | Prompt, *, salt: bytes = b""
    ) -> tuple[list[Any] | None, Sequence[int]]:
        """Return the deepest prompt cache for these tokens, and the tokens still to be computed; (None, tokens) on a miss. A
        `Prompt` stands for its model, tokens and salt.
        """
        try:
            prompt = self._prompt(model, tokens, salt)
            self._wait_for_ssd(prompt)  # others may insert meanwhile
            with self._turn:
                prompt_cache, rest = self._fetch(prompt)
                if len(self._live):
                    key = prompt.model, prompt.salt
                    live, live_rest = self._live.fetch_nearest_cache(key, list(prompt.given))
                    if live is not None and (prompt_cache is None or len(live_rest) < len(rest)):
                        return live, live_rest
                return prompt_cache, rest
        except OutOfStep:
            raise
        except Exception as error:
            log.warning("a lookup failed, which is a miss: %s: %s", type(error).__name__, error)
            return None, tokens.given if isinstance(tokens, Prompt) else tokens

    def insert_cache(
        self,
        model: Any,
        tokens: Sequence[int] | Prompt,
        prompt_cache: list[Any],
        *,
        cache_type: str = "assistant",
        salt: bytes = b"",
        write_back_from: int | None = None,
    ) -> int:
        """Keep the prompt cache of these tokens. It is read here, and neither changed nor held (but see the class); an
        answer's whose rows are what a hit gives is kept hot, see `PrefixCache.keep_hot`. Returns how many of the tokens a
        PrefixCache can give now. A `Prompt` stands for its model, tokens and salt. `write_back_from`: see
        `PrefixCache.store`.
        """
        kept = 0
        with self._turn:
            try:
                prompt = self._prompt(model, tokens, salt)
                try:
                    if not len(prompt):
                        raise CacheError("no tokens")
                    self.promotions.ended(prompt)
                    labelled = prompt.labelled(cache_type)
                    kept = self.cache.store(labelled, prompt_cache, write_back_from=write_back_from).tokens
                    if cache_type == "assistant":  # the others go on
                        self.cache.keep_hot(labelled, prompt_cache)
                except CacheError as error:
                    self._insert_live(prompt, prompt_cache, cache_type, error)
                self._keep_limits()
            except Exception as error:
                self._fail(error)
        return kept

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Delete the least recently used sequences from every tier; evict bytes from RAM (to the SSD, where there is one)."""
        with self._turn:
            try:
                if n_sequences is not None:
                    self._live.trim_to(n_sequences=n_sequences - self.cache.stats().sequences)  # these go first
                    self.cache.keep(max(n_sequences - len(self._live), 0))
                if n_bytes is not None:
                    self._live.trim_to(n_bytes=n_bytes)
                    self._pay_for_live()
                    self._trim_ram(n_bytes)
                self._pay_for_live()
            except Exception as error:
                self._fail(error)

    def __len__(self) -> int:
        """Sequences that can be had, from RAM or SSD; one that another goes on from is not counted."""
        return len(self._live) + self.cache.stats().sequences

    @property
    def nbytes(self) -> int:
        """Bytes of RAM that hold prompt caches."""
        stats = self.cache.stats()
        return int(self._live.nbytes) + stats.ram_images + stats.ram_hot

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        """By cache type: sequences, and bytes in RAM. What the SSD brought after a restart is of type "restored"."""
        by_type: dict[str, dict[str, int]] = self._live.stats_by_type()
        for label, counted in self.cache.stats().labels.items():
            of_type = by_type.setdefault(label or RESTORED, {"n_sequences": 0, "n_bytes": 0})
            of_type["n_sequences"] += counted.sequences
            of_type["n_bytes"] += counted.ram_bytes
        return by_type

    def drop_live(self) -> None:
        """Let go of the objects that are kept as they are."""
        with self._turn:
            self._live.trim_to(n_sequences=0)
            self._pay_for_live()

    def _trim_ram(self, nbytes: int) -> None:
        """Evict images from RAM until they and the live objects take no more than this."""
        stats = self.cache.stats()
        if stats.ram_images + stats.ram_hot + self._live.nbytes > nbytes:
            beside = stats.ram_nodes + stats.ram_reserved
            self.cache.trim_to(max(nbytes - self._live.nbytes, 0) + beside, wait=0)

    # -- names ----------------------------------------------------------------------------------------------------------

    def name_of(self, model: Any) -> str:
        """Return the name under which a model key's blocks are kept.

        Weights are looked at again when their files have changed and another model was asked for in between: the server
        loads one at a time, so it has loaded them anew. A server that knows better says so by `name_anew`.
        """
        with self._turn:
            known = self._names.get(model)
            if known is None or (model != self._last_model and known[1] != _stamp(model)):
                stamp = _stamp(model)
                known = self._names[model] = self._identify(model), stamp
            self._last_model = model
            return known[0]

    def name_anew(self, model: Any) -> str:
        """Identify the weights of this key, which were just loaded, and return their name."""
        with self._turn:
            self._names.pop(model, None)
            return self.name_of(model)

    # -- the PrefixCache --------------------------------------------------------------------------------------------------

    def _prompt(self, model: Any, tokens: Sequence[int] | Prompt, salt: bytes) -> Prompt:
        if isinstance(tokens, Prompt):
            return tokens
        name, media = self.name_of(model), images_of(tokens)
        return self.cache.prompt(tokens, model=name, salt=salt, like=self._like(model), media=media)

    def _wait_for_ssd(self, prompt: Prompt) -> None:
        self.promotions.wait(prompt)

    def _fetch(self, prompt: Prompt) -> tuple[list[Any] | None, Sequence[int]]:
        # A batch copies what it is given, and room for a long rest after a short hit costs more than the hit.
        prompt_cache, rest = self.cache.fetch(prompt, room=min(len(prompt), ROOM))
        self.promotions.began(prompt, len(rest))
        return prompt_cache, rest

    def _keep_limits(self) -> None:
        if self.max_size < 1 << 62 and len(self) > self.max_size:
            self.trim_to(n_sequences=self.max_size)
        if self.max_bytes < 1 << 62 and self.nbytes > self.max_bytes:
            self.trim_to(n_bytes=self.max_bytes)

    def _fail(self, error: Exception) -> None:
        self.failed += 1
        if self.failed in (1, 10, 100) or self.failed % 1000 == 0:
            log.warning(
                "%d prompt caches could not be kept; this one: %s: %s", self.failed, type(error).__name__, error
            )

    # -- what a PrefixCache can't keep ------------------------------------------------------------------------------------

    def _insert_live(self, prompt: Prompt, prompt_cache: list[Any], cache_type: str, error: CacheError) -> None:
        """Keep the objects as they are, with their bytes reserved; older ones are dropped for them."""
        if self.cache.ranks is not None:  # the others might not have it
            return self._fail(error)
        nbytes = sum(layer.nbytes for layer in prompt_cache)
        while not self._pay_for_live(nbytes):
            if not len(self._live):
                return self._fail(error)
            self._live.trim_to(n_sequences=len(self._live) - 1)
        key = prompt.model, prompt.salt
        self._live.insert_cache(key, list(prompt.given), prompt_cache, cache_type=cache_type)
        self._pay_for_live()

    def _pay_for_live(self, more: int = 0) -> bool:
        """Reserve what the objects take, and `more`. False when the budget has no room."""
        missing = self._live.nbytes + more - sum(reservation.left for reservation in self._live_room)
        if missing > 0:
            reservation = self.cache.reserve(missing)
            if reservation is None:
                return False
            self._live_room.append(reservation)
            return True
        for reservation in reversed(self._live_room):
            missing += reservation.release(max(-missing, 0))
        self._live_room = [reservation for reservation in self._live_room if reservation.left]
        return True


def images_of(tokens: Tokens) -> list[Media]:
    """Return the images of a prompt as mlx-lm looks it up, where all patches of one have a negative id of it. An image that a
    hit has a part of it would take for one that was seen whole.
    """
    ids = as_tokens(tokens)
    edges = np.flatnonzero(np.diff(ids, prepend=0, append=0)) if (ids < 0).any() else ()
    return [
        Media(int(first), int(last - first), media_digest("image", int(ids[first]).to_bytes(8, "little", signed=True)))
        for first, last in pairwise(edges)
        if ids[first] < 0
    ]


def identity_of(model: Any) -> str:
    """Return the identity of the weights behind mlx_lm.server's model key: (model, adapter, draft model), the last two may be
    None or missing.

    A key whose weights can't be found gets a name that is good once: its blocks meet no others.
    """
    path, adapter, draft = _parts(model)

    def identify() -> str:
        name = model_identity(path, adapter)
        return name if draft is None else f"{name}|{model_identity(draft)}"

    return identity_or_nameless(identify)


def _parts(model: Any) -> tuple[Any, Any, Any]:
    return (*model, None, None)[:3] if isinstance(model, tuple) and model else (model, None, None)


def _stamp(model: Any) -> Stamp:
    """Return the files behind a model key, as their names and times tell: of a repository, those of the revision
    that is here now. () where there are none.
    """
    files: list[tuple[str, int, int]] = []
    for part in _parts(model):
        if part is not None:
            with suppress(OSError, ValueError, TypeError):
                about = [(file.path, file.stat()) for file in os.scandir(folder_of(part)) if file.is_file()]
                files += [(path, stat.st_size, stat.st_mtime_ns) for path, stat in about]
    return tuple(sorted(files))
