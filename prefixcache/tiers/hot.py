"""Hot prompts: the decoded state of those that were used last, which a hit gives as it is.

It is a copy of what images hold, so its loss costs time only, and it is evicted before any image. What such a state is
(`layers.hot_state`) is not known here; nothing here runs MLX. Which of them a prompt hits is `store_fetch_remove.hot`'s.
Decision 0040 says why.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from prefixcache.blocks.budget import Budget, Reservation

MOST = 64  # prompts: a fetch looks at each


class DecodedState(Protocol):
    """Layer caches that nobody changes, of all tokens of a hot prompt."""

    nbytes: int
    is_sliceable: bool  # it can be cut at any token


class HotPrompt(NamedTuple):
    """`root`: of its namespace. `ids`: int64, (tokens,)."""

    root: bytes
    ids: np.ndarray
    state: DecodedState

    @property
    def nbytes(self) -> int:
        return self.state.nbytes + self.ids.nbytes


class HotPrompts:
    """The hot prompts, the least recently used first. Called under the storage's lock.

    `budget` counts their bytes: the RAM's, or where the device has memory of its own, one of that memory. They take `limit`
    bytes of it at most.
    """

    def __init__(self, budget: Budget, limit: int):
        self.budget, self.limit, self.nbytes = budget, limit, 0
        self._prompts: OrderedDict[int, HotPrompt] = OrderedDict()  # by the state's id

    def take_room_of(self, budget: Budget) -> bool:
        """Tell whether this budget counts their bytes."""
        return self.budget is budget

    def __len__(self) -> int:
        return len(self._prompts)

    def of(self, root: bytes) -> Iterator[HotPrompt]:
        """Yield those of a namespace."""
        return (hot for hot in self._prompts.values() if hot.root == root)

    def roots(self) -> set[bytes]:
        return {hot.root for hot in self._prompts.values()}

    def add(self, hot: HotPrompt, reservation: Reservation) -> bool:
        """Keep a prompt, whose bytes are reserved. One that it goes on from is not kept any longer, nor more than `MOST`, nor
        what others that came meanwhile take beyond the limit. False where the limit has fallen below its bytes.
        """
        if hot.nbytes > self.limit:
            return False
        for other in self._begun_by(hot.root, hot.ids):
            self.drop(other)
        while len(self) >= MOST or self.nbytes + hot.nbytes > self.limit:
            self.evict()
        reservation.spend(hot=hot.nbytes)
        self.nbytes += hot.nbytes
        self._prompts[id(hot.state)] = hot
        return True

    def evict_first(self, root: bytes, ids: np.ndarray) -> None:
        """Let those that a prompt goes on from be the first to go: `add` lets go of them anyway."""
        for hot in self._begun_by(root, ids):
            self._prompts.move_to_end(id(hot.state), last=False)

    def _begun_by(self, root: bytes, ids: np.ndarray) -> list[HotPrompt]:
        return [hot for hot in self.of(root) if np.array_equal(hot.ids, ids[: len(hot.ids)])]

    def touch(self, hot: HotPrompt) -> None:
        """Make a prompt the most recently used."""
        self._prompts.move_to_end(id(hot.state))

    def drop(self, hot: HotPrompt) -> None:
        del self._prompts[id(hot.state)]
        self.nbytes -= hot.nbytes
        self.budget.free_hot(hot.nbytes)

    def evict(self) -> bool:
        """Let go of the least recently used. False where there is none."""
        if not self._prompts:
            return False
        self.drop(next(iter(self._prompts.values())))
        return True

    def resize(self, limit: int) -> None:
        """Take at most `limit` bytes from now on."""
        self.limit = limit
        while self.nbytes > limit:
            self.evict()

    def clear(self) -> None:
        while self.evict():
            pass

    def check_integrity(self) -> None:
        assert self.nbytes == sum(hot.nbytes for hot in self._prompts.values()) == self.budget.held().hot
        assert self.nbytes <= self.limit
