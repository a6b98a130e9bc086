"""The encoders of TurboQuant rows on a GPU, one pass from floats to packed codes and scales: of rows, and of new keys and
values together, which a decoding step adds to a cache.

The format, and the order of every rounded operation, is that of prefixcache.codecs.turboquant.format.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import mlx.core as mx

from .dialects import Dialect, Kernel, KernelSource, bits_of, build, defines, launch, table
from .turboquant_rows import FUNCTIONS, THREADS, RowKind, groups_of

ENCODER = """
// One fold across two lanes of a column of FACTOR values: the two columns become one of twice the length, whose upper
// half is added onto its lower half. `upper`: this lane's values are the higher ones of each pair.
FUNCTION void fold_column(THREAD float* own, THREAD const float* other, const bool upper) {
#if FACTOR == 1
  own[0] = plus(own[0], other[0]);
#else
  float both[2 * FACTOR];
  UNROLL for (int a = 0; a < FACTOR; a++) {
    both[2 * a] = upper ? other[a] : own[a];
    both[2 * a + 1] = upper ? own[a] : other[a];
  }
  UNROLL for (int a = 0; a < FACTOR; a++) own[a] = plus(both[a], both[a + FACTOR]);
#endif
}

// The sum of squares in the format's order, in every lane of the row. Where a fold goes across lanes, each of the two
// keeps half of the columns and sends the other half, so three folds take 7 exchanges, not 24.
FUNCTION float sum_of_squares(THREAD const float* v, const u32 lane) {
  float sums[8][FACTOR];  // by place in the chunk
#if FACTOR == 1
  float folded[VALUES];
  UNROLL for (int i = 0; i < VALUES; i++) folded[i] = times(v[i], v[i]);
  UNROLL for (int fold = 1; fold <= SLOT_BITS; fold++) {
    UNROLL for (int i = 0; i < VALUES / 2; i++)
      if (i < VALUES >> fold) folded[i] = plus(folded[i], folded[i + (VALUES >> fold)]);
  }
  UNROLL for (int e = 0; e < 8; e++) sums[e][0] = folded[e];
#else
  UNROLL for (int a = 0; a < FACTOR; a++) {
    UNROLL for (int e = 0; e < 8; e++) sums[e][a] = times(v[8 * a + e], v[8 * a + e]);
  }
#endif
  UNROLL for (int fold = 1; fold <= LANE_BITS; fold++) {
    const int step = LANES >> fold, kept = 8 >> fold;
    const bool upper = (lane & step) != 0;
    UNROLL for (int e = 0; e < 4; e++) {
      if (e >= kept) continue;  // bounds that depend on an outer loop keep a loop from being unrolled
      float other[FACTOR];
      UNROLL for (int a = 0; a < FACTOR; a++) {
        const float sent = upper ? sums[e][a] : sums[e + kept][a];
        sums[e][a] = upper ? sums[e + kept][a] : sums[e][a];
        other[a] = swapped(sent, step);
      }
      fold_column(sums[e], other, upper);
    }
  }
  // Now lane bits stand for the place in the chunk, as far as they go.
  UNROLL for (int fold = 1; fold <= LANE_BITS; fold++) {
    const int step = LANES >> fold;
    UNROLL for (int e = 0; e < 8 / LANES; e++) {
      float other[FACTOR];
      UNROLL for (int a = 0; a < FACTOR; a++) other[a] = swapped(sums[e][a], step);
      fold_column(sums[e], other, (lane & step) != 0);
    }
  }
  UNROLL for (int fold = LANE_BITS + 1; fold <= 3; fold++) {
    UNROLL for (int e = 0; e < 4; e++)
      if (e < 8 >> fold) fold_column(sums[e], sums[e + (8 >> fold)], false);
  }
  THREAD float* last = sums[0];
#if FACTOR == 3
  return plus(plus(last[0], last[1]), last[2]);
#elif FACTOR == 5
  return plus(plus(plus(last[0], last[2]), plus(last[1], last[3])), last[4]);
#elif FACTOR == 7
  return plus(plus(plus(last[0], last[3]), plus(last[2], last[5])), plus(plus(last[1], last[4]), last[6]));
#else
  return last[0];
#endif
}

FUNCTION u32 sum_over_lanes(u32 x) {
  UNROLL for (u32 step = 1; step < LANES; step *= 2) x += swapped(x, step);
  return x;
}

FUNCTION u32 largest_over_lanes(u32 x) {
  UNROLL for (u32 step = 1; step < LANES; step *= 2) x = larger(x, swapped(x, step));
  return x;
}

#if BITS < 8
// For every half step of the grid from zero: the code in the top bits, the square of what it stands for below.
#define REACH 256
#define CODE_MASK (~0u << (32 - BITS))
FUNCTION u32 entry_of(const int half_steps) {
  int index = 0;
  for (int i = 0; i < (1 << (BITS - 1)) - 1; i++) index += half_steps >= DOUBLED_BORDERS[i];
  return u32((1 << (BITS - 1)) + index) << (32 - BITS) | u32(SQUARES[index]);
}

// 8 values -> their codes, and their share of cc.
FUNCTION u32 codes_of(THREAD const float* v, const float half_steps, const SHARED_SPACE u32* entries, THREAD u32& cc) {
  u32 piece = 0, sum = 0;
  UNROLL for (int e = 7; e >= 0; e--) {
    const float at = fused(v[e], half_steps, 0.0f);  // 0, not -0
    const u32 entry = entries[int(least(magnitude(at), REACH - 1))];
    const u32 code = entry ^ (u32(int(bits_of(at)) >> 31) & CODE_MASK);
    sum += entry;
    piece = piece << BITS | code >> (32 - BITS);
  }
  cc += sum & ~CODE_MASK;
  return piece;
}
#else
// 4 values -> a word of codes 128 + c.
FUNCTION u32 codes_of(THREAD const float* v, const float half_steps, THREAD u32& cc) {
  u32 word = 0;
  UNROLL for (int e = 3; e >= 0; e--) {
    const int index = (int(least(times(magnitude(v[e]), half_steps), 254.0f)) + 1) >> 1;
    cc += u32(index * index);
    word = word << 8 | u32(v[e] < 0.0f ? 128 - index : 128 + index);
  }
  return word;
}
#endif

// A row's codes as packed words. `pieces`: 8 codes of each slot. All lanes come here; those of `valid` rows write.
FUNCTION void store_codes(DEVICE u32* words, THREAD const u32* pieces, const u32 lane, const bool valid) {
#if BITS == 8
  UNROLL for (int s = 0; s < SLOTS; s++) {
    if (valid) {
      words[2 * (s * LANES + lane)] = pieces[2 * s];
      words[2 * (s * LANES + lane) + 1] = pieces[2 * s + 1];
    }
  }
#elif BITS == 4
  UNROLL for (int s = 0; s < SLOTS; s++) {
    if (valid) words[s * LANES + lane] = pieces[s];
  }
#elif LANES < 4
  // Words straddle slots: both lanes put all pieces together, and take turns in writing.
  u32 all[2 * SLOTS];
  UNROLL for (int s = 0; s < SLOTS; s++) {
    const u32 other = swapped(pieces[s], 1);
    all[2 * s] = lane ? other : pieces[s];
    all[2 * s + 1] = lane ? pieces[s] : other;
  }
  UNROLL for (int w = 0; w < WORDS; w++) {
    u32 word = 0;
    UNROLL for (int c = 0; c < 2 * SLOTS; c++) {
      const int shift = 8 * BITS * c - 32 * w;
      if (shift >= 0 && shift < 32) word |= all[c] << shift;
      if (shift < 0 && shift > -8 * BITS) word |= all[c] >> -shift;
    }
    if (valid && (w & 1) == int(lane)) words[w] = word;
  }
#else
  const u32 place = lane % 4;  // of the 4 chunks, one in each of 4 lanes, that fill BITS words
  UNROLL for (int s = 0; s < SLOTS; s++) {
    const u32 first = (s * LANES + lane) / 4 * BITS;
#if BITS == 3
    const u32 word = pieces[s] >> (8 * place) | from_next(pieces[s]) << (24 - 8 * place);
    if (valid && place < 3) words[first + place] = word;
#elif BITS == 2
    const u32 word = pieces[s] | swapped(pieces[s], 1) << 16;
    if (valid && place % 2 == 0) words[first + place / 2] = word;
#else
    u32 word = pieces[s] << (8 * place);
    word |= swapped(word, 1);
    word |= swapped(word, 2);
    if (valid && place == 0) words[first] = word;
#endif
  }
#endif
}
"""

ENTRIES = """
#if BITS < 8
  SHARED u32 entries[REACH];
  for (u32 i = member; i < REACH; i += THREADS) entries[i] = entry_of(int(i));
  barrier();
#endif
"""

FLIPS = """  u32 flip[ROUNDS][SLOTS];
  UNROLL for (int turn = 0; turn < ROUNDS; turn++) {
    UNROLL for (int s = 0; s < SLOTS; s++) flip[turn][s] = flips_of(turn, s * LANES + lane);
  }
"""

# A row of values as they are, from `rows + at`, `stride` apart.
LOAD = """
    float v[VALUES];
    UNROLL for (int s = 0; s < SLOTS; s++) {
      const u32 channel = 8 * (s * LANES + lane);
      if (whole) {
        load_chunk(reinterpret_cast<const DEVICE u32*>(rows + at + channel), v + 8 * s);
      } else {
        UNROLL for (int e = 0; e < 8; e++) v[8 * s + e] = float(rows[at + (channel + e) * stride]);
      }
    }
"""

# From values as they are to `pieces` and `scale`.
ARITHMETIC = """
#if LEVELLED
    UNROLL for (int i = 0; i < VALUES; i++) v[i] = times(minus(v[i], own_mean[i]), own_weight[i]);
#endif

    u32 top = 0;
    UNROLL for (int i = 0; i < VALUES; i++) top = larger(top, bits_of(v[i]) & 0x7FFFFFFFu);
    top = largest_over_lanes(top) >> 23;
    const bool alive = top > 0 && top < 255;
#if LEVELLED || ELEMENT != HALF  // fp16's own exponents span less than 100
    const u32 smallest = (top > 101 ? top - 100 : 1) << 23;
    UNROLL for (int i = 0; i < VALUES; i++) v[i] = (bits_of(v[i]) & 0x7FFFFFFFu) < smallest ? 0.0f : v[i];
#endif
    const float prescale = float_of((255 - top) << 23);
    UNROLL for (int i = 0; i < VALUES; i++) v[i] = times(v[i], prescale);
    const float ss = sum_of_squares(v, lane);

    UNROLL for (int turn = 0; turn < ROUNDS; turn++) {
      if (turn || !LEVELLED) {
        UNROLL for (int i = 0; i < VALUES; i++) v[i] = flipped(v[i], flip[turn][i / 8], i % 8);
      }
      mix_row(v, lane);
    }

    float steps = 0.0f;
#if BY_LENGTH
    steps = over(float_of(PER_LENGTH), root(ss));
#endif
#if BY_PEAK
    float peak = magnitude(v[0]);
    UNROLL for (int i = 1; i < VALUES; i++) peak = greatest(peak, magnitude(v[i]));
    UNROLL for (u32 step = 1; step < LANES; step *= 2) peak = greatest(peak, swapped(peak, step));
    steps = plus(steps, over(float_of(PER_PEAK), peak));
#endif
    const float half_steps = plus(steps, steps);

    u32 cc = 0;
#if BITS == 8
    u32 pieces[2 * SLOTS];
    UNROLL for (int i = 0; i < 2 * SLOTS; i++) pieces[i] = codes_of(v + 4 * i, half_steps, cc);
#else
    u32 pieces[SLOTS];
    UNROLL for (int s = 0; s < SLOTS; s++) pieces[s] = codes_of(v + 8 * s, half_steps, entries, cc);
#endif
    cc = sum_over_lanes(cc);

    const u32 value = bits_of(root(over(ss, float(cc))));
    int scale = int((value + 0x7FFFu + (value >> 16 & 1u)) >> 16) + (int(top) - 128 + SHIFT) * 128;
    scale = scale < 0x80 ? 0 : scale > 0x7F7F ? 0x7F7F : scale;
    scale = alive ? scale : top ? 0x7FC0 : 0;
    if (!alive || scale == 0) {
      UNROLL for (int i = 0; i < (BITS == 8 ? 2 * SLOTS : SLOTS); i++) pieces[i] = 0;
    }
"""

BODY = (
    ENTRIES
    + """
  const u32 tokens = rows_shape[0], heads = rows_shape[1];
  const u32 tile = tile_of(tokens, heads, groups);
  const u32 lane = member % LANES;
  const u32 head = group % heads;
  const u32 first = group / heads * tile;
  const u32 end = first + tile < tokens ? first + tile : tokens;
  const bool whole = rows_strides[2] == 1 && rows_strides[0] % 8 == 0 && rows_strides[1] % 8 == 0 &&
      aligned(reinterpret_cast<const DEVICE u32*>(rows));
  const u64 stride = u64(rows_strides[2]);
"""
    + FLIPS
    + """
#if LEVELLED
  float own_mean[VALUES], own_weight[VALUES];
  UNROLL for (int i = 0; i < VALUES; i++) {
    const u32 at = head * WIDTH + 8 * (i / 8 * LANES + lane) + i % 8;
    own_mean[i] = levels[at];
    own_weight[i] = flipped(levels[heads * WIDTH + at], flip[0][i / 8], i % 8);  // a sign less to flip; squares don't mind
  }
#endif

  for (u32 start = first; start < end; start += ROWS_AT_ONCE) {
    const u32 own = start + member / LANES;
    const bool valid = own < end;
    const u32 token = valid ? own : end - 1;
    const u64 at = u64(token) * u64(rows_strides[0]) + u64(head) * u64(rows_strides[1]);
"""
    + LOAD
    + ARITHMETIC
    + """
    const u64 row = u64(token) * heads + head;
    store_codes(codes + row * WORDS, pieces, lane, valid);
    if (valid && lane == 0) scales[row] = u16(scale);
  }
"""
)

# Keys and values of a decoding step together: a key, its value, the next key, as codes lie.
PAIR = (
    ENTRIES
    + """
  const u32 batch = keys_shape[0], heads = keys_shape[1], length = keys_shape[2], lane = member % LANES;
  const u32 count = 2 * batch * heads * length;
"""
    + FLIPS
    + """
  for (u32 start = group * ROWS_AT_ONCE; start < count; start += groups * ROWS_AT_ONCE) {
    const u32 own = start + member / LANES;
    const bool valid = own < count;
    // A key, its value, the next key: as codes lie.
    const u32 row = valid ? own : count - 1, token = row / 2 % length, plane = row / 2 / length;
    const u32 head = plane % heads, sequence = plane / heads;
    const bool of_value = row % 2 != 0;
    const decltype(keys) rows = of_value ? values : keys;
    const u64 stride = of_value ? values_strides[3] : keys_strides[3];
    const u64 by_sequence = of_value ? values_strides[0] : keys_strides[0];
    const u64 by_head = of_value ? values_strides[1] : keys_strides[1];
    const u64 by_token = of_value ? values_strides[2] : keys_strides[2];
    const u64 at = sequence * by_sequence + head * by_head + token * by_token;
    const bool whole = stride == 1 && (by_sequence | by_head | by_token) % 8 == 0 &&
        aligned(reinterpret_cast<const DEVICE u32*>(rows));
"""
    + LOAD
    + """
#if LEVELLED
    const decltype(key_levels) levels = of_value ? value_levels : key_levels;
    const u32 kept = of_value ? value_levels_shape[1] : key_levels_shape[1];
    float own_mean[VALUES], own_weight[VALUES];
    UNROLL for (int i = 0; i < VALUES; i++) {
      const u64 level = (u64(kept > 1 ? sequence : 0) * heads + head) * WIDTH + 8 * (i / 8 * LANES + lane) + i % 8;
      own_mean[i] = levels[level];
      own_weight[i] = flipped(levels[u64(kept) * heads * WIDTH + level], flip[0][i / 8], i % 8);
    }
#endif
"""
    + ARITHMETIC
    + """
    store_codes(codes + u64(row) * WORDS, pieces, lane, valid);
    if (valid && lane == 0) scales[row] = u16(scale);
  }
"""
)


def source_of(rows: RowKind) -> KernelSource:
    """Return the encoder of such rows. Inputs: rows (tokens, heads, width), strided; if levelled, levels float32 (2,
    heads, width): mean, weight.
    """
    magnitudes = rows.magnitudes
    numbers = {
        "BY_LENGTH": int(rows.per_length != 0),
        "BY_PEAK": int(rows.per_peak != 0),
        "PER_LENGTH": bits_of(rows.per_length),
        "PER_PEAK": bits_of(rows.per_peak),
    }
    constants = defines(numbers)
    if rows.bits < 8:
        constants += table("SQUARES", [c * c for c in magnitudes])
        constants += table("DOUBLED_BORDERS", [a + b for a, b in pairwise(magnitudes)] or [0])
    inputs = ("rows", "levels") if rows.levelled else ("rows",)
    functions = rows.defines() + constants + FUNCTIONS + ENCODER
    return KernelSource("turboquant_encode", inputs, ("codes", "scales"), functions, BODY)


@lru_cache(maxsize=64)
def _kernel(dialect: Dialect, rows: RowKind) -> Kernel:
    return build(dialect, source_of(rows))


def encode(dialect: Dialect, kind: RowKind, rows: mx.array, levels: mx.array | None) -> tuple[mx.array, mx.array]:
    """Encode rows (tokens, heads, width), not empty -> codes uint32 (tokens, heads, words), scales uint16 (tokens, heads)."""
    tokens, heads, _ = rows.shape
    inputs = [rows] if levels is None else [rows, levels]
    outputs = [((tokens, heads, kind.words), mx.uint32), ((tokens, heads), mx.uint16)]
    codes, scales = launch(_kernel(dialect, kind), inputs, outputs, groups_of(kind, tokens, heads), THREADS)
    return codes, scales


def pair_source_of(rows: RowKind) -> KernelSource:
    """Inputs: keys, values (B, heads, L, width) of one dtype, strided; if levelled, key_levels, value_levels float32
    (2, B or 1, heads, width): mean, weight. Outputs: codes (B, heads, L, 2 * words), scales (B, heads, L, 2)."""
    inputs = ("keys", "values", "key_levels", "value_levels") if rows.levelled else ("keys", "values")
    return KernelSource("turboquant_encode_pair", inputs, ("codes", "scales"), source_of(rows).functions, PAIR)


class PairEncoder:
    """The kernel of a kind of rows, compiled when it first runs."""

    def __init__(self, dialect: Dialect, kind: RowKind) -> None:
        self._kind = kind
        self._encode = build(dialect, pair_source_of(kind))

    def __call__(self, keys: mx.array, values: mx.array, *levels: mx.array) -> tuple[mx.array, mx.array]:
        """Return keys and values (B, heads, L, width), not empty; their levels if the kind is levelled -> codes, scales."""
        batch, heads, length, _ = keys.shape
        groups = min(-(-2 * batch * heads * length // self._kind.rows_at_once), 1024)
        outputs = [((batch, heads, length, 2 * self._kind.words), mx.uint32), ((batch, heads, length, 2), mx.uint16)]
        codes, scales = launch(self._encode, [keys, values, *levels], outputs, groups, THREADS)
        return codes, scales
