"""The decoder of TurboQuant rows on a GPU, one pass from packed codes and scales to floats.

Codes stand for integers below 128, and a rotation made of additions keeps them integers, so most of it runs on *pairs*:
two neighbouring values in one 32-bit integer, high * 65536 + low. Sums and differences of such integers are the pairs of
the sums and differences, at half the instructions and half the exchanges of floats, as long as every value fits 16 bits.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from .dialects import SIMD_WIDTH, Dialect, Kernel, KernelSource, bits_of, build, defines, launch, table
from .turboquant_rows import FUNCTIONS, LARGEST, THREADS, RowKind, groups_of

DECODER = """
FUNCTION u32 paired(const int low, const int high) { return (u32(high) << 16) + u32(low); }
FUNCTION int low_of(const u32 pair) { return int(pair << 16) >> 16; }
FUNCTION int high_of(const u32 pair) { return int(pair - u32(low_of(pair))) >> 16; }

// Two codes -> what they stand for; PACKED: already mixed at stride 1.
FUNCTION u32 pair_for(const int low, const int high) { return PACKED ? paired(low + high, low - high) : paired(low, high); }

#if BITS == 8
FUNCTION int centroid_of(const u32 code) { return int(larger(code, 1u)) - 128; }

FUNCTION void unpack(const u32 low, const u32 high, THREAD u32* pairs) {
  UNROLL for (int i = 0; i < 4; i++) {
    const u32 codes = (i < 2 ? low : high) >> (16 * (i % 2));
    pairs[i] = pair_for(centroid_of(codes & 255u), centroid_of(codes >> 8 & 255u));
  }
}
#else
#define PAIRS (1 << (2 * BITS))

FUNCTION void unpack(const u32 piece, const SHARED_SPACE u32* entries, THREAD u32* pairs) {
  UNROLL for (int i = 0; i < 4; i++) pairs[i] = entries[piece >> (2 * BITS * i) & (PAIRS - 1)];
}
#endif

#if PACKED
FUNCTION void mix_pairs(THREAD u32* p, const u32 lane) {
  UNROLL for (int stride = 1; stride < VALUES / 2; stride *= 2) {
    UNROLL for (int i = 0; i < VALUES / 2; i++) {
      if (!(i & stride)) {
        const u32 low = p[i], high = p[i + stride];
        p[i] = low + high;
        p[i + stride] = low - high;
      }
    }
  }
  UNROLL for (u32 step = 1; step < LANES; step *= 2) {
    const u32 sign = lane & step ? 0xFFFFFFFFu : 1u;
    UNROLL for (int i = 0; i < VALUES / 2; i++) p[i] = p[i] * sign + swapped(p[i], step);
  }
}

// Both fields of every pair 32768 more than the value. A constant on the row's first value spreads evenly over all of
// the row, so one lane adds it, once, before the mixing; then no field is negative, and they part without a carry.
FUNCTION void lift(THREAD u32* p, const u32 lane) { p[0] += lane == 0 ? 0x80008000u : 0u; }

// A field under the exponent of 2**23: the float 2**23 + 32768 + value.
FUNCTION void part(THREAD const u32* p, THREAD float* y) {
  UNROLL for (int i = 0; i < VALUES / 2; i++) {
    y[2 * i] = minus(float_of(low_field(p[i], 0x4B00u)), 8421376.0f);
    y[2 * i + 1] = minus(float_of(high_field(p[i], 0x4B00u)), 8421376.0f);
  }
}

FUNCTION void flip_and_mix_within(THREAD u32* p, THREAD const u32* flips) {
  UNROLL for (int i = 0; i < VALUES / 2; i++) {
    const u32 own = flips[i / 4] >> (2 * (i % 4));
    const int low = own & 1 ? -low_of(p[i]) : low_of(p[i]);
    const int high = own & 2 ? -high_of(p[i]) : high_of(p[i]);
    p[i] = paired(low + high, low - high);
  }
}
#else
FUNCTION void part(THREAD const u32* p, THREAD float* y) {
  UNROLL for (int i = 0; i < VALUES / 2; i++) {
    y[2 * i] = float(low_of(p[i]));
    y[2 * i + 1] = float(high_of(p[i]));
  }
}
#endif

FUNCTION float cut(const float x) {
  const float largest = float_of(LARGEST);
  return x > largest ? largest : x < -largest ? -largest : x;
}

// 8 neighbouring values to memory.
FUNCTION void store_chunk(DEVICE u32* address, THREAD const float* x) {
  u32 words[4];
#if ELEMENT == FLOAT
  UNROLL for (int half_ = 0; half_ < 2; half_++) {
    UNROLL for (int i = 0; i < 4; i++) words[i] = bits_of(x[4 * half_ + i]);
    store_four(address + 4 * half_, words);
  }
#else
  UNROLL for (int i = 0; i < 4; i++) {
#if ELEMENT == HALF
    words[i] = half_pair(x[2 * i], x[2 * i + 1]);
#else
    words[i] = bfloat_pair(x[2 * i], x[2 * i + 1]);
#endif
  }
  store_four(address, words);
#endif
}
"""

BODY = """
#if BITS < 8
  SHARED u32 entries[PAIRS];
  for (u32 i = member; i < PAIRS; i += THREADS) {
    entries[i] = pair_for(CENTROIDS[i & ((1 << BITS) - 1)], CENTROIDS[i >> BITS]);
  }
  barrier();
#endif
  const u32 tokens = codes_shape[0], heads = codes_shape[1];
  const u32 tile = tile_of(tokens, heads, groups);
  const u32 lane = member % LANES;
  const u32 head = group % heads;
  const u32 first = group / heads * tile;
  const u32 end = first + tile < tokens ? first + tile : tokens;

  float own_spread[VALUES];
#if LEVELLED
  float own_mean[VALUES];
  float most_spread = 0.0f, most_mean = 0.0f;
#endif
  UNROLL for (int i = 0; i < VALUES; i++) {
    const u32 chunk = i / 8 * LANES + lane;
#if !LEVELLED
    own_spread[i] = flipped(float_of(DECODE_GAIN), flips_of(0, chunk), i % 8);
#else
    const u32 at = head * WIDTH + 8 * chunk + i % 8;
    own_mean[i] = levels[at];
    own_spread[i] = levels[heads * WIDTH + at];
    most_spread = greatest(most_spread, magnitude(own_spread[i]));
    most_mean = greatest(most_mean, magnitude(own_mean[i]));
#endif
  }
#if ROUNDS == 2
  u32 flip[SLOTS];
  UNROLL for (int s = 0; s < SLOTS; s++) flip[s] = flips_of(1, s * LANES + lane);
#endif

  u32 coming[2 * SLOTS] = {0}, coming_scale = 0;
  for (u32 ahead = first; ahead < end + ROWS_AT_ONCE; ahead += ROWS_AT_ONCE) {
    // The words of the next rows are on their way while these are worked on.
    u32 words[2 * SLOTS];
    UNROLL for (int i = 0; i < 2 * SLOTS; i++) words[i] = coming[i];
    const float scale = float_of(coming_scale << 16);
    const u32 next = ahead + member / LANES;
    const u64 token = next < tokens ? next : tokens - 1;
    const u64 row = token * u64(codes_strides[0]) + head * u64(codes_strides[1]);
    coming_scale = scales[token * u64(scales_strides[0]) + head * u64(scales_strides[1])];
    UNROLL for (int s = 0; s < SLOTS; s++) {
      const u32 word = 8 * BITS * (s * LANES + lane) / 32;
      coming[2 * s] = codes[row + word * u64(codes_strides[2])];
#if BITS == 3 || BITS == 8
      coming[2 * s + 1] = codes[row + (word + 1 < WORDS ? word + 1 : word) * u64(codes_strides[2])];
#endif
    }
    if (ahead == first) continue;

    const u32 start = ahead - ROWS_AT_ONCE;
    const u32 own = start + member / LANES;
    const u64 to = (u64(head) * tokens + own) * WIDTH + 8 * lane;
    if (start + member / SIMD_WIDTH * (SIMD_WIDTH / LANES) >= tokens) continue;  // not one row of this simdgroup's

    u32 p[VALUES / 2];
    UNROLL for (int s = 0; s < SLOTS; s++) {
      const u32 shift = 8 * BITS * (s * LANES + lane) % 32;
#if BITS == 8
      unpack(words[2 * s], words[2 * s + 1], p + 4 * s);
#elif BITS == 3
      unpack(window(words[2 * s], words[2 * s + 1], shift), entries, p + 4 * s);
#else
      unpack(words[2 * s] >> shift, entries, p + 4 * s);
#endif
    }
    float v[VALUES];
#if PACKED
#if ROUNDS == 2
    mix_pairs(p, lane);
    flip_and_mix_within(p, flip);
#endif
    lift(p, lane);
    mix_pairs(p, lane);
    part(p, v);
#else
    part(p, v);
    mix_row(v, lane);
#if ROUNDS == 2
    UNROLL for (int i = 0; i < VALUES; i++) v[i] = flipped(v[i], flip[i / 8], i % 8);
    mix_row(v, lane);
#endif
#endif

    UNROLL for (int i = 0; i < VALUES; i++) {
#if LEVELLED
      v[i] = plus(times(times(v[i], own_spread[i]), scale), own_mean[i]);
#elif FACTOR == 7
      v[i] = plus(times(times(v[i], own_spread[i]), scale), 0.0f);
#else
      v[i] = fused(times(v[i], own_spread[i]), scale, 0.0f);  // nothing to round twice: the product is 0 or normal enough
#endif
    }
#if LEVELLED
    const bool safe = fused(times(most_spread, float_of(LARGEST_Y)), scale, most_mean) < float_of(SAFE);
#else
    const bool safe = times(scale, float_of(LARGEST_VALUE)) < float_of(SAFE);
#endif
    if (!safe) {  // or NaN
      UNROLL for (int i = 0; i < VALUES; i++) v[i] = cut(v[i]);
    }
    if (own < end) {
      UNROLL for (int s = 0; s < SLOTS; s++) store_chunk(reinterpret_cast<DEVICE u32*>(rows + to + 8 * LANES * s), v + 8 * s);
    }
  }
"""


def _packed(rows: RowKind) -> bool:
    """Tell whether every integer on the way fits 16 bits: none exceeds sqrt(width) times the length of the row before it."""
    return rows.factor == 1 and rows.width ** ((1 + rows.rounds) / 2) * max(rows.magnitudes) < 1 << 15


def source_of(rows: RowKind) -> KernelSource:
    """Return the decoder of such rows. Inputs: codes uint32 (tokens, heads, words) and scales uint16 (tokens, heads),
    strided; if levelled, levels float32 (2, heads, width): mean, spread.
    """
    power = rows.width // rows.factor
    # No value of y exceeds this: the greatest length of a row, lengthened by both rounds.
    longest = (
        rows.width**0.5 * max(rows.magnitudes) * (power**0.5 * (rows.factor if rows.factor != 7 else 3)) ** rows.rounds
    )
    constants = {
        "PACKED": int(_packed(rows)),
        "SIMD_WIDTH": SIMD_WIDTH,
        "LARGEST": bits_of(LARGEST[rows.dtype]),
        "SAFE": bits_of(0.99 * LARGEST[rows.dtype]),
        "LARGEST_Y": bits_of(longest),
        "DECODE_GAIN": bits_of(rows.decode_gain),
        "LARGEST_VALUE": bits_of(longest * rows.decode_gain),
    }
    text = defines(constants)
    if rows.bits < 8:
        text += table("CENTROIDS", [-c for c in reversed(rows.magnitudes)] + list(rows.magnitudes))
    inputs = ("codes", "scales", "levels") if rows.levelled else ("codes", "scales")
    functions = rows.defines() + text + FUNCTIONS + DECODER
    return KernelSource("turboquant_decode", inputs, ("rows",), functions, BODY)


@lru_cache(maxsize=64)
def _kernel(dialect: Dialect, rows: RowKind) -> Kernel:
    return build(dialect, source_of(rows))


def decode(dialect: Dialect, kind: RowKind, codes: mx.array, scales: mx.array, levels: mx.array | None) -> mx.array:
    """Decode codes uint32 (tokens, heads, words), scales uint16 (tokens, heads), not empty -> rows (heads, tokens, width)."""
    tokens, heads, _ = codes.shape
    inputs = [codes, scales] if levels is None else [codes, scales, levels]
    outputs = [((heads, tokens, kind.width), getattr(mx, kind.dtype))]
    (rows,) = launch(_kernel(dialect, kind), inputs, outputs, groups_of(kind, tokens, heads), THREADS)
    return rows
