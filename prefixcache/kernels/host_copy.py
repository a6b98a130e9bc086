"""Kernels that copy from pinned memory of the host, by its address, and that tell the addresses of a GPU's arrays."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import mlx.core as mx

from .dialects import Dialect, Kernel, KernelSource, build, defines, launch

THREADS = 256
MOST = 16  # arrays that one kernel tells the addresses of
GROUPS = 128  # enough for the bus, and most of the GPU stays free for others

BODY = """
  const u64 count = size_shape[0], whole = aligned(from) && aligned(to) ? count / 4 : 0;
  const u64 step = u64(groups) * THREADS;
  for (u64 i = u64(group) * THREADS + member; i < whole; i += step) {
    u32 words[4];
    load_four(from + 4 * i, words);
    store_four(to + 4 * i, words);
  }
  for (u64 i = 4 * whole + u64(group) * THREADS + member; i < count; i += step) to[i] = from[i];
"""

TO_GPU = KernelSource(
    "to_gpu",
    ("address", "size"),
    ("copied", "done"),
    defines({"THREADS": THREADS}),
    "  const u32* from = reinterpret_cast<const u32*>(address[0]);\n  u32* to = copied;\n" + BODY + "  done[0] = 1;\n",
)

ADDRESSES = KernelSource(
    "addresses",
    tuple(f"array{i}" for i in range(MOST)),
    tuple(f"address{i}" for i in range(MOST)),
    "",
    "".join(f"  address{i}[0] = reinterpret_cast<u64>(array{i});\n" for i in range(MOST)),
)


@lru_cache(maxsize=8)
def _kernel(dialect: Dialect, source: KernelSource) -> Kernel:
    return build(dialect, source)


def to_gpu(dialect: Dialect, address: mx.array, words: int) -> tuple[mx.array, mx.array]:
    """Copy words of 32 bits from an address, uint64 (1,), of pinned memory -> uint32 (words,), and an array that is there
    once they are read. Lazy.
    """
    outputs = [((words,), mx.uint32), ((1,), mx.uint32)]
    copied, done = launch(_kernel(dialect, TO_GPU), [address, _size(address, words)], outputs, GROUPS, THREADS)
    return copied, done


def addresses(dialect: Dialect, arrays: Sequence[mx.array]) -> list[mx.array]:
    """Return where up to `MOST` arrays lie on the GPU, each uint64 (1,), there once all of them are computed. Lazy."""
    alike = [array.view(mx.uint8) for array in arrays]  # MLX compiles a kernel anew for other dtypes
    inputs = alike + alike[-1:] * (MOST - len(arrays))
    return list(launch(_kernel(dialect, ADDRESSES), inputs, [((1,), mx.uint64)] * MOST, 1, 1))[: len(arrays)]


def _size(anything: mx.array, words: int) -> mx.array:
    """Return an array that is not read: a number reaches a kernel as a shape for nothing."""
    return mx.broadcast_to(anything, (words,))
