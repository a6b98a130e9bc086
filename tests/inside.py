"""What tests look at inside of the product, where no public call tells it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `make test-fast` has no MLX
    from prefixcache import PrefixCache
    from prefixcache.live.layer import CodedLayer
    from prefixcache.live.protocol import LiveCache
    from prefixcache.open_cache import OpenCache
    from prefixcache.ssd import Ssd
    from prefixcache.ssd.open_directory import OpenDirectory
    from prefixcache.ssd.queue import Queue


def inside(cache: PrefixCache) -> OpenCache:
    """Return the parts of a cache."""
    return cache._opened


def directory_of(ssd: Ssd) -> OpenDirectory:
    """Return the directory of an SSD, with its index and its ledger."""
    return ssd._opened


def queue_of(ssd: Ssd) -> Queue:
    """Return what waits to be written to an SSD."""
    return ssd._queue


def layer_of(cache: LiveCache) -> CodedLayer:
    """Return the codes of a live layer cache."""
    return cache._layer
