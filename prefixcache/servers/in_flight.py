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
LONGEST = 120.0  # seconds of a wait, at most: the other is computed all the while, unless it is stuck
IN_VAIN = 10.0  # seconds for which nobody waits after a store found no room


class Space(NamedTuple):
    """The prompts that may wait for each other: those of one model and salt."""

    model: str
    salt: bytes


@dataclass(eq=False)
class PromptUnderWay:
    """A prompt that is computed now: its tokens (n,) int64, the boundaries, ascending, at which its state will be stored, and
    how many tokens are `stored`. `alive`: whether an answer is still to come, and somebody wants it.
    """

    ids: np.ndarray
    space: Space
    boundaries: Sequence[int]
    alive: Callable[[], bool]
    stored: int = 0

    def has(self, boundary: int) -> bool:
        """Tell whether it is stored up to a boundary, or never will be."""
        return self.stored >= boundary or not self.alive()


class Wait(NamedTuple):
    """A request waits until something is `done`, at the latest until `until` (of time.monotonic())."""

    done: Callable[[], bool]
    until: float

    def over(self) -> bool:
        return self.done() or time.monotonic() >= self.until


class PromptsUnderWay:
    """The prompts under way. For one thread: the one that generates. `waited` counts the waits."""

    def __init__(self, whole_blocks: bool = False):
        self._whole_blocks = whole_blocks  # a hit doesn't end inside a whole block
        self.waited = 0
        self._in_vain_until = 0.0
        self._prompts: list[PromptUnderWay] = []

    def wait_for(self, ids: np.ndarray, space: Space, has: int, *, sliceable: bool) -> Wait | None:
        """Return the wait for the prompt under way that shares most tokens with this one, of whose tokens `has` can be had
        already; None where none is worth it.

        A wait must save `LEAST` tokens, and half of what is computed until it is over. A model that is not `sliceable` can go
        on from a stored boundary only, not from anywhere before one.
        """
        if time.monotonic() < self._in_vain_until:
            return None
        deepest = 0
        wait: Wait | None = None
        for prompt in self._alive(space):
            common = common_prefix(prompt.ids, ids[:-1])
            for boundary in prompt.boundaries:
                depth = min(boundary, common) if sliceable or boundary <= common else 0
                if self._whole_blocks and sliceable and depth < len(prompt.ids) // BLOCK * BLOCK:
                    depth -= depth % BLOCK
                gain = depth - max(has, prompt.stored)
                if gain >= LEAST and 0 < boundary - prompt.stored <= 2 * gain and depth > deepest:
                    deepest = depth
                    wait = Wait(partial(prompt.has, boundary), time.monotonic() + LONGEST)
        self.waited += wait is not None
        return wait

    def shared(self, ids: np.ndarray, space: Space) -> int:
        """Return with how many tokens both this prompt, but for its last one, and another that is under way begin."""
        others = [prompt.ids for prompt in self._alive(space) if prompt.ids is not ids]
        return max((common_prefix(other, ids[:-1]) for other in others), default=0)

    def enter(self, prompt: PromptUnderWay) -> None:
        """Hear that a prompt is now being computed."""
        self._prompts.append(prompt)

    def stored(self, ids: np.ndarray, space: Space, kept: int) -> None:
        """Hear that these tokens were stored, and that the first `kept` found room. Where more than a tail found none, nobody
        waits for a while: it would be in vain.
        """
        if kept < len(ids) - BLOCK:
            self._in_vain_until = time.monotonic() + IN_VAIN
        for prompt in self._alive(space):
            n = min(len(ids), len(prompt.ids))
            if prompt.stored < n and np.array_equal(prompt.ids[:n], ids[:n]):
                prompt.stored = n

    def _alive(self, space: Space) -> list[PromptUnderWay]:
        """Return the prompts of a model and salt that are still under way, and forget those of anybody that are not."""
        self._prompts = [prompt for prompt in self._prompts if prompt.alive()]
        return [prompt for prompt in self._prompts if prompt.space == space]
