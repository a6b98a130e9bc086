"""Belady's bound: the hits of a cache that knows the future, which no policy can beat.

Blocks are the ids of a trace, each as large as another. What a real policy hits, with bytes, tails and tiers, `simulator`
says.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from prefixcache.trace.reading import Request


class Bound(NamedTuple):
    """How many of the `asked` blocks are `hit` at a `capacity` of so many blocks."""

    capacity: int
    hit: int
    asked: int

    @property
    def hit_rate(self) -> float:
        """The share of the asked blocks that is hit; 0 when none was asked for."""
        return self.hit / self.asked if self.asked else 0.0


def best_at(requests: Iterable[Request], capacities: Sequence[int]) -> list[Bound]:
    """Return the most hits that a cache can have at each capacity: the blocks that fit into RAM and SSD together.

    By Belady's rule ("A study of replacement algorithms", 1966) those blocks stay that are asked for soonest, of one prompt
    the first ones; a block may also leave at once. A prompt that has a block has its parent, too, so a parent never waits
    longer than its child, and what is kept of a prompt is always a leading run. With recorded calls the bound may be out of
    reach: a fetch is taken to bring back, for the next one, any block that was ever stored.

    Reads `requests` once and holds all ids, some 60 bytes each. ValueError for a capacity below 0.
    """
    for capacity in capacities:
        if capacity < 0:
            raise ValueError(f"capacity={capacity}: give a number of blocks, 0 or more")
    reuse = _reuse(requests)
    return [Bound(capacity, _hits(reuse, capacity), reuse.asked) for capacity in capacities]


class _Reuse(NamedTuple):
    """Which blocks are asked for again: `blocks[i]` of those of request `since[i]`, next by request `until[i]`. `since`
    ascends. `requests` is the number of requests, `asked` that of the blocks that they ask for.
    """

    requests: int
    asked: int
    since: list[int]
    until: list[int]
    blocks: list[int]


def _reuse(requests: Iterable[Request]) -> _Reuse:
    ids: list[np.ndarray] = []
    calls: list[str] = []
    for request in requests:
        ids.append(np.array(request.ids, np.int64))
        calls.append(request.call)
    asks = np.array([*(call != "store" for call in calls), False], bool)  # the last for blocks that are not used again
    stores = np.array([call != "fetch" for call in calls], bool)
    length = np.array([*map(len, ids)], np.int64)
    since = np.repeat(np.arange(len(calls)), length)
    until = _next_use(np.concatenate(ids) if ids else np.empty(0, np.int64), since, stores)
    useful = asks[until]
    since, until = since[useful], until[useful]
    starts = np.flatnonzero(np.diff(since, prepend=-1) | np.diff(until, prepend=-1))
    blocks = np.diff(starts, append=len(since))
    asked = int(length[asks[:-1]].sum())
    return _Reuse(len(calls), asked, since[starts].tolist(), until[starts].tolist(), blocks.tolist())


def _next_use(ids: np.ndarray, since: np.ndarray, stores: np.ndarray) -> np.ndarray:
    """Return, for each id of a request, the next request that has it: `len(stores)`, which is none, for an id's last request
    and before a request that stores it.
    """
    never = len(stores)
    order = np.argsort(ids, kind="stable")
    by_id, when = ids[order], since[order]
    first = np.flatnonzero(np.diff(by_id, prepend=by_id[:1] - 1))
    until = np.full(len(ids), never)
    until[:-1] = when[1:]
    until[first[1:] - 1] = never
    if not stores.all():
        stored = np.minimum.reduceat(np.where(stores[when], when, never), first) if len(first) else when
        until[np.repeat(stored, np.diff(first, append=len(ids))) > when] = never
    next_use = np.empty_like(until)
    next_use[order] = until
    return next_use


def _hits(reuse: _Reuse, capacity: int) -> int:
    """Return how many blocks are there when their request comes, in a cache that evicts those that are needed last."""
    waiting = [0] * reuse.requests  # blocks kept for each request to come
    latest: list[int] = []  # a heap of those requests, negated: the last on top, those that have passed below
    size = hits = at = 0
    for now in range(reuse.requests):
        hits += waiting[now]
        size -= waiting[now]
        while at < len(reuse.since) and reuse.since[at] == now:
            until, blocks = reuse.until[at], reuse.blocks[at]
            if not waiting[until]:
                heapq.heappush(latest, -until)
            waiting[until] += blocks
            size += blocks
            at += 1
        while size > capacity:
            last = -latest[0]
            evicted = min(waiting[last], size - capacity)
            waiting[last] -= evicted
            size -= evicted
            if not waiting[last]:
                heapq.heappop(latest)
    return hits
