"""What a caller wants back with a whole prompt beside its state, such as the logits of its last token: arrays on the host,
found by exactly those tokens. The state itself is the PrefixCache's.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from prefixcache.blocks.budget import Reservation
from prefixcache.cache import PrefixCache
from prefixcache.codecs.interchange import bring_in, copy_out, name_of

SHARE = 32  # of the RAM budget, one part in so many at most
COST = 1024  # bytes of an entry, beside its tokens and its arrays


class _HeldArray(NamedTuple):
    """An MLX array's elements on the host, and the dtype to bring them back by."""

    elements: np.ndarray
    dtype: str


def hold(value: Any) -> Any:
    return _HeldArray(copy_out(value), name_of(value.dtype)) if isinstance(value, mx.array) else value


def give(held: dict[str, Any]) -> dict[str, Any]:
    return {name: bring_in(*value) if isinstance(value, _HeldArray) else value for name, value in held.items()}


class Auxiliary:
    """Arrays by exact tokens, in RAM only, within a share of the PrefixCache's budget; the least recently used are dropped.

    Thread-safe: `_lock` guards the entries; each has the bytes reserved that it takes.
    """

    def __init__(self, cache: PrefixCache):
        self._cache = cache
        self._limit = cache.stats().ram_limit // SHARE
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, tuple[dict[str, Any], Reservation]] = OrderedDict()

    def put(self, tokens: bytes, held: dict[str, Any]) -> bool:
        """Keep these, in the place of what was kept for the tokens. False when there is no room."""
        nbytes = COST + len(tokens)
        nbytes += sum(value.elements.nbytes for value in held.values() if isinstance(value, _HeldArray))
        self.drop(tokens)
        with self._lock:
            while self._kept and self._held() + nbytes > self._limit:
                self._forget(next(iter(self._kept)))
            reservation = self._cache.reserve(nbytes) if nbytes <= self._limit else None
            if reservation is None:
                return False
            self._kept[tokens] = (held, reservation)
            return True

    def get(self, tokens: bytes) -> dict[str, Any] | None:
        with self._lock:
            if tokens not in self._kept:
                return None
            self._kept.move_to_end(tokens)
            held = self._kept[tokens][0]
        return give(held)

    def drop(self, tokens: bytes) -> None:
        with self._lock:
            if tokens in self._kept:
                self._forget(tokens)

    def clear(self) -> None:
        with self._lock:
            for tokens in list(self._kept):
                self._forget(tokens)

    def _held(self) -> int:
        return sum(reservation.left for _, reservation in self._kept.values())

    def _forget(self, tokens: bytes) -> None:
        self._kept.pop(tokens)[1].release()
