"""What all ranks of a model can serve of a prompt (decision 0032). Collective: all ranks call these with the same
prompt, and what fails on one is a shorter hit for all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from prefixcache.keys import canonical
from prefixcache.ranks.agreement import Ranks, number_of
from prefixcache.tiers.prompt import Prompt

log = logging.getLogger("prefixcache")


def depths_of_all(ranks: Ranks, prompt: Prompt, leave: int, depths: Callable[[list[int]], list[int]]) -> list[int]:
    """Tell how deep all ranks can serve a prompt from RAM, and from all tiers together. `depths` says how deep this one can,
    up to a limit for each; where it fails, nothing is served.
    """
    failed = False

    def deepest(limits: list[int]) -> list[int]:
        nonlocal failed
        try:
            return [0, 0] if failed else depths(limits)
        except Exception as error:
            failed = True
            log.warning("a lookup failed, which is a miss on all ranks: %s: %s", type(error).__name__, error)
            return [0, 0]

    limits = [max(len(prompt) - leave, 0)] * 2
    return ranks.agree(deepest, limits, _question("match", prompt, leave))


def taken_by_all(ranks: Ranks, prompt: Prompt, leave: int, take: Callable[[int], tuple[Any, int]]) -> tuple[Any, int]:
    """Return what `take(leave)` gives here and how deep it is, once it is as deep on every rank; (None, 0) where there is
    nothing that all can serve. What can't be found or decoded on one rank makes the hit of all shorter.
    """
    taken, tokens, failed = None, -1, False

    def deepest(limits: list[int]) -> list[int]:
        nonlocal taken, tokens, failed
        if failed or tokens == limits[0]:  # else it was too deep for another rank, or this is the first time
            return [tokens, 0]
        taken, tokens = None, 0
        try:
            taken, tokens = take(len(prompt) - limits[0])
        except Exception as error:
            failed = True
            log.warning("a fetch failed, which is a miss on all ranks: %s: %s", type(error).__name__, error)
        return [tokens, 0]

    # As many numbers as a match has: ranks that don't call the same must learn it.
    limits = [max(len(prompt) - leave, 0), 0]
    depth = ranks.agree(deepest, limits, _question("take", prompt, leave))[0]
    return (taken, depth) if depth else (None, 0)


def _question(call: str, prompt: Prompt, leave: int) -> int:
    """Return what the ranks must all ask for."""
    about = canonical([call, len(prompt), leave, prompt.terms.whole_blocks]).encode()
    return number_of(b"".join((prompt.token_bytes, prompt.salt, about)))
