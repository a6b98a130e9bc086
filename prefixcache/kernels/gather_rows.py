"""The same tokens' rows of many layers, brought side by side on an NVIDIA GPU in one launch, where MLX takes one a layer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import mlx.core as mx

from .dialects import Dialect, Kernel, KernelSource, build, defines, launch

THREADS = 256
TOKENS = 64  # of a head, that a group of threads copies
MOST = 40  # layers of a launch: what a kernel is given fits 4 kB

BODY = """
  const u32 heads = layer0_shape[1], first = span_shape[0] - 1, count = span_shape[1];
  const u32 parts = (count + TOKENS - 1) / TOKENS;
  const u32 part = group % parts, head = group / parts % heads, layer = group / parts / heads;
  decltype(layer0) from = nullptr;
  u64 by_head = 0, by_token = 0, by_value = 0;
  switch (layer) {
CASES
  }
  const u32 begin = part * TOKENS, tokens = part + 1 < parts ? TOKENS : count - begin;
  from += head * by_head + (first + begin) * by_token;
  const u64 at = (u64(layer * heads + head) * count + begin) * WIDTH;
  const u32* source = reinterpret_cast<const u32*>(from);
  u32* target = reinterpret_cast<u32*>(rows + at);
  if (by_value == 1 && by_token == WIDTH && aligned(source) && aligned(target)) {
    for (u32 i = 4 * member; i < tokens * ROW_WORDS; i += 4 * THREADS) {
      u32 words[4];
      load_four(source + i, words);
      UNROLL for (u32 e = 0; e < 4; e++) target[i + e] = words[e];
    }
  } else {
    for (u32 i = member; i < tokens * WIDTH; i += THREADS) {
      rows[at + i] = from[i / WIDTH * by_token + i % WIDTH * by_value];
    }
  }
"""

CASE = """    case {i}:
      from = layer{i}; by_head = layer{i}_strides[1]; by_token = layer{i}_strides[2]; by_value = layer{i}_strides[3];
      break;
"""


def takes(dialect: Dialect, layers: Sequence[mx.array]) -> bool:
    """Tell whether `gather` takes these arrays (1, heads, capacity, width): several, all alike, of rows of whole 16 bytes."""
    if dialect.name != "cuda" or len(layers) < 2:
        return False
    first = layers[0]
    alike = all(layer.shape == first.shape and layer.dtype == first.dtype for layer in layers)
    return alike and first.shape[3] * first.dtype.size % 16 == 0


def gather(dialect: Dialect, layers: Sequence[mx.array], first: int, last: int) -> mx.array:
    """Return tokens `first` to `last` (not included) of arrays (1, heads, capacity, width) -> (heads of all, tokens, width).
    Lazy.
    """
    parts = [_launched(dialect, layers[at : at + MOST], first, last) for at in range(0, len(layers), MOST)]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def _launched(dialect: Dialect, layers: Sequence[mx.array], first: int, last: int) -> mx.array:
    _, heads, _, width = layers[0].shape
    dtype, count = layers[0].dtype, last - first
    span = mx.broadcast_to(_nothing(), (first + 1, count))  # numbers reach a kernel as a shape for nothing
    groups = len(layers) * heads * -(-count // TOKENS)
    kernel = _kernel(dialect, len(layers), width, dtype.size)
    (rows,) = launch(kernel, [*layers, span], [((len(layers) * heads, count, width), dtype)], groups, THREADS)
    return rows


@lru_cache(maxsize=64)
def _kernel(dialect: Dialect, layers: int, width: int, itemsize: int) -> Kernel:
    return build(dialect, source_of(layers, width, itemsize))


@lru_cache(maxsize=1)
def _nothing() -> mx.array:
    nothing = mx.zeros(1)
    mx.eval(nothing)
    return nothing


def source_of(layers: int, width: int, itemsize: int) -> KernelSource:
    """Inputs: layer0, layer1, ... (1, heads, capacity, width), strided, and span, of whose shape (first token + 1, tokens)
    alone is read. Output: rows (heads of all, tokens, width).
    """
    numbers = {"THREADS": THREADS, "TOKENS": TOKENS, "WIDTH": width, "ROW_WORDS": width * itemsize // 4}
    cases = "".join(CASE.format(i=i) for i in range(layers))
    inputs = (*(f"layer{i}" for i in range(layers)), "span")
    body = BODY.replace("CASES\n", cases)
    return KernelSource("gather_rows", inputs, ("rows",), defines(numbers, unsigned=True), body)
