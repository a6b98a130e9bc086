"""MLX's pool of freed buffers, under a server on a GPU that has memory of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx

from prefixcache.codecs.interchange import device_memory

POOL = 1 << 30  # bytes

empty_pool = mx.clear_cache


@contextmanager
def pool_kept() -> Iterator[None]:
    """Let a GPU with memory of its own keep the buffers that MLX has freed, up to `POOL` bytes, for the next chunk of a
    prompt. `empty_pool` gives them back all the same.

    Patch: mlx-lm and mlx-vlm call `mx.clear_cache` after each chunk, and the driver takes an eighth of a prefill to give the
    same memory again (decision 0059). Issue: none filed. Goes when they bound the pool instead.
    """
    if device_memory() is None:
        yield
        return
    before = mx.set_cache_limit(POOL)
    mx.set_cache_limit(min(POOL, before))
    mx.clear_cache = lambda: None
    try:
        yield
    finally:
        mx.clear_cache = empty_pool
        mx.set_cache_limit(before)
