"""What tests of machines that share one engine do, and wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prefixcache import PrefixCache
from tests.models import states
from tests.models.states import got, put
from tests.waiting import until

LONG = list(range(1000))  # three whole blocks and a tail
Machine = Callable[..., PrefixCache]


def shared(cache: PrefixCache, tokens: list[int], make: Callable[..., Any] = states.sliceable, **more: Any) -> int:
    """Store a prompt, use it a second time, and wait until it is sent."""
    put(cache, tokens, make, **more)
    got(cache, [*tokens, 0], **more)
    return sent(cache)


def sent(cache: PrefixCache) -> int:
    """Wait until nothing waits to be sent; the images that were sent so far."""
    until(lambda: not cache.stats().remote.queued, 10)
    return cache.stats().remote.written_images


def brought(cache: PrefixCache, tokens: Any, **how: Any) -> int:
    """Promote, and the depth in RAM then."""
    return cache.promote(tokens, model="m", **how).result(20)
