"""Attention to the few rows that a live cache keeps as they are, put together with what attention to its codes gave.

Those rows are the first tokens of a sequence, in order, and a ring of its last ones: row r in place r % ring. A group of
threads has one query row: its simdgroups share out the rows, the lanes of each the channels.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

from .dialects import ELEMENTS, LOG2_E, SIMD_WIDTH, Dialect, Kernel, KernelSource, bits_of, build, defines, launch

THREADS = 256
MOST_ROWS = 512  # their scores stand in shared memory

FUNCTIONS = """
FUNCTION float over_lanes(float x) {
  UNROLL for (u32 step = 1; step < SIMD_WIDTH; step *= 2) x = plus(x, swapped(x, step));
  return x;
}

FUNCTION float most_of_lanes(float x) {
  UNROLL for (u32 step = 1; step < SIMD_WIDTH; step *= 2) x = greatest(x, swapped(x, step));
  return x;
}

FUNCTION void store_value(DEVICE u16* to, const u32 pair) { *to = u16(pair & 0xFFFFu); }
"""

BODY = """
  const u32 simd = member / SIMD_WIDTH, lane = member % SIMD_WIDTH;
  const u32 query_heads = queries_shape[1], length = queries_shape[2], heads = recent_keys_shape[1];
  const u32 query = group % length, query_head = group / length % query_heads, sequence = group / length / query_heads;
  const u32 head = query_head / (query_heads / heads);
  const int rows = room_shape[0];
  int pad = 0;
#if HAS_PADS
  pad = pads[sequence];
#endif
  int floor = pad + SINKS > rows - RING ? pad + SINKS : rows - RING;
#if HAS_FLOORS
  floor = floors[sequence] > floor ? floors[sequence] : floor;
#endif

  SHARED float scores[SLOTS];
  float asked[KEY_SLICES];
  const u64 query_at = u64(sequence) * u64(queries_strides[0]) + u64(query_head) * u64(queries_strides[1]) +
                       u64(query) * u64(queries_strides[2]);
  UNROLL for (int k = 0; k < KEY_SLICES; k++) {
    const u32 channel = 32 * k + lane;
    asked[k] = channel < KEY_WIDTH ? times(float(queries[query_at + channel]), float_of(SCALE_LOG2_E)) : 0.0f;
  }
  UNROLL for (u32 each = 0; each < (SLOTS + SIMDGROUPS - 1) / SIMDGROUPS; each++) {
    const u32 wanted = each * SIMDGROUPS + simd, slot = wanted < SLOTS ? wanted : SLOTS - 1;
    int row;
    bool seen;
#if SINKS
    if (slot < SINKS) {
      row = pad + int(slot);
      seen = row < rows;
    } else
#endif
    {
      const int behind = (rows - 1 - int(slot - SINKS)) % RING;
      row = rows - 1 - (behind < 0 ? behind + RING : behind);
      seen = row >= floor;
    }
#if CAUSAL
    seen = seen && row <= rows - int(length) + int(query);
#endif
    float sum = 0.0f;
    UNROLL for (int k = 0; k < KEY_SLICES; k++) {
      const u32 channel = 32 * k + lane < KEY_WIDTH ? 32 * k + lane : 0;
#if SINKS
      const float key = slot < SINKS
        ? float(sink_keys[((u64(sequence) * heads + head) * SINKS + slot) * KEY_WIDTH + channel])
        : float(recent_keys[((u64(sequence) * heads + head) * RING + (slot - SINKS)) * KEY_WIDTH + channel]);
#else
      const float key = float(recent_keys[((u64(sequence) * heads + head) * RING + slot) * KEY_WIDTH + channel]);
#endif
      sum = fused(asked[k], key, sum);
    }
    sum = over_lanes(sum);
#if MASK
    if (seen) {
      const u64 at = u64(sequence) * u64(mask_strides[0]) + u64(query_head) * u64(mask_strides[1]) +
                     u64(query) * u64(mask_strides[2]) + u64(row) * u64(mask_strides[3]);
#if MASK == 1
      seen = mask[at];
#else
      sum = fused(float(mask[at]), float_of(LOG2_E), sum);
#endif
    }
#endif
    if (lane == 0) scores[slot] = seen && sum > -1e30f ? sum : -2e30f;
  }
  barrier();

  const float coded = lse[group] > -1e30f ? times(lse[group], float_of(LOG2_E)) : -2e30f;
  float most = coded;
  for (u32 slot = lane; slot < SLOTS; slot += SIMD_WIDTH) most = greatest(most, scores[slot]);
  most = most_of_lanes(most);
#if HAS_LOGITS
  const float logit = times(float(logits[query_head]), float_of(LOG2_E));
  most = greatest(most, logit);
#endif
  const bool nothing = most < -1e30f;
  float total = 0.0f;
  for (u32 slot = lane; slot < SLOTS; slot += SIMD_WIDTH) {
    total = plus(total, scores[slot] > -1e30f ? power_of_two(minus(scores[slot], most)) : 0.0f);
  }
  total = over_lanes(total);
  const float of_codes = coded > -1e30f ? power_of_two(minus(coded, most)) : 0.0f;
  total = plus(total, of_codes);
#if HAS_LOGITS
  total = plus(total, power_of_two(minus(logit, most)));
#endif

  float sums[VALUE_SLICES];
  UNROLL for (int k = 0; k < VALUE_SLICES; k++) sums[k] = 0.0f;
  UNROLL for (u32 each = 0; each < (SLOTS + SIMDGROUPS - 1) / SIMDGROUPS; each++) {
    const u32 wanted = each * SIMDGROUPS + simd, slot = wanted < SLOTS ? wanted : SLOTS - 1;
    const bool seen = wanted < SLOTS && scores[slot] > -1e30f;
    const float weight = power_of_two(minus(scores[slot], most));
    UNROLL for (int k = 0; k < VALUE_SLICES; k++) {
      const u32 channel = 32 * k + lane < VALUE_WIDTH ? 32 * k + lane : 0;
#if SINKS
      const float value = slot < SINKS
        ? float(sink_values[((u64(sequence) * heads + head) * SINKS + slot) * VALUE_WIDTH + channel])
        : float(recent_values[((u64(sequence) * heads + head) * RING + (slot - SINKS)) * VALUE_WIDTH + channel]);
#else
      const float value = float(recent_values[((u64(sequence) * heads + head) * RING + slot) * VALUE_WIDTH + channel]);
#endif
      sums[k] = seen ? fused(weight, value, sums[k]) : sums[k];  // a value nobody sees may be NaN
    }
  }
  SHARED float shares[SIMDGROUPS * VALUE_SLICES * 32];
  UNROLL for (int k = 0; k < VALUE_SLICES; k++) shares[(simd * VALUE_SLICES + k) * 32 + lane] = sums[k];
  barrier();
  for (u32 channel = member; channel < VALUE_WIDTH; channel += THREADS) {
    const u64 to = u64(group) * VALUE_WIDTH + channel;
    float sum = of_codes > 0.0f ? times(out[to], of_codes) : 0.0f;
    for (u32 j = 0; j < SIMDGROUPS; j++) {
      sum = plus(sum, shares[(j * VALUE_SLICES + channel / 32) * 32 + channel % 32]);
    }
    const float value = nothing ? 0.0f : over(sum, total);
#if ELEMENT == 2
    result[to] = value;
#elif ELEMENT == 1
    store_value(reinterpret_cast<DEVICE u16*>(result) + to, bfloat_pair(value, 0.0f));
#else
    store_value(reinterpret_cast<DEVICE u16*>(result) + to, half_pair(value, 0.0f));
#endif
  }
"""


class RawAttentionKind(NamedTuple):
    """What the kernel is compiled for. `rows`, `queries`, `mask`, `logits`: their dtypes, "" for a mask or logits that there
    aren't. The output has the queries'.
    """

    key_width: int
    value_width: int
    sinks: int
    ring: int
    scale: float
    causal: bool
    rows: str
    queries: str
    mask: str
    logits: str
    pads: bool
    floors: bool


def source_of(kind: RawAttentionKind) -> KernelSource:
    """Inputs: out float32 (B, query heads, L, value width) and lse float32 (B, query heads, L) of the codes; queries;
    room, anything of shape (rows,), not read; recent_keys, recent_values (B, heads, ring, width); those of sink_keys,
    sink_values (B, heads, sinks, width), pads and floors int32 (B,), mask, logits (query heads,) that there are. Output:
    result (B, query heads, L, value width)."""
    numbers = {
        "SIMD_WIDTH": SIMD_WIDTH,
        "THREADS": THREADS,
        "SIMDGROUPS": THREADS // SIMD_WIDTH,
        "KEY_WIDTH": kind.key_width,
        "VALUE_WIDTH": kind.value_width,
        "KEY_SLICES": -(-kind.key_width // 32),
        "VALUE_SLICES": -(-kind.value_width // 32),
        "SINKS": kind.sinks,
        "RING": kind.ring,
        "SLOTS": kind.sinks + kind.ring,
        "CAUSAL": int(kind.causal),
        "MASK": 0 if not kind.mask else 1 if kind.mask == "bool" else 2,
        "HAS_PADS": int(kind.pads),
        "HAS_FLOORS": int(kind.floors),
        "HAS_LOGITS": int(bool(kind.logits)),
        "ELEMENT": ELEMENTS.index(kind.queries),
        "SCALE_LOG2_E": bits_of(kind.scale * LOG2_E),
        "LOG2_E": bits_of(LOG2_E),
    }
    # MLX compiles a kernel for the dtypes of its first call; they are part of the text, so that each has its own.
    dtypes = f"// rows of {kind.rows}, queries {kind.queries}, mask {kind.mask}, logits {kind.logits}\n"
    text = dtypes + defines(numbers)
    given = {
        "sink_keys": kind.sinks > 0,
        "sink_values": kind.sinks > 0,
        "pads": kind.pads,
        "floors": kind.floors,
        "mask": bool(kind.mask),
        "logits": bool(kind.logits),
    }
    always = ("out", "lse", "queries", "room", "recent_keys", "recent_values")
    inputs = (*always, *(name for name, there in given.items() if there))
    return KernelSource("raw_attention", inputs, ("result",), text + FUNCTIONS, BODY)


@lru_cache(maxsize=64)
def _kernel(dialect: Dialect, kind: RawAttentionKind) -> Kernel:
    return build(dialect, source_of(kind))


def attend(dialect: Dialect, kind: RawAttentionKind, inputs: list[mx.array]) -> mx.array:
    """Launch the kernel on its inputs, in the order of `source_of`, as far as there are. Return the output."""
    batch, query_heads, length, _ = shape = inputs[0].shape
    outputs = [(shape, getattr(mx, kind.queries))]
    (result,) = launch(_kernel(dialect, kind), inputs, outputs, batch * query_heads * length, THREADS)
    return result
