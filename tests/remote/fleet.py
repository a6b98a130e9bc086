"""What tests of machines that share one engine wait for."""

from __future__ import annotations

import time
from typing import Any

from prefixcache import PrefixCache


def sent(cache: PrefixCache, seconds: float = 10) -> int:
    """Wait until nothing waits to be sent; the images that were sent so far."""
    until = time.monotonic() + seconds
    while cache.stats().remote.queued:
        assert time.monotonic() < until, cache.stats().remote
        time.sleep(0.005)
    return cache.stats().remote.written_images


def brought(cache: PrefixCache, tokens: Any, **how: Any) -> int:
    """Promote, and the depth in RAM then."""
    return cache.promote(tokens, model="m", **how).result(20)
