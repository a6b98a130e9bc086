"""The prompts of the crash scenario, and the state that each must have: a function of its name alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.models import states

RAW, LEVELLED = "raw", os.environ.get("CRASH_CODEC", "turboquant:8:sink_tokens=3")
IS_TRANSFORM = LEVELLED.startswith("transform")  # its basis is where PREFIXCACHE_BASIS_DIR says


class Kind(NamedTuple):
    """How a model's prompt caches are made and checked. `codec` is the one of its namespace."""

    model: str
    codec: str
    make: Callable[[list[int]], list[Any]]
    check: Callable[[list[Any], list[int]], None]


DENSE = Kind("dense", RAW, lambda tokens: states.sliceable(tokens, 1), states.check)
WINDOWED = Kind("windowed", RAW, lambda tokens: states.windowed(tokens, 200), states.check)
HYBRID = Kind("hybrid", RAW, states.hybrid, states.check)
CODED = Kind("coded", LEVELLED, lambda tokens: states.uneven(tokens, 1), states.check_uneven)


class Prompt(NamedTuple):
    kind: Kind
    tokens: list[int]


def text(seed: int, count: int) -> list[int]:
    """Tokens that begin with no other seed's."""
    return [(seed * 100_003 + n * 7919) % 131_071 for n in range(count)]


PROMPTS = {
    "short": Prompt(DENSE, text(1, 300)),
    "grown": Prompt(DENSE, text(1, 600)),  # its first 300 tokens are `short`: a tail grows
    "branch": Prompt(DENSE, text(1, 256) + text(2, 100)),
    "window": Prompt(WINDOWED, text(3, 420)),
    "early": Prompt(WINDOWED, text(3, 260)),  # brings rows of windows that `window` had no more
    "state": Prompt(HYBRID, text(4, 300)),
    "later": Prompt(HYBRID, text(4, 330)),
    "first": Prompt(CODED, text(5, 300)),
    "second": Prompt(CODED, text(6, 270)),
    **{f"filler{n}": Prompt(DENSE, text(10 + n, 520)) for n in range(3)},
    "last": Prompt(DENSE, text(30, 300)),
    "probe": Prompt(DENSE, text(31, 40)),  # stored while the disk fails
    "afterwards": Prompt(DENSE, text(32, 300)),  # stored by the check of what is left
}
