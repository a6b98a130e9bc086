"""From a tier below into RAM: reserve, read, verify, publish, in this order, for every image of a path, the first block
first.

A promotion never evicts its own path, stops at what finds no room or went bad, and unpins everything however it ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple, Protocol

from prefixcache.blocks.budget import Reservation
from prefixcache.blocks.lookup import required_images
from prefixcache.blocks.node import RAM, Slot
from prefixcache.image_format import ROWS, SNAPSHOT, Image
from prefixcache.keys import BLOCK, TOKEN_BYTES
from prefixcache.ssd import Corrupt
from prefixcache.tiers.prompt import Prompt
from prefixcache.tiers.storage import Storage
from prefixcache.tiers.tier import PendingRead

log = logging.getLogger("prefixcache")

BATCH = 16  # images that RAM is reserved for at once
PROMOTERS = 4  # promotions at work at once; the reads of each go to the tier
PATIENCE = 10.0  # seconds that a promotion waits for RAM while the writer makes some free


class ReadableTier(Protocol):
    """What a promotion asks of a tier below RAM."""

    number: int

    def read(self, slot: Slot) -> PendingRead:
        """Begin to read a slot's image."""

    def invalidate(self, slot: Slot) -> None:
        """Forget a slot's image: it went bad."""


class ImageSource(Protocol):
    """Where a promotion reads images, and which of them it believes."""

    def tier_of(self, slot: Slot) -> ReadableTier | None:
        """Return the fastest tier that has a slot's image, or None."""

    def fits(self, slot: Slot, image: Image) -> bool:
        """Return whether it has the tensors that an image in this place must have."""


class StorageSource:
    """The tiers of a storage, whose images are compared with the plan of their namespace."""

    def __init__(self, storage: Storage):
        self._storage = storage

    def tier_of(self, slot: Slot) -> ReadableTier | None:
        return next(self._storage.lower.having(slot), None)

    def fits(self, slot: Slot, image: Image) -> bool:
        node = slot.node
        namespace = self._storage.namespaces.get(node.tree.root.key) if node.tree is not None else None
        if namespace is None:
            return False
        start, tokens = (node.end, slot.suffix) if slot.kind == SNAPSHOT else (node.start, node.tokens)
        return namespace.plan.fits(image, slot.kind, start, len(tokens) // TOKEN_BYTES, slot.mask)


class SlotRead(NamedTuple):
    """One image on its way. `reservation` is None in a promotion that waits for another's reading of it."""

    slot: Slot
    tier: ReadableTier
    future: PendingRead
    reservation: Reservation | None


def promote(storage: Storage, prompt: Prompt, leave: int, source: ImageSource | None = None) -> int:
    """Bring the deepest boundary of a prompt that fits into RAM; returns the depth there.

    `leave`: see `PrefixCache.promote`. `source`: the storage's tiers unless told. Blocks on reads: call it on a thread of its
    own.
    """
    graph, began = storage.graph, time.monotonic()
    with storage.lock:
        deepest = prompt.deepest(graph.last, leave)
        if deepest is None:
            return 0
        end, namespace, walk = deepest
        limit = max(len(prompt) - leave, 0)
        if namespace.plan.windows or namespace.plan.snapshots:  # a part of what a boundary needs is no hit
            fits = _room(storage)
            while end and sum(s.nbytes for s in required_images(walk, end, graph.last)) > fits:
                end, _, walk = prompt.deepest_in(namespace, graph.last, max(end - BLOCK, 0))
        pinned = graph.pin(required_images(walk, end, graph.last))
        before = prompt.deepest_in(namespace, RAM, limit).depth
    try:
        missing = [slot for slot in reversed(pinned) if slot.image is None]
        _Promotion(storage, source or StorageSource(storage), before).bring(missing)
    finally:
        with storage.lock:
            storage.unpin(pinned)  # superseded tails are deleted
            depth, _, walk = prompt.deepest_in(namespace, RAM, limit)
            graph.recency.touch(required_images(walk, depth, RAM))
            storage.counters.promoted_tokens += max(depth - before, 0)
            storage.spilling.ahead(0)
            storage.changed.notify_all()
    storage.counters.durations.promote.observe(time.monotonic() - began)
    return depth


class Promoter:
    """Promotions on threads of their own."""

    def __init__(self, storage: Storage):
        self._storage = storage
        self._threads = ThreadPoolExecutor(PROMOTERS, "prefixcache-promote")
        self._running: set[Future[int]] = set()

    def submit(self, prompt: Prompt, leave: int) -> Future[int]:
        """Begin one: its result is the depth in RAM. RuntimeError when closed."""
        promoting = self._threads.submit(promote, self._storage, prompt, leave)
        promoting.add_done_callback(self.notify)
        self._running.add(promoting)
        promoting.add_done_callback(self._running.discard)
        return promoting

    def close(self, timeout: float) -> None:
        """Cancel what has not begun; wait so many seconds for what has."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        wait(list(self._running), timeout)

    def notify(self, promoting: Future[int]) -> None:
        """Tell whoever waits for the blocks of a promotion that it has ended."""
        with self._storage.changed:
            self._storage.changed.notify_all()


def last_of(local: Future[int], remote: Future[int], depth: Callable[[], int]) -> Future[int]:
    """Return a future of the `depth` in RAM when both have ended; `local`'s error if it has one."""
    both: Future[int] = Future()
    both.set_running_or_notify_cancel()  # it can't be cancelled: its parts go on
    left, lock = [local, remote], threading.Lock()

    def ended(future: Future[int]) -> None:
        with lock:
            left.remove(future)
            if left:
                return
        if not remote.cancelled() and (error := remote.exception()) is not None:
            log.warning("the remote tier: %s: %s", type(error).__name__, error)
        try:
            local.result()
            both.set_result(depth())
        except BaseException as error:
            both.set_exception(error)

    for future in (local, remote):
        future.add_done_callback(ended)
    return both


def _room(storage: Storage) -> int:
    held = storage.budget.held()
    return storage.budget.limit - held.nodes - held.reserved


class _Promotion:
    """The reads of one promotion. `before`: the depth that RAM had without them."""

    def __init__(self, storage: Storage, source: ImageSource, before: int):
        self._storage = storage
        self._source = source
        self._before = before
        self._waiting: deque[SlotRead] = deque()
        self._complete = True  # so far: what comes after one that did not land is of no use now

    def bring(self, slots: list[Slot]) -> None:
        first = 0
        try:
            while first < len(slots) and self._complete:
                begun = self._begin(slots[first : first + BATCH])
                if not begun:
                    return
                first += begun
                while self._waiting and self._waiting[0].future.done():
                    self._finish_first()
        finally:
            while self._waiting:
                self._finish_first()

    def _begin(self, slots: list[Slot]) -> int:
        """Begin to read the first of these, and return how many. Where there is no room beside what is being read, that
        is finished first; then fewer are begun.
        """
        while self._complete:
            if self._read(slots, 0):
                return len(slots)
            if self._waiting:
                self._finish_first()
            elif len(slots) > 1:
                slots = slots[: len(slots) // 2]
            else:
                return int(self._read(slots, PATIENCE))
        return 0

    def _read(self, slots: list[Slot], wait: float) -> bool:
        """Reserve for slots and start to read them. False, and nothing is read, when there is no room."""
        storage = self._storage
        with storage.lock:
            missing = sum(slot.nbytes for slot in slots if slot.image is None and slot.reading is None)
            reservation = storage.ram.reserve(missing, wait, drop=False)  # may let go of the lock
            if reservation is None:
                return False
            with reservation:
                for slot in slots:
                    if slot.image is None and slot.reading is not None:
                        self._waiting.append(slot.reading._replace(reservation=None))
                    elif slot.image is None and not self._read_one(slot, reservation):
                        self._complete = False
                        break
            return True

    def _read_one(self, slot: Slot, reservation: Reservation) -> bool:
        """Start to read an image. False when no tier has it any more."""
        tier = self._source.tier_of(slot)
        if tier is None or reservation.left < slot.nbytes:
            return False
        slot.reading = SlotRead(slot, tier, tier.read(slot), reservation.split(slot.nbytes))
        self._waiting.append(slot.reading)
        return True

    def _finish_first(self) -> None:
        reading = self._waiting.popleft()
        landed = self._await(reading) if reading.reservation is None else self._finish(reading, reading.reservation)
        self._complete = self._complete and landed

    def _await(self, reading: SlotRead) -> bool:
        """Wait until another promotion has published a reading, or given it up."""
        slot, changed = reading.slot, self._storage.changed
        with changed:
            while slot.reading is not None and slot.reading.future is reading.future:
                changed.wait()
            return slot.image is not None

    def _finish(self, reading: SlotRead, reservation: Reservation) -> bool:
        """Wait for a read and publish what it gave. False when it gave nothing."""
        storage, slot, number = self._storage, reading.slot, reading.tier.number
        image, error = None, None
        fits = False
        try:
            image = reading.future.result()
            fits = self._source.fits(slot, image)
        except Exception as failure:
            image, error = None, failure
        with storage.lock, reservation:
            slot.reading = None
            if isinstance(error, Corrupt):
                if slot.is_in(number):
                    reading.tier.invalidate(slot)
            elif image is not None and not fits:  # the index has no checksum, and that of a file is no signature
                storage.counters.corrupt += 1
                storage.lower.discard(slot)
            elif image is not None and slot.is_in(number) and slot.image is None:
                storage.graph.place(slot, RAM, image=image, reservation=reservation)
                storage.counters.promoted_bytes += slot.nbytes
                first = slot.node.start if slot.kind == ROWS else 0
                storage.counters.arrivals.arrived(slot, max(first, self._before))
            storage.changed.notify_all()
            return slot.image is not None
