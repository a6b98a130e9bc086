"""From SSD to RAM: reserve, read, verify, publish, in this order, for every image of a path, the first block first.

A promotion never evicts its own path, stops at what finds no room or went bad, and lets go of everything however it
ends.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future
from typing import NamedTuple

from prefixcache.blocks.tree import BLOCK, RAM, SSD, Slot
from prefixcache.image import Image
from prefixcache.keys import TOKEN_BYTES
from prefixcache.ssd import Corrupt, Ssd
from prefixcache.tiers.budget import Reservation
from prefixcache.tiers.finding import boundary
from prefixcache.tiers.tiers import Home, Tiers

PATIENCE = 10.0  # seconds that a promotion waits for RAM while the writer makes some free


class Reading(NamedTuple):
    """One image on its way. `reservation` is None when another promotion reads it."""

    slot: Slot
    future: Future[Image]
    reservation: Reservation | None


def promote(tiers: Tiers, ssd: Ssd, home: Home, raw: bytes, limit: int, whole_blocks: bool = False) -> int:
    """Bring the deepest boundary of these tokens (raw int64 bytes) that fits into RAM; returns the depth there.

    `whole_blocks`: see `finding.boundary`.

    Blocks on reads: call it on a thread of its own.
    """
    tree, began = tiers.tree, time.monotonic()
    with tiers.lock:
        walk = tree.walk(home.space, raw)
        end = boundary(tree, home, walk, SSD, limit, whole_blocks)
        fits = _room(tiers)
        if home.plan.windows or home.plan.snapshots:  # a part of such a boundary is none: take one that fits
            while end and sum(s.nbytes for s in tree.serving(walk, end)) > fits:
                end = boundary(tree, home, walk, SSD, max(end - BLOCK, 0), whole_blocks)
        pinned = tree.pin(tree.serving(walk, end))
        tree.touch(pinned)  # or each eviction would first look at all that is here of it
        before = boundary(tree, home, walk, RAM, limit, whole_blocks)
    try:
        _bring(tiers, ssd, [slot for slot in reversed(pinned) if slot.image is None], before)
    finally:
        with tiers.lock:
            tiers.unpin(pinned)  # tails that grew meanwhile leave
            walk = tree.walk(home.space, raw, tree.standing(walk.path))
            depth = boundary(tree, home, walk, RAM, limit, whole_blocks)
            tree.touch(tree.serving(walk, depth, RAM))
            tiers.counters.promoted_tokens += max(depth - before, 0)
            tiers.spill_ahead(0)
    tiers.counters.durations.promote.observe(time.monotonic() - began)
    return depth


def _room(tiers: Tiers) -> int:
    held = tiers.budget.held()
    return tiers.budget.limit - held.nodes - held.reserved


def _bring(tiers: Tiers, ssd: Ssd, slots: list[Slot], before: int) -> None:
    """`before`: the depth that RAM had without them."""
    waiting: deque[Reading] = deque()
    whole = True
    try:
        for slot in slots:
            reading = _begin(tiers, ssd, slot)
            while reading is None and waiting:  # no room beside what is being read: finish that first
                whole = _end(tiers, waiting.popleft(), whole, before)
                reading = _begin(tiers, ssd, slot) if whole else None
            if reading is None:
                reading = _begin(tiers, ssd, slot, PATIENCE) if whole else None
            if reading is None:
                return
            if reading.slot.image is None or reading.reservation is not None:
                waiting.append(reading)
            while waiting and waiting[0].future.done():
                whole = _end(tiers, waiting.popleft(), whole, before)
            if not whole:
                return
    finally:
        while waiting:
            whole = _end(tiers, waiting.popleft(), whole, before)


def _begin(tiers: Tiers, ssd: Ssd, slot: Slot, wait: float = 0) -> Reading | None:
    """Reserve and start to read. None when there is no room, or the image left the SSD meanwhile."""
    with tiers.lock:
        if slot.image is not None:
            done: Future[Image] = Future()
            done.set_result(slot.image)
            return Reading(slot, done, None)
        if slot.loading is not None:
            return Reading(slot, slot.loading, None)
        reservation = tiers.reserve(slot.nbytes, wait, drop=False)
        if reservation is None or not slot.disk or slot.loading is not None or slot.image is not None:
            if reservation is not None:
                reservation.release()
                return _begin(tiers, ssd, slot, wait) if slot.loading is not None or slot.image is not None else None
            return None
        slot.loading = ssd.read(tiers.entry_of(slot))
        return Reading(slot, slot.loading, reservation)


def _end(tiers: Tiers, reading: Reading, whole: bool, before: int) -> bool:
    """Wait for a read; publish what it gave. False when it gave nothing: what comes after is of no use now."""
    slot, future, reservation = reading
    try:
        image = future.result()
    except Exception as error:
        with tiers.lock:
            if reservation is not None:
                slot.loading = None
                reservation.release()
                if isinstance(error, Corrupt) and slot.disk:
                    tiers.lost(slot)
        return False
    sound = reservation is None or _fits(tiers, slot, image)
    with tiers.lock:
        if reservation is None:
            deadline = time.monotonic() + PATIENCE
            while slot.loading is not None and time.monotonic() < deadline:
                tiers.moved.wait(0.1)
            return whole and slot.image is not None
        slot.loading = None
        with reservation:
            if not sound:  # the index has no checksum, and that of a file is no signature
                tiers.counters.corrupt += 1
                tiers.discard(slot)
            elif slot.disk and slot.image is None:
                tiers.tree.enter(slot, RAM, image=image, reservation=reservation)
                tiers.counters.promoted_bytes += slot.nbytes
                first = slot.node.start if slot.kind == "rows" else 0
                tiers.counters.arrivals.came(slot, max(first, before))
        tiers.moved.notify_all()
        return whole and slot.image is not None


def _fits(tiers: Tiers, slot: Slot, image: Image) -> bool:
    """Whether it has the tensors that an image in this place must have."""
    node = slot.node
    home = tiers.homes.get(node.space.root.key) if node.space is not None else None
    if home is None:
        return False
    start, tokens = (node.end, slot.suffix) if slot.kind == "snapshot" else (node.start, node.tokens)
    return home.plan.fits(image, slot.kind, start, len(tokens) // TOKEN_BYTES, slot.mask)
