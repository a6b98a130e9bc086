"""What tests look at inside a cache, where no public call tells it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `make test-fast` has no MLX
    from prefixcache import PrefixCache
    from prefixcache.open_cache import OpenCache


def inside(cache: PrefixCache) -> OpenCache:
    """Return the parts of a cache."""
    return cache._opened
