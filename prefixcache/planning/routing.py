"""Which machine of a fleet serves each request of a trace: the one of its session, or any.

A trace names no sessions: `sessions` tells them by their blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from hashlib import blake2b
from itertools import pairwise
from random import Random

from prefixcache.trace.format import FETCH, REQUEST, STORE
from prefixcache.trace.reading import Request

STICKY, RANDOM = ("sticky", "random")
COMMON = 4  # a block with at least this many different successors is shared by sessions: a system prompt's
NOWHERE = -1  # the session of a prompt without ids; those are never negative


def machines_of(requests: Iterable[Request], machines: int, routing: str) -> list[int]:
    """Return the machine of each request, 0 to `machines` - 1, always the same. `requests` are read more than once.

    "sticky": the one that a hash of the session chooses. "random": any machine, but a recorded store goes to the machine of
    its fetch. ValueError for another routing.
    """
    if routing not in (STICKY, RANDOM):
        raise ValueError(f"routing={routing!r}: write {STICKY!r} or {RANDOM!r}")
    if routing == STICKY:
        return [_hashed(session) % machines for session in sessions(requests)]
    chance, origin = Random(0), _Successors(requests).origin
    fetched: dict[int, int] = {}  # the machine that was last asked for a recording's ids, by their origin
    chosen = []
    for request in requests:
        ids = [origin.get(block, block) for block in request.ids] if request.call != REQUEST else []
        known = (fetched[block] for block in reversed(ids) if block in fetched)
        machine = next(known, None) if request.call == STORE else None
        chosen.append(chance.randrange(machines) if machine is None else machine)
        if request.call == FETCH:
            fetched.update(dict.fromkeys(ids, chosen[-1]))
    return chosen


def sessions(requests: Iterable[Request]) -> list[int]:
    """Return the session of each request: the first of its blocks that is not common to sessions.

    A block is common when `COMMON` different ones come after it in the trace. So turns that go on from one another are of
    one session, and what shares a system prompt only is not. `requests` are read twice.
    """
    blocks = _Successors(requests)
    return [blocks.session(request) for request in requests]


class _Successors:
    """How many blocks come after each one of a trace. One that has grown from a tail counts as that tail, its `origin`."""

    def __init__(self, requests: Iterable[Request]):
        self.origin: dict[int, int] = {}
        self._next: Counter[int] = Counter()
        seen: set[int] = set()
        for request in requests:
            for grown in request.grown:
                self.origin.setdefault(request.ids[grown.place], self.origin.get(grown.tail, grown.tail))
            for parent, block in reversed([*pairwise((NOWHERE, *request.ids))]):
                if block in seen:
                    break  # and so is all before it
                seen.add(block)
                self._next[parent] += block not in self.origin

    def session(self, request: Request) -> int:
        """Return the origin of the first block that isn't common, else of the last."""
        block = NOWHERE
        for block in request.ids:
            if self._next[block] < COMMON:
                break
        return self.origin.get(block, block)


def _hashed(session: int) -> int:
    return int.from_bytes(blake2b(session.to_bytes(8, "little", signed=True), digest_size=8).digest(), "little")
