"""Attention on TurboQuant's codes on a GPU: keys and values are never decoded.

A decoded key is spread * T c * scale + mean, and T is symmetric, so its product with a query is scale * (c . T(spread *
query)) + query . mean: the query is rotated once, not every key. Likewise the sum of weighted values is taken of their
codes, and rotated back once. What is left to do a key and a value is to look their codes up and to multiply.

Two launches. The first splits the keys among groups of threads: each simdgroup takes 16 keys at a time, multiplies their
codes (integers, exact in fp16) by up to four queries, then the transposed codes of the values by the weights. Queries and
weights are pairs of fp16, the number and what its rounding left over, in neighbouring columns: as exact as float32. The
second launch, `turboquant_merge`, adds the splits up and rotates back. Decision 0026 says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from .dialects import LOG2_E, SIMD_WIDTH, Dialect, KernelSource, bits_of, build, defines, launch, table
from .turboquant_merge import MERGE_THREADS, merge_source_of, turning
from .turboquant_rows import FUNCTIONS, RowKind

KEYS = 16  # that a simdgroup works on at a time
QUERIES = 4  # columns of a tile, each twice: the number, and what its rounding left over
MOST_ROWS = 64  # query rows a head of keys
COPIES = {"metal": 1, "cuda": 32}  # as the preludes have it
SETS = {"metal": 1, "cuda": 2}
SIMDGROUPS = {"metal": 4, "cuda": 8}
GROUPS = {"metal": 256, "cuda": 264}
AHEAD = 2  # tiles, of what is fetched into the cache before it is loaded

CODES = """
// `COUNT` words of a row, VECTOR at a time. Nothing behind the word `last` is read where they come one by one.
template <int COUNT, int VECTOR>
FUNCTION void load_words(const DEVICE u32* row, const int last, THREAD u32* words) {
  if (VECTOR == 4) {
    UNROLL for (int i = 0; i + 4 <= COUNT; i += 4) load_four(row + i, words + i);
  } else if (VECTOR == 2) {
    UNROLL for (int i = 0; i + 2 <= COUNT; i += 2) load_two(row + i, words + i);
  } else {
    UNROLL for (int i = 0; i < COUNT; i++) words[i] = row[i < last ? i : last];
  }
}

// Moves codes that begin at bit `shift` of the first word to its beginning.
template <int COUNT>
FUNCTION void begin_at(THREAD u32* words, const u32 shift) {
  UNROLL for (int i = 0; i < COUNT; i++) words[i] = window(words[i], i + 1 < COUNT ? words[i + 1] : 0u, shift);
}

// Codes are taken out of words by the piece: 8 at a time, 4 of 8 bits.
#define CODES_IN_PIECE(bits) ((bits) == 8 ? 4 : 8)
#define EVEN_CODES(bits) \
  ((bits) == 1 ? 0x55u : (bits) == 2 ? 0x3333u : (bits) == 3 ? 0x1C71C7u : (bits) == 4 ? 0xF0F0F0Fu : 0xFF00FFu)

template <int BITS_, int COUNT>
FUNCTION u32 piece_of(const THREAD u32* words, const int number) {
  const int bit = number * CODES_IN_PIECE(BITS_) * BITS_, word = bit / 32, shift = bit % 32;
  if (shift + CODES_IN_PIECE(BITS_) * BITS_ <= 32) return words[word] >> shift;
  return window(words[word], words[word + 1 < COUNT ? word + 1 : word], shift);
}

// Two neighbouring codes of a piece, the pair `number`, as fp16. `copy`: the bytes from an entry to this lane's copy.
template <int BITS_, int ENTRY>
FUNCTION u32 pair_at(const u32 piece, const int number, const SHARED_SPACE u32* entries, const u32 copy) {
  if (BITS_ == 8) {  // 1024 + code has the code in its last bits; 1152 = 1024 + 128 is taken off
    const u32 two = piece >> (16 * number);
    return pair_minus((two & 0xFFu) | (two & 0xFF00u) << 8 | 0x64006400u, 0x64806480u);
  }
  if (BITS_ == 4 && ENTRY == 8) return entry_at(entries, byte_above(piece, number, copy));
  const int down = 2 * BITS_ * number - ENTRY;
  return entry_at(entries, ((down < 0 ? piece << -down : piece >> down) & ((1u << 2 * BITS_) - 1u) << ENTRY) | copy);
}

#define FILL(entries, bits, entry, centroids) \
  for (u32 i = member - SIMD_WIDTH * FILLING; i < (1u << 2 * (bits)); i += THREADS - SIMD_WIDTH * FILLING) { \
    const u32 both = half_pair(float(centroids[i & ((1u << (bits)) - 1u)]), float(centroids[i >> (bits)])); \
    UNROLL for (u32 j = 0; j < COPIES; j++) (entries)[(i << (entry)) / 4 + ((j ^ i) & (COPIES - 1))] = both; \
  }

FUNCTION u32 least_of(const int a, const int b) { return u32(a < b ? a : b); }

FUNCTION const DEVICE u32* further(const DEVICE u32* from, const u32 rows, const u32 words) {
  return from + u64(rows) * words;
}

FUNCTION float over_rows(float x) {
  x = greatest(x, swapped(x, ROW_1));
  x = greatest(x, swapped(x, ROW_2));
  return greatest(x, swapped(x, ROW_4));
}
"""

BODY = """
  const u32 simd = member / SIMD_WIDTH, at_lane = member % SIMD_WIDTH;
  const u32 row = tile_row(at_lane), pair = tile_pair(at_lane), copy = at_lane % COPIES * 4;
  const u32 batch = codes_shape[0], heads = codes_shape[1];
  const int tokens = codes_shape[2], length = queries_shape[2];
  const u32 rows = u32(queries_shape[1]) / heads * u32(length);  // of queries, for each head of keys
  const u32 passes = (rows + COLUMNS - 1) / COLUMNS, splits = groups / (batch * heads * passes);
  const u32 pass = group % passes, split = group / passes % splits;
  const u32 head = group / passes / splits % heads, sequence = group / passes / splits / heads;

  int begin = 0, end = tokens;
#if HAS_FIRST
  begin = first[sequence] > 0 ? first[sequence] : 0;
#endif
#if HAS_LAST
  end = last[sequence] < tokens ? last[sequence] : tokens;
#endif
  const u32 tiles = end > begin ? u32(end - begin + KEYS - 1) / KEYS : 0;
  u32 tile = tiles * split / splits + simd;
  const u32 end_tile = tiles * (split + 1) / splits;

  const DEVICE u32* own_codes = codes + u64(sequence) * u64(codes_strides[0]) + u64(head) * u64(codes_strides[1]);
  const bool whole = (codes_strides[0] | codes_strides[1] | codes_strides[2]) % 4 == 0 && aligned(own_codes);
  const u32 key_bit = pair * (KEY_SPAN * KEY_BITS), value_bit = row * (VALUE_SPAN * VALUE_BITS);
  const DEVICE u32* key_codes = own_codes + key_bit / 32;
  const DEVICE u32* value_codes = own_codes + (VALUE_AT + value_bit / 32);
  const u32 row_words = u32(codes_strides[2]), row_scales = u32(scales_strides[2]);
  const u64 own_scales = u64(sequence) * u64(scales_strides[0]) + u64(head) * u64(scales_strides[1]);

  u32 keys[2 * SETS][KEY_READ], values[4 * SETS][VALUE_READ], scale_bits[2 * SETS][2];
#define KEY_ROW(tile, i) least_of(begin + int(KEYS * (tile) + row) + 8 * (i), end - 1)
#define VALUE_ROW(tile, i) least_of(begin + int(KEYS * (tile) + 2 * pair) + (i) % 2 + (i) / 2 * 8, end - 1)
#define LOAD_KEYS(tile, vector) \
  UNROLL for (int i = 0; i < 2 * SETS; i++) \
    load_words<KEY_READ, vector>(further(key_codes, KEY_ROW(tile, i), row_words), KEY_LAST - int(key_bit / 32), keys[i])
#define LOAD_SCALES(tile) \
  UNROLL for (int i = 0; i < 2 * SETS; i++) { \
    const u64 at = own_scales + u64(KEY_ROW(tile, i)) * row_scales; \
    scale_bits[i][0] = scales[at]; \
    scale_bits[i][1] = scales[at + 1]; \
  }
#define LOAD_VALUES(tile, vector) \
  UNROLL for (int i = 0; i < 4 * SETS; i++) \
    load_words<VALUE_READ, vector>( \
        further(value_codes, VALUE_ROW(tile, i), row_words), VALUE_LAST - int(VALUE_AT + value_bit / 32), values[i])
#define FETCH(tile) \
  UNROLL for (int i = 0; i < (KEYS * ROW_LINES + SIMD_WIDTH - 1) / SIMD_WIDTH; i++) { \
    const u32 line = i * SIMD_WIDTH + at_lane; \
    const u32 near = least_of(begin + int(KEYS * (tile) + line / ROW_LINES), end - 1); \
    fetch_ahead(further(own_codes, near, row_words) + line % ROW_LINES * 16); \
  } \
  fetch_ahead(scales + own_scales + u64(least_of(begin + int(KEYS * (tile) + row * (KEYS / 8)), end - 1)) * row_scales);
  if (tile < end_tile) {
    if (whole) {
      LOAD_KEYS(tile, KEY_VECTOR);
      LOAD_VALUES(tile, VALUE_VECTOR);
    } else {
      LOAD_KEYS(tile, 1);
      LOAD_VALUES(tile, 1);
    }
    LOAD_SCALES(tile);
  }
#if FETCHES
  for (u32 next = tile + SIMDGROUPS; next < tile + AHEAD * SIMDGROUPS && next < end_tile; next += SIMDGROUPS) {
    FETCH(next);
  }
#endif

  SHARED_WORDS(room, ROOM);
  if (simd >= FILLING) {
#if KEY_BITS < 8
    FILL(room, KEY_BITS, KEY_ENTRY, KEY_CENTROIDS);
#endif
#if VALUE_BITS < 8 && VALUE_BITS != KEY_BITS
    FILL(room + VALUE_TABLE, VALUE_BITS, VALUE_ENTRY, VALUE_CENTROIDS);
#endif
  }

  // Queries times spread, rotated, times a power of two: fp16 and what its rounding leaves over.
  SHARED u32 turned[COLUMNS * 4 * (KEY_SPAN + 2)];  // in quarters, 2 apart: lanes meet in no bank
  SHARED float factors[COLUMNS];
  SHARED float shifts[COLUMNS];
  if (simd < TURNING) {
    const u32 lane = member % LANES, column = member / LANES % COLUMNS;
    const u32 asked = pass * COLUMNS + column, query = asked < rows ? asked : rows - 1;
    const u64 at = u64(sequence) * u64(queries_strides[0]) +
        u64(head * (rows / u32(length)) + query / u32(length)) * u64(queries_strides[1]) +
        u64(query % u32(length)) * u64(queries_strides[2]);
    float v[VALUES];
    UNROLL for (int i = 0; i < VALUES; i++) {
      v[i] = float(queries[at + (8 * (i / 8 * LANES + lane) + i % 8) * u64(queries_strides[3])]);
    }
    float shift = 0.0f;
    UNROLL for (int i = 0; i < VALUES; i++) {
      const u32 chunk = i / 8 * LANES + lane;
#if LEVELLED
      const u32 own = key_levels_shape[1] > 1 ? sequence : 0;
      const u64 level = (u64(own) * heads + head) * WIDTH + 8 * chunk + i % 8;
      shift = fused(v[i], key_levels[level], shift);
      v[i] = times(v[i], key_levels[level + u64(key_levels_shape[1]) * heads * WIDTH]);
#else
      v[i] = flipped(times(v[i], float_of(DECODE_GAIN)), flips_of(0, chunk), i % 8);
#endif
    }
    UNROLL for (int turn = 0; turn < ROUNDS; turn++) {
      if (turn) {
        UNROLL for (int i = 0; i < VALUES; i++) v[i] = flipped(v[i], flips_of(turn, i / 8 * LANES + lane), i % 8);
      }
      mix_row(v, lane);
    }
    u32 top = 0;
    UNROLL for (int i = 0; i < VALUES; i++) top = larger(top, bits_of(v[i]) & 0x7FFFFFFFu);
    for (u32 step = 1; step < LANES; step *= 2) {
      top = larger(top, swapped(top, step));
      shift = plus(shift, swapped(shift, step));
    }
    top = larger(top >> 23, 30u);
    const float larger_ = float_of((127 + 12 + 127 - top) << 23);  // the largest is then from 2**12 to 2**13
    if (member / LANES < COLUMNS) {
      UNROLL for (int i = 0; i < VALUES; i++) {
        const float x = times(v[i], larger_);
        const u32 channel = 8 * (i / 8 * LANES + lane) + i % 8;
        turned[(column * 4 + channel / KEY_SPAN) * (KEY_SPAN + 2) + channel % KEY_SPAN] =
            half_pair(x, minus(x, low_half(half_pair(x, 0.0f))));
      }
      for (u32 i = WIDTH + lane; i < 4 * KEY_SPAN; i += LANES) {
        turned[(column * 4 + i / KEY_SPAN) * (KEY_SPAN + 2) + i % KEY_SPAN] = 0;
      }
      factors[column] = times(float_of((top - 12) << 23), float_of(SCALE_LOG2_E));
      shifts[column] = times(shift, float_of(SCALE_LOG2_E));
    }
  }
  barrier();

  u32 query[TILES][KEY_STEPS][2];
  float factor[TILES];
  int limit[TILES];
#if MASK
  u64 mask_at[TILES];
#endif
  UNROLL for (int t = 0; t < TILES; t++) {
    const u32 column = 4 * t + pair;
    UNROLL for (int step = 0; step < KEY_STEPS; step++) {
      UNROLL for (int k = 0; k < 2; k++) {
        query[t][step][k] = right_of(turned[(column * 4 + row / 2) * (KEY_SPAN + 2) + 4 * step + 2 * k + row % 2]);
      }
    }
    factor[t] = factors[column];
    const u32 asked = pass * COLUMNS + column, own = asked < rows ? asked : rows - 1;
    const int place = int(own % u32(length));
    const int causal = CAUSAL ? tokens - length + place + 1 : tokens;
    limit[t] = causal < end ? causal : end;
#if MASK
    mask_at[t] = u64(sequence) * u64(mask_strides[0]) +
        u64(head * (rows / u32(length)) + own / u32(length)) * u64(mask_strides[1]) + u64(place) * u64(mask_strides[2]);
#endif
  }

  // Weights are powers of two to exponents less `most`, and those that values are weighted by, with the scales of the
  // values in the exponent, less `most_weighted`. Both are raised only when they fall behind far enough to matter.
  const float nothing = -1e30f, masked = -float_of(0x7F800000u);
  float most[TILES], most_weighted[TILES], total[TILES], sums[TILES][VALUE_SPAN / 2][4];
  UNROLL for (int t = 0; t < TILES; t++) {
    most[t] = most_weighted[t] = nothing;
    total[t] = 0.0f;
    UNROLL for (int i = 0; i < VALUE_SPAN / 2; i++) {
      UNROLL for (int j = 0; j < 4; j++) sums[t][i][j] = 0.0f;
    }
  }

  for (; tile < end_tile; tile += SIMDGROUPS) {
    const int own = begin + int(KEYS * tile + row);
#if FETCHES
    if (tile + AHEAD * SIMDGROUPS < end_tile) {
      FETCH(tile + AHEAD * SIMDGROUPS);
    }
#endif
#if MASK
    float added[TILES][2 * SETS];
    bool allowed[TILES][2 * SETS];
    UNROLL for (int t = 0; t < TILES; t++) {
      UNROLL for (int i = 0; i < 2 * SETS; i++) {
        const u64 at = mask_at[t] + u64(KEY_ROW(tile, i)) * u64(mask_strides[3]);
#if MASK == 1
        allowed[t][i] = mask[at];
        added[t][i] = 0.0f;
#else
        added[t][i] = times(float(mask[at]), float_of(LOG2_E));
        allowed[t][i] = added[t][i] != masked;
#endif
      }
    }
#endif

    float scores[TILES][SETS][4];
    UNROLL for (int t = 0; t < TILES; t++) {
      UNROLL for (int j = 0; j < 4 * SETS; j++) scores[t][j / 4][j % 4] = 0.0f;
    }
#if KEY_ALIGNED == 0
    UNROLL for (int i = 0; i < 2 * SETS; i++) begin_at<KEY_READ>(keys[i], key_bit % 32);
#endif
    UNROLL for (int piece = 0; piece < KEY_SPAN / CODES_IN_PIECE(KEY_BITS); piece++) {
      UNROLL for (int set = 0; set < SETS; set++) {
        const u32 upper = piece_of<KEY_BITS, KEY_READ>(keys[2 * set], piece);
        const u32 lower = piece_of<KEY_BITS, KEY_READ>(keys[2 * set + 1], piece);
        UNROLL for (int i = 0; i < CODES_IN_PIECE(KEY_BITS) / 4; i++) {
          u32 left[4];
          left[0] = pair_at<KEY_BITS, KEY_ENTRY>(upper, 2 * i, room, copy);
          left[1] = pair_at<KEY_BITS, KEY_ENTRY>(lower, 2 * i, room, copy);
          left[2] = pair_at<KEY_BITS, KEY_ENTRY>(upper, 2 * i + 1, room, copy);
          left[3] = pair_at<KEY_BITS, KEY_ENTRY>(lower, 2 * i + 1, room, copy);
          UNROLL for (int t = 0; t < TILES; t++)
            multiply(scores[t][set], left, query[t][piece * (CODES_IN_PIECE(KEY_BITS) / 4) + i]);
        }
      }
    }
    float key_scale[2 * SETS], value_exponent[2 * SETS];
    UNROLL for (int i = 0; i < 2 * SETS; i++) {
      key_scale[i] = float_of(scale_bits[i][0] << 16);
      value_exponent[i] = logarithm(float_of(scale_bits[i][1] << 16));
    }
    if (tile + SIMDGROUPS < end_tile) {  // on their way while the values are worked on
      if (whole) {
        LOAD_KEYS(tile + SIMDGROUPS, KEY_VECTOR);
        LOAD_SCALES(tile + SIMDGROUPS);
      } else {
        LOAD_KEYS(tile + SIMDGROUPS, 1);
        LOAD_SCALES(tile + SIMDGROUPS);
      }
    }

    u32 weights[TILES][SETS][2];
    UNROLL for (int t = 0; t < TILES; t++) {
      float exponent[2 * SETS], weighted[2 * SETS], high = masked, high_weighted = masked;
      UNROLL for (int i = 0; i < 2 * SETS; i++) {
        bool seen = own + 8 * i < limit[t];
        const THREAD float* both = scores[t][i / 2] + i % 2 * 2;
        float score = times(plus(both[0], both[1]), times(key_scale[i], factor[t]));
#if MASK
        seen = seen && allowed[t][i];
        score = plus(score, added[t][i]);
#endif
        exponent[i] = seen ? score : masked;
        weighted[i] = seen ? plus(score, value_exponent[i]) : masked;
        high = greatest(high, exponent[i]);
        high_weighted = greatest(high_weighted, weighted[i]);
      }
      if (any_lane(high > plus(most[t], 8.0f) || high_weighted > plus(most_weighted[t], 8.0f))) {
        const float raised = greatest(most[t], over_rows(high));
        const float raised_weighted = greatest(most_weighted[t], over_rows(high_weighted));
        total[t] = times(total[t], power_of_two(minus(most[t], raised)));
        const float less = power_of_two(minus(most_weighted[t], raised_weighted));
        UNROLL for (int i = 0; i < VALUE_SPAN / 2; i++) {
          UNROLL for (int j = 0; j < 4; j++) sums[t][i][j] = times(sums[t][i][j], less);
        }
        most[t] = raised;
        most_weighted[t] = raised_weighted;
      }
      UNROLL for (int i = 0; i < 2 * SETS; i++) {
        total[t] = plus(total[t], power_of_two(minus(exponent[i], most[t])));
        const float weight = power_of_two(minus(weighted[i], most_weighted[t]));
        weights[t][i / 2][i % 2] = right_of(half_pair(weight, minus(weight, low_half(half_pair(weight, 0.0f)))));
      }
    }

#if VALUE_ALIGNED == 0
    UNROLL for (int i = 0; i < 4 * SETS; i++) begin_at<VALUE_READ>(values[i], value_bit % 32);
#endif
    UNROLL for (int piece = 0; piece < VALUE_SPAN / CODES_IN_PIECE(VALUE_BITS); piece++) {
      UNROLL for (int set = 0; set < SETS; set++) {
        // Even codes of two keys, their odd codes: neighbours are then the same channel of the two.
        u32 even[2], odd[2];
        UNROLL for (int k = 0; k < 2; k++) {
          const u32 one = piece_of<VALUE_BITS, VALUE_READ>(values[4 * set + 2 * k], piece);
          const u32 other = piece_of<VALUE_BITS, VALUE_READ>(values[4 * set + 2 * k + 1], piece);
          const u32 mask_ = EVEN_CODES(VALUE_BITS);
          even[k] = (one & mask_) | (other << VALUE_BITS & mask_ << VALUE_BITS);
          odd[k] = (one >> VALUE_BITS & mask_) | (other & mask_ << VALUE_BITS);
        }
        UNROLL for (int i = 0; i < CODES_IN_PIECE(VALUE_BITS) / 2; i++) {
          u32 left[4];
          left[0] = pair_at<VALUE_BITS, VALUE_ENTRY>(even[0], i, room + VALUE_TABLE, copy);
          left[1] = pair_at<VALUE_BITS, VALUE_ENTRY>(odd[0], i, room + VALUE_TABLE, copy);
          left[2] = pair_at<VALUE_BITS, VALUE_ENTRY>(even[1], i, room + VALUE_TABLE, copy);
          left[3] = pair_at<VALUE_BITS, VALUE_ENTRY>(odd[1], i, room + VALUE_TABLE, copy);
          UNROLL for (int t = 0; t < TILES; t++)
            multiply(sums[t][piece * (CODES_IN_PIECE(VALUE_BITS) / 2) + i], left, weights[t][set]);
        }
      }
    }
    if (tile + SIMDGROUPS < end_tile) {
      if (whole) {
        LOAD_VALUES(tile + SIMDGROUPS, VALUE_VECTOR);
      } else {
        LOAD_VALUES(tile + SIMDGROUPS, 1);
      }
    }
  }

  // The simdgroups of the group together.
  SHARED float ends[SIMDGROUPS * COLUMNS * 3];
  UNROLL for (int t = 0; t < TILES; t++) {
    total[t] = plus(total[t], swapped(total[t], ROW_1));
    total[t] = plus(total[t], swapped(total[t], ROW_2));
    total[t] = plus(total[t], swapped(total[t], ROW_4));
    if (row == 0) {
      ends[(simd * COLUMNS + 4 * t + pair) * 3] = most[t];
      ends[(simd * COLUMNS + 4 * t + pair) * 3 + 1] = total[t];
      ends[(simd * COLUMNS + 4 * t + pair) * 3 + 2] = most_weighted[t];
    }
  }
  barrier();
  UNROLL for (int t = 0; t < TILES; t++) {
    const u32 column = 4 * t + pair;
    float highest = nothing;
    for (u32 i = 0; i < SIMDGROUPS; i++) highest = greatest(highest, ends[(i * COLUMNS + column) * 3 + 2]);
    const float less = power_of_two(minus(most_weighted[t], highest));
    const u32 to = ((simd * COLUMNS + column) * 8 + row) * (VALUE_SPAN + 1);  // one more: lanes meet in no bank
    UNROLL for (int i = 0; i < VALUE_SPAN / 2; i++) {
      room[to + 2 * i] = bits_of(times(plus(sums[t][i][0], sums[t][i][1]), less));
      room[to + 2 * i + 1] = bits_of(times(plus(sums[t][i][2], sums[t][i][3]), less));
    }
  }
  barrier();
  const u32 before = (sequence * heads + head) * rows;
  for (u32 i = member; i < COLUMNS * VALUE_WIDTH; i += THREADS) {
    const u32 column = i / VALUE_WIDTH, channel = i % VALUE_WIDTH, asked = pass * COLUMNS + column;
    float sum = 0.0f;
    for (u32 j = 0; j < SIMDGROUPS; j++) {
      const u32 from = ((j * COLUMNS + column) * 8 + channel / VALUE_SPAN) * (VALUE_SPAN + 1) + channel % VALUE_SPAN;
      sum = plus(sum, float_of(room[from]));
    }
    if (asked < rows) parts[(u64(before + asked) * splits + split) * (VALUE_WIDTH + 4) + channel] = sum;
  }
  if (member < COLUMNS && pass * COLUMNS + member < rows) {
    float highest = nothing, highest_weighted = nothing, sum = 0.0f;
    for (u32 i = 0; i < SIMDGROUPS; i++) {
      highest = greatest(highest, ends[(i * COLUMNS + member) * 3]);
      highest_weighted = greatest(highest_weighted, ends[(i * COLUMNS + member) * 3 + 2]);
    }
    for (u32 i = 0; i < SIMDGROUPS; i++) {
      const u32 from = (i * COLUMNS + member) * 3;
      sum = plus(sum, times(ends[from + 1], power_of_two(minus(ends[from], highest))));
    }
    const u64 to = (u64(before + pass * COLUMNS + member) * splits + split) * (VALUE_WIDTH + 4) + VALUE_WIDTH;
    parts[to] = highest;
    parts[to + 1] = sum;
    parts[to + 2] = highest_weighted;
    parts[to + 3] = shifts[member];
  }
"""


@dataclass(frozen=True)
class CodedAttentionKind:
    """What a pair of kernels is compiled for."""

    keys: RowKind
    """Their dtype is that of the queries."""
    values: RowKind
    """Their dtype is that of the result."""
    tiles: int
    """Of QUERIES query rows each, that a simdgroup holds at a time."""
    scale: float
    causal: bool
    mask: str
    """"", or the mask's dtype."""
    first: bool
    last: bool
    sinks: str
    """"", or their dtype."""


def tiles_for(key_width: int, value_width: int, many: bool) -> int:
    """Return as many tiles as registers, and Metal's shared memory, have room for."""
    return 2 if many and value_width <= 128 and key_width <= 192 else 1


def _span(rows: RowKind, lanes: int, at: int) -> dict[str, int]:
    """Return how `lanes` lanes share the channels of a row: each takes as many whole chunks of 8 as fill the row, in words
    from where its first code lies, which may be inside a word."""
    chunks = -(-rows.width // 8)
    span = 8 * -(-chunks // lanes)
    bits = span * rows.bits
    shifts = {lane * bits % 32 for lane in range(lanes)}
    read = max(-(-(shift + bits) // 32) for shift in shifts)
    vector = 1
    if shifts == {0} and span * lanes == rows.width:
        vector = next(n for n in (4, 2, 1) if read % n == 0 and at % n == 0)
    return {"SPAN": span, "READ": read, "ALIGNED": int(shifts == {0}), "VECTOR": vector, "LAST": at + rows.words - 1}


def _entry_bits(bits: int, dialect: str) -> int:
    """log2 of the bytes from one entry of a table to the next: those of its copies, and at 4 bits as many that a byte of
    two codes, put above an offset of 8 bits, is the address."""
    copies = (4 * COPIES[dialect]).bit_length() - 1
    return 8 if bits == 4 and copies > 2 else copies


def _room(kind: CodedAttentionKind, dialect: str, simdgroups: int) -> tuple[int, int]:
    """Return words of shared memory for tables, and for what simdgroups add up afterwards; where the values' table begins."""
    sizes = [
        (1 << 2 * rows.bits + _entry_bits(rows.bits, dialect)) // 4 if rows.bits < 8 else 0
        for rows in (kind.keys, kind.values)
    ]
    at = 0 if kind.values.bits in (kind.keys.bits, 8) else sizes[0]
    used = max(sizes[0], at + sizes[1])
    span = _span(kind.values, 8, 0)["SPAN"]
    return max(used, simdgroups * kind.tiles * QUERIES * 8 * (span + 1), 1), at


def source_of(dialect: Dialect, kind: CodedAttentionKind) -> KernelSource:
    """Return the first launch. Inputs: codes, scales, queries, then those of key_levels, first, last and mask that
    there are; output: parts float32 (B, query heads, L, splits, width + 4): sums of weighted values; the exponent that
    weights are relative to, their sum, the exponent that weighted values are relative to, what to add to all exponents.
    """
    simdgroups = SIMDGROUPS[dialect.name]
    keys, values = kind.keys, kind.values
    turning_text, lanes_turning = turning(keys)
    room, value_table = _room(kind, dialect.name, simdgroups)
    numbers: dict[str, int | str] = {}
    for name, rows, lanes, at in (("KEY", keys, 4, 0), ("VALUE", values, 8, keys.words)):
        numbers |= {f"{name}_{what}": number for what, number in _span(rows, lanes, at).items()}
        numbers |= {f"{name}_BITS": rows.bits, f"{name}_ENTRY": _entry_bits(rows.bits, dialect.name)}
    span = int(numbers["KEY_SPAN"])
    simdgroups_turning = -(-kind.tiles * QUERIES * lanes_turning // SIMD_WIDTH)
    sets = SETS[dialect.name] if kind.tiles == 1 and keys.words + values.words <= 32 else 1
    numbers |= {
        "KEY_STEPS": span // 4,
        "VALUE_AT": keys.words,
        "VALUE_WIDTH": values.width,
        "VALUE_TABLE": value_table,
        "ROOM": room,
        "ROW_LINES": -(-(keys.words + values.words) // 16),
        "AHEAD": AHEAD,
        "SETS": sets,
        "KEYS": 16 * sets,
        "TILES": kind.tiles,
        "COLUMNS": kind.tiles * QUERIES,
        "SIMDGROUPS": simdgroups,
        "TURNING": simdgroups_turning,
        "FILLING": simdgroups_turning % simdgroups,  # the first simdgroup that fills tables: where all turn, all do
        "SIMD_WIDTH": SIMD_WIDTH,
        "CAUSAL": int(kind.causal),
        "MASK": 0 if not kind.mask else 1 if kind.mask == "bool" else 2,
        "HAS_FIRST": int(kind.first),
        "HAS_LAST": int(kind.last),
        "DECODE_GAIN": bits_of(keys.decode_gain),
        "SCALE_LOG2_E": bits_of(kind.scale * LOG2_E),
        "LOG2_E": bits_of(LOG2_E),
    }
    text = defines(numbers)
    text += f"#undef THREADS\n#define THREADS {simdgroups * SIMD_WIDTH}\n"
    for name, rows in (("KEY", keys), ("VALUE", values)):
        if rows.bits < 8:
            text += table(f"{name}_CENTROIDS", [-c for c in reversed(rows.magnitudes)] + list(rows.magnitudes))
    given = {"key_levels": keys.levelled, "first": kind.first, "last": kind.last, "mask": bool(kind.mask)}
    inputs = ("codes", "scales", "queries", *(name for name, there in given.items() if there))
    name = "_".join(filter(None, ("turboquant_attention", keys.dtype, kind.mask)))  # dtypes are nowhere in the text
    return KernelSource(name, inputs, ("parts",), turning_text + text + FUNCTIONS + CODES, BODY, 4 * room)


class Attention:
    """Both kernels of a kind, compiled when they first run."""

    def __init__(self, dialect: Dialect, kind: CodedAttentionKind) -> None:
        self.kind = kind
        self._threads = SIMDGROUPS[dialect.name] * SIMD_WIDTH
        self._groups = GROUPS[dialect.name]
        self._dtype = getattr(mx, kind.values.dtype)
        self._split = build(dialect, source_of(dialect, kind))
        self._merge = build(dialect, merge_source_of(kind.values, kind.sinks))

    def __call__(
        self,
        codes: mx.array,
        scales: mx.array,
        queries: mx.array,
        more: Sequence[mx.array],
        merged_with: Sequence[mx.array],
    ) -> tuple[mx.array, mx.array]:
        """Return codes and scales as `CodedRows` has them, queries (B, query heads, L, width), none empty; `more`: key
        levels, first, last, mask as far as there are; `merged_with`: value levels, sinks -> out, lse.
        """
        batch, heads, tokens, _ = codes.shape
        _, query_heads, length, _ = queries.shape
        passes = -(-(query_heads // heads * length) // (self.kind.tiles * QUERIES))
        splits = max(1, min(-(-tokens // 128), self._groups // (batch * heads * passes)))
        width = self.kind.values.width
        shape = batch, query_heads, length
        parts_shape, groups = (*shape, splits, width + 4), batch * heads * passes * splits
        inputs = [codes, scales, queries, *more]
        (parts,) = launch(self._split, inputs, [(parts_shape, mx.float32)], groups, self._threads)
        outputs = [((*shape, width), self._dtype), (shape, mx.float32)]
        out, lse = launch(self._merge, [parts, *merged_with], outputs, batch * query_heads * length, MERGE_THREADS)
        return out, lse
