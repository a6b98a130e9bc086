"""The encoder of new keys and values together, in one launch: what a decoding step adds to a cache.

The arithmetic is `turboquant_encode`'s own text; here is only how rows are found and where codes go.
"""

from __future__ import annotations

import mlx.core as mx

from .dialects import Dialect, KernelSource, build
from .turboquant_encode import BODY, source_of
from .turboquant_rows import THREADS, RowKind

LEVELLING = "#if LEVELLED\n    UNROLL for (int i = 0; i < VALUES; i++) v[i] = times(minus(v[i]"
STORING = "    const u64 row = u64(token) * heads + head;\n"
# From values as they are to `pieces` and `scale`.
ARITHMETIC = BODY[BODY.index(LEVELLING) : BODY.index(STORING)]

PAIR = (
    """
#if BITS < 8
  SHARED u32 entries[REACH];
  for (u32 i = member; i < REACH; i += THREADS) entries[i] = entry_of(int(i));
  barrier();
#endif
  const u32 batch = keys_shape[0], heads = keys_shape[1], length = keys_shape[2], lane = member % LANES;
  const u32 count = 2 * batch * heads * length;
  u32 flip[ROUNDS][SLOTS];
  UNROLL for (int turn = 0; turn < ROUNDS; turn++) {
    UNROLL for (int s = 0; s < SLOTS; s++) flip[turn][s] = flips_of(turn, s * LANES + lane);
  }

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
    float v[VALUES];
    UNROLL for (int s = 0; s < SLOTS; s++) {
      const u32 channel = 8 * (s * LANES + lane);
      if (whole) {
        load_chunk(reinterpret_cast<const DEVICE u32*>(rows + at + channel), v + 8 * s);
      } else {
        UNROLL for (int e = 0; e < 8; e++) v[8 * s + e] = float(rows[at + (channel + e) * stride]);
      }
    }
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
        """Keys and values (B, heads, L, width), not empty; their levels if the kind is levelled -> codes, scales."""
        batch, heads, length, _ = keys.shape
        groups = min(-(-2 * batch * heads * length // self._kind.rows_at_once), 1024)
        codes, scales = self._encode(
            inputs=[keys, values, *levels],
            output_shapes=[(batch, heads, length, 2 * self._kind.words), (batch, heads, length, 2)],
            output_dtypes=[mx.uint32, mx.uint16],
            grid=(groups * THREADS, 1, 1),
            threadgroup=(THREADS, 1, 1),
        )
        return codes, scales
