"""`PrefixCache`: the public calls. Each checks its arguments and hands the work on.

The way of a prompt: tokens -> `tiers.prompt` (how deep it is known) -> `store_fetch_remove.fetch` (images in RAM) ->
`layers.stored` (a live prompt cache). The way of new tokens: `layers.image_layout` (read) -> `store_fetch_remove.store`
(what is new, encode, publish) -> `tiers.storage` (RAM, spill) -> `ssd` (files, index).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import math
import time
from collections.abc import Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from prefixcache.blocks.budget import Reservation
from prefixcache.blocks.continuations import continuations
from prefixcache.blocks.lookup import required_images
from prefixcache.blocks.node import RAM
from prefixcache.byte_sizes import parse_size
from prefixcache.codecs import Codec, TurboQuant
from prefixcache.keys import Tokens, as_model, as_salt, as_session, as_tokens
from prefixcache.layers.allowed_classes import allow
from prefixcache.layers.form import CacheForm
from prefixcache.layers.read_ahead import ReadAhead
from prefixcache.layers.reading import live_arrays
from prefixcache.layers.stored import StoredPrompt
from prefixcache.media import Media, as_media, check_placeholders, with_pseudo_ids
from prefixcache.memory import trim_process_memory
from prefixcache.metrics.rates import MeasuredRates
from prefixcache.metrics.stats import Stats
from prefixcache.open_cache import open_cache
from prefixcache.ranks.agreement import Ranks
from prefixcache.settings import Settings
from prefixcache.store_fetch_remove.agreed import depths_of_all, taken_by_all
from prefixcache.store_fetch_remove.fetch import FetchedPrompt, Fetches, decline_slow, discard_hit, fill_read_ahead
from prefixcache.store_fetch_remove.hot import forget_deleted, keep_hot
from prefixcache.store_fetch_remove.leases import Leased
from prefixcache.store_fetch_remove.live_stores import LiveStores
from prefixcache.store_fetch_remove.numbers import check_leave, number, seconds, unix_time
from prefixcache.store_fetch_remove.pins import Pinned
from prefixcache.store_fetch_remove.pruning import (
    Deleted,
    clear_all,
    clear_namespaces,
    end_session,
    prune_namespaces,
    prune_tier,
    roots_meant,
)
from prefixcache.store_fetch_remove.remove import remove, remove_following
from prefixcache.store_fetch_remove.selection import Selection
from prefixcache.store_fetch_remove.store import StoreCall, Stored
from prefixcache.tiers.parting import Parting, branch_point_of, parting_of
from prefixcache.tiers.promotion import last_of
from prefixcache.tiers.prompt import Prompt, PromptTerms

log = logging.getLogger("prefixcache")

LONGEST = 1 << 24  # tokens that a fetch leaves room for

NOTHING_STORED = Stored(0, 0, 0, False, ())


class Match(NamedTuple):
    """How many leading tokens can be had: from RAM alone, and from RAM and SSD together (`ssd` >= `ram`)."""

    ram: int
    ssd: int


class PrefixCache:
    """The attention state of prompts seen, compressed in RAM under a hard budget, and on SSD.

    Thread-safe: any thread may call anything, but for what the ranks of a `group` call together. MLX runs only in `store`,
    `fetch` and `StoredPrompt`, on the caller's thread and stream. Nothing waits for the disk or the remote tier but `flush`,
    `close`, the future of `promote`, and where it is asked for `fetch` (`promote=True`) and `store` (the setting
    `spill="wait"`). `ranks`: those of the group, None where there is a single process. `rates`: how long fetches and prefills
    take here, see `learn_prefill`.
    """

    def __init__(self, settings: Settings | None = None, *, group: mx.distributed.Group | None = None, **values: Any):
        """Open the cache. Give a `Settings`, or its fields by name.

        `group`: the processes that the model spans, as `mx.distributed.init()` gives them. Each opens a cache with budgets of
        its own and a directory of its own in `ssd_dir` (`rank-0`, ...). Then opening, `match`, `lookup` and `fetch` are
        collective: all ranks make the same calls in the same order, on the thread that computes with the model, and are given
        what all of them have. `model` must name the rank's part: see `ranks.rank_identity`.

        Raises ValueError for a bad setting, and `ssd.DirectoryError` (which names the directory and what to do) when
        the SSD's directory is held by another process, was written by a newer release, or can't be used.
        """
        if settings is not None and not isinstance(settings, Settings):
            raise TypeError(f"settings of type {type(settings).__name__}: pass a Settings, or its fields by name")
        if settings is not None and values:
            raise TypeError(f"settings and {', '.join(values)} were both given: pass one Settings, or its fields")
        self.settings = settings if settings is not None else Settings(**values)
        self.codec: Codec = self.settings.codec if self.settings.codec is not None else TurboQuant()
        allow(*self.settings.allow_classes)
        self.rates = MeasuredRates()
        self.ranks = Ranks(group) if group is not None and group.size() > 1 else None
        self._opened = open_cache(self.settings, self.codec, self.ranks)
        self.settings = self._opened.settings  # of ranks each has a directory of its own
        self._storage = self._opened.storage
        self._placeholders: dict[str, np.ndarray] = {}  # by model
        self._stores = LiveStores(self._storage, self._opened.namespaces, self._opened.recorder)
        self._fetches = Fetches(self._storage, self._opened.namespaces, self.rates, self._opened.recorder)

    @property
    def sharing(self) -> int:
        """The processes of one model that share this machine: what "auto" gives is divided by it."""
        return self._opened.sharing

    # -- storing and finding ------------------------------------------------------------------------------------------

    def prompt(
        self,
        tokens: Tokens,
        *,
        model: str,
        salt: bytes = b"",
        like: list[Any] | CacheForm | None = None,
        whole_blocks: bool = False,
        media: Sequence[Media] = (),
    ) -> Prompt:
        """Return a request's tokens, checked once: the calls below take it in the place of tokens, model and salt, and then
        walk the graph of blocks once for all of them.

        `model` names the weights, `salt` separates tenants. `like` is a prompt cache as the caller makes it, or a `CacheForm`
        made of such: what was stored with layers of other classes or attributes (a ring's `max_size`) is then a miss, and
        once a token went through it, of other heads, widths or dtypes, too. Without, whatever was stored of the weights is a
        hit. What the stores of `prompt.labelled("chat")` add, `stats().labels` counts under that word.

        With `whole_blocks` a hit doesn't end inside a whole block, whose rows are coded: it ends with it, or in an incomplete
        one, whose rows are as they were computed. At most 255 tokens more are computed, always on the same rows, whatever was
        stored since, so that the answer is the same again: see `store(write_back_from=)`. Exact codecs and recurrent models
        are hit as without.

        `media`, in the prompt's order: its pictures, sounds and video frames, for whose placeholders keys see their contents.
        No store, hit or branch point ends inside one that is `whole`. With `whole_blocks` a hit may end with a medium, too,
        if a store did: `chunks` has one end there. Its rows are kept as they are beside the block that is coded.

        Raises TypeError or ValueError for bad tokens, media, model or salt, CacheError for what is no prompt cache.
        """
        ids = as_tokens(tokens)
        spans = as_media(media, len(ids))
        form = None if like is None else CacheForm.of(like)
        terms = PromptTerms(as_model(model), as_salt(salt), form, whole_blocks)
        if (placeholders := self._placeholders.get(model)) is not None:
            check_placeholders(ids, spans, placeholders)
        token_bytes = (with_pseudo_ids(ids, spans) if spans else ids).tobytes()
        self._opened.namespaces.derive_roots(terms.model, terms.salt)
        return Prompt(
            self._storage,
            lambda: self._opened.namespaces.known(terms.model, terms.salt),
            token_bytes,
            tokens,
            terms,
            spans,
        )

    def set_placeholders(self, tokens: Tokens | set[int], *, model: str) -> None:
        """Name all placeholder tokens of a model. From now on its prompts are refused (ValueError) unless all placeholders in
        them, and nothing else, are in `media`: plain tokens can't tell one picture from another, and would hit the wrong one.
        """
        self._placeholders[as_model(model)] = as_tokens(
            sorted(tokens) if isinstance(tokens, (set, frozenset)) else tokens
        )

    def _prompt(self, tokens: Tokens | Prompt, model: str | None, salt: bytes) -> Prompt:
        if not isinstance(tokens, Prompt):
            return self.prompt(tokens, model=model, salt=salt)  # type: ignore[arg-type]
        if model is not None or salt:
            raise TypeError("a Prompt has its model and salt: pass them to PrefixCache.prompt alone")
        if not tokens.is_of(self._storage):
            raise ValueError("this Prompt is of another PrefixCache: make one with this cache's prompt()")
        return tokens

    def store(
        self,
        tokens: Tokens | Prompt,
        prompt_cache: list[Any],
        *,
        model: str | None = None,
        salt: bytes = b"",
        write_back_from: int | None = None,
        snapshot: bool = True,
    ) -> Stored:
        """Keep the state of `tokens`: what is not kept already is encoded here, on this thread.

        `prompt_cache` is mlx-lm's list of layer caches after these tokens; it is read, and never kept. When it
        has seen fewer positions than there are tokens, the tokens beyond are left out; when more, what lies beyond
        is. Where it ends inside a whole medium, only what lies before that is kept. `model` and `salt`: see `prompt`. The
        codes of a `TurboQuantKVCache` are kept as they are, but where a basis transforms what they decode to; it shares
        blocks with plain caches of the model. The rows of whole blocks are coded, those of an incomplete last one are kept
        as they are.

        With `write_back_from` the rows of whole blocks in `prompt_cache` become what a fetch would give, from the block of
        this token on (those before, which a fetch gave, are left alone). Call it so after each chunk of a prefill, which must
        end where a block ends: then what is generated on is what is stored, and the same prompt asked again is answered the
        same, with lossy codecs too. Without it `prompt_cache` is not changed.
        `snapshot=False` keeps no recurrent state: for chunks that nobody will ask for.
        A block with a row that holds NaN or infinity is not kept, nor is what comes behind it, nor such recurrent state.

        Raises TypeError or ValueError for bad tokens, model or salt, and `CacheError` (a ValueError) for a prompt cache
        that can't be kept: a batch, a class that isn't known, an attribute that isn't plain data, codes of another codec.
        """
        began = time.monotonic()
        call = self._store_call(self._prompt(tokens, model, salt), prompt_cache, write_back_from, snapshot=snapshot)
        if call is None:
            return NOTHING_STORED
        stored = call.run()
        self._stores.warn_of(call)
        self._storage.counters.durations.store.observe(time.monotonic() - began)
        return stored

    def store_behind(
        self, prompt: Prompt, prompt_cache: list[Any], *, write_back_from: int | None = None, snapshot: bool = True
    ) -> Future[Stored]:
        """`store`, of which this thread does what reads and changes `prompt_cache`; on a GPU it launches that and waits for
        nothing. A thread of the cache brings the codes to the host and makes them visible, in the order of the calls. All
        that this cache is asked for afterwards waits for that. For the chunks of a prefill: until then a GPU holds the codes.

        Raises what `store` raises; the future, what went wrong later: the prompt is then not stored.
        """
        began = time.monotonic()
        call = self._store_call(prompt, prompt_cache, write_back_from, snapshot=snapshot)
        if call is None:
            return self._opened.behind.submit(lambda: NOTHING_STORED)
        end = call.begin()
        self._storage.counters.durations.store.observe(time.monotonic() - began)

        def end_and_warn() -> Stored:
            stored = end()
            self._stores.warn_of(call)
            return stored

        return self._opened.behind.submit(end_and_warn)

    def _store_call(
        self, prompt: Prompt, prompt_cache: list[Any], write_back_from: int | None, *, snapshot: bool
    ) -> StoreCall | None:
        """Check the arguments of `store` and read the prompt cache. None where nothing has gone through it yet."""
        self._opened.check_open()
        if write_back_from is not None:
            write_back_from = number(write_back_from, "store: write_back_from", "tokens")
        if not len(prompt):
            raise ValueError("tokens are empty: there is nothing to store")
        if self.ranks is not None:  # what the ranks compute together must not wait for one that fails to store it
            mx.eval(live_arrays(prompt_cache))
        return self._stores.call(prompt, prompt_cache, write_back_from, snapshot=snapshot)

    def keep_hot(
        self, tokens: Tokens | Prompt, prompt_cache: list[Any], *, model: str | None = None, salt: bytes = b""
    ) -> int:
        """Keep the arrays of a prompt cache, whose tokens are stored, for hits that have nothing to decode. Return the bytes
        that they take of the setting `hot`, 0 where there is no room.

        A hit must not change an answer, so with a lossy codec this takes the `Prompt` that was fetched with, or one made of
        it, and of it the tokens whose rows are what a fetch gives: those of the hit, and of stores with `write_back_from`
        since. Give it when nothing is appended any more, since the next append would copy. Hot prompts are the first to leave
        for anything else; their images stay.

        Raises as `store` does.
        """
        self._opened.check_open()
        return keep_hot(self._storage, self._opened.namespaces, self._prompt(tokens, model, salt), prompt_cache)

    def match(self, tokens: Tokens | Prompt, *, model: str | None = None, salt: bytes = b"", leave: int = 0) -> Match:
        """Tell how deep a `fetch` with these arguments can hit `tokens`. No I/O, and nothing changes; no MLX, but where ranks
        agree on it.
        """
        check_leave(leave)
        prompt = self._prompt(tokens, model, salt)

        def depths(limits: list[int]) -> list[int]:
            self._opened.check_open()
            return self._depths(prompt, limits)

        if self.ranks is None:
            return Match(*depths([max(len(prompt) - leave, 0)] * 2))
        return Match(*depths_of_all(self.ranks, prompt, leave, depths))

    def _depths(self, prompt: Prompt, limits: list[int]) -> list[int]:
        """Tell how deep RAM, and all tiers together, can serve a prompt, up to a limit for each."""
        asked = [(RAM, limits[0]), (self._storage.graph.last, limits[1])]
        with self._storage.lock:
            deepest = {(tier, limit): prompt.deepest(tier, len(prompt) - limit) for tier, limit in set(asked)}
        return [hit.depth if (hit := deepest[tier_and_limit]) is not None else 0 for tier_and_limit in asked]

    def parting(self, tokens: Tokens | Prompt, hit: int, *, model: str | None = None, salt: bytes = b"") -> Parting:
        """Return where `tokens`, of which a fetch gave `hit`, part from the stored prompt that shares most with them, and why
        it gave no more. No I/O, no MLX, and nothing changes; of ranks each answers for itself.
        """
        prompt = self._prompt(tokens, model, salt)
        self._opened.check_open()  # without the lock, which stores behind need to end
        with self._storage.lock:
            return parting_of(self._storage, prompt, hit)

    def branch_point(self, tokens: Tokens | Prompt, *, model: str | None = None, salt: bytes = b"") -> int:
        """Return where these tokens part from a stored prompt: for a model with recurrent layers the end of a block, with
        `whole_blocks` and a lossy codec a multiple of 32 tokens; 0 for others, whose hits end anywhere. No I/O, and nothing
        changes; no MLX, but where ranks agree on it.

        Where it is beyond the hit, others may part there, too: end a chunk of the prefill there and `store` it, with its
        state. The last token is left out, as by a fetch.
        """
        prompt = self._prompt(tokens, model, salt)
        self._opened.check_open()
        with self._storage.lock:
            depth, step = branch_point_of(self._storage, prompt)
        if self.ranks is not None:  # the stages of a pipeline have different layers
            depth, step = self.ranks.least(depth)[0], self.ranks.most(step)[0]
        return prompt.last_multiple(step, depth) if step else 0

    def known(self, prompt: Prompt) -> int:
        """Count the leading tokens of a prompt that a stored one begins with, in whichever tier; a hit may be less deep. No
        I/O, no MLX, and nothing changes; of ranks each answers for itself.
        """
        self._opened.check_open()  # without the lock, which stores behind need to end
        with self._storage.lock:
            return max((prompt.walk(space).depth for space in prompt.namespaces()), default=0)

    def continuations(self, prompt: Prompt, start: int, limit: int, most: int) -> list[list[int]]:
        """Return how stored sequences go on behind the first `start` tokens of a prompt, as far as `limit` tokens. Those that
        are alike so far count once, and no more than `most` are looked at. Nothing is read, as by `known`.
        """
        self._opened.check_open()  # without the lock, which stores behind need to end
        with self._storage.lock:
            walks = [prompt.walk(space) for space in prompt.namespaces()]
            found = {
                tokens for walk in walks if walk.depth >= start for tokens in continuations(walk, start, limit, most)
            }
        return [memoryview(tokens).cast("q").tolist() for tokens in sorted(found)]

    def fetch(
        self,
        tokens: Tokens | Prompt,
        *,
        model: str | None = None,
        salt: bytes = b"",
        leave: int = 1,
        room: int | None = None,
        promote: bool = False,
    ) -> tuple[list[Any] | None, Any]:
        """Return the deepest prompt cache that RAM has for `tokens`, and the tokens that are still to be computed.

        Returns (prompt_cache, rest): a new list of layer caches of the classes that were stored, the caller's own, and
        `tokens[depth:]`, of at least `leave` tokens. (None, tokens) on a miss.

        With `promote` the caller waits for what only the SSD and the remote tier have, for the latter at most for the setting
        `remote_timeout`, and on a CPU blocks of layers that keep every token are
        decoded as they are read; without, no file is read.

        The layers have room for `room` tokens more and some beside, before they must grow; None: for the rest. `lookup` gives
        what RAM has still encoded.
        """
        prompt, durations = self._prompt(tokens, model, salt), self._storage.counters.durations
        check_leave(leave)
        room = room if room is None else number(room, "fetch: room", "tokens", LONGEST)
        read_ahead = None
        if promote:
            try:
                read_ahead = self._bring(prompt, leave, room)
            except Exception as error:
                if self.ranks is None:
                    raise
                log.warning("a promotion failed, so this rank has what RAM has: %s: %s", type(error).__name__, error)
        began = time.monotonic()

        def decode(leave: int) -> tuple[FetchedPrompt | None, int]:
            self._opened.check_open()
            fetched = self._fetches.decode(prompt, leave, room, read_ahead)
            return fetched, 0 if fetched is None else fetched.tokens

        if self.ranks is not None:
            fetched, depth = taken_by_all(self.ranks, prompt, leave, decode)
        else:
            fetched, depth = decode(self._worth(prompt, leave))
        given = prompt.given_rows
        given.tokens, given.state, given.codec = depth, depth, "" if fetched is None else fetched.codec
        self._count(prompt, depth, 0 if fetched is None else fetched.hot)
        duration = durations.fetch_hit if fetched is not None else durations.fetch_miss
        duration.observe(time.monotonic() - began)
        return (None, prompt.given) if fetched is None else (fetched.layers, prompt.given[depth : len(prompt)])

    @property
    def declines_slow_hits(self) -> bool:
        """Whether `fetch` declines hits that take longer than computing: the setting. Ranks don't, whose times differ."""
        return self.settings.decline_slow_hits and self.ranks is None

    def _worth(self, prompt: Prompt, leave: int) -> int:
        """Return how many tokens to leave, so that what is hit is quicker fetched than computed."""
        self._opened.check_open()
        return decline_slow(self._storage, self.rates, prompt, leave) if self.declines_slow_hits else leave

    def learn_prefill(self, tokens: int, seconds: float, *, model: str) -> None:
        """Hear that computing so many tokens of a prompt of `model` took so many seconds: its prefill, or what was left of it
        behind a hit. With the setting `decline_slow_hits`, `fetch` declines a hit that would take clearly longer, or gives
        only what is hot of it, once both were measured a few times.
        """
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < math.inf:
            raise ValueError(f"learn_prefill: seconds={seconds!r}: give the time that it took, 0 or more")
        self.rates.learn_prefill(as_model(model), number(tokens, "learn_prefill", "tokens"), seconds)

    def _bring(self, prompt: Prompt, leave: int, room: int | None) -> ReadAhead | None:
        """Promote, and wait for it. Return what could be decoded meanwhile."""
        coming, read_ahead = self.promote(prompt, leave=leave), None
        if not coming.done():
            read_ahead = fill_read_ahead(self._storage, coming, prompt, leave, room)
        try:
            coming.result()
        except concurrent.futures.CancelledError as error:
            self._opened.check_open()
            raise RuntimeError("the promotion was cancelled") from error
        return read_ahead

    def lookup(
        self, tokens: Tokens | Prompt, *, model: str | None = None, salt: bytes = b"", leave: int = 0
    ) -> StoredPrompt | None:
        """Return what RAM has for `tokens`, still encoded: to copy, trim and `dequantize` later, or to go on from as `live`
        caches that keep codes. None on a miss.

        It holds its images while it lives, and what the cache evicts meanwhile is then the holder's memory.
        """
        check_leave(leave)
        prompt = self._prompt(tokens, model, salt)

        def look_up(leave: int) -> tuple[StoredPrompt | None, int]:
            self._opened.check_open()
            hit = self._fetches.find(prompt, leave)
            if hit is None:
                return None, 0
            self._storage.unpin(hit.slots)
            return hit.stored, hit.stored.tokens

        if self.ranks is None:
            stored, depth = look_up(leave)
        else:
            stored, depth = taken_by_all(self.ranks, prompt, leave, look_up)
        self._count(prompt, depth)
        return stored

    def _count(self, prompt: Prompt, depth: int, hot: int = 0) -> None:
        if not self._opened.closed:
            self._fetches.count(prompt, depth, hot)

    # -- SSD to RAM ---------------------------------------------------------------------------------------------------

    def promote(
        self,
        tokens: Tokens | Prompt,
        *,
        model: str | None = None,
        salt: bytes = b"",
        leave: int = 0,
        prefill_rate: float | None = None,
    ) -> Future[int]:
        """Bring what the SSD and the remote tier have for `tokens` into RAM. Returns at once; the future's result is how many
        of them RAM has then.

        `leave` is that of the `fetch` to come: a sliding window needs other rows where a hit ends earlier. When not all of it
        fits, the leading part comes. A file that went bad is quarantined, and the depth ends before it. The remote tier may
        take the setting `remote_timeout`, or with `prefill_rate`, the tokens that are computed a second here, no longer than
        computing what it has would take.
        """
        prompt = self._prompt(tokens, model, salt)
        remote = self.promote_remote(prompt, leave=leave, prefill_rate=prefill_rate)
        local = self.promote_local(prompt, leave=leave)
        if remote is None:
            return local
        limits = [max(len(prompt) - leave, 0)] * 2
        both = last_of(local, remote, lambda: self._depths(prompt, limits)[0])
        both.add_done_callback(self._opened.promoter.notify)
        return both

    def promote_remote(
        self, prompt: Prompt, *, leave: int = 0, prefill_rate: float | None = None
    ) -> Future[int] | None:
        """Promote what the remote tier has. None where there is nothing to ask it for: the prompt is known here, it was
        missing there just now, or the engine doesn't answer.
        """
        self._opened.check_open()
        check_leave(leave)
        if prefill_rate is not None and (not isinstance(prefill_rate, (int, float)) or not prefill_rate > 0):
            raise ValueError(f"prefill_rate={prefill_rate!r}: give tokens a second, more than 0")
        remote = self._opened.remote
        return remote.promote(prompt, leave, prefill_rate) if remote is not None else None

    def promote_local(self, prompt: Prompt, *, leave: int = 0) -> Future[int]:
        """Promote what the SSD has."""
        self._opened.check_open()
        check_leave(leave)
        with self._storage.lock:
            deepest = prompt.deepest(self._storage.graph.last, leave)
            depth = deepest.depth if deepest is not None else 0
            limit = max(len(prompt) - leave, 0)
            if not deepest or depth == prompt.deepest_in(deepest.namespace, RAM, limit).depth:
                done: Future[int] = Future()
                done.set_result(depth)
                return done
        try:
            return self._opened.promoter.submit(prompt, leave)
        except RuntimeError:
            self._opened.check_open()  # closed meanwhile
            raise

    async def promote_async(
        self,
        tokens: Tokens | Prompt,
        *,
        model: str | None = None,
        salt: bytes = b"",
        leave: int = 0,
        prefill_rate: float | None = None,
    ) -> int:
        """`promote`, awaited. Cancelling the wait does not stop the reads that have begun."""
        coming = self.promote(tokens, model=model, salt=salt, leave=leave, prefill_rate=prefill_rate)
        return await asyncio.shield(asyncio.wrap_future(coming))

    def unread(self, tokens: Tokens | Prompt, *, model: str | None = None, salt: bytes = b"", leave: int = 0) -> int:
        """Return the bytes that `promote` would read for these tokens now. No I/O, no MLX, nothing changes."""
        self._opened.check_open()
        check_leave(leave)
        prompt, last = self._prompt(tokens, model, salt), self._storage.graph.last
        with self._storage.lock:
            deepest = prompt.deepest(last, leave)
            if deepest is None:
                return 0
            required = required_images(deepest.walk, deepest.depth, last)
            return sum(slot.nbytes for slot in required if slot.image is None)

    # -- pinned and deleted -------------------------------------------------------------------------------------------

    def pin(self, tokens: Tokens | Prompt, *, model: str | None = None, salt: bytes = b"") -> int:
        """Keep what is stored of `tokens` in the tier it is in. Returns how many tokens that are; counts."""
        self._opened.check_open()
        return self._opened.pins.add(self._prompt(tokens, model, salt))

    def unpin(self, tokens: Tokens | Prompt, *, model: str | None = None, salt: bytes = b"") -> bool:
        """Undo one `pin` of the same tokens. False when there is none."""
        self._opened.check_open()
        return self._opened.pins.remove(self._prompt(tokens, model, salt))

    def pinned(self) -> list[Pinned]:
        """Return the prompts that are pinned: for each a name for `end_pins`, and numbers."""
        self._opened.check_open()
        return self._opened.pins.listed()

    def end_pins(self, name: str) -> int:
        """Undo every `pin` of the prompt that `pinned` gives this name. Returns how many there were."""
        self._opened.check_open()
        return self._opened.pins.end(name)

    def lease(self, tokens: Tokens | Prompt, *, ttl: float, model: str | None = None, salt: bytes = b"") -> int:
        """Keep what is stored of `tokens` for `ttl` seconds, a day at most: its images are the last to leave the last tier
        that has them, the SSD where there is one, which they are written to now. Returns how many tokens that is; 0 where it
        is nothing, or more than the setting `lease_share`.

        Unlike a pin a lease holds up nothing: where room can be had no other way, leased images are evicted, too. The oldest
        lease ends where a tenant's take more than `lease_share`, or those of all tenants more than half. With an SSD leases
        outlast a restart, and once `flush` has returned a crash.
        """
        self._opened.check_open()
        wanted = seconds(ttl, "lease: ttl")
        if wanted is None:
            raise ValueError("ttl=None: give the seconds to keep it for")
        return self._opened.leases.add(self._prompt(tokens, model, salt), wanted)

    def leased(self) -> list[Leased]:
        """Return the prompts that are leased, the oldest lease first: numbers, no text."""
        self._opened.check_open()
        return self._opened.leases.listed()

    def end_session(self, session: str, *, salt: bytes = b"") -> Deleted:
        """Delete, in every tier, what requests stored that named this session (`Prompt.in_session`) and this salt, and that
        no other request has used since; and end its leases. What is pinned stays, what others lease, and what others' prompts
        depend on. What an SSD brings after a restart is no session's.
        """
        self._opened.check_open()
        session = as_session(session)
        roots = roots_meant(self._storage, Selection(), as_salt(salt))
        self._opened.leases.end_session(roots, session)
        deleted = end_session(self._storage, roots, session)
        forget_deleted(self._storage)
        trim_process_memory()
        return deleted

    def remove(
        self, tokens: Tokens | Prompt, *, model: str | None = None, salt: bytes = b"", following: bool = False
    ) -> int:
        """Delete this prompt, in every tier: its blocks that no other stored prompt shares. Returns their bytes.

        Blocks that a longer prompt goes on from stay, and so do those before them. With `following` all that begins with this
        prompt is deleted, too, and its pins end.
        """
        self._opened.check_open()
        prompt = self._prompt(tokens, model, salt)
        if following:
            if not len(prompt):
                raise ValueError("tokens are empty, and everything begins with none: call clear() for that")
            self._opened.pins.end_beginning_with(prompt)
        removed = (remove_following if following else remove)(self._storage, prompt)
        forget_deleted(self._storage)
        return removed

    def drop_hit(self, prompt: Prompt, depth: int) -> int:
        """A fetch gave the state of a prompt's first `depth` tokens, and the model raised an exception when it went on from
        it: delete what that hit was made of, in every tier, other prompts' shares included. Returns the bytes. The next fetch
        is a miss, and what is computed then is stored anew.
        """
        self._opened.check_open()
        prompt.given_rows.tokens = 0
        freed = discard_hit(self._storage, prompt, depth)
        forget_deleted(self._storage)
        return freed

    def clear(self, *, model: str | None = None, salt: bytes | None = None) -> Deleted:
        """Delete everything, in RAM and on SSD, pins included; with `model` or `salt` what is of both. `model` is its name in
        whole, or the part before the @; a salt of b"" stands for what was stored without one. What the remote tier has stays.

        Raises `ssd.NoSuchNamespace` where nothing is of that model.
        """
        self._opened.check_open()
        if model is None and salt is None:
            with self._storage.lock:
                self._opened.pins.clear()
                deleted = clear_all(self._storage)
        else:
            roots = roots_meant(self._storage, Selection(model), None if salt is None else as_salt(salt))
            self._opened.pins.clear(roots)
            deleted = clear_namespaces(self._storage, roots)
        forget_deleted(self._storage)
        trim_process_memory()
        return deleted

    def prune(
        self,
        *,
        model: str | None = None,
        salt: bytes | None = None,
        namespace: str | None = None,
        used_before: float | None = None,
        ssd_to: int | None = None,
    ) -> Deleted:
        """Delete the images that are of all that is given, in RAM and on SSD: of a model and a salt as for `clear`, of a
        namespace (the beginning of its root key, in hex), last used before a Unix time, to the minute. What is pinned stays,
        and what something depends on that stays. With `ssd_to` only the SSD's images are deleted, the least recent first,
        until it takes at most so many bytes.

        Raises ValueError where nothing is given, or no SSD is there for `ssd_to`; `ssd.NoSuchNamespace` as `clear`.
        """
        self._opened.check_open()
        if (model, salt, namespace, used_before, ssd_to) == (None,) * 5:
            raise ValueError(
                "nothing is selected: give model, salt, namespace, used_before or ssd_to; clear() deletes all"
            )
        if ssd_to is not None and self._opened.ssd is None:
            why = (
                "this cache was opened without an SSD"
                if self._opened.disk is None
                else "the SSD's disk is not there yet"
            )
            raise ValueError(f"ssd_to={ssd_to!r}: {why}; leave it out")
        used_before = unix_time(used_before, "prune: used_before")
        storage, selection = self._storage, Selection(model, namespace)
        roots = roots_meant(storage, selection, None if salt is None else as_salt(salt))
        if ssd_to is None:
            deleted = prune_namespaces(storage, roots, used_before)
        else:
            to_size = number(ssd_to, "prune: ssd_to", "bytes")
            deleted = prune_tier(storage, storage.lower[0], roots, used_before, to_size)
        forget_deleted(storage)
        trim_process_memory()
        return deleted

    def trim_to(self, nbytes: int, *, wait: float | None = None) -> int:
        """Let the coldest leave RAM (to the SSD, where there is one) until it holds at most `nbytes`. Returns bytes held:
        more, when the SSD did not take what must leave within `wait` seconds (the setting `spill_wait`, if None).
        """
        self._opened.check_open()
        wait = seconds(wait, "trim_to: wait")
        limit, before = number(nbytes, "trim_to", "bytes"), self._storage.budget.held().total
        if before <= limit:
            return before
        held = self._storage.ram.trim(limit, self.settings.spill_wait if wait is None else wait)
        trim_process_memory()
        return held

    def resize(self, *, ram: Any = None, ssd: Any = None, wait: float | None = None) -> None:
        """New limits while it runs, as in `Settings` ("8GB", or a number of bytes); None leaves one as it is.

        What must leave for a lower RAM budget goes to the SSD, where there is one; what that has not taken within `wait`
        seconds (the setting `spill_wait`, if None) is lost, pinned images excepted. Until the last of it is gone,
        `stats().ram_limit` is what is held. For a lower SSD limit the coldest files are deleted; `flush()` waits for that.

        Raises ValueError for what is no size, for 0, and for a tier that the cache was opened without.
        """
        self._opened.check_open()
        wait = seconds(wait, "resize: wait")
        sizes = {name: parse_size(value, name) for name, value in (("ram", ram), ("ssd", ssd)) if value is not None}
        for name, nbytes in sizes.items():
            if not nbytes:
                raise ValueError(f"{name}=0: a tier can't be taken away while the cache runs; open another without it")
        if "ssd" in sizes and self._opened.ssd is None and self._opened.disk is not None:
            raise ValueError(
                f"ssd={ssd!r}: the disk of {str(self.settings.ssd_dir)!r} is not there yet; try again when it is"
            )
        if "ssd" in sizes and self._opened.ssd is None:
            raise ValueError(f"ssd={ssd!r}: this cache was opened without an SSD; open another with ssd_dir")
        if "ram" in sizes:
            self._opened.resize_ram(sizes["ram"], self.settings.spill_wait if wait is None else wait)
        if "ssd" in sizes:
            self._storage.lower[0].resize(sizes["ssd"])

    def keep(self, sequences: int) -> int:
        """Forget the coldest sequences, in every tier, until at most so many are left. Returns how many are.

        A sequence is a stored prompt that no other stored prompt goes on from.
        """
        self._opened.check_open()
        kept = self._storage.keep(number(sequences, "keep", "sequences"))
        forget_deleted(self._storage)
        return kept

    def reserve(self, nbytes: int) -> Reservation | None:
        """Set RAM of the budget aside for something of the caller's, evicting the coldest for it; it counts as held until
        `release()`, or the end of a `with` block. None when the room can't be had.
        """
        self._opened.check_open()
        wait = self.settings.spill_wait if self.settings.spill == "wait" else 0.0
        return self._storage.ram.reserve(number(nbytes, "reserve", "bytes"), wait)

    # -- the cache itself ---------------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Tell where everything is now, and what has happened since the cache was opened."""
        self._opened.check_process()
        return self._opened.stats()

    def codec_of(self, model: str) -> Codec:
        """Return what codes the rows of this model, an identity. Of codec `Transform`: its `Calibrated` form with the model's
        basis, which is reserved in RAM; TurboQuant, with a warning, where there is none yet or no room for it.
        """
        self._opened.check_open()
        return self._opened.namespaces.codec_of(model)

    def check_integrity(self) -> None:
        """AssertionError when an invariant of the graph, the budget or the orders of eviction does not hold."""
        with self._storage.lock:
            self._storage.graph.check_integrity()
            for tier in self._storage.lower:
                tier.check_integrity()
            self._storage.hot.check_integrity()
            self._opened.leases.check_integrity()

    def flush(self, timeout: float | None = None) -> bool:
        """Make what RAM holds durable, as far as the SSD's limit has room. False when that did not end within `timeout`
        seconds, when the disk failed meanwhile, or while it is not there yet.
        """
        self._opened.check_open()
        timeout = seconds(timeout, "flush: timeout")
        if self._opened.disk is not None and self._opened.ssd is None:
            return False
        self._storage.spilling.flush_recency()
        return self._storage.spilling.drain(timeout if timeout is not None else self.settings.close_timeout)

    def close(self) -> None:
        """End it: write what RAM still holds (setting `spill_on_close`), let go of the directory. May be called
        again.

        A cache with a directory that is open when the interpreter ends is closed then. An exception that interrupts this
        (KeyboardInterrupt) cuts the writing short: what is being written becomes durable, the directory is let go of.
        """
        self._opened.close()

    def __enter__(self) -> PrefixCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
