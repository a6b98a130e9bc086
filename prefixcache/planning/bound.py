"""What no policy can beat: Belady's bound, the hits of a cache that knows the future.

It counts whole ids of a trace. What a real policy gets is `simulator`'s to say, with bytes, tails and tiers.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from prefixcache.trace.reading import Request

NEVER = np.iinfo(np.int64).max


class Bound(NamedTuple):
    """`hit` of the `asked` blocks at a capacity, all in ids of the trace."""

    capacity: int
    hit: int
    asked: int

    @property
    def hit_rate(self) -> float:
        """Hits over what was asked for; 0 when nothing was."""
        return self.hit / self.asked if self.asked else 0.0


def best_at(requests: Iterable[Request], capacities: Sequence[int]) -> list[Bound]:
    """Return the most blocks that a cache can have when they are asked for, at each capacity: bytes of RAM and SSD together
    over the bytes of an id's tokens.

    Belady's rule ("A study of replacement algorithms", 1966) with leave to keep nothing: of all blocks those stay that are
    asked for soonest, of one prompt the first. A prompt that has a block has its parent, too, so a parent never waits longer
    than its child, and what is kept of a prompt is always a leading run. With recorded calls the bound may be out of reach: a
    fetch is taken to bring back, for the next one, any block that was ever stored.

    Holds all ids at once, some 60 bytes each. One pass over `requests`. ValueError for a capacity below 0.
    """
    for capacity in capacities:
        if capacity < 0:
            raise ValueError(f"capacity={capacity}: give a number of blocks, 0 or more")
    reuse = _reuse(requests)
    return [Bound(capacity, _hits(reuse, capacity), reuse.asked) for capacity in capacities]


class _Reuse(NamedTuple):
    """Blocks of request `since[i]` that are next asked for by request `until[i]`: `blocks[i]` of them. Ordered by `since`."""

    requests: int
    asked: int
    since: list[int]
    until: list[int]
    blocks: list[int]


def _reuse(requests: Iterable[Request]) -> _Reuse:
    ids: list[np.ndarray] = []
    lengths: list[int] = []
    calls: list[str] = []
    for request in requests:
        ids.append(np.array(request.ids, np.int64))
        lengths.append(len(request.ids))
        calls.append(request.call)
    asks = np.array([call != "store" for call in calls], bool)
    stores = np.array([call != "fetch" for call in calls], bool)
    length = np.array(lengths, np.int64)
    since = np.repeat(np.arange(len(calls)), length)
    until = _next_use(np.concatenate(ids) if ids else np.empty(0, np.int64), since, stores)
    useful = until != NEVER
    since, until = since[useful], until[useful]
    useful = asks[until]
    since, until = since[useful], until[useful]
    starts = np.flatnonzero(np.diff(since, prepend=-1) | np.diff(until, prepend=-1))
    blocks = np.diff(starts, append=len(since))
    asked = int(length[asks].sum())
    return _Reuse(len(calls), asked, since[starts].tolist(), until[starts].tolist(), blocks.tolist())


def _next_use(ids: np.ndarray, since: np.ndarray, stores: np.ndarray) -> np.ndarray:
    """Return the next request with the same id, for each id of a request; NEVER for the last and for what isn't stored."""
    order = np.argsort(ids, kind="stable")
    by_id, when = ids[order], since[order]
    first = np.flatnonzero(np.diff(by_id, prepend=by_id[:1] - 1))
    until = np.full(len(ids), NEVER)
    until[:-1] = when[1:]
    until[first[1:] - 1] = NEVER
    if not stores.all():
        stored = np.minimum.reduceat(np.where(stores[when], when, NEVER), first) if len(first) else when
        until[np.repeat(stored, np.diff(first, append=len(ids))) > when] = NEVER
    next_use = np.empty_like(until)
    next_use[order] = until
    return next_use


def _hits(reuse: _Reuse, capacity: int) -> int:
    """Return the blocks that are there when their request comes, of a cache that evicts what is needed last."""
    waiting = [0] * reuse.requests  # blocks kept for each request to come
    latest: list[int] = []  # a heap of those requests, negated; what has passed sinks to its end
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
