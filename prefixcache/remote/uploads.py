"""How images leave for the remote tier; which ones, `RemoteTier` decides. A queue of addresses, and the threads that send
images behind everything else.

The queue holds no image. When its turn comes, an image is pinned where it stands in RAM, and RAM is reserved for its sealed
form; what has left RAM by then is dropped: its next use offers it again.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress

import numpy as np

from prefixcache.blocks.node import Slot
from prefixcache.image_format import ROWS, SNAPSHOT, WINDOW
from prefixcache.keys import root_key
from prefixcache.remote.breaker import FAILURES
from prefixcache.remote.client import Client
from prefixcache.remote.engine import EngineError
from prefixcache.remote.sealing import Seal, image_name, layout_id, layouts_folder
from prefixcache.remote.search import whole_mask
from prefixcache.ssd.entries import Address, NamespaceRow
from prefixcache.tiers.storage import Storage

log = logging.getLogger("prefixcache")

UPLOADERS = 2  # threads that send
BATCH = 8  # images that the engine is asked about at once
QUEUED = 8192  # addresses that may wait
SALTS = 4096  # namespaces of which it is remembered whether they have a salt
PAUSE = 0.5  # seconds until a probe finds RAM again


class Uploads:
    """`_wake`'s lock guards the queue; it nests in the storage's."""

    def __init__(self, storage: Storage, client: Client, writes: bool):
        """`writes`: whether anything may be sent at all."""
        self._storage, self._client, self._writes = storage, client, writes
        self._wake = threading.Condition()
        self._waiting: dict[Address, None] = {}  # in order
        self._sending = 0
        self._closing = False
        self._salted: dict[bytes, bool] = {}  # by root key
        self._published: set[str] = set()  # names of layouts that the engine has had; of few models
        self._threads = [
            threading.Thread(target=self._run, args=(n == 0,), name="prefixcache-remote-upload", daemon=True)
            for n in range(UPLOADERS if writes else 1)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def queued(self) -> int:
        """Return how many images wait or are being sent."""
        with self._wake:
            return len(self._waiting) + self._sending

    def takes(self, slot: Slot) -> bool:
        """Tell whether an image is one that others can look for, and may leave. Called under the storage's lock."""
        node = slot.node
        if node.tree is None or self._may_not_leave(node.tree.root.key):
            return False
        if slot.kind == WINDOW:
            return node.is_whole and slot.mask == whole_mask(node.tree.windows, node.start)
        if slot.kind == ROWS and not node.is_whole:  # of use where a snapshot ends with it
            return node.parent is not None and node.tokens in node.parent.snapshots
        return True

    def add(self, slot: Slot) -> None:
        """Queue an image. Dropped where the queue is full."""
        address = slot.kind, slot.key
        with self._wake:
            if address in self._waiting:
                return
            if len(self._waiting) >= QUEUED or self._closing:
                self._client.counters.add(dropped=1)
                return
            self._waiting[address] = None
            self._wake.notify()

    def close(self, timeout: float) -> None:
        """Send what waits, for at most so many seconds while the engine takes it."""
        end = time.monotonic() + timeout
        with self._wake:
            while (self._waiting or self._sending) and self._client.calls.takes_writes and time.monotonic() < end:
                self._wake.wait(0.05)
            self._closing = True
            self._waiting.clear()
            self._wake.notify_all()
        for thread in self._threads:
            thread.join(max(end - time.monotonic(), 0.1))

    def _may_not_leave(self, root: bytes) -> bool:
        """Tell whether a namespace has a salt, and there is no key to seal its images with."""
        if self._client.seal.is_secret:
            return False
        salted = self._salted.get(root)
        if salted is None:
            row = self._storage.namespaces[root].row
            plain = root_key(row.model, json.loads(row.codec), json.loads(row.layout), b"")
            if len(self._salted) >= SALTS:
                self._salted.clear()
            salted = self._salted[root] = plain != root
        return salted

    # -- the threads --------------------------------------------------------------------------------------------------

    def _run(self, probes: bool) -> None:
        """Send what waits, until it is closed. One thread also looks at the engine's key first, and later whether an engine
        that failed works again.
        """
        if probes:
            for _ in range(FAILURES):  # then the breaker says so, and a probe finds when it works
                with suppress(EngineError):
                    self._client.compare_keys(self._writes)
                    break
        while (batch := self._next(probes)) is not None:
            try:
                if batch:
                    self._send(batch)
                elif probes:
                    self._probe()
            except EngineError:  # counted; the batch is offered again when it is used
                pass
            except Exception:
                log.exception("remote %s: %d images were not sent", self._client.engine.label, len(batch))
            finally:
                with self._wake:
                    self._sending -= len(batch)
                    self._wake.notify_all()

    def _probe(self) -> None:
        client = self._client
        with self._storage.ram.reserve(client.probe_bytes, drop=False) or nullcontext() as room:
            failed = not client.calls.reading.closed
            if room is not None:
                client.probe()
        if room is None:
            time.sleep(PAUSE)
        elif failed and client.calls.reading.closed:  # it may have been emptied
            client.compare_keys(self._writes)

    def _next(self, probes: bool) -> list[Address] | None:
        """Wait for the next batch and return it; an empty one when it is time for a probe; None at the end."""
        with self._wake:
            while not self._closing:
                due = self._client.calls.probe_in() if probes else None
                if due is not None and due <= 0:
                    return []
                if self._waiting and self._client.calls.takes_writes:
                    batch = list(self._waiting)[:BATCH]
                    for address in batch:
                        del self._waiting[address]
                    self._sending += len(batch)
                    return batch
                self._wake.wait(min(due, 1.0) if due is not None else 1.0)
            return None

    def _send(self, batch: list[Address]) -> None:
        """Send what the engine doesn't have, and the layouts of its namespaces before it."""
        client, seal = self._client, self._client.seal
        with self._storage.lock:
            slots = [slot for address in batch if (slot := self._storage.graph.slots.get(address)) is not None]
            slots = self._storage.graph.pin(slot for slot in slots if slot.image is not None)
            rows = {slot: self._storage.namespaces[slot.node.tree.root.key].row for slot in slots if slot.node.tree}
            names = [name_of(seal, slot) for slot in slots]
        unsettled = len(batch)
        try:
            layouts, asked = {self._layout_name(row): row.layout for row in rows.values()}, time.monotonic()
            published = set(self._published)
            sizes = client.sizes([*layouts, *names])
            listed = []
            for (name, layout), size in zip(layouts.items(), sizes, strict=False):
                if size is not None:
                    listed.append(name)
                    continue
                if name in published:  # asked for with every batch, it is the last that an engine evicts
                    client.calls.note_loss(asked)
                client.write(name, np.frombuffer(layout.encode(), np.uint8), listed=True)
            self._published.update(layouts)
            missing = []
            for slot, name, size in zip(slots, names, sizes[len(layouts) :], strict=True):
                if size is None:
                    missing.append((slot, name))
                    continue
                client.counters.add(known=1)
                slot.remote_at = asked
                unsettled -= 1
                listed += [name] if slot.kind == SNAPSHOT else []
            client.keep_listed(listed)
            for slot in self._put(missing):
                slot.remote_at = asked
                unsettled -= 1
        finally:
            client.counters.add(dropped=unsettled)
            self._storage.unpin(slots)

    def _put(self, missing: list[tuple[Slot, str]]) -> Iterator[Slot]:
        """Send images under these names, and yield those that were sent. RAM is reserved for the sealed form of the largest:
        the next one is sealed in the same.
        """
        largest = max((slot.nbytes for slot, _ in missing), default=0) + self._client.seal.overhead
        reservation = self._storage.ram.reserve(largest, drop=False) if missing else None
        if reservation is None:
            return
        with reservation:
            try:
                for slot, name in missing:
                    if (image := slot.image) is not None:  # else it was deleted meanwhile
                        self._client.write(name, image.data, listed=slot.kind == SNAPSHOT)
                        yield slot
            finally:
                self._client.forget_memory()

    def _layout_name(self, row: NamespaceRow) -> str:
        folder = layouts_folder(self._client.seal, row.model, row.codec)
        return f"{folder}/{layout_id(self._client.seal, row.layout.encode())}"


def name_of(seal: Seal, slot: Slot) -> str:
    assert slot.node.tree is not None
    return image_name(seal, slot.node.tree.root.key, slot.kind, slot.key, slot.node.key)
