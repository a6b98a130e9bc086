"""`PrefixCache`: the public calls. Each checks its arguments, finds the namespace and hands the work on.

The way of a prompt: tokens -> `keys` -> `tree` (how deep it is known) -> images in RAM -> `layers.stored` (a live
prompt cache). The way of new tokens: `layers.plan` (read) -> `storing` (what is new, encode, publish) -> `tiers`
(RAM, spill) -> `ssd` (files, index).
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import json
import logging
import os
import sqlite3
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from prefixcache.blocks.tree import RAM, SSD, Node, Slot, Walk
from prefixcache.codecs import Codec, TurboQuant, codec_from_spec
from prefixcache.codecs.turboquant import backends as turboquant_backends
from prefixcache.image import Image
from prefixcache.keys import BLOCK, TOKEN_BYTES, Tokens, as_model, as_salt, as_tokens, canonical, root_key
from prefixcache.layers.classes import allow
from prefixcache.layers.decoded import Decoded
from prefixcache.layers.encode import evaluate
from prefixcache.layers.plan import Plan, mask_of, read
from prefixcache.layers.read_ahead import ReadAhead
from prefixcache.layers.stored import Block, Held, StoredPrompt
from prefixcache.memory import give_back, machine_memory
from prefixcache.metrics.logs import Summary
from prefixcache.metrics.stats import Labelled, Stats
from prefixcache.operations.store import Store
from prefixcache.settings import Settings, parse_size
from prefixcache.ssd import Namespace, Ssd
from prefixcache.ssd.directory import refusal
from prefixcache.tiers.budget import Reservation
from prefixcache.tiers.finding import Deepest, boundary, deepest, hit
from prefixcache.tiers.memory_pressure import Pressure
from prefixcache.tiers.promotion import promote
from prefixcache.tiers.tiers import QUEUE_SHARE, Home, Tiers
from prefixcache.trace.recording import Recorder

log = logging.getLogger("prefixcache")

TELL = 60.0  # seconds after which a hit tells the index what was used
NAMESPACES = 1024  # from so many on, those that hold nothing are forgotten when one is added
PROMOTERS = 4  # promotions at work at once; the reads of each go to the SSD's reader pool
LONGEST = 1 << 24  # tokens that a fetch leaves room for
YEAR = 365 * 86_400.0
HURRY = 5.0  # seconds that an interrupted close() gives the SSD

_open: set[PrefixCache] = set()  # those that have a directory, until they are closed


class Stored(NamedTuple):
    """What `store` did.

    `tokens`: how many of the prompt's tokens can be found now; `new_tokens`, `new_bytes`: what this call added, the
    bytes with headers; `snapshot`: whether a state that can't be cut by token was kept for this boundary (False for
    models that have none); `raw_layers`: the layers whose rows the codec left as they are.
    """

    tokens: int
    new_tokens: int
    new_bytes: int
    snapshot: bool
    raw_layers: tuple[int, ...]


class Match(NamedTuple):
    """How many leading tokens can be had: from RAM alone, and from RAM and SSD together (`ssd` >= `ram`)."""

    ram: int
    ssd: int


class PrefixCache:
    """The attention state of prompts seen, compressed in RAM under a hard budget, and on SSD.

    Thread-safe: any thread may call anything. MLX runs only in `store`, `fetch` and `StoredPrompt`, on the caller's
    thread and stream. Nothing waits for the disk but `flush`, `close`, the future of `promote`, where it is asked for
    `fetch` (`promote=True`) and `store` (the setting `spill="wait"`), and where `trace` records, the call whose turn it is
    to write it, once a second.
    """

    def __init__(self, settings: Settings | None = None, **values: Any):
        """Open the cache. Give a `Settings`, or its fields by name.

        Raises ValueError for a bad setting, and `ssd.DirectoryError` (which names the directory and what to do) when
        the SSD's directory is held by another process, was written by a newer release, or can't be used.
        """
        if settings is not None and not isinstance(settings, Settings):
            raise TypeError(f"settings of type {type(settings).__name__}: pass a Settings, or its fields by name")
        if settings is not None and values:
            raise TypeError(f"settings and {', '.join(values)} were both given: pass one Settings, or its fields")
        self.settings = settings if settings is not None else Settings(**values)
        self.codec: Codec = self.settings.codec if self.settings.codec is not None else TurboQuant()
        self._codec_text = canonical(self.codec.spec())
        allow(*self.settings.allow_classes)
        ram = self.settings.ram_bytes(usable_memory())
        self._recorder = Recorder(self.settings.trace) if self.settings.trace is not None else None
        self._tiers = Tiers(self.settings, ram)
        self._by_model: dict[str, dict[str, Plan]] = {}  # model -> layout -> plan
        self._plans: dict[tuple[str, str], Plan] = {}  # codec, layout -> plan
        self._roots: dict[tuple[str, str, bytes], bytes] = {}
        self._sweep_at = NAMESPACES
        self._pins: dict[tuple[bytes, bytes], list[list[Slot]]] = {}
        self._kernels = turboquant_backends.describe()
        self._told = time.monotonic()  # when the index last heard what was used
        self._closed = False
        self._close_lock = threading.RLock()  # a signal's handler may close what is being closed
        self._pid = os.getpid()
        self._ssd: Ssd | None = None
        if self.settings.ssd_dir is not None and self.settings.ssd != 0:
            try:
                self._open_ssd(ram)
            except BaseException:
                if self._recorder is not None:
                    self._recorder.close()
                raise
        self._promoters = ThreadPoolExecutor(PROMOTERS, "prefixcache-promote")
        self._promoting: set[Future[int]] = set()
        self._pressure = Pressure(self._tiers, self.settings.reserve_bytes(machine_memory()))
        if self.settings.memory_reserve != 0:
            self._pressure.start()
        self._summary: Summary | None = None
        if self.settings.log_every:
            self._summary = Summary(self, self.settings.log_every)
            self._summary.start()
        if self._ssd is not None:
            _open.add(self)

    def _open_ssd(self, ram: int) -> None:
        directory = self.settings.ssd_dir
        assert directory is not None
        queue = self.settings.spill_queue if self.settings.spill_queue != "auto" else max(ram // QUEUE_SHARE, 1)
        self._ssd = Ssd(
            directory, limit=self.settings.ssd_bytes(directory), queue_bytes=queue, readers=self.settings.readers,
            written=self._tiers.written, vanished=self._tiers.vanished,
        )  # fmt: skip
        try:
            self._tiers.open_ssd(self._ssd, filter(None, map(self._home_of, self._ssd.namespaces())))
        except BaseException as error:
            self._ssd.close(0)
            if isinstance(error, (OSError, sqlite3.Error)):
                raise refusal(directory, error) from error
            raise

    # -- namespaces ---------------------------------------------------------------------------------------------------

    def _home_of(self, row: Namespace) -> Home | None:
        """A namespace that the index names. None, with a warning, when this process can't make its caches."""
        try:
            return self._make_home(row)
        except Exception as error:
            log.warning("namespace %s of model %r is out of reach: %s", row.root.hex(), row.model, error)
            return None

    def _make_home(self, row: Namespace) -> Home:
        plan = self._plan(row.model, row.codec, row.layout)
        return Home(row, plan, self._tiers.tree.space(row.root, plan.windows, bool(plan.snapshots)))

    def _plan(self, model: str, codec: str, layout: str) -> Plan:
        plan = self._plans.get((codec, layout))  # one for all models and salts that share them
        if plan is None:
            plan = Plan(json.loads(layout), codec_from_spec(json.loads(codec)))
            plan.check_classes()
            self._plans[codec, layout] = plan
        if codec == self._codec_text:
            self._by_model.setdefault(model, {})[layout] = plan
        return plan

    def _homes(self, model: Any, salt: Any) -> list[Home]:
        """The namespaces of a model and a salt that are known: one for each layout that its caches have had."""
        model, salt = as_model(model), as_salt(salt)
        with self._tiers.lock:
            stated = [(model, self._codec_text, layout) for layout in self._by_model.get(model, ())]
            known = [(one, self._tiers.homes.get(self._root(model, one[2], salt))) for one in stated]
            return [home for one, home in known if home is not None and home.row.stated == one]

    def _root(self, model: str, layout: str, salt: bytes) -> bytes:
        known = self._roots.get((model, layout, salt))
        if known is None:
            known = root_key(model, self.codec.spec(), json.loads(layout), salt)
            if len(self._roots) >= 1024:
                self._roots.clear()
            self._roots[model, layout, salt] = known
        return known

    def _record_root(self, model: str, salt: bytes) -> bytes:
        """What a recording's ids begin from: the same for all layouts, so also before a namespace is known."""
        with self._tiers.lock:
            return self._root(model, "{}", as_salt(salt))

    def _home_for(self, model: str, layout: dict[str, Any], salt: bytes) -> Home:
        """The namespace of a layout, made when it isn't there."""
        text = canonical(layout)
        with self._tiers.lock:
            root = self._root(model, text, salt)
            row = Namespace(root, model, self._codec_text, text, time.time())
            known = self._tiers.homes.get(root)
            if known is not None and known.row.stated != row.stated:  # nobody else could tell, if there is a salt
                log.warning("namespace %s was forged: it is not what model %r makes; deleted", root.hex(), model)
                self._tiers.disown(known)
            if root not in self._tiers.homes:
                if len(self._tiers.homes) >= self._sweep_at:
                    self._tiers.drop_empty()
                    self._sweep_at = max(NAMESPACES, 2 * len(self._tiers.homes))
                self._tiers.homes[root] = self._make_home(row)
            return self._tiers.homes[root]

    def _deepest(
        self, raw: bytes, homes: list[Home], tier: int, limit: int, whole_blocks: bool = False
    ) -> Deepest | None:
        """The namespace that gives most of these tokens; call it under the lock."""
        return deepest(self._tiers.tree, raw, homes, tier, limit, whole_blocks)

    # -- storing and finding ------------------------------------------------------------------------------------------

    def store(
        self,
        tokens: Tokens,
        prompt_cache: list[Any],
        *,
        model: str,
        salt: bytes = b"",
        label: str = "",
        write_back: bool = False,
        since: int = 0,
        state: bool = True,
        whole_blocks: bool = False,
    ) -> Stored:
        """Keep the state of `tokens`: what is not kept already is encoded here, on this thread.

        `prompt_cache` is mlx-lm's list of layer caches after these tokens; it is read, and never kept. When it
        has seen fewer positions than there are tokens, the tokens beyond are left out; when more, what lies beyond
        is. `model` names the weights, `salt` separates tenants. The codes of a `TurboQuantKVCache` are kept as they are;
        it shares blocks with plain caches of the model. The rows of whole blocks are coded, those of an incomplete last one
        are kept as they are. Under `label`, one of a few words of yours, `stats().labels` counts what this call adds.

        With `write_back` the rows of whole blocks in `prompt_cache` become what a fetch would give, from the block of token
        `since` on (those before, which a fetch gave, are left alone). Call it so after each chunk of a prefill, which must
        end where a block ends: then what is generated on is what is stored, and the same prompt asked again is answered the
        same, with lossy codecs too.
        Without it `prompt_cache` is not changed. `state=False` keeps no recurrent state: for chunks that nobody will ask for.
        With `whole_blocks` an incomplete last block is left out, for where a prompt goes on nobody would hit it: see `fetch`.

        Raises TypeError or ValueError for bad tokens, model or salt, and `CacheError` (a ValueError) for a prompt cache
        that can't be kept: a batch, a class that isn't known, an attribute that isn't plain data, codes of another codec.
        """
        self._check_open()
        began = time.monotonic()
        ids, model, salt = as_tokens(tokens), as_model(model), as_salt(salt)
        since = _whole(since, "store: since", "tokens")
        if not isinstance(label, str):
            raise TypeError(f"label={label!r}: give a word")
        if not len(ids):
            raise ValueError("tokens are empty: there is nothing to store")
        reading = read(prompt_cache)
        limit = min(len(ids), reading.positions) if reading.positions is not None else len(ids)
        counted = any(leaf.positions for leaf in reading.leaves)
        if not counted and not any(mx.array in map(type, _flat(leaf.state)) for leaf in reading.leaves):
            return Stored(0, 0, 0, False, ())  # nothing has gone through this cache yet
        home = self._home_for(model, reading.layout, salt)
        if whole_blocks and not (home.plan.snapshots or home.plan.lossless):
            limit -= limit % BLOCK
            if not limit:
                return Stored(0, 0, 0, False, tuple(home.plan.raw))
        agreed = reading.agreed and reading.positions in (None, limit)
        evaluate(reading.leaves)
        raw = ids[:limit].tobytes()
        if self._recorder is not None and (state or not write_back):
            self._recorder.store(self._record_root(model, salt), raw)
        back = Decoded(since) if write_back and not home.plan.lossless else None
        with_snapshot = bool(home.plan.snapshots) and agreed and state
        store = Store(self._tiers, home, raw, reading.leaves, with_snapshot, sys.intern(label), back)
        stored = Stored(*store.run(), tuple(home.plan.raw))
        self._tiers.counters.durations.store.observe(time.monotonic() - began)
        return stored

    def match(
        self, tokens: Tokens, *, model: str, salt: bytes = b"", leave: int = 0, whole_blocks: bool = False
    ) -> Match:
        """How deep a `fetch` with these arguments can hit `tokens`. No I/O, no MLX, nothing changes."""
        self._check_open()
        _check_leave(leave)
        raw, homes, tree = as_tokens(tokens).tobytes(), self._homes(model, salt), self._tiers.tree
        limit, ram, ssd = len(raw) // TOKEN_BYTES - leave, 0, 0
        with self._tiers.lock:
            for home in homes if limit > 0 else ():
                walk = tree.walk(home.space, raw)
                ram = max(ram, boundary(tree, home, walk, RAM, limit, whole_blocks))
                if self._ssd is not None:
                    ssd = max(ssd, boundary(tree, home, walk, SSD, limit, whole_blocks))
        return Match(ram, max(ram, ssd))

    def fetch(
        self,
        tokens: Tokens,
        *,
        model: str,
        salt: bytes = b"",
        leave: int = 1,
        compressed: bool = False,
        room: int | None = None,
        whole_blocks: bool = False,
        promote: bool = False,
    ) -> tuple[list[Any] | None, Any]:
        """The deepest prompt cache that RAM has for `tokens`, and the tokens that are still to be computed.

        Returns (prompt_cache, rest): a new list of layer caches of the classes that were stored, the caller's own, and
        `tokens[depth:]`, of at least `leave` tokens. (None, tokens) on a miss.

        With `promote` the caller waits for what only the SSD has, and on a CPU blocks of layers that keep every token are
        decoded as they are read; without, no file is read.

        With `whole_blocks` a hit ends where a whole block does: at most 255 tokens more are computed, always on the same
        rows, whatever was stored since, so that the answer is the same again: see `store(write_back=)`. A prompt that was
        stored as it is asked for, but for `leave` tokens, is hit at its end. Exact codecs and recurrent models are hit as
        without.

        The layers have room for `room` tokens more and some beside, before they must grow; None: for the rest.

        With `compressed`, layers of KVCache whose rows are TurboQuant's codes come as `TurboQuantKVCache`, and a model whose
        attention is mlx-lm's own goes on from them. It takes the codes as they are where they have at most 4 sets of levels,
        as those have that a live cache stored; what plain caches stored has one in each block, and is decoded and coded anew.
        What such a cache holds can be stored again as it is.
        """
        ids, counters = as_tokens(tokens), self._tiers.counters
        _check_leave(leave)
        room = room if room is None else _whole(room, "fetch: room", "tokens", LONGEST)
        ahead = None
        if promote:
            coming = self.promote(ids, model=model, salt=salt, leave=leave, whole_blocks=whole_blocks)
            if not coming.done() and not compressed:
                ahead = self._read_ahead(coming, ids, model, salt, leave, whole_blocks, room)
            try:
                coming.result()
            except concurrent.futures.CancelledError:
                self._check_open()
                raise
        began = time.monotonic()
        found = self._find(ids, model, salt, leave, whole_blocks)
        if found is None:
            counters.durations.fetch_miss.observe(time.monotonic() - began)
            return None, tokens
        prompt, pinned = found
        try:
            room = len(ids) - prompt.tokens if room is None else room
            made = prompt.live(room) if compressed else prompt.dequantize(room, ahead)
            mx.eval([_flat(vars(layer)) for layer in made])
        finally:
            self._tiers.unpin(pinned)
        counters.durations.fetch_hit.observe(time.monotonic() - began)
        return made, tokens[prompt.tokens :]

    def _read_ahead(
        self, coming: Future[int], ids: np.ndarray, model: str, salt: bytes, leave: int, whole_blocks: bool,
        room: int | None,
    ) -> ReadAhead | None:  # fmt: skip
        """What comes is decoded block by block. What will be hit is a guess until all is there; None where it can't help."""
        raw, homes = ids.tobytes(), self._homes(model, salt)
        with self._tiers.lock:
            best = self._deepest(raw, homes, SSD, len(ids) - leave, whole_blocks)
        if best is None or best.depth <= 0 or not ReadAhead.serves(best.home.plan):
            return None
        depth, home, walk = best
        ahead = ReadAhead(home.plan, depth, len(ids) - depth if room is None else room)
        for node in walk.nodes:
            if node.start >= depth or (image := self._arrived(node, coming)) is None:
                break
            ahead.add(node.start, image)
        return ahead

    def _arrived(self, node: Node, coming: Future[int]) -> Image | None:
        """A block's rows, once they are in RAM; None when they don't come."""
        with self._tiers.lock:
            while node.rows is not None and node.rows.image is None and not coming.done():
                self._tiers.moved.wait(0.1)
            return node.rows.image if node.rows is not None else None

    def lookup(self, tokens: Tokens, *, model: str, salt: bytes = b"", leave: int = 0) -> StoredPrompt | None:
        """What RAM has for `tokens`, still encoded: wrappers to copy, trim and dequantize later. None on a miss.

        It holds its images while it lives, and what the cache evicts meanwhile is then the holder's memory.
        """
        found = self._find(as_tokens(tokens), model, salt, leave)
        if found is None:
            return None
        self._tiers.unpin(found[1])
        return found[0]

    def _find(
        self, ids: np.ndarray, model: Any, salt: Any, leave: int, whole_blocks: bool = False
    ) -> tuple[StoredPrompt, list[Slot]] | None:
        self._check_open()
        _check_leave(leave)
        homes, raw, tree = self._homes(model, salt), ids.tobytes(), self._tiers.tree
        if self._recorder is not None:
            self._recorder.fetch(self._record_root(model, salt), raw)
        with self._tiers.lock:
            found = hit(self._tiers, raw, homes, len(ids) - leave, len(ids), whole_blocks)
            if found is None:
                return None
            depth, home, walk, pinned = found
            blocks = [
                Block(n.start, n.rows.image, tuple(
                    Held(slot.image, tuple(mask & mask_of(0, shared) for mask in slot.mask))
                    for slot, shared in tree.windows(n, depth, RAM).items()
                ))
                for n in walk.nodes
                if n.start < depth and n.rows is not None
            ]  # fmt: skip
            state: Image | None = next((s.image for s in pinned if s.kind == "snapshot"), None)
            if len(tree.touched) > 8192 or time.monotonic() > self._told + TELL:
                self._told = time.monotonic()
                self._tiers.persist_recency()
        try:
            return StoredPrompt(home.plan, depth, blocks, state), pinned
        except BaseException:
            self._tiers.unpin(pinned)
            raise

    # -- SSD to RAM ---------------------------------------------------------------------------------------------------

    def promote(
        self, tokens: Tokens, *, model: str, salt: bytes = b"", leave: int = 0, whole_blocks: bool = False
    ) -> Future[int]:
        """Bring what the SSD has for `tokens` into RAM. Returns at once; the future's result is how many of them RAM has
        then.

        `leave` and `whole_blocks` are those of the `fetch` to come: a sliding window needs other rows where a hit ends
        earlier. When not all of it fits, the leading part comes. A file that went bad is set aside, and the depth ends before
        it.
        """
        self._check_open()
        _check_leave(leave)
        ids, tree = as_tokens(tokens), self._tiers.tree
        raw, homes, limit = ids.tobytes(), self._homes(model, salt), max(len(ids) - leave, 0)
        with self._tiers.lock:
            best = self._deepest(raw, homes, SSD, limit, whole_blocks)
            depth = best.depth if best is not None else 0
            if (
                best is None
                or depth == 0
                or self._ssd is None
                or depth == boundary(tree, best.home, best.walk, RAM, limit, whole_blocks)
            ):
                done: Future[int] = Future()
                done.set_result(depth)
                return done
        try:
            promoting = self._promoters.submit(promote, self._tiers, self._ssd, best.home, raw, limit, whole_blocks)
        except RuntimeError:
            self._check_open()  # closed meanwhile
            raise
        self._promoting.add(promoting)
        promoting.add_done_callback(self._promoting.discard)
        return promoting

    async def promote_async(
        self, tokens: Tokens, *, model: str, salt: bytes = b"", leave: int = 0, whole_blocks: bool = False
    ) -> int:
        """`promote`, awaited. Cancelling the wait does not stop the reads that have begun."""
        coming = self.promote(tokens, model=model, salt=salt, leave=leave, whole_blocks=whole_blocks)
        return await asyncio.shield(asyncio.wrap_future(coming))

    def unread(
        self, tokens: Tokens, *, model: str, salt: bytes = b"", leave: int = 0, whole_blocks: bool = False
    ) -> int:
        """The bytes that `promote` would read for these tokens now. No I/O, no MLX, nothing changes."""
        self._check_open()
        _check_leave(leave)
        raw, homes = as_tokens(tokens).tobytes(), self._homes(model, salt)
        with self._tiers.lock:
            best = self._deepest(raw, homes, SSD, max(len(raw) // TOKEN_BYTES - leave, 0), whole_blocks)
            if best is None:
                return 0
            return sum(slot.nbytes for slot in self._tiers.tree.serving(best[2], best[0]) if slot.image is None)

    # -- keeping and letting go ---------------------------------------------------------------------------------------

    def pin(self, tokens: Tokens, *, model: str, salt: bytes = b"") -> int:
        """Keep what is stored of `tokens` from leaving the tier it is in. Returns how many tokens that are; counts."""
        self._check_open()
        raw, homes = as_tokens(tokens).tobytes(), self._homes(model, salt)
        with self._tiers.lock:
            best = self._deepest(raw, homes, SSD, len(raw) // TOKEN_BYTES)
            if best is None or best[0] == 0:
                return 0
            depth, home, walk = best
            held = self._tiers.tree.pin(self._tiers.tree.serving(walk, depth))
            self._pins.setdefault((home.row.root, raw), []).append(held)
            return depth

    def unpin(self, tokens: Tokens, *, model: str, salt: bytes = b"") -> bool:
        """Undo one `pin` of the same tokens. False when there is none."""
        self._check_open()
        raw, homes = as_tokens(tokens).tobytes(), self._homes(model, salt)
        with self._tiers.lock:
            for home in homes:
                if held := self._pins.get((home.row.root, raw)):
                    self._tiers.unpin(held.pop())
                    if not held:
                        del self._pins[home.row.root, raw]
                    return True
        return False

    def remove(self, tokens: Tokens, *, model: str, salt: bytes = b"") -> int:
        """Forget this prompt, in every tier: its blocks that no other stored prompt shares. Returns their bytes.

        Blocks that a longer prompt goes on from stay, and so do those before them.
        """
        self._check_open()
        raw, homes, freed = as_tokens(tokens).tobytes(), self._homes(model, salt), 0
        with self._tiers.lock:
            for home in homes:
                walk = self._tiers.tree.walk(home.space, raw)
                boundary = walk.depth
                if boundary * TOKEN_BYTES != len(raw) or not walk.nodes:
                    continue
                freed += self._remove(walk, boundary)
        return freed

    def _remove(self, walk: Walk, boundary: int) -> int:
        tree, freed = self._tiers.tree, 0
        node = walk.nodes[-1]
        own = [s for s in tree.serving(walk, boundary) if s.kind == "snapshot"]
        if (
            walk.partial is not None or node.kids
        ):  # a longer prompt goes on from here: only the boundary's state is its own
            return sum(self._tiers.discard(slot) for slot in own)
        freed += sum(self._tiers.discard(slot) for slot in own)
        while node.parent is not None and not node.kids and not node.snapshots:
            parent = node.parent
            if any(parent.snapshots_of(node.tokens)):
                break  # a boundary that is stored needs its rows
            for slot in (*node.windows, node.rows):
                if slot is not None:
                    freed += self._tiers.discard(slot)
            node = parent
        return freed

    def clear(self) -> None:
        """Forget everything, in RAM and on SSD, pins included."""
        self._check_open()
        with self._tiers.lock:
            for held in (one for pins in self._pins.values() for one in pins):
                self._tiers.unpin(held)
            self._pins.clear()
            self._tiers.clear()
        give_back()

    def trim_to(self, nbytes: int, *, wait: float | None = None) -> int:
        """Let the coldest leave RAM (to the SSD, where there is one) until it holds at most `nbytes`. Returns bytes held:
        more, when the SSD did not take what must leave within `wait` seconds (the setting `spill_wait`, if None).
        """
        self._check_open()
        wait = _seconds(wait, "trim_to: wait")
        limit, before = _whole(nbytes, "trim_to", "bytes"), self._tiers.budget.held().total
        if before <= limit:
            return before
        held = self._tiers.trim(limit, self.settings.spill_wait if wait is None else wait)
        give_back()
        return held

    def resize(self, *, ram: Any = None, ssd: Any = None, wait: float | None = None) -> None:
        """New limits while it runs, as in `Settings` ("8GB", or a number of bytes); None leaves one as it is.

        What must leave for a lower RAM budget goes to the SSD, where there is one; what that has not taken within `wait`
        seconds (the setting `spill_wait`, if None) is lost, pinned images excepted. Until the last of it is gone,
        `stats().ram_limit` is what is held. For a lower SSD limit the coldest files are deleted; `flush()` waits for that.

        Raises ValueError for what is no size, for 0, and for a tier that the cache was opened without.
        """
        self._check_open()
        wait = _seconds(wait, "resize: wait")
        sizes = {name: parse_size(value, name) for name, value in (("ram", ram), ("ssd", ssd)) if value is not None}
        for name, nbytes in sizes.items():
            if not nbytes:
                raise ValueError(f"{name}=0: a tier can't be taken away while the cache runs; open another without it")
        if "ssd" in sizes and self._ssd is None:
            raise ValueError(f"ssd={ssd!r}: this cache was opened without an SSD; open another with ssd_dir")
        if "ram" in sizes and self.settings.ram == 0:
            raise ValueError(f"ram={ram!r}: this cache was opened with ram=0, the SSD only; open another")
        if "ram" in sizes:
            if self._ssd is not None and self.settings.spill_queue == "auto":
                self._ssd.resize_queue(max(sizes["ram"] // QUEUE_SHARE, 1))
            self._tiers.resize(sizes["ram"], self.settings.spill_wait if wait is None else wait, asked=True)
            give_back()
        if "ssd" in sizes:
            self._tiers.resize_ssd(sizes["ssd"])

    def keep(self, sequences: int) -> int:
        """Forget the coldest sequences, in every tier, until at most so many are left. Returns how many are.

        A sequence is a stored prompt that no other stored prompt goes on from.
        """
        self._check_open()
        return self._tiers.keep(_whole(sequences, "keep", "sequences"))

    def reserve(self, nbytes: int) -> Reservation | None:
        """Set RAM of the budget aside for something of the caller's, evicting the coldest for it; it counts as held until
        `release()`, or the end of a `with` block. None when the room can't be had.
        """
        self._check_open()
        wait = self.settings.spill_wait if self.settings.spill == "wait" else 0.0
        return self._tiers.reserve(_whole(nbytes, "reserve", "bytes"), wait)

    # -- the cache itself ---------------------------------------------------------------------------------------------

    def stats(self) -> Stats:
        """Where everything is now, and what has happened since the cache was opened."""
        self._check_process()
        tiers = self._tiers
        with tiers.lock:
            held = tiers.budget.held()
            return Stats(
                ram_limit=tiers.budget.bound,
                ram_configured=tiers.full,
                ram_setting=str(self.settings.ram),
                ram_held=held.total,
                ram_images=held.images,
                ram_queued=held.queued,
                ram_nodes=held.nodes,
                ram_reserved=held.reserved,
                ram_peak=tiers.budget.peak,
                namespaces=len(tiers.homes),
                blocks=tiers.tree.nodes,
                sequences=tiers.tree.leaves.total(),
                labels={
                    label: Labelled(tiers.tree.leaves[label], tiers.tree.ram_by_label[label])
                    for label in sorted({*+tiers.tree.leaves, *+tiers.tree.ram_by_label})
                },
                images_in_ram=len(tiers.tree.order[RAM]),
                images_on_ssd=tiers.tree.on_ssd,
                pinned=tiers.tree.pinned,
                codec=str(self.codec),
                kernels=self._kernels,
                counters=tiers.counters.copy(denied=tiers.counters.denied + tiers.budget.denied),
                seconds=tiers.counters.durations.read(),
                ssd=self._ssd.stats() if self._ssd is not None else None,
            )

    def check_integrity(self) -> None:
        """AssertionError when an invariant of the tree, the budget or the order of leaving does not hold."""
        with self._tiers.lock:
            self._tiers.tree.check_integrity()

    def flush(self, timeout: float | None = None) -> bool:
        """Make what RAM holds durable, as far as the SSD's limit has room. False when that did not end within `timeout`
        seconds, or when the disk failed meanwhile.
        """
        self._check_open()
        timeout = _seconds(timeout, "flush: timeout")
        self._tiers.persist_recency()
        return self._tiers.drain(timeout if timeout is not None else self.settings.close_timeout)

    def close(self) -> None:
        """End it: write what RAM still holds (setting `spill_on_close`), let go of the directory. May be called
        again.

        A cache with a directory that is open when the interpreter ends is closed then. An exception that interrupts this
        (KeyboardInterrupt) cuts the writing short: what is being written becomes durable, the directory is let go of.
        """
        if self._pid != os.getpid():
            return
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
            end, whole = time.monotonic() + self.settings.close_timeout, False
            try:
                self._pressure.stop()
                if self._summary is not None:
                    self._summary.stop()
                self._promoters.shutdown(wait=False, cancel_futures=True)
                concurrent.futures.wait(list(self._promoting), _left(end))
                if self._ssd is not None:
                    self._write_out(_left(end))
                whole = True
            finally:
                if self._ssd is not None:
                    self._ssd.close(_left(end) if whole else min(HURRY, _left(end)))
                _open.discard(self)
                with self._tiers.lock:
                    self._tiers.counters.denied += self._tiers.budget.denied  # of a budget that ends here
                    self._tiers.release()
                if self._recorder is not None:
                    self._recorder.close()
                give_back()

    def _write_out(self, timeout: float) -> None:
        self._tiers.persist_recency()
        if self.settings.spill_on_close and not self._tiers.drain(timeout):
            log.warning("not all of RAM was written within close_timeout=%s s", self.settings.close_timeout)

    def __enter__(self) -> PrefixCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_process(self) -> None:
        if self._pid != os.getpid():  # its locks may be held by threads that the fork left behind
            raise RuntimeError(
                f"this PrefixCache is of process {self._pid}, and this is a fork of it: open another here"
            )

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise RuntimeError("this PrefixCache is closed: open another")


@atexit.register
def _close_all() -> None:
    """Those that nobody closed. Threads can't be started any more; those of the SSD's writer still run."""
    for cache in list(_open):
        try:
            cache.close()
        except Exception:
            log.exception("ssd_dir=%r: not closed cleanly at the end of the program", str(cache.settings.ssd_dir))


def _seconds(value: Any, what: str) -> float | None:
    """A time to wait, None for the setting's. ValueError for what is none; a year at most, which threads can wait for."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ValueError(f"{what}={value!r}: give seconds, 0 or more")
    return float(min(value, YEAR))


def _check_leave(leave: Any) -> None:
    if isinstance(leave, bool) or not isinstance(leave, int) or leave < 0:
        raise ValueError(f"leave={leave!r}: give the number of tokens to leave, 0 or more")


def _left(end: float) -> float:
    return max(end - time.monotonic(), 0.0)


def _whole(number: Any, call: str, what: str, most: int | None = None) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError(f"{call}({number!r}): give a number of {what}, 0 or more")
    if most is not None and number > most:
        raise ValueError(f"{call}({number if number < 1 << 63 else '...'}): give at most {most} {what}")
    return number


def usable_memory() -> int:
    """Bytes that "auto" takes a share of: on a Mac Metal's recommended working set, else the machine's memory."""
    if mx.metal.is_available():
        return int(mx.metal.device_info()["max_recommended_working_set_size"])
    return machine_memory()


def _flat(value: Any) -> list[Any]:
    """All leaves of nested attributes, the arrays of nested caches included."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [leaf for v in value for leaf in _flat(v)]
    if isinstance(value, mx.array):
        return [value]
    return _flat(vars(value)) if hasattr(value, "update_and_fetch") else []
