"""What stands on a GPU around the products of transform coding: kernels from rows of a stream to centred ones without RoPE,
from products to rows with it, and for sums over channels and over rows.

A thread has a pair of values that RoPE turns together, or two neighbours, of some tokens one after the other. Centred rows
and products are half precision, as bits, of channels that were each divided by a scale of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

from .dialects import SIMD_WIDTH, Dialect, Kernel, KernelSource, bits_of, build, defines, launch

THREADS = 256
TOKENS = 16  # of a thread: what is of a channel is read once for them
MOST = {"float16": "65504.0f", "bfloat16": "float_of(0x7F7F0000u)", "float32": "float_of(0x7F7FFFFFu)"}

PLACE = """
  const u32 parts = (tokens + TOKENS - 1) / TOKENS;
  const u32 at = group * THREADS + member, pair = at % HALF, part = at / HALF % parts, head = at / HALF / parts;
  if (head >= HEADS * u32(mean_shape[0])) return;
  const bool turns = pair < PAIRS;
  const u32 one = turns && !INTERLEAVED ? pair : 2 * pair, other = turns && !INTERLEAVED ? pair + PAIRS : one + 1;
  const bool both = other < WIDTH;
  const u32 channel = head / HEADS * u32(mean_shape[1]) + places[0] + head % HEADS * WIDTH;
  const u32 a_channel = channel + one, b_channel = channel + (both ? other : one);
  const float a_mean = mean[a_channel], b_mean = mean[b_channel], a_scale = scale[a_channel], b_scale = scale[b_channel];
  const u32 last = part * TOKENS + TOKENS < tokens ? part * TOKENS + TOKENS : tokens;
"""

# RoPE, or its inverse where SINE is negative.
TURN = """
    if (turns) {
      const float c = times(cosines[token * PAIRS + pair], COSINE), s = times(sines[token * PAIRS + pair], SINE);
      const float turned = minus(times(a, c), times(b, s));
      b = plus(times(a, s), times(b, c));
      a = turned;
    }
"""

LOADS = {
    "float16": "FUNCTION float loaded(const u16 bits) { return low_half(u32(bits)); }",
    "bfloat16": "FUNCTION float loaded(const u16 bits) { return float_of(u32(bits) << 16); }",
    "float32": "FUNCTION float loaded(const u32 bits) { return float_of(bits); }",
}
STORES = {
    "float16": "FUNCTION u16 stored(const float x) { return u16(half_pair(x, 0.0f)); }",
    "bfloat16": "FUNCTION u16 stored(const float x) { return u16(bfloat_pair(x, 0.0f)); }",
    "float32": "FUNCTION u32 stored(const float x) { return bits_of(x); }",
}

CENTRE = (
    """
  const u32 tokens = u32(rows_shape[1]);
"""
    + PLACE
    + """
  const u64 step = u64(rows_strides[2]);
  for (u32 token = part * TOKENS; token < last; token++) {
    const u64 source = u64(head) * u64(rows_strides[0]) + u64(token) * u64(rows_strides[1]);
    float a = loaded(rows[source + one * step]), b = both ? loaded(rows[source + other * step]) : 0.0f;
"""
    + TURN
    + """    const u64 row = (u64(head) * tokens + token) * WIDTH;
    centred[row + one] = u16(half_pair(times(over(minus(a, a_mean), a_scale), FACTOR), 0.0f));
    if (both) centred[row + other] = u16(half_pair(times(over(minus(b, b_mean), b_scale), FACTOR), 0.0f));
  }
"""
)

RESTORE = (
    """
  const u32 tokens = u32(products_shape[1]);
"""
    + PLACE
    + """
#define NIBBLE(i) float(int(offsets[u64(block) * u64(offsets_strides[0]) + (i) / 2] >> 4 * ((i) & 1) & 15) - 8)
  u32 block = 0xFFFFFFFFu;
  float a_added = 0.0f, b_added = 0.0f;
  for (u32 token = part * TOKENS; token < last; token++) {
    if (blocks[token] != block) {
      block = blocks[token];
      const float step = float_of(u32(steps[block * u32(steps_strides[0]) + places[1] + head]) << 16);
      a_added = plus(a_mean, times(NIBBLE(a_channel), step));
      b_added = plus(b_mean, times(NIBBLE(b_channel), step));
    }
    const u64 source = (u64(places[2] + head) * tokens + token) * WIDTH;
    float a = plus(times(low_half(u32(products[source + one])), times(a_scale, FACTOR)), a_added);
    float b = plus(times(low_half(u32(products[source + (both ? other : one)])), times(b_scale, FACTOR)), b_added);
"""
    + TURN
    + """    const u64 row = (u64(head) * tokens + token) * WIDTH;
    restored[row + one] = stored(least(greatest(a, -MOST), MOST));
    if (both) restored[row + other] = stored(least(greatest(b, -MOST), MOST));
  }
"""
)

# Sums of the squares of CHANNELS neighbouring channels of a group: a thread a row of them.
LENGTHS = """
  const u32 channels = u32(values_shape[1]), rows = u32(values_shape[2]), in_part = (rows + THREADS - 1) / THREADS;
  const u32 parts = (channels + CHANNELS - 1) / CHANNELS, part = group / in_part, row = group % in_part * THREADS + member;
  if (row >= rows) return;
  const u32 first = part % parts * CHANNELS, last = first + CHANNELS < channels ? first + CHANNELS : channels;
  const u64 place = u64(part / parts) * channels * rows + row;
  float sum = 0.0f;
  for (u32 i = first; i < last; i++) {
    const float value = low_half(u32(values[place + u64(i) * rows]));
    sum = plus(sum, times(value, value));
  }
  squares[u64(part) * rows + row] = sum;
"""

# Sums of the rows of each block that are fine, by channel: a simdgroup a channel and block.
SUMS = """
  const u32 channels = u32(values_shape[1]), rows = u32(values_shape[2]), blocks = u32(edges_shape[0]) - 1;
  const u32 at = group * (THREADS / SIMD_WIDTH) + member / SIMD_WIDTH, lane = member % SIMD_WIDTH;
  const bool inside = at < u32(values_shape[0]) * channels * blocks;
  const u32 channel = inside ? at / blocks : 0, block = inside ? at % blocks : 0;  // a channel of all parts
  float sum = 0.0f;
  for (u32 i = edges[block] + lane; i < edges[block + 1]; i += SIMD_WIDTH) {
    const float value = low_half(u32(values[u64(channel) * rows + i]));
    if (fine[channel / channels * rows + i]) sum = plus(sum, value);
  }
  for (u32 mask = SIMD_WIDTH / 2; mask > 0; mask /= 2) sum = plus(sum, swapped(sum, mask));
  if (inside && lane == 0) sums[at] = sum;
"""
CHANNELS = 128


class StreamKind(NamedTuple):
    """What a kernel is made for: a stream's heads and their width and dtype, and how many `pairs` of a head turn, which
    neighbours where `interleaved`: their cosines and sines are multiplied by `cosine` and `sine`. Products, or what becomes
    one, are multiplied by `factor`.
    """

    heads: int
    width: int
    dtype: str
    pairs: int
    interleaved: bool
    cosine: float
    sine: float
    factor: float

    def functions(self) -> str:
        numbers = {
            "THREADS": THREADS,
            "TOKENS": TOKENS,
            "HEADS": self.heads,
            "WIDTH": self.width,
            "HALF": -(-self.width // 2),
            "PAIRS": self.pairs,
            "INTERLEAVED": int(self.interleaved),
        }
        factors = {"COSINE": self.cosine, "SINE": self.sine, "FACTOR": self.factor}
        text = defines(numbers, unsigned=True)
        text += defines({name: f"float_of({bits_of(number)})" for name, number in factors.items()})
        return f"\n{text}#define MOST {MOST[self.dtype]}\n{LOADS[self.dtype]}\n{STORES[self.dtype]}\n"


def centrer(form: StreamKind) -> KernelSource:
    """Inputs: the bits of rows (heads of all groups, tokens, width); mean and scale, float32 (groups, channels); cosines and
    sines float32 (tokens, pairs); `places` as for `restorer`, of which it takes the first. Output: (row - mean) / scale *
    factor, uint16, of the same shape.
    """
    inputs = ("rows", "mean", "scale", "cosines", "sines", "places")
    return KernelSource("transform_centre", inputs, ("centred",), form.functions(), CENTRE)


def restorer(form: StreamKind) -> KernelSource:
    """Inputs: products uint16 (heads, tokens, width), mean and scale, float32 (1, channels); of each token its block,
    uint32 (tokens,); of each block offsets of channels, uint8, two to a byte, and of heads steps of them, bf16 as uint16;
    cosines and sines float32 (tokens, pairs); `places`, the stream's first channel and head, and where that is among
    products, uint32 (3,). Output: the bits of rows (heads, tokens, width).
    """
    inputs = ("products", "mean", "scale", "blocks", "offsets", "steps", "cosines", "sines", "places")
    return KernelSource("transform_restore", inputs, ("restored",), form.functions(), RESTORE)


def measurer() -> KernelSource:
    """Input: values uint16 (groups, channels, rows). Output: sums of their squares, float32 (groups, parts, rows), a part for
    each 128 channels, the last for fewer.
    """
    return KernelSource("transform_lengths", ("values",), ("squares",), _defines(CHANNELS=CHANNELS), LENGTHS)


def adder() -> KernelSource:
    """Inputs: values uint16 (groups, channels, rows), which rows are fine, uint16 (groups, rows), the first row of each block
    and the end of the last, uint32 (blocks + 1,). Output: sums of the fine ones, float32 (groups, channels, blocks).
    """
    return KernelSource("transform_sums", ("values", "fine", "edges"), ("sums",), _defines(SIMD_WIDTH=SIMD_WIDTH), SUMS)


def _defines(**numbers: int) -> str:
    return defines({"THREADS": THREADS, **numbers}, unsigned=True)


@lru_cache(maxsize=256)
def _kernel(dialect: Dialect, make: Callable[..., KernelSource], *form: StreamKind) -> Kernel:
    return build(dialect, make(*form))


def centre(dialect: Dialect, form: StreamKind, inputs: list[mx.array]) -> mx.array:
    """Inputs and output of `centrer`, one token at least."""
    return _launched(_kernel(dialect, centrer, form), form, inputs, inputs[0].shape[0], mx.uint16)


def restore(dialect: Dialect, form: StreamKind, inputs: list[mx.array]) -> mx.array:
    """Inputs and output of `restorer`, one token at least."""
    dtype = mx.uint32 if form.dtype == "float32" else mx.uint16
    return _launched(_kernel(dialect, restorer, form), form, inputs, form.heads, dtype)


def lengths(dialect: Dialect, values: mx.array) -> mx.array:
    """Input and output of `measurer`."""
    groups, channels, rows = values.shape
    shape = (groups, -(-channels // CHANNELS), rows)
    launched = groups * shape[1] * -(-rows // THREADS)
    (squares,) = launch(_kernel(dialect, measurer), [values], [(shape, mx.float32)], launched, THREADS)
    return squares


def sums(dialect: Dialect, values: mx.array, fine: mx.array, edges: mx.array) -> mx.array:
    """Inputs and output of `adder`."""
    groups, channels, _ = values.shape
    shape = (groups, channels, len(edges) - 1)
    launched = -(-groups * channels * shape[2] * SIMD_WIDTH // THREADS)
    (added,) = launch(_kernel(dialect, adder), [values, fine, edges], [(shape, mx.float32)], launched, THREADS)
    return added


def _launched(kernel: Kernel, form: StreamKind, inputs: list[mx.array], heads: int, dtype: mx.Dtype) -> mx.array:
    tokens = inputs[0].shape[1]
    threads = heads * -(-tokens // TOKENS) * -(-form.width // 2)
    outputs = [((heads, tokens, form.width), dtype)]
    (rows,) = launch(kernel, inputs, outputs, -(-threads // THREADS), THREADS)
    return rows
