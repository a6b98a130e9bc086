"""The remote tier in the graph of blocks: which images leave for it, and where those of other machines land.

It is no `TierInGraph`. What is there is not known here: other machines write, and the engine evicts. So no slot has a bit
for it, lookups know RAM and SSD only, and nothing is deleted from it. A promotion asks it for what is missing here,
and what comes lands in RAM, as an image from the SSD does, after the same checks.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from itertools import islice
from typing import Protocol

from prefixcache.blocks.lookup import image_depth, required_images
from prefixcache.blocks.node import RAM, Slot, Walk
from prefixcache.image_format import SNAPSHOT
from prefixcache.keys import BLOCK, TOKEN_BYTES
from prefixcache.remote.client import Client
from prefixcache.remote.engine import EngineError
from prefixcache.remote.promotion import MIN_TIMEOUT, Pace, RemotePromotion, gap_name, question_timeout
from prefixcache.remote.sealing import layout_id, layouts_folder
from prefixcache.remote.search import Gap, whole_mask
from prefixcache.remote.stats import RemoteStats
from prefixcache.remote.threads import DaemonThreads
from prefixcache.remote.uploads import Uploads, name_of
from prefixcache.tiers.prompt import Prompt
from prefixcache.tiers.state import Namespace
from prefixcache.tiers.storage import Storage

log = logging.getLogger("prefixcache")

PROMOTERS = 32  # prompts that are read at once
# `Slot.remote_at` is when the engine was known to have the image, by time.monotonic(). 0: never, or
TO_BE_SENT = -1.0  # it is sent once it is durable
BELIEVED = 3600.0  # seconds that the engine is believed to have an image; then it is asked again
LEARN_AGAIN = 30.0  # seconds after which a model's layouts are asked for again
LAYOUTS = 8  # of a model, that are learnt
LAYOUT_BYTES = 1 << 18
LAYOUT_ID = re.compile(r"[0-9a-f]{32}")


class Layouts(Protocol):
    """How the layouts of models are told and learnt: a machine that has not stored anything of a model has no namespace
    yet.
    """

    def stated(self, model: str) -> tuple[str, str]:
        """Return a model, and its codec as JSON."""

    def layouts_of(self, model: str) -> Sequence[str]:
        """Return the layouts (JSON) of this model that are known here."""

    def learn(self, model: str, layout: str, salt: bytes) -> None:
        """Learn a layout (JSON) of this model that another machine has. Raises ValueError for one that can't be made here."""


class RemoteTier:
    """Called on any thread; takes the storage's lock where it needs it. `offer_*` and `refuse` are called under it."""

    def __init__(self, storage: Storage, client: Client, layouts: Layouts, admission: str, timeout: float):
        """`admission`: "second", "always" or "never". `timeout`: seconds that a prompt may take at most."""
        self._storage, self._client, self._layouts = storage, client, layouts
        self._admission, self._timeout = admission, timeout
        self._threads = DaemonThreads(PROMOTERS, "prefixcache-remote-prompt")
        # By key, each block that is being read or asked for; the storage's lock guards it.
        self._under_way: dict[bytes, threading.Event] = {}
        self._unusable: set[str] = set()  # ids of layouts that can't be made here; of few models
        self._uploads = Uploads(storage, client, admission != "never")

    # -- up -----------------------------------------------------------------------------------------------------------

    def offer_stored(self, slot: Slot) -> None:
        """Offer an image that was stored here. The rows that end where a snapshot does are of use with it only."""
        if self._admission == "always":
            self._offer(slot)
            tail = self._storage.graph.child(slot.node, slot.suffix) if slot.kind == SNAPSHOT else None
            if tail is not None and tail.rows is not None:
                self._offer(tail.rows)

    def offer_used(self, walk: Walk, depth: int, required: Sequence[Slot]) -> None:
        """Offer the `required` images, tail first, of a hit at `depth`. Where another machine's hit will end with a block, it
        needs that boundary's windows.
        """
        if self._admission == "never":
            return
        if walk.tree.windows and depth % BLOCK:
            required = [*required_images(walk, depth - depth % BLOCK, RAM), *required]
        for slot in reversed(required):
            self._offer(slot)

    def offer_written(self, slot: Slot) -> None:
        if self._admission == "always" or slot.remote_at == TO_BE_SENT:
            self._offer(slot)

    def _offer(self, slot: Slot) -> None:
        """Queue an image to be sent. What is worth sending is worth keeping: it goes to the SSD first, where one takes
        it.
        """
        below = self._storage.lower.spill_tier
        if self._has(slot) or not self._uploads.takes(slot):
            return
        if below is None or slot.tiers > 1 << RAM:
            self._uploads.add(slot)
            return
        slot.remote_at = TO_BE_SENT  # `offer_written` hears when it is durable
        if not slot.pending and not below.spill(slot):
            self._uploads.add(slot)

    def _has(self, slot: Slot) -> bool:
        """Tell whether the engine is believed to have an image. After a while it is asked again: an engine that evicts by use
        takes that for a use, and keeps what machines hit in their own RAM.
        """
        known = slot.remote_at
        return known > 0 and known >= self._client.calls.believed_since and time.monotonic() < known + BELIEVED

    # -- down ---------------------------------------------------------------------------------------------------------

    def has_something_to_ask(self, prompt: Prompt, leave: int) -> bool:
        """Tell whether whole blocks are missing here, and the engine may have them. Makes the namespaces of a new tenant
        whose model's layouts are known.
        """
        if not self._client.calls.ready or (prompt.salt and not self._client.seal.is_secret):
            return False
        limit = max(len(prompt) - leave, 0)
        with self._storage.lock:
            gaps = [self._gap(prompt, namespace, limit) for namespace in self._namespaces(prompt)]
        if not gaps:
            return limit >= BLOCK and self._layouts_folder(prompt) not in self._client.missing
        return any(map(self._is_worth_asking, gaps))

    def promote(self, prompt: Prompt, leave: int, prefill_rate: float | None) -> Future[int] | None:
        """Begin to read what other machines have of a prompt into RAM: the depth there at its end. None where there is
        nothing to ask. `prefill_rate`: tokens that are computed a second: more time than that saves is not spent.
        """
        if not self.has_something_to_ask(prompt, leave):
            return None
        try:
            pace = Pace(time.monotonic(), self._timeout, prefill_rate)
            return self._threads.submit(self._promote, prompt, leave, pace)
        except RuntimeError:  # closed
            return None

    def _promote(self, prompt: Prompt, leave: int, pace: Pace) -> int:
        """Read what all namespaces of a prompt lack, and return the depth in RAM. The wait for a thread counts as time."""
        limit = max(len(prompt) - leave, 0)
        try:
            if self._client.calls.ready and time.monotonic() < max(pace.until(limit), pace.began + MIN_TIMEOUT):
                for namespace in self._namespaces(prompt) or self._learn(prompt, limit, pace):
                    self._promote_in(prompt, namespace, limit, pace)
        except EngineError:
            pass  # it is counted; the request goes on without
        with self._storage.lock:
            deepest = prompt.deepest(RAM, leave)
            if deepest is None:
                return 0
            self._storage.graph.recency.touch(required_images(deepest.walk, deepest.depth, RAM))
            return deepest.depth

    def _promote_in(self, prompt: Prompt, namespace: Namespace, limit: int, pace: Pace) -> None:
        """Read what one namespace lacks. What another thread is reading is waited for, and not read twice."""
        while self._client.calls.ready:
            with self._storage.lock:
                gap = self._gap(prompt, namespace, limit)
                if not self._is_worth_asking(gap):
                    return
                lacking = gap.keys[gap.known :] or gap.keys[-1:]
                other = self._under_way.get(lacking[0])
                if other is None:
                    ended = threading.Event()
                    claimed = [key for key in lacking if key not in self._under_way]
                    self._under_way.update(dict.fromkeys(claimed, ended))
            if other is not None:
                if not other.wait(max(pace.until(gap.tokens) - time.monotonic(), 0.0)):
                    return
                continue
            try:
                measure = RemotePromotion(self._storage, self._client, namespace, gap, pace).run()
                if measure is not None:
                    with suppress(RuntimeError):  # closed
                        self._threads.submit(measure)
                return
            finally:
                with self._storage.lock:
                    for key in claimed:
                        del self._under_way[key]
                ended.set()

    def _is_worth_asking(self, gap: Gap) -> bool:
        """Tell whether a whole block is missing, and was not missing in the engine just now."""
        if gap.tokens < BLOCK:
            return False
        first = gap.known if not (gap.windows or gap.snapshots) else gap.boundary // BLOCK
        return first < len(gap.keys) and gap_name(self._client, gap) not in self._client.missing

    def _gap(self, prompt: Prompt, namespace: Namespace, limit: int) -> Gap:
        walk, graph = prompt.walk(namespace), self._storage.graph
        nodes = []
        for node in walk.path[: limit // BLOCK]:
            if node.rows is None or not node.is_whole:
                break
            nodes.append(node)
        tokens = prompt.token_bytes[: limit * TOKEN_BYTES]
        windows = namespace.tree.windows

        def has_window(block: int) -> bool:
            if block >= len(nodes):
                return False
            rows = [0] * len(windows)
            for slot in nodes[block].windows:
                rows = [a | b for a, b in zip(rows, slot.mask, strict=True)]
            return all(
                wanted & ~here == 0 for wanted, here in zip(whole_mask(windows, block * BLOCK), rows, strict=True)
            )

        here = image_depth(walk, graph.last, limit)
        keys = prompt.keys(namespace)[: limit // BLOCK] if limit - here >= BLOCK else ()  # else nothing is asked
        return Gap(namespace.row.root, tokens, keys, len(nodes), here, windows, namespace.tree.snapshots, has_window)

    def _namespaces(self, prompt: Prompt) -> Sequence[Namespace]:
        """Return the prompt's namespaces of the codec that the model is stored with; for a new tenant they are made, where
        the model's layouts are known.
        """
        known = self._known(prompt)
        layouts = () if known else self._layouts.layouts_of(prompt.model)
        for layout in layouts:
            self._layouts.learn(prompt.model, layout, prompt.salt)
        return self._known(prompt) if layouts else known

    def _known(self, prompt: Prompt) -> Sequence[Namespace]:
        stated = self._layouts.stated(prompt.model)
        return [namespace for namespace in prompt.namespaces() if namespace.row.stated[:2] == stated]

    def _learn(self, prompt: Prompt, limit: int, pace: Pace) -> Sequence[Namespace]:
        """Return the namespaces of layouts that other machines have told, if they come in time; `limit` tokens can be
        gained by it. Who comes meanwhile asks, too.
        """
        client, folder = self._client, self._layouts_folder(prompt)
        if folder in client.missing:
            return ()
        try:
            until = max(pace.until(limit), pace.began + MIN_TIMEOUT)
            gain = min(pace.timeout, pace.gain(limit))
            timeout = question_timeout(client, gain, pace.shortest_wait(limit))
            return self._learn_from(folder, prompt, timeout, until)
        finally:
            client.missing.add(folder, LEARN_AGAIN)

    def _layouts_folder(self, prompt: Prompt) -> str:
        return layouts_folder(self._client.seal, *self._layouts.stated(prompt.model))

    def _learn_from(self, folder: str, prompt: Prompt, timeout: float, until: float) -> Sequence[Namespace]:
        client, began = self._client, time.monotonic()
        until = min(began + 2 * timeout, until)  # for the list, and for all layouts
        (ids,) = client.ids_under([folder], min(timeout, until - began))
        names = (f"{folder}/{id}" for id in ids if LAYOUT_ID.fullmatch(id) and id not in self._unusable)
        usable = islice((name for name in names if name not in client.missing), LAYOUTS)
        for name, future in [(name, client.calls.read(self._read_layout, name)) for name in usable]:
            text = client.calls.wait(future, max(until - time.monotonic(), 0.0))
            if text is not None:
                self._learn_one(name, text, prompt)
        return self._known(prompt)

    def _read_layout(self, name: str) -> bytes | None:
        """Read a layout, on a thread of the client."""
        with ExitStack() as reserved:

            def reserve_room(nbytes: int) -> bool:
                reservation = self._storage.ram.reserve(2 * nbytes, drop=False) if nbytes <= LAYOUT_BYTES else None
                if reservation is not None:
                    reserved.enter_context(reservation)
                return reservation is not None

            data = self._client.read(name, None, reserve_room)
            return data.tobytes() if data is not None else None

    def _learn_one(self, name: str, text: bytes, prompt: Prompt) -> None:
        client, id = self._client, name.rpartition("/")[2]
        if layout_id(client.seal, text) != id:
            return client.refuse(name, "it is not the layout that its name says")
        try:
            layout = text.decode()
            self._layouts.learn(prompt.model, layout, prompt.salt)
        except ValueError as error:  # its text may quote the layout
            self._unusable.add(id)
            reason = type(error.__cause__ or error).__name__
            log.warning(
                "remote %s: a layout of model %r can't be made here: %s", client.engine.label, prompt.model, reason
            )

    # -- the tier itself ----------------------------------------------------------------------------------------------

    def refuse(self, slot: Slot) -> None:
        if slot.remote_at > 0 and slot.node.tree is not None:
            self._client.refuse(name_of(self._client.seal, slot), "it can't be decoded")

    def stats(self) -> RemoteStats:
        return self._client.stats(self._uploads.queued)

    def close(self, timeout: float) -> None:
        """Send what waits, for at most so many seconds while the engine takes it; then end."""
        self._threads.close()
        self._uploads.close(timeout)
        self._client.close()
