"""The levels of blocks of rows, measured on a GPU: of each head the channels' means and the roots of their spreads.

What they are says prefixcache.codecs.turboquant.measure_levels. A group of threads has one head of one block and goes over
its rows, 64 kB or so, some five times: which are finite, the means, the deviations, each row's size, and once more where
rows are far.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

from .dialects import ELEMENTS, Dialect, Kernel, KernelSource, bits_of, build, defines, launch
from .turboquant_rows import FUNCTIONS, THREADS

MOST_ROWS = THREADS  # a thread has a row
MOST_WIDTH = THREADS
AT_ONCE = 8  # rows of a channel that a thread has on their way

BODY = """
  SHARED float centre[WIDTH], spread[WIDTH], per_unit[WIDTH], sums[THREADS], sizes[THREADS], middle[2];
  SHARED u32 usual[THREADS], changed;
  const u32 tokens = rows_shape[0];
  const u32 begin = u32(firsts[group % firsts_shape[0]]);
  const u64 head_at = u64(group) * u64(rows_strides[1]);
  const bool whole = rows_strides[2] == 1 && rows_strides[0] % 8 == 0 && rows_strides[1] % 8 == 0 &&
      aligned(reinterpret_cast<const DEVICE u32*>(rows));
  const u32 channel = member % WIDTH, slice = member / WIDTH;

  // Each thread a row: is it finite?
  const u64 row_at = head_at + u64(member < tokens ? member : 0) * u64(rows_strides[0]);
  bool counts = member >= begin && member < tokens;
  for (u32 at = 0; at < WIDTH; at += 8) {
    float v[8];
    if (whole) {
      load_chunk(reinterpret_cast<const DEVICE u32*>(rows + row_at + at), v);
    } else {
      UNROLL for (u32 e = 0; e < 8; e++) v[e] = float(rows[row_at + (at + e) * u64(rows_strides[2])]);
    }
    UNROLL for (u32 e = 0; e < 8; e++) counts = counts && (bits_of(v[e]) & 0x7F800000u) != 0x7F800000u;
  }
  usual[member] = counts ? 1 : 0;
  if (member == 0) {
    changed = 0;
    middle[0] = float_of(0x7F800000u);  // stays where sizes are no numbers: then no row is far
  }
  barrier();
  u32 count = 0;
  for (u32 row = 0; row < THREADS; row++) count += usual[row];
  const bool enough = count >= LEAST_ROWS;

  for (u32 turn = 0; turn < 2; turn++) {
    const float number = count ? float(count) : 1.0f;
    for (u32 pass = CENTRED ? 0 : 1; pass < 2; pass++) {
      // Each thread a channel, and every SLICES-th row of it.
      const float mean = pass && CENTRED && slice < SLICES ? centre[channel] : 0.0f;
      float sum = 0.0f;
      if (slice < SLICES) {
        for (u32 base = slice; base < tokens; base += AT_ONCE * SLICES) {
          float x[AT_ONCE];
          UNROLL for (u32 i = 0; i < AT_ONCE; i++) {  // no value waits for the one before
            const u32 row = base + i * SLICES < tokens ? base + i * SLICES : slice;
            x[i] = float(rows[head_at + u64(row) * u64(rows_strides[0]) + channel * u64(rows_strides[2])]);
          }
          UNROLL for (u32 i = 0; i < AT_ONCE; i++) {
            const u32 row = base + i * SLICES;
            const bool is_usual = row < tokens && usual[row];
            sum = plus(sum, is_usual ? (pass ? magnitude(minus(x[i], mean)) : x[i]) : 0.0f);
          }
        }
      }
      sums[member] = sum;
      barrier();
      if (slice == 0) {
        float all = sums[member];
        UNROLL for (u32 other = 1; other < SLICES; other++) all = plus(all, sums[other * WIDTH + member]);
        if (pass) {
          spread[member] = over(all, number);
          per_unit[member] = spread[member] > 0.0f ? over(1.0f, spread[member]) : 1.0f;
          if (!CENTRED) centre[member] = 0.0f;
        } else {
          centre[member] = over(all, number);
        }
      }
      barrier();
    }
    if (turn) break;

    // Each thread a row again: its size in deviations, and whether most are much smaller.
    float size = 0.0f;
    for (u32 at = 0; at < WIDTH; at += 8) {
      float v[8];
      if (whole) {
        load_chunk(reinterpret_cast<const DEVICE u32*>(rows + row_at + at), v);
      } else {
        UNROLL for (u32 e = 0; e < 8; e++) v[e] = float(rows[row_at + (at + e) * u64(rows_strides[2])]);
      }
      UNROLL for (u32 e = 0; e < 8; e++) {
        const float apart = times(minus(v[e], centre[at + e]), per_unit[at + e]);
        size = fused(apart, apart, size);
      }
    }
    sizes[member] = size;
    barrier();
    u32 rank = 0;
    for (u32 row = 0; row < THREADS; row++) {
      rank += usual[row] && (sizes[row] < size || (sizes[row] == size && row < member)) ? 1 : 0;
    }
    if (counts && rank == (count - 1) / 2) middle[0] = size;
    barrier();
    if (counts && size > times(float_of(FAR), middle[0])) {
      usual[member] = 0;
      changed = 1;
    }
    barrier();
    if (changed == 0) break;
    count = 0;
    for (u32 row = 0; row < THREADS; row++) count += usual[row];
  }

  // Of the head: the median of the spreads, the least one, and whether all is finite.
  const float deviation = slice == 0 ? spread[channel] : 0.0f;
  u32 rank = 0;
  bool finite = enough;
  for (u32 other = 0; other < WIDTH; other++) {
    rank += spread[other] < deviation || (spread[other] == deviation && other < channel) ? 1 : 0;
    finite = finite && (bits_of(spread[other]) & 0x7F800000u) != 0x7F800000u;
    finite = finite && (bits_of(centre[other]) & 0x7F800000u) != 0x7F800000u;
  }
  if (slice == 0 && rank == (WIDTH - 1) / 2) middle[0] = deviation;
  if (slice == 0 && rank == WIDTH / 2) middle[1] = deviation;
  barrier();
  if (slice == 0) {
    const float floor = times(float_of(FLOOR), times(plus(middle[0], middle[1]), 0.5f));
    float smallest = greatest(spread[0], floor);
    for (u32 other = 1; other < WIDTH; other++) smallest = least(smallest, greatest(spread[other], floor));
    float steps = 0.0f;
    if (finite && smallest > 0.0f) {
      steps = least(times(logarithm(over(greatest(deviation, floor), smallest)), float_of(STEPS)), float_of(MOST_STEPS));
    }
    means[group * WIDTH + channel] = finite ? centre[channel] : 0.0f;
    roots[group * WIDTH + channel] = u16(plus(greatest(steps, 0.0f), 0.5f));
  }
"""


class MeasureKind(NamedTuple):
    """What a kernel is compiled for. `steps`: of a root, to each factor of two of the spread."""

    width: int
    dtype: str
    centred: bool
    least_rows: int
    far: float
    floor: float
    steps: float
    most_steps: int


def source_of(kind: MeasureKind) -> KernelSource:
    """Inputs: rows (tokens, heads * blocks, width), strided, and int32 firsts (blocks,): rows of each block before its first
    one don't count."""
    numbers = {
        "WIDTH": kind.width,
        "SLICES": THREADS // kind.width,
        "THREADS": THREADS,
        "ELEMENT": ELEMENTS.index(kind.dtype),
        "CENTRED": int(kind.centred),
        "LEAST_ROWS": kind.least_rows,
        "FAR": bits_of(kind.far),
        "FLOOR": bits_of(kind.floor),
        "STEPS": bits_of(kind.steps),
        "MOST_STEPS": bits_of(kind.most_steps),
        "AT_ONCE": AT_ONCE,
    }
    return KernelSource(
        "turboquant_measure", ("rows", "firsts"), ("means", "roots"), "\n" + defines(numbers) + FUNCTIONS, BODY
    )


@lru_cache(maxsize=64)
def _kernel(dialect: Dialect, kind: MeasureKind) -> Kernel:
    return build(dialect, source_of(kind))


def measure(dialect: Dialect, kind: MeasureKind, rows: mx.array, firsts: mx.array) -> tuple[mx.array, mx.array]:
    """Measure rows (1 to 256 tokens, heads * blocks, width) -> means float32 and roots uint16, (heads * blocks, width)."""
    heads = rows.shape[1]
    outputs = [((heads, kind.width), mx.float32), ((heads, kind.width), mx.uint16)]
    means, roots = launch(_kernel(dialect, kind), [rows, firsts], outputs, heads, THREADS)
    return means, roots
