"""What the ranks of one model agree on. Every agreement is a small collective of integers: all ranks make the same calls in
the same order, on the thread that computes with the model, whatever became of their own part of the work.
"""

from __future__ import annotations

import pickle
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import mlx.core as mx
import numpy as np
import xxhash

Value = TypeVar("Value")
MAX = (1 << 31) - 1  # the largest integer of an agreement


class OutOfStep(RuntimeError):
    """The ranks don't do the same: what they compute together would be wrong from here on."""


class Ranks:
    """The processes that one model spans. `rank` of `size` is this one; rank 0 is the first.

    `on_this_machine`: how many of them share its memory and its disk.
    """

    def __init__(self, group: mx.distributed.Group):
        """Collective, as all methods are."""
        self.group = group
        self.rank: int = group.rank()
        self.size: int = group.size()
        node = uuid.getnode()
        if node >> 40 & 1:  # made up by this process: the machine has none
            node = 0
        machine = number_of(f"{socket.gethostname()} {node}".encode())
        self.on_this_machine = self.each(machine).count(machine)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def least(self, *values: int) -> list[int]:
        """Return of each value (32 bits, signed) the least that a rank has."""
        return self._result(mx.distributed.all_min(_integers(values), group=self.group))

    def most(self, *values: int) -> list[int]:
        """Return of each value (32 bits, signed) the most that a rank has."""
        return self._result(mx.distributed.all_max(_integers(values), group=self.group))

    def each(self, value: int) -> list[int]:
        """Return the value of every rank."""
        return self._result(mx.distributed.all_gather(_integers([value]), group=self.group))

    def any(self, here: bool) -> bool:
        """Return whether `here` is true on any rank."""
        return bool(self.most(int(here))[0])

    def from_first(self, value: Value) -> Value:
        """Rank 0's value, pickled; that of the others is not looked at. None costs one collective, anything else two."""
        told = pickle.dumps(value) if self.is_first and value is not None else b""
        data = np.frombuffer(told, np.uint8)
        size = self.most(len(data))[0]
        if not size:
            return None  # type: ignore[return-value]
        mine = data if self.is_first else np.zeros(size, np.uint8)
        shared = mx.distributed.all_max(mx.array(mine), group=self.group)
        mx.eval(shared)
        return value if self.is_first else pickle.loads(np.array(shared).data)

    def done_by_first(self, work: Callable[[], Value]) -> Value:
        """Return what `work` gives on rank 0, which alone does it. RuntimeError with its text on all ranks where it fails."""
        told: tuple[Value | None, str | None] = None, None
        if self.is_first:
            try:
                told = work(), None
            except Exception as error:
                told = None, str(error) or type(error).__name__
        value, failed = self.from_first(told)
        if failed is not None:
            raise RuntimeError(failed)
        return value  # type: ignore[return-value]

    def done_by_all(self, work: Callable[[], Value], what: str) -> Value:
        """Return what `work` gives here, once it has succeeded on all ranks. Else its error where it failed, elsewhere a
        RuntimeError that names the ranks that could not do `what`. No collective may run within it.
        """
        value, failed = None, None
        try:
            value = work()
        except Exception as error:
            failed = error
        failures = self.each(int(failed is not None))
        if failed is not None:
            raise failed
        if any(failures):
            raise RuntimeError(f"{named([rank for rank, bad in enumerate(failures) if bad])} could not {what}")
        return value  # type: ignore[return-value]

    def differing(self, values: Mapping[str, Any]) -> list[str]:
        """Return the names under which the ranks have different values; all must ask for the same names."""
        hashes = [number_of(repr(value).encode()) for value in values.values()]
        told = self.least(*hashes, *(-value for value in hashes))
        return [name for name, low, high in zip(values, told, told[len(hashes) :], strict=False) if low != -high]

    def agree(self, deepest: Callable[[list[int]], list[int]], limits: Sequence[int], about: int = 0) -> list[int]:
        """For each limit, the deepest boundary at or before it that every rank can serve.

        `deepest` says for given limits where this rank can: a boundary of one rank need be none of another, so the ranks go
        down until all say the same. `about`: what the question is about, as `number_of` gives it. OutOfStep when the ranks
        ask different questions.
        """
        agreed = list(limits)
        while True:
            mine = deepest(agreed)
            least = self.least(*mine, *(-depth for depth in mine), about, -about)
            count = len(mine)
            low, high = least[:count], [-depth for depth in least[count : 2 * count]]
            if least[-2] != -least[-1]:
                raise OutOfStep(
                    "the ranks look different prompts up: give all the same tokens, salt and arguments, in the same order"
                )
            if low == high:
                return low
            agreed = low

    @staticmethod
    def _result(array: mx.array) -> list[int]:
        mx.eval(array)  # NumPy would hide MLX's error of a peer that is gone, and take what is in memory
        return [int(value) for value in np.array(array)]


def named(ranks: Sequence[int]) -> str:
    """Ranks as text."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def number_of(data: bytes) -> int:
    """Return a hash that an agreement can compare."""
    return xxhash.xxh3_64_intdigest(data) & MAX


def _integers(values: Sequence[int]) -> mx.array:
    return mx.array(np.array(values, np.int32))
