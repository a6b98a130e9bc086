"""What stands on a GPU around the products of transform coding, a kernel each way: rows of a stream to centred ones without
RoPE, and from products to rows with it.

A thread has a pair of values that RoPE turns together, or two neighbours. Centred rows and products are half precision, as
bits, of channels that were each divided by a scale of its own.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

from .dialects import Dialect, Kernel, Source, build

THREADS = 256
DTYPES = ("float16", "bfloat16", "float32")
MOST = {"float16": "65504.0f", "bfloat16": "float_of(0x7F7F0000u)", "float32": "float_of(0x7F7FFFFFu)"}

PLACE = """
  const u32 at = group * THREADS + member, pair = at % HALF, token = at / HALF % tokens, head = at / HALF / tokens;
  if (head >= HEADS) return;
  const bool turns = pair < PAIRS;
  const u32 one = turns && !INTERLEAVED ? pair : 2 * pair, other = turns && !INTERLEAVED ? pair + PAIRS : one + 1;
  const u32 begin = head * WIDTH;
  const u64 row = (u64(head) * tokens + token) * WIDTH;
"""

LOADS = {
    "float16": "FUNCTION float loaded(const u16 bits) { return low_half(u32(bits)); }",
    "bfloat16": "FUNCTION float loaded(const u16 bits) { return float_of(u32(bits) << 16); }",
    "float32": "FUNCTION float loaded(const u32 bits) { return float_of(bits); }",
}
STORES = {
    "float16": "FUNCTION u16 stored(const float x) { return u16(half_pair(x, 0.0f)); }",
    "bfloat16": "FUNCTION u16 stored(const float x) { return u16(bfloat_pair(x, 0.0f)); }",
    "float32": "FUNCTION u32 stored(const float x) { return bits_of(x); }",
}

CENTRE = """
  const u32 tokens = u32(rows_shape[1]);
""" + PLACE + """
  const u64 source = u64(head) * u64(rows_strides[0]) + u64(token) * u64(rows_strides[1]);
  const u64 step = u64(rows_strides[2]);
  float a = loaded(rows[source + one * step]), b = other < WIDTH ? loaded(rows[source + other * step]) : 0.0f;
  if (turns) {
    const float c = times(cosines[token * PAIRS + pair], LENGTH), s = times(sines[token * PAIRS + pair], LENGTH);
    const float turned = plus(times(a, c), times(b, s));
    b = minus(times(b, c), times(a, s));
    a = turned;
  }
  centred[row + one] = u16(half_pair(times(minus(a, mean[begin + one]), scale[begin + one]), 0.0f));
  if (other < WIDTH) {
    centred[row + other] = u16(half_pair(times(minus(b, mean[begin + other]), scale[begin + other]), 0.0f));
  }
"""

RESTORE = """
  const u32 tokens = u32(products_shape[0]);
""" + PLACE + """
  const u32 block = blocks[token];
  const u64 source = u64(token) * u64(products_strides[0]) + begin, of_block = u64(block) * u64(offsets_strides[0]);
  const float step = float_of(u32(steps[block * u32(steps_strides[0]) + head]) << 16);
#define NIBBLE(i) (offsets[of_block + (i) / 2] >> 4 * ((i) & 1) & 15)
#define CHANNEL(i) plus(plus(times(low_half(u32(products[source + i])), scale[begin + i]), mean[begin + i]), \\
  times(float(int(NIBBLE(begin + i + ODD)) - 8), step))
  float a = CHANNEL(one), b = other < WIDTH ? CHANNEL(other) : 0.0f;
  if (turns) {
    const float c = times(cosines[token * PAIRS + pair], LENGTH), s = times(sines[token * PAIRS + pair], LENGTH);
    const float turned = minus(times(a, c), times(b, s));
    b = plus(times(a, s), times(b, c));
    a = turned;
  }
  restored[row + one] = stored(least(greatest(a, -MOST), MOST));
  if (other < WIDTH) restored[row + other] = stored(least(greatest(b, -MOST), MOST));
"""


class Form(NamedTuple):
    """What a kernel is made for: a stream's heads and their width and dtype, and how many `pairs` of a head turn, which
    neighbours where `interleaved`, to be `length` times as long. `odd`: whether its first channel is an odd one.
    """

    heads: int
    width: int
    dtype: str
    pairs: int
    interleaved: bool
    length: float
    odd: bool = False

    def functions(self) -> str:
        numbers = {
            "THREADS": THREADS, "HEADS": self.heads, "WIDTH": self.width, "HALF": -(-self.width // 2),
            "PAIRS": self.pairs, "INTERLEAVED": int(self.interleaved), "ODD": int(self.odd),
        }  # fmt: skip
        lines = [f"#define {name} {number}u" for name, number in numbers.items()]
        lines.append(f"#define LENGTH float_of({mx.array(self.length, mx.float32).view(mx.uint32).item()}u)")
        lines += [f"#define MOST {MOST[self.dtype]}", LOADS[self.dtype], STORES[self.dtype]]
        return "\n" + "\n".join(lines) + "\n"


def centrer(form: Form) -> Source:
    """Inputs: the bits of rows (heads, tokens, width); of each channel mean and scale, float32;
    cosines and sines float32 (tokens, pairs). Output: (row - mean) * scale, uint16 (heads, tokens, width).
    """
    inputs = ("rows", "mean", "scale", "cosines", "sines")
    return Source("transform_centre", inputs, ("centred",), form.functions(), CENTRE)


def restorer(form: Form) -> Source:
    """Inputs: products uint16 (tokens, heads * width), of each channel mean and scale, float32; of each token its block,
    uint32 (tokens,); of each block offsets, uint8, two to a byte, and steps of them, bf16 as uint16 (blocks, heads); cosines and
    sines float32 (tokens, pairs). Output: the bits of rows (heads, tokens, width).
    """
    inputs = ("products", "mean", "scale", "blocks", "offsets", "steps", "cosines", "sines")
    return Source("transform_restore", inputs, ("restored",), form.functions(), RESTORE)


@lru_cache(maxsize=256)
def _kernel(dialect: Dialect, make: object, form: Form) -> Kernel:
    return build(dialect, make(form))  # type: ignore[operator]


def centre(dialect: Dialect, form: Form, inputs: list[mx.array]) -> mx.array:
    """Inputs and output of `centrer`, one token at least."""
    return _launched(_kernel(dialect, centrer, form), form, inputs, inputs[0].shape[1], mx.uint16)


def restore(dialect: Dialect, form: Form, inputs: list[mx.array]) -> mx.array:
    """Inputs and output of `restorer`, one token at least."""
    dtype = mx.uint32 if form.dtype == "float32" else mx.uint16
    return _launched(_kernel(dialect, restorer, form), form, inputs, inputs[0].shape[0], dtype)


def _launched(kernel: Kernel, form: Form, inputs: list[mx.array], tokens: int, dtype: mx.Dtype) -> mx.array:
    threads = form.heads * tokens * -(-form.width // 2)
    (made,) = kernel(
        inputs=inputs,
        output_shapes=[(form.heads, tokens, form.width)],
        output_dtypes=[dtype],
        grid=(-(-threads // THREADS) * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
    )
    return made
