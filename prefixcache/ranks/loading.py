"""Loading a sharded model with any of MLX's back ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx


@contextmanager
def any_backend() -> Iterator[None]:
    """Within it, `mlx_lm.utils.sharded_load` works with NCCL, too: it ends with a collective on the CPU, where NCCL has none
    ("There is no Stream(gpu, 1) in current thread", mlx-lm 0.31.3 to 0.32.2). Here that one runs where the group's others do.
    """
    all_sum = mx.distributed.all_sum

    def where_the_group_is(x: Any, *, stream: Any = None, **options: Any) -> mx.array:
        return all_sum(x, **options)

    mx.distributed.all_sum = where_the_group_is
    try:
        yield
    finally:
        mx.distributed.all_sum = all_sum
