"""Kernels that copy between the host's pinned memory, which a GPU reads and writes by its address, and the GPU's own."""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from .dialects import Dialect, Kernel, KernelSource, build, defines, launch

THREADS = 256
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
FROM_GPU = KernelSource(
    "from_gpu",
    ("copied", "address", "size"),
    ("done",),
    defines({"THREADS": THREADS}),
    "  const u32* from = copied;\n  u32* to = reinterpret_cast<u32*>(address[0]);\n" + BODY + "  done[0] = 1;\n",
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


def from_gpu(dialect: Dialect, copied: mx.array, address: mx.array) -> mx.array:
    """Copy uint32 (words,), which lies in one piece, to an address, uint64 (1,), of pinned memory.
    Return an array that is there once they are written. Lazy.
    """
    inputs = [copied, address, _size(address, len(copied))]
    (done,) = launch(_kernel(dialect, FROM_GPU), inputs, [((1,), mx.uint32)], GROUPS, THREADS)
    return done


def _size(anything: mx.array, words: int) -> mx.array:
    """Return an array that is not read: a number reaches a kernel as a shape for nothing."""
    return mx.broadcast_to(anything, (words,))
