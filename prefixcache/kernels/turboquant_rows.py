"""How a TurboQuant row lies in the lanes of a GPU, and its rotation there: what the encoder and the decoder share.

A row belongs to LANES neighbouring lanes. Its values come in chunks of 8 neighbours, 16 bytes of fp16: lane l holds the
chunks l, l + LANES, ... in its SLOTS. So value 8 * (slot * LANES + lane) + e is `v[8 * slot + e]`: the rotation's
strides 1, 2, 4 lie inside a chunk, the next ones between lanes, the last (and a factor 3, 5 or 7) between slots.
"""

from __future__ import annotations

from dataclasses import dataclass

from .dialects import ELEMENTS, bits_of, defines, table

LARGEST = {"float16": 65504.0, "bfloat16": float.fromhex("0x1.fep127"), "float32": float.fromhex("0x1.fffffep127")}
THREADS = 256
GROUPS = 4096
CHUNK = 8

FUNCTIONS = """
#define HALF 0
#define BFLOAT 1
#define FLOAT 2

// What one lane has and its partner has, in the order of their place in the row.
FUNCTION void butterfly(THREAD float& low, THREAD float& high) {
  const float sum = plus(low, high);
  high = minus(low, high);
  low = sum;
}

// The factor 3, 5 or 7 at the last stride, one column of it: x[0], x[step], ...
FUNCTION void mix_factor(THREAD float* x, const int step) {
#if FACTOR == 3 || FACTOR == 5
  float total = plus(x[0], x[step]);
  UNROLL for (int i = 2; i < FACTOR; i++) total = plus(total, x[i * step]);
  total = plus(total, total);
  UNROLL for (int i = 0; i < FACTOR; i++) x[i * step] = minus(times(x[i * step], float(FACTOR)), total);
#elif FACTOR == 7
  float mixed[7];
  UNROLL for (int i = 0; i < 7; i++) {
    UNROLL for (int j = 0; j < 7; j++) {
      const int line = (i + j) % 7;
      const float term = times(x[i * step], line == 1 || line == 2 || line == 4 ? float_of(FANO) : -1.0f);
      mixed[j] = i ? plus(mixed[j], term) : term;
    }
  }
  UNROLL for (int j = 0; j < 7; j++) x[j * step] = mixed[j];
#endif
}

// T over a row, each sum rounded, strides ascending.
FUNCTION void mix_row(THREAD float* v, const u32 lane) {
  UNROLL for (int stride = 1; stride < 8; stride *= 2) {
    UNROLL for (int i = 0; i < VALUES; i++)
      if (!(i & stride)) butterfly(v[i], v[i + stride]);
  }
  UNROLL for (u32 step = 1; step < LANES; step *= 2) {
    const float sign = lane & step ? -1.0f : 1.0f;
    UNROLL for (int i = 0; i < VALUES; i++) v[i] = fused(v[i], sign, swapped(v[i], step));
  }
#if FACTOR == 1
  UNROLL for (int stride = 8; stride < VALUES; stride *= 2) {
    UNROLL for (int i = 0; i < VALUES; i++)
      if (!(i & stride)) butterfly(v[i], v[i + stride]);
  }
#else
  UNROLL for (int e = 0; e < 8; e++) mix_factor(v + e, 8);
#endif
}

// The signs of a round are a bit each, set bits flip. Here those of a chunk.
FUNCTION u32 flips_of(const u32 turn, const u32 chunk) {
  return u32(FLIPS[turn * FLIP_WORDS + chunk / 4]) >> (8 * (chunk % 4)) & 255u;
}

// How many tokens of a head are a group's, where `groups` share all.
FUNCTION u32 tile_of(const u32 tokens, const u32 heads, const u32 groups) {
  const u32 tiles = groups / heads;
  return ((tokens + tiles - 1) / tiles + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE * ROWS_AT_ONCE;
}

// 8 neighbouring values from memory, whole 16 bytes at a time.
FUNCTION void load_chunk(const DEVICE u32* address, THREAD float* x) {
  u32 words[4];
#if ELEMENT == FLOAT
  UNROLL for (int part = 0; part < 2; part++) {
    load_four(address + 4 * part, words);
    UNROLL for (int i = 0; i < 4; i++) x[4 * part + i] = float_of(words[i]);
  }
#else
  load_four(address, words);
  UNROLL for (int i = 0; i < 4; i++) {
#if ELEMENT == HALF
    x[2 * i] = low_half(words[i]);
    x[2 * i + 1] = high_half(words[i]);
#else
    x[2 * i] = float_of(words[i] << 16);
    x[2 * i + 1] = float_of(words[i] & 0xFFFF0000u);
#endif
  }
#endif
}

FUNCTION float flipped(const float x, const u32 flips, const int e) {
  return float_of(bits_of(x) ^ (flips << (31 - e) & 0x80000000u));
}
"""


@dataclass(frozen=True)
class RowKind:
    """Rows of one kind: all that a kernel is specialised on, and nothing else. The key of a compiled kernel."""

    width: int
    bits: int
    rounds: int
    dtype: str
    levelled: bool
    magnitudes: tuple[int, ...]
    shift: int
    per_length: float
    per_peak: float
    decode_gain: float
    flips: tuple[int, ...]
    """The signs of the rotation as bits, a set bit flips: words of 32, each round in words of its own."""

    @property
    def factor(self) -> int:
        """The odd part of the width."""
        return self.width // (self.width & -self.width)

    @property
    def lanes(self) -> int:
        """At least 16 values a lane; with an odd factor, that factor's values of a column in one lane."""
        return min(8, self.width // self.factor // (CHUNK if self.factor > 1 else 2 * CHUNK))

    @property
    def words(self) -> int:
        return -(-self.width * self.bits // 32)

    @property
    def rows_at_once(self) -> int:
        """Return how many rows a group of threads works on at a time."""
        return THREADS // self.lanes

    def defines(self) -> str:
        values = self.width // self.lanes
        numbers = {
            "WIDTH": self.width,
            "BITS": self.bits,
            "ROUNDS": self.rounds,
            "FACTOR": self.factor,
            "LANES": self.lanes,
            "LANE_BITS": self.lanes.bit_length() - 1,
            "SLOTS": values // CHUNK,
            "SLOT_BITS": (values // CHUNK).bit_length() - 1,
            "VALUES": values,
            "WORDS": self.words,
            "FLIP_WORDS": -(-self.width // 32),
            "ELEMENT": ELEMENTS.index(self.dtype),
            "LEVELLED": int(self.levelled),
            "THREADS": THREADS,
            "ROWS_AT_ONCE": self.rows_at_once,
            "SHIFT": self.shift,
            "FANO": bits_of(2 - 2**0.5),
        }
        return "\n" + defines(numbers) + table("FLIPS", [word - (word >> 31 << 32) for word in self.flips])


def takes(width: int, bits: int) -> bool:
    """Tell whether the kernels have a layout for such rows."""
    power = width & -width
    odd = width // power
    laid_out = odd == 1 or (odd in (3, 5, 7) and power <= 8 * CHUNK)  # beyond, a lane has no slot for the odd factor's
    return 32 <= width <= 512 and power >= 16 and laid_out and bits in (1, 2, 3, 4, 8)


def groups_of(rows: RowKind, tokens: int, heads: int) -> int:
    """Return how many groups of threads share tokens x heads rows: a multiple of `heads`. Some thousands fill a large GPU;
    more would only prepare their tables oftener."""
    most = -(-tokens // rows.rows_at_once)
    return heads * max(1, min(most, GROUPS // heads))
