"""The same tokens' rows of many layers, side by side: in one launch on an NVIDIA GPU, elsewhere by MLX."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from prefixcache.kernels import gather_rows
from prefixcache.kernels.dialects import dialect_here


def gather(layers: Sequence[mx.array], first: int, last: int) -> mx.array:
    """Return tokens `first` to `last` (not included) of arrays (1, heads, capacity, width) -> (heads of all, tokens, width).
    Lazy.
    """
    dialect = dialect_here()
    if dialect is not None and gather_rows.takes(dialect, layers):
        return gather_rows.gather(dialect, layers, first, last)
    return mx.concatenate([layer[:, :, first:last] for layer in layers], axis=1)[0]
