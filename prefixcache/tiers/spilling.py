"""What is written to the tier below RAM, and when: ahead of eviction, block by block, while nobody asks, or all of it at the
end. Decision 0012 says why tails are not written through.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from prefixcache.blocks.node import RAM, Slot
from prefixcache.image_format import SNAPSHOT
from prefixcache.ssd.entries import Use
from prefixcache.tiers.ram import Ram
from prefixcache.tiers.state import StorageState
from prefixcache.tiers.tier_in_graph import LowerTiers, TierInGraph

AHEAD_SHARE = 4  # the next 1/4 of the budget to be evicted is written ahead
AHEAD_STEP = 32  # after 1/32 of the budget has been newly filled, check again
IDLE_QUEUE_SHARE = 8  # at most 1/8 of the budget waits for idle writes: the next store finds the queue half empty


class Spilling:
    """Called under the storage's lock, but for `drain` and `flush_recency`, which take it."""

    def __init__(self, state: StorageState, lower: LowerTiers, ram: Ram, *, through: bool):
        """`through`: whether each whole block is written at once."""
        self._state, self._lower, self._ram, self._through = state, lower, ram, through
        self._backlog: dict[Slot, None] = {}  # slots that `write_through` has still to queue, oldest first
        self._entered = 0  # bytes that entered RAM since the last spill ahead

    def clear(self) -> None:
        self._backlog.clear()

    def ahead(self, entered: int) -> None:
        """Write the least recent quarter of a full RAM before it must be evicted, so that eviction costs nothing."""
        state, tier = self._state, self._lower.spill_tier
        if tier is None:
            return
        self._entered += entered
        limit = state.budget.limit
        if state.budget.held().total < limit - limit // AHEAD_SHARE or self._entered < limit // AHEAD_STEP:
            return
        self._entered = 0
        for slot in list(self._least_recent(limit // AHEAD_SHARE)):
            if self._is_dirty(slot) and self._ram.admits(slot) and not tier.spill(slot):
                return

    def _least_recent(self, nbytes: int) -> Iterator[Slot]:
        """Yield the slots of the least recent `nbytes` of RAM."""
        passed = 0
        for slot in self._state.graph.orders[RAM]:
            passed += slot.nbytes
            if passed > nbytes:
                return
            yield slot

    def write_through(self, slots: Iterable[Slot]) -> None:
        """Queue images of whole blocks and snapshots, those that are leased, or with spill="through" all: now, or once the
        queue has room. Tails are written when they are evicted or at the end: each turn of a conversation has another.
        """
        if self._lower.spill_tier is None:
            return
        self._backlog.update((slot, None) for slot in slots if _is_lasting(slot) and (self._through or slot.leases))
        self.drain_backlog()

    def write_idle(self, nbytes: int) -> int:
        """Queue at most `nbytes` of whole blocks and snapshots, with what they depend on, the most recent first. Returns the
        bytes queued. The rest is for later calls: no more waits at once than an 8th of the budget.
        """
        state, tier = self._state, self._lower.spill_tier
        queued, most = 0, state.budget.limit // IDLE_QUEUE_SHARE
        if tier is None:
            return 0
        for slot in list(reversed(state.graph.orders[RAM])):
            if not (self._is_dirty(slot) and _is_lasting(slot) and self._ram.admits(slot)):
                continue
            for required in tier.missing(slot):
                waiting = state.budget.held().queued
                fits = queued + required.nbytes <= nbytes and (not waiting or waiting + required.nbytes <= most)
                if not (fits and tier.tier.has_room(required.nbytes) and tier.spill(required)):
                    return queued
                queued += required.nbytes
        return queued

    def drain_backlog(self) -> None:
        tier = self._lower.spill_tier
        while self._backlog and tier is not None:
            slot = next(iter(self._backlog))
            if self._is_dirty(slot) and not tier.spill(slot) and not tier.tier.has_room(slot.nbytes):
                break  # goes on when a write has ended, or with the next store
            del self._backlog[slot]  # an image that the limit has no room for is tried again when RAM evicts it
        if len(self._backlog) > 2 * len(self._state.graph.slots):  # the disk has failed for long
            self._backlog = {slot: None for slot in self._backlog if self._is_dirty(slot)}

    def spill_onward(self, slot: Slot, tier: TierInGraph) -> None:
        """Spill an image that is durable in a tier to the one below it."""
        below = self._lower[tier.number :]
        if below and slot.image is not None and not slot.is_in(below[0].number):
            below[0].spill(slot)

    def drain(self, timeout: float) -> bool:
        """Write all that RAM holds and the tier below has room for, the newest first. False when not done in `timeout`
        seconds.
        """
        state, tier = self._state, self._lower.spill_tier
        deadline = time.monotonic() + timeout
        if tier is None:
            return True
        with state.lock:
            failed = tier.tier.failed
            given: set[Slot] = set()  # once each: the tier's deletions then make room for others
            while True:
                dirty = [s for s in reversed(state.graph.orders[RAM]) if self._is_dirty(s) and s not in given]
                for slot in dirty:  # a slot that finds the queue full is tried again while the writer makes progress
                    if tier.spill(slot):
                        given.add(slot)
                    elif state.budget.held().queued:
                        break
                if not state.budget.held().queued:
                    break
                if time.monotonic() > deadline:
                    return False
                state.changed.wait(0.1)
        return tier.tier.flush(max(deadline - time.monotonic(), 0.01), since=failed)

    def unwritten(self) -> list[Slot]:
        """Return the slots that RAM alone has, with those that wait for a write."""
        with self._state.lock:
            return [slot for slot in self._state.graph.slots.values() if slot.tiers == 1 << RAM]

    def flush_recency(self) -> None:
        """Tell the indexes which images were used since they last heard."""
        with self._state.lock:
            recency = self._state.graph.recency
            for tier in self._lower if recency.unflushed else ():
                tier.tier.touch(Use(slot.kind, slot.key, slot.tick, hits) for slot, hits in recency.unflushed.items())
            recency.unflushed.clear()

    def _is_dirty(self, slot: Slot) -> bool:
        """Tell whether RAM alone has it, and it is not being written."""
        return slot.tiers == 1 << RAM and not slot.pending


def _is_lasting(slot: Slot) -> bool:
    """Tell whether it is of a whole block, or a snapshot. Each turn of a conversation has another tail."""
    return slot.kind == SNAPSHOT or slot.node.is_whole
