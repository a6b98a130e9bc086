"""The second launch of attention on codes: adds the parts up that the first made of splits of the keys, and rotates back."""

from __future__ import annotations

from .dialects import LOG2_E, SIMD_WIDTH, KernelSource, bits_of, defines
from .turboquant_rows import CHUNK, FUNCTIONS, RowKind

MERGE_THREADS = 256

MERGE = """
  const u32 simd = member / SIMD_WIDTH, at_lane = member % SIMD_WIDTH, splits = parts_shape[3];
  const u64 own = u64(group) * splits * (WIDTH + 4), stats = own + WIDTH;

  // All loads of some splits are on their way before anything waits for one.
  float sums[SLICES], coming[AT_ONCE][SLICES], exponents[AT_ONCE];
  UNROLL for (int k = 0; k < SLICES; k++) sums[k] = 0.0f;
#define LOAD_PARTS(begin) \
  UNROLL for (int j = 0; j < AT_ONCE; j++) { \
    const u32 wanted = (begin) + j * SIMDGROUPS + simd, near = wanted < splits ? wanted : splits - 1; \
    exponents[j] = wanted < splits ? parts[stats + u64(near) * (WIDTH + 4) + 2] : -2e30f; \
    UNROLL for (int k = 0; k < SLICES; k++) { \
      const u32 channel = 32 * k + at_lane; \
      coming[j][k] = parts[own + u64(near) * (WIDTH + 4) + (channel < WIDTH ? channel : 0)]; \
    } \
  }
  LOAD_PARTS(0);

  float highest = -1e30f, highest_weighted = -1e30f;
  for (u32 i = at_lane; i < splits; i += SIMD_WIDTH) {
    highest = greatest(highest, parts[stats + u64(i) * (WIDTH + 4)]);
    highest_weighted = greatest(highest_weighted, parts[stats + u64(i) * (WIDTH + 4) + 2]);
  }
  UNROLL for (u32 step = 1; step < SIMD_WIDTH; step *= 2) {
    highest = greatest(highest, swapped(highest, step));
    highest_weighted = greatest(highest_weighted, swapped(highest_weighted, step));
  }
  float total = 0.0f;
  for (u32 i = at_lane; i < splits; i += SIMD_WIDTH) {
    const u64 at = stats + u64(i) * (WIDTH + 4);
    total = plus(total, times(parts[at + 1], power_of_two(minus(parts[at], highest))));
  }
  UNROLL for (u32 step = 1; step < SIMD_WIDTH; step *= 2) total = plus(total, swapped(total, step));

  for (u32 begin = 0; begin < splits; begin += AT_ONCE * SIMDGROUPS) {
    if (begin) LOAD_PARTS(begin);
    UNROLL for (int j = 0; j < AT_ONCE; j++) {
      const bool there = begin + j * SIMDGROUPS + simd < splits;
      const float share = power_of_two(minus(exponents[j], highest_weighted));
      UNROLL for (int k = 0; k < SLICES; k++) sums[k] = there ? fused(coming[j][k], share, sums[k]) : sums[k];
    }
  }
  SHARED float room[SIMDGROUPS * SLICES * 32];
  UNROLL for (int k = 0; k < SLICES; k++) room[(simd * SLICES + k) * 32 + at_lane] = sums[k];
  barrier();
  if (simd == 0) {
    UNROLL for (int k = 0; k < SLICES; k++) {
      for (u32 j = 1; j < SIMDGROUPS; j++) sums[k] = plus(sums[k], room[(j * SLICES + k) * 32 + at_lane]);
      room[k * 32 + at_lane] = sums[k];
    }
  }
  barrier();
  if (simd == 0) {
    const u32 lane = at_lane % LANES;
    float v[VALUES];
    UNROLL for (int i = 0; i < VALUES; i++) v[i] = room[8 * (i / 8 * LANES + lane) + i % 8];
    UNROLL for (int turn = 0; turn < ROUNDS; turn++) {
      mix_row(v, lane);
      if (turn + 1 < ROUNDS) {
        UNROLL for (int i = 0; i < VALUES; i++) v[i] = flipped(v[i], flips_of(1, i / 8 * LANES + lane), i % 8);
      }
    }
    const float shift = parts[stats + 3];
    float all = total;
#if HAS_SINKS
    const u32 head = group / parts_shape[2] % parts_shape[1];
    all = plus(all, power_of_two(minus(minus(times(float(sinks[head]), float_of(LOG2_E)), shift), highest)));
#endif
    const float share = over(1.0f, all), level = power_of_two(minus(highest_weighted, highest));
#if LEVELLED
    const u32 queries = parts_shape[1], per_sequence = queries * parts_shape[2];
    const u32 kept = levels_shape[2], from = group / parts_shape[2] % queries / (queries / kept);
    const u32 sequence = levels_shape[1] > 1 ? group / per_sequence : 0;
    const u64 level_at = (u64(sequence) * kept + from) * WIDTH;
    const u64 spread_at = level_at + u64(levels_shape[1]) * kept * WIDTH;
#endif
    UNROLL for (int i = 0; i < VALUES; i++) {
      const u32 chunk = i / 8 * LANES + lane;
#if LEVELLED
      v[i] = times(times(times(v[i], levels[spread_at + 8 * chunk + i % 8]), share), level);
      v[i] = fused(levels[level_at + 8 * chunk + i % 8], times(total, share), v[i]);
#else
      v[i] = times(times(flipped(times(v[i], float_of(DECODE_GAIN)), flips_of(0, chunk), i % 8), share), level);
#endif
      if (all == 0.0f) v[i] = 0.0f;
    }
    if (at_lane < LANES) {
      UNROLL for (int i = 0; i < VALUES; i++) {
        const u64 to = u64(group) * WIDTH + 8 * (i / 8 * LANES + lane) + i % 8;
#if ELEMENT == FLOAT
        out[to] = v[i];
#else
        if (i % 2) continue;
        const u32 both = ELEMENT == HALF ? half_pair(v[i], v[i + 1]) : bfloat_pair(v[i], v[i + 1]);
        reinterpret_cast<DEVICE u32*>(out)[to / 2] = both;
#endif
      }
    }
    if (member == 0) lse[group] = times(plus(plus(highest, logarithm(total)), shift), float_of(LN_2));
  }
"""


def turning(rows: RowKind) -> tuple[str, int]:
    """Return the defines of rows that are rotated by as many lanes as have 8 values (of each of an odd factor's) to
    work on, since few rows wait for it; how many lanes.
    """
    lanes = min(16, rows.width // rows.factor // CHUNK)
    values = rows.width // lanes
    numbers = {"LANES": lanes, "LANE_BITS": lanes.bit_length() - 1, "VALUES": values, "SLOTS": values // CHUNK}
    return rows.defines() + "".join(f"#undef {name}\n" for name in numbers) + defines(numbers), lanes


def merge_source_of(values: RowKind, sinks: str) -> KernelSource:
    """Return the launch; `sinks` is their dtype, or "". Inputs: parts, then those of levels and sinks that there are;
    outputs: out (B, query heads, L, width) of the values' dtype, lse float32 (B, query heads, L).
    """
    numbers = {
        "SIMD_WIDTH": SIMD_WIDTH,
        "SIMDGROUPS": MERGE_THREADS // SIMD_WIDTH,
        "SLICES": -(-values.width // 32),
        "AT_ONCE": 5,
        "DECODE_GAIN": bits_of(values.decode_gain),
        "HAS_SINKS": int(bool(sinks)),
        "LOG2_E": bits_of(LOG2_E),
        "LN_2": bits_of(1 / LOG2_E),
    }
    text = defines(numbers)
    given = {"levels": values.levelled, "sinks": bool(sinks)}
    inputs = ("parts", *(name for name, there in given.items() if there))
    name = "_".join(filter(None, ("turboquant_merge", values.dtype, sinks)))
    return KernelSource(name, inputs, ("out", "lse"), turning(values)[0] + text + FUNCTIONS, MERGE)
