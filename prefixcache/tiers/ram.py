"""Room in RAM: reserved before anything is made, by evicting what the policy names, first to the tier below."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np

from prefixcache.blocks.budget import Reservation
from prefixcache.blocks.eviction import least_recent_leaf, victim_in_ram
from prefixcache.blocks.node import RAM, Node, Slot
from prefixcache.byte_sizes import size
from prefixcache.image_format import ROWS
from prefixcache.tiers.admission import Claim, Doorkeeper
from prefixcache.tiers.state import StorageState
from prefixcache.tiers.tier_in_graph import LowerTiers

log = logging.getLogger("prefixcache")

USELESS = 64_000  # bytes of RAM: a block of 256 tokens of 4 layers with one key head of 64 takes 70 kB at 4 bits

GRAPH_SHARE = 2  # the graph's nodes may take 1/2 of the budget
DOORKEEPER_SHARE = 4096  # of the budget: for what the tier below was not given at first sight
DOORKEEPER_MOST = 16 << 20  # and bytes of it
LOOK_AGAIN = 0.05  # seconds between looks at what may be evicted by now, where nothing tells of it


class Ram:
    """Evicts images from RAM, so that what is held stays within the budget. Called under the storage's lock, or takes it."""

    def __init__(self, state: StorageState, lower: LowerTiers, admission: str):
        """`admission`: which evicted images go to the tier below: "always" all, "second" those that were asked for again."""
        self._state, self._lower = state, lower
        self.configured = state.budget.limit  # what was asked for; memory pressure may lower the limit in force
        self._warned = False
        self._doorkeeper: Doorkeeper | None = None
        if admission == "second":
            limit = state.budget.limit
            nbytes = min(max(limit // DOORKEEPER_SHARE, 1024), DOORKEEPER_MOST, limit // 16)
            self._doorkeeper = Doorkeeper(nbytes)
            state.budget.reserve(nbytes)  # for good

    def reserve(
        self, nbytes: int, wait: float = 0, drop: bool = True, claim: Claim | None = None
    ) -> Reservation | None:
        """Reserve RAM, evicting for it; for `wait` seconds nothing is evicted that the tier below does not have.

        After that, if `drop`, images are evicted although the spill queue has no room for them, but for those that the
        prompt's `claim` spares. None when the room can't be had: what is left is spared, pinned, or being written.
        """
        state, budget = self._state, self._state.budget
        with state.lock:
            if budget.room >= nbytes:
                return budget.reserve(nbytes)
            if nbytes <= budget.limit and (
                self._in_time(lambda: self._make_room(nbytes, False, claim), wait)
                or (drop and self._make_room(nbytes, True, claim))
            ):
                return budget.reserve(nbytes)
            state.counters.denied += drop or wait > 0  # else only asked in passing, and again
            return None

    def reserve_hot(self, nbytes: int, root: bytes, ids: np.ndarray) -> Reservation | None:
        """Reserve room for a hot prompt of a namespace: of what it goes on from and less recently used ones if they take
        their share, else of what is free or taken by the coldest images, as far as a tier below has them or is given them.
        None where that is not enough: one that is larger than their share, or than what RAM has free without them, pushes
        none out.
        """
        state, hot = self._state, self._state.hot
        if nbytes > hot.limit:
            return None
        if hot.take_room_of(state.budget) and self._lower.spill_tier is not None:
            beyond = max(hot.nbytes + nbytes - hot.limit, 0)  # leaves for their share
            self._make_room(nbytes - beyond, False, None, for_hot=True)
        if hot.budget.room + hot.nbytes < nbytes:
            return None
        hot.evict_first(root, ids)
        while hot.nbytes + nbytes > hot.limit or hot.budget.room < nbytes:
            if not hot.evict():  # others reserved meanwhile
                return None
        return hot.budget.reserve(nbytes)

    def trim(self, nbytes: int, wait: float) -> int:
        """Evict until RAM holds at most `nbytes`. Nothing is lost for it: what the tier below has not taken in `wait` seconds
        stays. Returns the bytes held.
        """
        budget = self._state.budget

        def done() -> bool:
            while (held := budget.held()).total > max(nbytes, held.nodes):  # nodes alone: nothing to wait for
                if self._evict_hot():
                    continue
                writes_are_enough = held.total - held.queued <= nbytes
                victim = None if writes_are_enough else victim_in_ram(self._state.graph)
                if victim is None or not self._evict(victim, False, asked=True):
                    return False
            return True

        with self._state.lock:
            self._in_time(done, wait)
            return budget.held().total

    def resize(self, nbytes: int, wait: float = 0, asked: bool = False) -> int:
        """Set the budget to `nbytes`, and evict images until it holds. What the tier below has not taken in `wait`
        seconds is lost, but for what is being written by then. `asked`: it is what the user asked for now. Returns the bytes
        held.
        """
        state, budget = self._state, self._state.budget
        with state.lock:
            self.configured = nbytes if asked else self.configured
            budget.resize(nbytes)
            while budget.held().nodes > nbytes // GRAPH_SHARE:
                slot = least_recent_leaf(state.graph, only_below_ram=True)
                if slot is None:
                    break
                for tier in list(self._lower.having(slot)):
                    tier.unindex(slot)
            if not self._in_time(lambda: self._shrink(False), wait):
                self._shrink(True)
            return budget.held().total

    def return_to_limit(self) -> None:
        if self._state.budget.room < 0:
            self._shrink(False)

    def warn_if_useless(self) -> None:
        """Log it where RAM was given a size that holds no block of a usual model."""
        if self.configured < USELESS:
            log.warning(
                'ram=%s: holds no block of 256 tokens of any usual model, so nothing is kept; write "1GB" or more',
                size(self.configured),
            )

    def warn_if_too_small(self, tokens: int, nbytes: int, model: str) -> None:
        """Log it, once, where a block of so many tokens and bytes is larger than all of RAM."""
        if nbytes > self.configured and not self._warned:
            self._warned = True
            log.warning(
                'ram=%s: a block of %d tokens of %s takes %s, so nothing of it is kept; write "1GB" or more',
                size(self.configured),
                tokens,
                model,
                size(nbytes),
            )

    def admits(self, slot: Slot) -> bool:
        """Tell whether the tier below is to be given an image: with admission "second", if its block was asked for again
        since it came, or came before and was declined, or if that tier has what depends on it.
        """
        if self._doorkeeper is None or slot.hits > 0 or slot.leases or slot.node.key in self._doorkeeper:
            return True
        return slot.kind == ROWS and any(slot.node.dependents[RAM + 1 :])

    def claim(self, path: Sequence[Node], keys: Callable[[], list[bytes]]) -> Claim:
        """Return what a prompt may take from others. `path` are its known blocks, `keys` gives the keys of all whole ones."""
        return Claim(self._state.long_prompts, RAM, self._state.budget.limit, path, keys)

    def _in_time(self, done: Callable[[], bool], wait: float) -> bool:
        """Try until `done`, or until `wait` seconds have passed, or no write is left that could help."""
        deadline, idle = time.monotonic() + (wait if self._lower.spill_tier is not None else 0), 0
        while not done():
            left = deadline - time.monotonic()
            idle = 0 if self._state.budget.held().queued else idle + 1
            if left <= 0 or idle > 3:
                return False
            self._state.changed.wait(min(left, LOOK_AGAIN))
        return True

    def _evict_hot(self) -> bool:
        """Evict the least recently used hot prompt that takes RAM. False where there is none."""
        return self._state.hot.take_room_of(self._state.budget) and self._state.hot.evict()

    def _make_room(self, nbytes: int, drop: bool, claim: Claim | None, for_hot: bool = False) -> bool:
        state, budget = self._state, self._state.budget
        while (missing := nbytes - budget.room) > 0:
            if not for_hot and self._evict_hot():
                continue
            if not drop and budget.queued >= missing:
                return False  # enough is being written
            victim = victim_in_ram(state.graph)
            if victim is None:
                evicted = self._discard_for_nodes()
            elif claim is not None and claim.spares(victim, nbytes):
                evicted = self._is_kept_below(victim) and self._evict(victim, False)
            else:
                evicted = self._evict(victim, drop)
            if not evicted:
                return False
        return True

    def _is_kept_below(self, slot: Slot) -> bool:
        """Tell whether a tier below RAM has an image, or could be given it."""
        return slot.tiers > 1 << RAM or self._lower.spill_tier is not None

    def _shrink(self, drop: bool) -> bool:
        state, budget = self._state, self._state.budget
        while (room := budget.room) < 0:
            if self._evict_hot():
                continue
            if room + budget.held().queued >= 0:  # enough is being written
                return False
            victim = victim_in_ram(state.graph)
            if not (self._evict(victim, drop, asked=True) if victim is not None else self._discard_for_nodes()):
                return False
        return True

    def _evict(self, slot: Slot, drop: bool, asked: bool = False) -> bool:
        """Evict an image, or begin to. False when it would be lost and not `drop`. `asked`: for who asks for RAM to be given
        back, and not for what comes in its place: the tier below gets all.
        """
        state, below = self._state, self._lower.spill_tier
        if below is not None and slot.tiers == 1 << RAM:
            if not (asked or self.admits(slot)):
                self._decline(slot)
            elif below.spill(slot):
                return True  # it stays until it is durable; the next one may go at once
            elif not drop:
                return False
            else:
                self._count_drop(slot)
        state.drop_from_ram(slot)
        return True

    def _decline(self, slot: Slot) -> None:
        assert self._doorkeeper is not None
        self._doorkeeper.add(slot.node.key)
        self._state.counters.declined += 1

    def _count_drop(self, slot: Slot) -> None:
        counters = self._state.counters
        counters.dropped += 1
        counters.dropped_bytes += slot.nbytes
        if counters.dropped in (1, 10, 100) or counters.dropped % 1000 == 0:
            log.warning("spill queue full: %d images (%s) dropped", counters.dropped, size(counters.dropped_bytes))

    def _discard_for_nodes(self) -> bool:
        """Delete the least recent image and its node, if nodes fill their share of the RAM. Returns whether it did."""
        state = self._state
        if state.budget.held().nodes <= state.budget.limit // GRAPH_SHARE:
            return False
        slot = least_recent_leaf(state.graph, only_below_ram=True)
        if slot is None:
            return False
        state.counters.forgotten += 1
        self._lower.discard(slot)
        state.note_evicted(slot)
        return True
