"""The entropy coder of transform coding on a GPU, row by row: that of prefixcache.codecs.transform.entropy, bit for bit.

Several groups of layers are coded at once: a row takes as long as its components are many, however many rows there are.
Values are half precision, as bits, and lie component by component, (groups, components, rows): then neighbouring threads
read and write neighbours. Heads and words are anyone's: no word is read but between the first and the last of its row.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from .dialects import SIMD_WIDTH, Dialect, Kernel, KernelSource, build, defines, launch

THREADS = 64  # few, so that few rows are spread over many cores
MANY_ROWS = 1 << 15  # from so many on, all cores of a GPU are at work with fewer threads a row
SOUND, MISPLACED, TOO_FEW, TOO_MANY = range(4)  # what is wrong with a row's words

CONSTANTS = """
#define TOTAL 4096u
#define DIRECT 8u
#define SYMBOLS 57u
#define ESCAPE 56u
#define GAINS 15u
#define CLASSES 61u
#define LEAST 65536u
#define MOST_WORDS 4095u
#define MOST 32767.0f
FUNCTION u32 half_of(const float x) { return half_pair(x, 0.0f) & 0xFFFFu; }
"""

PLACE = """
  const u32 rows = u32(PLACED_shape[1]), most = u32(classes_shape[1]), in_group = (rows + THREADS - 1) / THREADS;
  const u32 part = group / in_group, own = group % in_group * THREADS + member;
  if (own >= rows) return;
  const u32 row = part * rows + own, components = counts[part];
  const u64 place = u64(part) * most * rows + own;
  const u32 own_classes = part * most;
"""

UNPACK = (
    PLACE.replace("PLACED", "heads")
    + """
  const u32 gain = heads[row] >> 12, count = heads[row] & MOST_WORDS, begin = first[row];
  const bool misplaced = count == 1 || count > u32(words_shape[0]) || begin > u32(words_shape[0]) - count;
  if (gain == GAINS || count == 0 || misplaced) {
    for (u32 i = 0; i < most; i++) values[place + u64(i) * rows] = 0;
    wrong[row] = gain == GAINS || count == 0 ? SOUND : MISPLACED;
    return;
  }
  const u32 last = begin + count - 1;
  u32 state = u32(words[begin]) << 16 | words[begin + 1], at = begin + 2;
  u32 next = words[at < last ? at : last];
  for (u32 i = 0; i < components; i++) {
    const u32 shifted = classes[own_classes + i] + gain;
    const u32 entry = slots[shifted * TOTAL + (state & (TOTAL - 1))], symbol = entry >> 24;
    state = ((entry & 4095u) + 1) * (state >> 12) + (entry >> 12 & 4095u);
    if (state < LEAST) {
      state = state << 16 | next;
      at++;
      next = words[at < last ? at : last];
    }
    u32 value = 0;
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
      value = (size < DIRECT ? points[shifted * DIRECT + size] : half_of(float(size))) | (bits & 1) << 15;
    }
    values[place + u64(i) * rows] = u16(value);
  }
  for (u32 i = components; i < most; i++) values[place + u64(i) * rows] = 0;
  wrong[row] = at > last + 1 ? TOO_FEW : at <= last || state != LEAST ? TOO_MANY : SOUND;
"""
)

PACKING = """
// A value -> its magnitude in whole steps; what is no number is 0.
FUNCTION u32 size_of(const float value) {
  if ((bits_of(value) & 0x7FFFFFFFu) > 0x7F800000u) return 0;
  return u32(least(plus(magnitude(value), float_of(DEAD_ZONE)), MOST));
}
FUNCTION u32 symbol_of(const u32 size) { return size < DIRECT ? size : (bits_of(float(size)) >> 21) - 512; }
"""

# A row's components are shared out among SLICES threads, but for the entropy coder's state, which goes from one to the next.
PACK = """
  SHARED int costs_of[SLICES][GAINS][ROWS];
  SHARED float reached_of[SLICES][ROWS];
  SHARED u32 used_of[SLICES][ROWS], within_of[SLICES][ROWS], too_long[ROWS];
  const u32 rows = u32(lengths_shape[1]), most = u32(classes_shape[1]), in_group = (rows + ROWS - 1) / ROWS;
  const u32 lane = member % ROWS, slice = member / ROWS;
  const u32 part = group / in_group, nth = group % in_group * ROWS + lane, own = nth < rows ? nth : rows - 1;
  const u32 row = part * rows + own, components = nth < rows ? counts[part] : 0, own_classes = part * most;
  const u64 place = u64(part) * most * rows + own;

  int cost[GAINS];
  UNROLL for (u32 gain = 0; gain < GAINS; gain++) cost[gain] = slice ? 0 : cost_of_zeros[part * GAINS + gain];
  u32 used = 0;
  float reached = 0.0f;
  bool within = true;
  for (u32 i = components * slice / SLICES; i < components * (slice + 1) / SLICES; i++) {
    const float value = low_half(u32(values[place + u64(i) * rows]));
    reached = plus(reached, times(value, value));
    within = within && magnitude(value) <= MOST;
    const u32 size = size_of(value);
    if (size) {
      used = i + 1;
      const u32 at = (symbol_of(size) * CLASSES + classes[own_classes + i]) * 8;
      u32 pairs[8];
      load_four(costs + at, pairs);
      load_four(costs + at + 4, pairs + 4);
      UNROLL for (u32 gain = 0; gain < GAINS; gain++) {
        cost[gain] += int(gain & 1 ? pairs[gain / 2] : pairs[gain / 2] << 16) >> 16;
      }
    }
  }
  UNROLL for (u32 gain = 0; gain < GAINS; gain++) costs_of[slice][gain][lane] = cost[gain];
  reached_of[slice][lane] = reached;
  used_of[slice][lane] = used;
  within_of[slice][lane] = within ? 1 : 0;
  barrier();

  // Each thread of a row adds up the same.
  u32 best = 0;
  int lowest = 0x7FFFFFFF;
  UNROLL for (u32 gain = 0; gain < GAINS; gain++) {
    int sum = 0;
    UNROLL for (u32 other = 0; other < SLICES; other++) sum += costs_of[other][gain][lane];
    if (sum < lowest) {
      lowest = sum;
      best = gain;
    }
  }
  reached = 0.0f;
  used = 0;
  within = true;
  UNROLL for (u32 other = 0; other < SLICES; other++) {
    reached = plus(reached, reached_of[other][lane]);
    used = used_of[other][lane] ? used_of[other][lane] : used;
    within = within && within_of[other][lane];
  }
  // A row that isn't finite, or too long for codes, or not along the vectors: the comparisons are false of NaN.
  const float left_out = minus(lengths[row], reached), limit = limits[part];
  const bool good = within && left_out <= plus(limit, times(float_of(SHARE), reached)), coded = good && !skipped[own];
  const bool fits = coded && left_out <= limit;
  u32 count = 0;
  if (slice == 0 && nth < rows) {
    if (coded && used) {
      const u32 room = ROOM;
      u32 state = LEAST;
      const u64 end = u64(row + 1) * room;
#define EMIT(word) { count++; if (count <= room) scratch[end - count] = u16(word); }
      for (u32 i = components; i-- > 0;) {
        const float value = low_half(u32(values[place + u64(i) * rows]));
        const u32 size = size_of(value), symbol = symbol_of(size), shifted = classes[own_classes + i] + best;
        u32 code[2];
        load_two(codes + 2 * (shifted * SYMBOLS + symbol), code);
        const u32 frequency = code[0] & 0xFFFFu, open = code[1] >> 16;
        if (open) {
          if (state >> (32 - open)) {
            EMIT(state & 0xFFFFu)
            state >>= 16;
          }
          state = state << open | (2 * size + (size && value < 0.0f ? 1 : 0) - 2 * (code[1] & 0xFFFFu));
        }
        if (state >> 20 >= frequency) {
          EMIT(state & 0xFFFFu)
          state >>= 16;
        }
        const u32 quotient = state / frequency;
        state = (quotient << 12) + (state - quotient * frequency) + (code[0] >> 16);
      }
      EMIT(state & 0xFFFFu)
      EMIT(state >> 16)
    }
    const u32 head = coded ? (used ? best << 12 | count : GAINS / 2 << 12) : skipped[own] ? 0u : 0xFFFFu;
    heads[row] = u16(count > MOST_WORDS ? 0xFFFFu : head);
    fine[row] = fits && count <= MOST_WORDS ? 1 : 0;
    too_long[lane] = count > MOST_WORDS ? 1 : 0;
  }
  // What the codes give, meanwhile.
  const u32 filled = coded && used ? components : 0, behind = nth < rows ? most : 0;
  for (u32 i = slice ? slice - 1 : most; i < behind; i += SLICES - 1) {
    u32 point = 0;
    if (i < filled) {
      const float value = low_half(u32(values[place + u64(i) * rows]));
      const u32 size = size_of(value), shifted = classes[own_classes + i] + best;
      point = size < DIRECT ? points[shifted * DIRECT + size] : half_of(float(size));
      point |= size && value < 0.0f ? 1u << 15 : 0;
    }
    decoded[place + u64(i) * rows] = u16(point);
  }
  barrier();
  if (nth < rows && too_long[lane]) {
    for (u32 i = slice; i < components; i += SLICES) decoded[place + u64(i) * rows] = 0;
  }
"""

GATHER = """
  const u32 row = group * (THREADS / WIDTH) + member / WIDTH, room = scratch_shape[1];
  if (row >= u32(heads_shape[0])) return;
  const u32 head = heads[row], count = head >> 12 == GAINS ? 0 : head & MOST_WORDS;
  for (u32 i = member % WIDTH; i < count; i += WIDTH) {
    words[u64(ends[row]) - count + i] = scratch[u64(row + 1) * room - count + i];
  }
"""


def unpacker() -> KernelSource:
    """Inputs: heads uint16 (groups, rows), first uint32 (groups, rows), words uint16, classes uint32 (groups, most) and of
    each group how many there are, counts uint32 (groups,), slots uint32 (76, 4096), points uint16 (76, 8). Outputs: values
    uint16 (groups, most, rows), and what is wrong, uint32 (groups, rows).
    """
    return KernelSource(
        "transform_unpack",
        ("heads", "first", "words", "classes", "counts", "slots", "points"),
        ("values", "wrong"),
        CONSTANTS + _defines(SOUND=SOUND, MISPLACED=MISPLACED, TOO_FEW=TOO_FEW, TOO_MANY=TOO_MANY),
        UNPACK,
    )


def packer(slices: int, room: int, dead_zone: int, share: int) -> KernelSource:
    """Inputs: values uint16 (groups, most, rows), the squares of rows' lengths float32 (groups, rows), skipped uint32
    (rows,), and the most that a row may lose to vectors that are left out, beside a `share` of the rest, limits float32
    (groups,); classes and counts as for `unpacker`, costs of gains int16, two to a uint32 (57, 61, 8), cost_of_zeros int32
    (groups, 15), codes uint32 (76, 57, 2), points uint16 (76, 8). Outputs: heads uint16 (groups, rows); fine uint16 (groups,
    rows), 1 of rows that lose no more than the limit; decoded uint16 (groups, most, rows); and scratch uint16 (groups * rows,
    room), the words of each row at its end. `slices`: threads of a row, two at least. `dead_zone` and `share` as bits.
    """
    numbers = _defines(ROOM=room, DEAD_ZONE=dead_zone, SHARE=share, ROWS=THREADS, SLICES=slices)
    return KernelSource(
        "transform_pack",
        ("values", "lengths", "skipped", "limits", "classes", "counts", "costs", "cost_of_zeros", "codes", "points"),
        ("heads", "fine", "decoded", "scratch"),
        CONSTANTS + numbers + PACKING,
        PACK,
    )


def gatherer() -> KernelSource:
    """Inputs: heads uint16 (rows,), scratch as `packer` gives it, where each row's words end uint32 (rows,). Output: words
    uint16.
    """
    return KernelSource(
        "transform_gather",
        ("heads", "scratch", "ends"),
        ("words",),
        CONSTANTS + _defines(WIDTH=SIMD_WIDTH),
        GATHER,
    )


def _defines(**numbers: int) -> str:
    return defines({"THREADS": THREADS, **numbers}, unsigned=True)


@lru_cache(maxsize=64)
def _kernel(dialect: Dialect, source: KernelSource) -> Kernel:
    return build(dialect, source)


def unpack(dialect: Dialect, inputs: list[mx.array]) -> tuple[mx.array, mx.array]:
    """Inputs and outputs of `unpacker`, one group and row at least."""
    groups, rows = inputs[0].shape
    outputs = [((groups, inputs[3].shape[1], rows), mx.uint16), ((groups, rows), mx.uint32)]
    values, wrong = launch(_kernel(dialect, unpacker()), inputs, outputs, groups * -(-rows // THREADS), THREADS)
    return values, wrong


def pack(
    dialect: Dialect, inputs: list[mx.array], room: int, dead_zone: int, share: int
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """Inputs and outputs of `packer`, one group and row at least."""
    groups, most, rows = inputs[0].shape
    slices = 2 if groups * rows > MANY_ROWS else 4
    kernel = _kernel(dialect, packer(slices, room, dead_zone, share))
    outputs = [
        (shape, mx.uint16) for shape in ((groups, rows), (groups, rows), (groups, most, rows), (groups * rows, room))
    ]
    heads, fine, decoded, scratch = launch(kernel, inputs, outputs, groups * -(-rows // THREADS), slices * THREADS)
    return heads, fine, decoded, scratch


def gather(dialect: Dialect, heads: mx.array, scratch: mx.array, ends: mx.array, count: int) -> mx.array:
    """Inputs and output of `gatherer`: `count` words, one at least."""
    groups = -(-heads.shape[0] // (THREADS // SIMD_WIDTH))
    (words,) = launch(_kernel(dialect, gatherer()), [heads, scratch, ends], [((count,), mx.uint16)], groups, THREADS)
    return words
