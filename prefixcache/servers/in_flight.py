"""Which requests wait for which: a prompt that begins like one being computed waits until that part is stored.

When ten agents arrive at once with one system prompt, the first computes it and nine find it. This is the rule alone, on
tokens and counts; the server that defers requests is `mlx_lm.generator`. Nothing here touches MLX.
Decision 0030 says why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from prefixcache.keys import BLOCK, common_prefix

LEAST = 16  # tokens that waiting must save
LOST = BLOCK  # tokens of a prompt that a store may leave out: its tail, where hits end with a block
IN_VAIN = 10.0  # seconds for which nobody waits after a store found no room
Space = tuple[str, bytes]  # model and salt: prompts of others never wait for each other


@dataclass(eq=False)
class Computing:
    """A prompt under way: its tokens (n,) int64, and the boundaries, ascending, at which its state will be stored."""

    ids: np.ndarray
    space: Space
    boundaries: Sequence[int]
    alive: Callable[[], bool]
    stored: int = 0

    def has(self, boundary: int) -> bool:
        """Tell whether it is stored up to a boundary, or never will be."""
        return self.stored >= boundary or not self.alive()


class Wait(NamedTuple):
    """A request waits until something is `done`, at the latest until `until` (of time.monotonic()). `boundary`: up to which
    another's prompt is to be stored, where it waits for that.
    """

    done: Callable[[], bool]
    until: float
    boundary: int = 0

    def over(self) -> bool:
        return self.done() or time.monotonic() >= self.until


class Admission:
    """The prompts under way. For one thread: the one that generates.

    `longest`: seconds that a request waits for another at most. That other one makes progress on the same device all
    the while, so this only guards against one that is stuck.
    """

    def __init__(self, longest: float = 120.0, whole_blocks: bool = False):
        self.longest = longest
        self._whole_blocks = whole_blocks  # a hit doesn't end inside a whole block
        self.waited = 0
        self._in_vain_until = 0.0
        self._under_way: list[Computing] = []

    def wait_for(self, ids: np.ndarray, space: Space, has: int, *, sliceable: bool) -> Wait | None:
        """Whom a prompt should wait for, of whose tokens `has` can be had already; None: nobody.

        Only for a part that is worth it: `LEAST` tokens, and no more than twice as much to be computed for it. A model
        that is not `sliceable` can go on from a stored boundary only, not from anywhere before one.
        """
        self._under_way = [prompt for prompt in self._under_way if prompt.alive()]
        if time.monotonic() < self._in_vain_until:
            return None
        best: tuple[int, Computing, int] | None = None
        for prompt in self._under_way:
            if prompt.space != space:
                continue
            common = common_prefix(prompt.ids, ids[:-1])
            for boundary in prompt.boundaries:
                depth = min(boundary, common) if sliceable or boundary <= common else 0
                if self._whole_blocks and sliceable and depth < len(prompt.ids) // BLOCK * BLOCK:
                    depth -= depth % BLOCK
                gain = depth - max(has, prompt.stored)
                if boundary <= prompt.stored or gain < LEAST or boundary - prompt.stored > 2 * gain:
                    continue
                if best is None or depth > best[0]:
                    best = depth, prompt, boundary
        if best is None:
            return None
        self.waited += 1
        _, prompt, boundary = best
        return Wait(partial(prompt.has, boundary), time.monotonic() + self.longest, boundary)

    def shared(self, ids: np.ndarray, space: Space) -> int:
        """Return with how many tokens both this prompt, but for its last one, and another that is under way begin."""
        others = [prompt.ids for prompt in self._under_way if prompt.space == space and prompt.ids is not ids]
        return max((common_prefix(other, ids[:-1]) for other in others), default=0)

    def enter(self, prompt: Computing) -> None:
        """Hear that a prompt is now being computed."""
        self._under_way.append(prompt)

    def stored(self, ids: np.ndarray, space: Space, kept: int | None = None) -> None:
        """Hear that these tokens were stored, or of them the first `kept`. Where less is kept, nobody waits for a while: it
        would be in vain.
        """
        if kept is not None and kept < len(ids) - LOST:
            self._in_vain_until = time.monotonic() + IN_VAIN
        for prompt in self._under_way:
            n = min(len(ids), len(prompt.ids))
            if prompt.space == space and prompt.stored < n and np.array_equal(prompt.ids[:n], ids[:n]):
                prompt.stored = n
