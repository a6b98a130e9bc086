"""Arrays that lie apart, side by side: in one launch on an NVIDIA GPU, elsewhere by MLX."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from prefixcache.kernels import gather_rows
from prefixcache.kernels.dialects import dialect_here

_VALUES = 16  # of what is a row to `gather`, where an array has no rows


def gather(layers: Sequence[mx.array], first: int, last: int) -> mx.array:
    """Return tokens `first` to `last` (not included) of arrays (1, heads, capacity, width) -> (heads of all, tokens, width).
    Lazy.
    """
    dialect = dialect_here()
    if dialect is not None and gather_rows.takes(dialect, layers):
        return gather_rows.gather(dialect, layers, first, last)
    return mx.concatenate([layer[:, :, first:last] for layer in layers], axis=1)[0]


def stacked(arrays: Sequence[mx.array]) -> mx.array:
    """Return contiguous arrays of one shape and dtype as one, with a new first axis. Lazy."""
    first = arrays[0]
    if len(arrays) == 1 or first.size % _VALUES:
        return mx.stack(list(arrays))
    rows = first.size // _VALUES
    return gather([array.reshape(1, 1, rows, _VALUES) for array in arrays], 0, rows).reshape(len(arrays), *first.shape)
