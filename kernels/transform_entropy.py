"""The entropy coder of transform coding on a GPU, a thread a row: that of prefixcache.codecs.transform.entropy, bit for bit.

Values lie component by component, (components, rows): then neighbouring threads read and write neighbours. Heads and words
are anyone's: no word is read but between the first and the last of its row.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from .dialects import SIMD_WIDTH, Dialect, Kernel, Source, build

THREADS = 64  # few, so that few rows are spread over many cores: a row takes as long as its components are many
SOUND, MISPLACED, TOO_FEW, TOO_MANY = range(4)  # what is wrong with a row's words
SKIPPED, CODED, AS_IT_IS = range(3)  # what becomes of a row: a head of 0, codes, or a head that says it isn't coded

CONSTANTS = """
#define TOTAL 4096u
#define DIRECT 8u
#define SYMBOLS 57u
#define ESCAPE 56u
#define GAINS 15u
#define SHIFTED 76u
#define LEAST 65536u
#define MOST_WORDS 4095u
"""

UNPACK = """
  const u32 rows = heads_shape[0], components = classes_shape[0];
  const u32 row = group * THREADS + member;
  if (row >= rows) return;
  const u32 gain = heads[row] >> 12, count = heads[row] & MOST_WORDS, begin = first[row];
  const bool misplaced = count == 1 || count > u32(words_shape[0]) || begin > u32(words_shape[0]) - count;
  if (gain == GAINS || count == 0 || misplaced) {
    for (u32 i = 0; i < components; i++) values[u64(i) * rows + row] = 0.0f;
    wrong[row] = gain == GAINS || count == 0 ? SOUND : MISPLACED;
    return;
  }
  const u32 last = begin + count - 1;
  u32 state = u32(words[begin]) << 16 | words[begin + 1], at = begin + 2;
  u32 next = words[at < last ? at : last];
  for (u32 i = 0; i < components; i++) {
    const u32 shifted = classes[i] + gain;
    const u32 entry = slots[shifted * TOTAL + (state & (TOTAL - 1))], symbol = entry >> 24;
    state = ((entry & 4095u) + 1) * (state >> 12) + (entry >> 12 & 4095u);
    if (state < LEAST) {
      state = state << 16 | next;
      at++;
      next = words[at < last ? at : last];
    }
    float value = 0.0f;
    if (symbol) {
      const u32 octave = (symbol - DIRECT) >> 2;
      const u32 open = symbol < DIRECT ? 1 : symbol == ESCAPE ? 16 : octave + 2;
      const u32 bits = state & ((1u << open) - 1);
      state >>= open;
      if (state < LEAST) {
        state = state << 16 | next;
        at++;
        next = words[at < last ? at : last];
      }
      u32 size = symbol < DIRECT ? symbol : symbol == ESCAPE ? 0 : (4 + ((symbol - DIRECT) & 3)) << (octave + 1);
      size += bits >> 1;
      value = size < DIRECT ? points[shifted * DIRECT + size] : float(size);
      value = float_of(bits_of(value) | bits << 31);
    }
    values[u64(i) * rows + row] = value;
  }
  wrong[row] = at > last + 1 ? TOO_FEW : at <= last || state != LEAST ? TOO_MANY : SOUND;
"""

PACKING = """
// A value -> its magnitude in whole steps; what is no number is 0.
FUNCTION u32 size_of(const float value) {
  if ((bits_of(value) & 0x7FFFFFFFu) > 0x7F800000u) return 0;
  return u32(least(plus(magnitude(value), float_of(DEAD_ZONE)), 32767.0f));
}
FUNCTION u32 symbol_of(const u32 size) { return size < DIRECT ? size : (bits_of(float(size)) >> 21) - 512; }
"""

PACK = """
  const u32 rows = values_shape[1], components = values_shape[0], room = ROOM;
  const u32 row = group * THREADS + member;
  if (row >= rows) return;
  int cost[GAINS];
  UNROLL for (u32 gain = 0; gain < GAINS; gain++) cost[gain] = cost_of_zeros[gain];
  u32 used = 0;
  for (u32 i = 0; i < components; i++) {
    const u32 size = size_of(values[u64(i) * rows + row]);
    if (size) {
      used = i + 1;
      const u32 at = symbol_of(size) * SHIFTED + classes[i];
      UNROLL for (u32 gain = 0; gain < GAINS; gain++) cost[gain] += costs[at + gain];
    }
  }
  const bool coded = wanted[row] == CODED;
  if (!coded || !used) {
    for (u32 i = 0; i < components; i++) decoded[u64(i) * rows + row] = 0.0f;
    heads[row] = u16(coded ? GAINS / 2 << 12 : wanted[row] == AS_IT_IS ? 0xFFFFu : 0u);
    return;
  }
  u32 best = 0;
  int lowest = cost[0];
  UNROLL for (u32 gain = 1; gain < GAINS; gain++) {
    if (cost[gain] < lowest) {
      lowest = cost[gain];
      best = gain;
    }
  }
  u32 state = LEAST, count = 0;
  const u64 end = u64(row + 1) * room;
#define EMIT(word) { count++; if (count <= room) scratch[end - count] = u16(word); }
  for (u32 i = components; i-- > 0;) {
    const float value = values[u64(i) * rows + row];
    const u32 size = size_of(value), symbol = symbol_of(size), shifted = classes[i] + best;
    const u32 sign = size && value < 0.0f ? 1 : 0;
    const u32 slots = codes[2 * (shifted * SYMBOLS + symbol)], open_part = codes[2 * (shifted * SYMBOLS + symbol) + 1];
    const u32 frequency = slots & 0xFFFFu, open = open_part >> 16;
    if (open) {
      if (state >> (32 - open)) {
        EMIT(state & 0xFFFFu)
        state >>= 16;
      }
      state = state << open | (2 * size + sign - 2 * (open_part & 0xFFFFu));
    }
    if (state >> 20 >= frequency) {
      EMIT(state & 0xFFFFu)
      state >>= 16;
    }
    const u32 quotient = state / frequency;
    state = (quotient << 12) + (state - quotient * frequency) + (slots >> 16);
    const float point = size < DIRECT ? points[shifted * DIRECT + size] : float(size);
    decoded[u64(i) * rows + row] = float_of(bits_of(point) | sign << 31);
  }
  EMIT(state & 0xFFFFu)
  EMIT(state >> 16)
  if (count > MOST_WORDS) {
    for (u32 i = 0; i < components; i++) decoded[u64(i) * rows + row] = 0.0f;
    heads[row] = u16(0xFFFFu);
    return;
  }
  heads[row] = u16(best << 12 | count);
"""

GATHER = """
  const u32 row = group * (THREADS / WIDTH) + member / WIDTH, room = scratch_shape[1];
  if (row >= u32(heads_shape[0])) return;
  const u32 head = heads[row], count = head >> 12 == GAINS ? 0 : head & MOST_WORDS;
  for (u32 i = member % WIDTH; i < count; i += WIDTH) {
    words[u64(first[row]) + i] = scratch[u64(row + 1) * room - count + i];
  }
"""


def unpacker() -> Source:
    """Inputs: heads uint16 (rows,), first uint32 (rows,), words uint16, classes uint32 (components,), slots uint32 (76, 4096)
    and points float32 (76, 8). Outputs: values float32 (components, rows), and what is wrong, uint32 (rows,).
    """
    return Source(
        "transform_unpack",
        ("heads", "first", "words", "classes", "slots", "points"),
        ("values", "wrong"),
        CONSTANTS + _defines(THREADS=THREADS, SOUND=SOUND, MISPLACED=MISPLACED, TOO_FEW=TOO_FEW, TOO_MANY=TOO_MANY),
        UNPACK,
    )


def packer(room: int, dead_zone: int) -> Source:
    """Inputs: values float32 (components, rows), wanted uint32 (rows,), classes uint32 (components,), costs int32 (57, 76),
    cost_of_zeros int32 (15,), codes uint32 (76, 57, 2), points float32 (76, 8). Outputs: heads uint16 (rows,), decoded
    float32 (components, rows), and scratch uint16 (rows, room), the words of each row at its end. `dead_zone` as bits.
    """
    return Source(
        "transform_pack",
        ("values", "wanted", "classes", "costs", "cost_of_zeros", "codes", "points"),
        ("heads", "decoded", "scratch"),
        CONSTANTS + _defines(THREADS=THREADS, ROOM=room, DEAD_ZONE=dead_zone, CODED=CODED, AS_IT_IS=AS_IT_IS) + PACKING,
        PACK,
    )


def gatherer() -> Source:
    """Inputs: heads and scratch as `packer` gives them, first uint32 (rows,). Output: words uint16."""
    return Source(
        "transform_gather",
        ("heads", "scratch", "first"),
        ("words",),
        CONSTANTS + _defines(THREADS=THREADS, WIDTH=SIMD_WIDTH),
        GATHER,
    )


def _defines(**numbers: int) -> str:
    return "".join(f"#define {name} {number}u\n" for name, number in numbers.items())


@lru_cache(maxsize=64)
def _kernel(dialect: Dialect, source: Source) -> Kernel:
    return build(dialect, source)


def unpack(
    dialect: Dialect,
    heads: mx.array,
    first: mx.array,
    words: mx.array,
    classes: mx.array,
    slots: mx.array,
    points: mx.array,
) -> tuple[mx.array, mx.array]:
    """Inputs and outputs of `unpacker`, one row at least."""
    rows = heads.shape[0]
    values, wrong = _kernel(dialect, unpacker())(
        inputs=[heads, first, words, classes, slots, points],
        output_shapes=[(classes.shape[0], rows), (rows,)],
        output_dtypes=[mx.float32, mx.uint32],
        **_launch(-(-rows // THREADS)),
    )
    return values, wrong


def pack(dialect: Dialect, inputs: list[mx.array], room: int, dead_zone: int) -> tuple[mx.array, mx.array, mx.array]:
    """Inputs and outputs of `packer`."""
    components, rows = inputs[0].shape
    heads, decoded, scratch = _kernel(dialect, packer(room, dead_zone))(
        inputs=inputs,
        output_shapes=[(rows,), (components, rows), (rows, room)],
        output_dtypes=[mx.uint16, mx.float32, mx.uint16],
        **_launch(-(-rows // THREADS)),
    )
    return heads, decoded, scratch


def gather(dialect: Dialect, heads: mx.array, scratch: mx.array, first: mx.array, count: int) -> mx.array:
    """Inputs and output of `gatherer`: `count` words, one at least."""
    (words,) = _kernel(dialect, gatherer())(
        inputs=[heads, scratch, first],
        output_shapes=[(count,)],
        output_dtypes=[mx.uint16],
        **_launch(-(-heads.shape[0] // (THREADS // SIMD_WIDTH))),
    )
    return words


def _launch(groups: int) -> dict[str, tuple[int, int, int]]:
    return {"grid": (groups * THREADS, 1, 1), "threadgroup": (THREADS, 1, 1)}
