"""A model's prompts in a PrefixCache, by the interface of vllm-mlx's `MemoryAwarePrefixCache`.

What vllm-mlx's schedulers call is here, and what they read of its private attributes. Who puts it in their place, and which
weights a model has, is `vllm_mlx`'s.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from prefixcache.blocks.budget import Reservation
from prefixcache.cache import PrefixCache
from prefixcache.keys import as_tokens
from prefixcache.layers.form import CacheForm
from prefixcache.media import Media
from prefixcache.servers.read_or_compute import ReadOrCompute
from prefixcache.servers.vllm_mlx.auxiliary import Auxiliary, give, hold
from prefixcache.servers.vllm_mlx.reports import MIB, Reports
from prefixcache.tiers.prompt import Prompt

LEAST = 128  # tokens of a prompt or a hit, where no configuration says otherwise
LONGEST_WAIT = 5.0  # seconds that one lookup waits for the SSD; the requests under way stand still meanwhile
LABEL = "vllm-mlx"


class _Here(threading.local):
    """What the last call on this thread found."""

    kind: str | None = None
    key: tuple[int, ...] | None = None
    whole: bytes | None = None  # the prompt whose auxiliary data was handed out last


class PromptHit(NamedTuple):
    """What a lookup gives: its kind (see `TieredPrefixCache._last_match_type`), and a prompt cache of so many tokens."""

    kind: str
    prompt_cache: list[Any] | None = None
    depth: int = 0


class TieredPrefixCache:
    """A model's prompts in a PrefixCache, by the interface of vllm-mlx 0.6's `MemoryAwarePrefixCache`.

    Of `config` only `min_prefix_tokens` counts: the budget, the codec and the SSD are the PrefixCache's. What a hit gives
    is the caller's own, and leaves at least one token to compute. Nothing here raises on the way of a request: what
    can't be kept is refused, what can't be read is a miss.

    Thread-safe: `_lock` guards the reservations. What the last `fetch` found is kept for each thread.
    """

    def __init__(
        self,
        cache: PrefixCache,
        model_name: str,
        config: Any = None,
        *,
        salt: bytes = b"",
        longest_wait: float = LONGEST_WAIT,
        like: CacheForm | None = None,
    ):
        """`cache`: the caller's, who closes it. `model_name`: the identity of the weights. `config`: as vllm-mlx gives it.
        `salt` separates these prompts from others of the same weights. `longest_wait`: seconds that a lookup waits for the
        SSD at most; it waits as long as reading is quicker than computing. `like`: see `PrefixCache.prompt`.
        """
        self.cache = cache
        self.like = like
        self.model_name = model_name
        self.promotions = ReadOrCompute(cache, longest_wait)
        self._salt = salt
        self._least = getattr(config, "min_prefix_tokens", LEAST)
        self._auxiliary = Auxiliary(cache)
        self._here = _Here()
        self._lock = threading.Lock()
        self._reserved: list[Reservation] = []
        self.reports = Reports(cache)
        if getattr(config, "kv_quantize", False):
            self.reports.warn_once("KV quantisation of vllm-mlx is not used: what is kept is coded by %s", cache.codec)

    # -- finding ------------------------------------------------------------------------------------------------------

    def fetch(self, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        """Return the deepest prompt cache for these tokens, from RAM or from the SSD, and the tokens still to be computed, at
        least one; (None, tokens) on a miss.

        A prompt whose auxiliary data this thread has just been given comes whole, with nothing left to compute, or not at
        all: its caller goes on from the stored logits.
        """
        hit = self.look_up(tokens)
        if hit.prompt_cache is None:
            return None, tokens
        self._here.key = tuple(tokens[: hit.depth])
        return hit.prompt_cache, tokens[hit.depth :]

    def look_up(self, tokens: Sequence[int] | Prompt, least: int = 0) -> PromptHit:
        """Return what `fetch` finds. A hit of fewer than `least` tokens is a miss."""
        here = self._here
        whole, here.whole, here.key = here.whole, None, None
        hit = PromptHit("miss")
        with self.reports.quietly("a lookup"):
            hit = self._find(tokens, whole, max(self._least, least))
        here.kind = hit.kind
        self.reports.looked_up(hit.depth, is_hit=hit.prompt_cache is not None)
        return hit

    def _find(self, tokens: Sequence[int] | Prompt, whole: bytes | None, least: int) -> PromptHit:
        if not len(tokens):
            return PromptHit("miss")
        if len(tokens) < self._least:
            return PromptHit("miss_short_prefix")
        prompt = self.prompt(tokens)
        leave = 0 if whole == prompt.token_bytes else 1
        least = min(least, len(prompt) - 1) if leave else len(prompt)
        self.promotions.wait(prompt, leave)
        depth = self.cache.match(prompt, leave=leave).ram
        if depth < least:
            self.promotions.began(prompt, len(prompt))
            return PromptHit("miss_short_lcp" if leave and depth else "miss")
        prompt_cache, rest = self.cache.fetch(prompt, leave=leave)
        depth = len(prompt) - len(rest)
        self.promotions.began(prompt, len(rest))
        if prompt_cache is None or depth < least:  # it left RAM in between
            return PromptHit("miss")
        return PromptHit("exact" if depth == len(prompt) else "prefix", prompt_cache, depth)

    def prompt(self, tokens: Sequence[int] | Prompt, media: Sequence[Media] = ()) -> Prompt:
        """Return a request's tokens as a `Prompt` of this model. One with media is computed on what is stored, so that its
        hits end with whole blocks.
        """
        if isinstance(tokens, Prompt):
            return tokens
        ids, whole = as_tokens(tokens), bool(media)
        prompt = self.cache.prompt(
            ids, model=self.model_name, salt=self._salt, like=self.like, whole_blocks=whole, media=media
        )
        return prompt.labelled(LABEL)

    def clone_for_replay(self, cache: list[Any]) -> list[Any]:
        """Return it as it is: what `fetch` and `PreparedEntry.cache` give is the caller's own already."""
        return cache

    def fetch_exact_auxiliary(self, tokens: Sequence[int] | Prompt) -> dict[str, Any] | None:
        """Return what was stored beside exactly these tokens, as new arrays; None where their whole state is not at hand."""
        self._here.whole = None
        with self.reports.quietly("a lookup"):
            prompt = self.prompt(tokens)
            kept = self._auxiliary.get(prompt.token_bytes)
            if kept is None:
                return None
            self.promotions.wait(prompt, leave=0)
            if self.cache.match(prompt).ram == len(prompt):
                self._here.whole = prompt.token_bytes
                return kept
        return None

    @property
    def _last_match_type(self) -> str | None:
        """Of this thread's last `fetch`: "prefix", "exact", "miss", "miss_short_prefix" (the prompt is shorter than
        `min_prefix_tokens`), "miss_short_lcp" (what is kept of it is). Blocks know no entries, so what theirs tells apart
        as prefix, supersequence and longest common prefix is "prefix" here.
        """
        return self._here.kind

    @property
    def _last_matched_key(self) -> tuple[int, ...] | None:
        return self._here.key

    # -- storing ------------------------------------------------------------------------------------------------------

    def store(self, tokens: list[int], cache: list[Any], evict_prefixes: bool = True) -> bool:
        """Keep the state of these tokens. False when it is too short or can't be kept. `evict_prefixes` means nothing
        here: a longer prompt shares the blocks of the shorter.
        """
        entry = self.prepare_store(tokens, cache)
        return entry is not None and self.commit_prepared(entry, evict_prefixes)

    def prepare_store(
        self, tokens: list[int], cache: list[Any], auxiliary: dict[str, Any] | None = None
    ) -> PreparedEntry | None:
        """Encode the state of these tokens now, since the caller goes on with the cache. None when it can't be kept.

        The blocks can be found from here on, before `commit_prepared`. That is harmless: the state is evaluated before a
        block is made of it, an evaluation that fails keeps nothing, and the state of these tokens stays right whatever
        becomes of the request. Holding them back would cost a second copy of what is shared, or a second encoding.
        The auxiliary data does wait for the commit.
        """
        return self._prepare(tokens, cache, auxiliary, None)

    def keep(
        self, prompt: Prompt, layers: list[Any], auxiliary: dict[str, Any] | None = None, *, write_back_from: int = 0
    ) -> None:
        """Store the state of a prompt, whose rows in `layers` become what a hit gives: see `PrefixCache.store`."""
        entry = self._prepare(prompt, layers, auxiliary, write_back_from)
        if entry is not None:
            self.commit_prepared(entry)

    def _prepare(
        self,
        tokens: Sequence[int] | Prompt,
        layers: list[Any],
        auxiliary: dict[str, Any] | None,
        write_back_from: int | None,
    ) -> PreparedEntry | None:
        if not len(tokens) or not layers or len(tokens) < self._least:
            return None
        try:
            prompt = self.prompt(tokens)
            self.promotions.ended(prompt)
            stored = self.cache.store(prompt, layers, write_back_from=write_back_from)
            if not stored.tokens:
                raise MemoryError("the budget has no room for its first block")
            self.cache.keep_hot(prompt, layers)
            held = {name: hold(value) for name, value in (auxiliary or {}).items()}
        except Exception as error:
            self.reports.refused(error)
            return None
        return PreparedEntry(self.cache, prompt, stored.new_bytes, held)

    def commit_prepared(
        self,
        entry: PreparedEntry,
        evict_prefixes: bool = True,
        *,
        commit_lock: AbstractContextManager[Any] | None = None,
        commit_guard: Callable[[], bool] | None = None,
    ) -> bool:
        """Publish what `prepare_store` gave, unless `commit_guard`, asked under `commit_lock`, says no. Then the auxiliary
        data is not kept, and the blocks are the budget's to forget.
        """
        try:
            with commit_lock if commit_lock is not None else nullcontext():
                if commit_guard is not None and not commit_guard():
                    return False
            if entry.held:
                self._auxiliary.put(entry.prompt.token_bytes, entry.held)
            return True
        except Exception as error:
            self.reports.refused(error)
            return False

    # -- letting go ---------------------------------------------------------------------------------------------------

    def remove(self, tokens: list[int], *, include_ssd: bool = False) -> bool:
        """Forget this prompt, in every tier whatever `include_ssd` says, as far as no longer one goes on from it. False
        when there was nothing to forget.
        """
        with self.reports.quietly("forgetting a prompt"):
            prompt = self.prompt(tokens)
            self._auxiliary.drop(prompt.token_bytes)
            return self.cache.remove(prompt) > 0
        return False

    def clear(self) -> None:
        """Empty the RAM of the PrefixCache, for all its models. What the SSD has stays, as it does for vllm-mlx's own tier,
        and what it was still to get is written.
        """
        self._auxiliary.clear()
        with self.reports.quietly("clearing"):
            self.cache.trim_to(0)
        self.reset_stats()

    def try_reserve_memory(self, nbytes: int) -> bool:
        """Reserve bytes of the RAM budget, evicting for them. False when the room can't be had."""
        if nbytes <= 0:
            return True
        with self.reports.quietly("a reservation"):
            reservation = self.cache.reserve(nbytes)
            if reservation is not None:
                with self._lock:
                    self._reserved.append(reservation)
                return True
        return False

    def release_reserved_memory(self, nbytes: int) -> None:
        """Give back bytes that `try_reserve_memory` reserved, in one call or in several; never more than those."""
        with self._lock:
            for reservation in reversed(self._reserved):
                nbytes -= reservation.release(max(nbytes, 0))
            self._reserved = [reservation for reservation in self._reserved if reservation.left]

    # -- the SSD --------------------------------------------------------------------------------------------------------

    def set_ssd_tier(self, ssd_tier: Any) -> None:
        """vllm-mlx's own SSD tier is never used; the PrefixCache has one of its own (setting `ssd_dir`)."""
        if ssd_tier is not None:
            self.reports.warn_once("--ssd-cache-dir is not used: give the PrefixCache an ssd_dir")

    def check_ssd(self, tokens: list[int]) -> dict[str, Any] | None:
        """Return None: what the SSD has came with `fetch`, as far as waiting for it paid."""
        return None

    def save_to_disk(self, cache_dir: str) -> bool:
        """Make what RAM holds durable, in the PrefixCache's own directory. False without one, or when it took too long."""
        if self.cache.stats().ssd is None:
            self.reports.warn_once("nothing is kept over a restart: the PrefixCache has no ssd_dir")
            return False
        with self.reports.quietly("saving"):
            if self.cache.flush():
                return self.cache.stats().images_on_ssd > 0
            self.reports.warn_once(
                "not all of RAM was written within close_timeout=%s s", self.cache.settings.close_timeout
            )
        return False

    def load_from_disk(self, cache_dir: str) -> int:
        """Return how many sequences the PrefixCache found in its directory; they are read when they are asked for."""
        stats = self.cache.stats()
        return stats.sequences if stats.images_on_ssd else 0

    # -- counting -------------------------------------------------------------------------------------------------------

    def get_stats(self) -> dict[str, Any]:
        """Return the numbers that vllm-mlx shows. Hits, misses, rejections and saved tokens are this model's; evictions,
        entries and memory are of the whole PrefixCache, whose `stats()` is under "prefixcache". An entry is a sequence that
        no other goes on from, in any tier.
        """
        return self.reports.numbers()

    def reset_stats(self) -> None:
        self.reports.reset()

    @property
    def memory_usage_mb(self) -> float:
        return self._current_memory / MIB

    @property
    def memory_limit_mb(self) -> float:
        return self._max_memory / MIB

    @property
    def _current_memory(self) -> int:
        return self.cache.stats().ram_held

    @property
    def _max_memory(self) -> int:
        return self.cache.stats().ram_limit

    @property
    def _entries(self) -> TieredPrefixCache:
        """What vllm-mlx asks for its length: there are no entries, so the cache itself."""
        return self

    def __len__(self) -> int:
        """Sequences of the PrefixCache that no other goes on from, in any tier."""
        return self.cache.stats().sequences

    def __contains__(self, tokens: Sequence[int]) -> bool:
        """Return whether the state of all these tokens is in RAM."""
        return bool(len(tokens)) and self.cache.match(self.prompt(tokens)).ram == len(tokens)


class PreparedEntry:
    """What `prepare_store` gives: the tokens, the bytes that were added for them, and the auxiliary data until the commit.

    `cache` is another copy of the state with each access, its reader's own; None when it has left RAM.
    """

    def __init__(self, owner: PrefixCache, prompt: Prompt, nbytes: int, held: dict[str, Any]):
        self._owner = owner
        self.prompt = prompt
        self.memory_bytes = nbytes
        self.held = held

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(self.prompt.given.tolist())

    @property
    def cache(self) -> list[Any] | None:
        prompt_cache, rest = self._owner.fetch(self.prompt, leave=0)
        return prompt_cache if not len(rest) else None

    @property
    def auxiliary(self) -> dict[str, Any] | None:
        return give(self.held) if self.held else None
