"""MLX keeps the buffers that were freed for the next arrays. A server that nobody asks gives them back to the system."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

LOOKS = 30  # in a row that find no request: mlx-lm's loop waits .1 s for one


class IdlePool:
    """Counts the looks for a request, on the thread that generates, and after `LOOKS` in vain empties the pool, once."""

    def __init__(self, empty: Callable[[], None] = mx.clear_cache):
        self._empty = empty
        self._looks = 0

    def look(self, *, busy: bool) -> None:
        """One look. `busy`: a request came, waits, or is under way."""
        self._looks = 0 if busy else self._looks + 1
        if self._looks == LOOKS:
            self._empty()
