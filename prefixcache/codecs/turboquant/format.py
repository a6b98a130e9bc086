"""The format of TurboQuant's rows: every constant that the back ends share, and the order of their arithmetic.

All arithmetic is float32 without fused multiply-adds; each operation named below rounds once. What is not named is
exact (integers, powers of two, comparisons), so a back end may do it in any order.

Encoding a row x of d values:

0. x = (x - mean) * weight, channel by channel, where the row is levelled (`levels.Levels`); else mean is 0, weight 1.
1. top = the largest exponent field of |x|'s float32 bits. top = 255 (NaN or inf): the row is kept as *not a number*,
   scale NaN, codes 0. top = 0 (zeros, or float32 subnormals only): scale 0, codes 0.
2. Values whose exponent field is below max(1, top - 100) count as zero. Multiply by 2**(128 - top): the largest lies in
   [2, 4), so neither a square overflows nor a row of 1e-35 vanishes.
3. ss = the sum of squares, folded: the upper half is added onto the lower half until one value is left; of an odd
   number, the last value moves down behind the lower half.
4. y = the rotation of x (`Rotation`), of two rounds at 1 and 2 bits, where one leaves a row with few spikes too
   regular, and for rows wider than 256, which are two populations (a latent, its positions); else of one.
5. a = |y| * (`per_length` / sqrt(ss) + `per_peak` / max |y|): two quotients, their sum, one product a value. a is in
   steps of the codebook's grid.
6. Each a becomes a code (`Codebook`) by y's sign (y < 0), which stands for an integer c. cc = the sum of c squared,
   exact, then float32.
7. scale = sqrt(ss / cc), to bf16 (round to nearest even), times 2**(top - 128 + codebook.shift) on its exponent field:
   beyond bf16's range it becomes bf16's largest number; below its normal numbers the scale and all codes are 0.
   This scale makes the decoded row as long as the row was (as levelled).

Decoding: y = T D_2 T c for two rounds, T c for one (exact up to 2**24, for widths whose T is made of integers), then
value = (y * spread) * scale + mean, rounded three times, where spread = D_1 * `decode_gain` * divisor, rounded once. That is
cut to the dtype's finite range, then rounded to nearest even. Without levels divisor is 1 and mean +0. So a row of scale 0
decodes to the mean, or +0, and a row of scale NaN to NaN.

Source: TurboQuant, arXiv 2504.19874, the variant for mean squared error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from prefixcache.codecs.interchange import Array
from prefixcache.codecs.levels import Levels
from prefixcache.codecs.packing import words_of
from prefixcache.codecs.turboquant.codebook import CODEBOOKS, Codebook
from prefixcache.codecs.turboquant.rotation import Rotation

NAN_SCALE = 0x7FC0
LARGEST_SCALE = 0x7F7F
LARGEST = {"float16": 65504.0, "bfloat16": float.fromhex("0x1.fep127"), "float32": float.fromhex("0x1.fffffep127")}


@dataclass(frozen=True, eq=False)
class Form:
    """The constants of rows of one width, bit depth and seed. Built once each by `form_of`; arrays are read-only."""

    width: int
    codebook: Codebook
    rotation: Rotation
    per_length: np.float32
    """by_rms * sqrt(d) * grid / gain**rounds."""
    per_peak: np.float32
    """by_peak * grid."""
    decode_gain: np.float32
    """1 / (gain**rounds * 2**shift)."""
    centroids: Array
    """int8 (2**bits,): what each code stands for."""

    def spread(self, levels: Levels | None) -> Array:
        """Return float32 (heads, width), or (1, width) for rows that aren't levelled: what the decoder multiplies y by."""
        gain = self.rotation.signs[0] * self.decode_gain
        return gain[None] if levels is None else gain * levels.divisor

    @property
    def longest(self) -> float:
        """Return the greatest length of a row of integers c."""
        return math.sqrt(self.width) * self.codebook.magnitudes[-1]


@lru_cache(maxsize=64)
def form_of(width: int, bits: int, seed: int) -> Form:
    codebook = CODEBOOKS[bits]
    rotation = Rotation(width, 2 if bits <= 2 or width > 256 else 1, seed)
    gain = rotation.gain**rotation.rounds
    centroids = codebook.centroids()
    centroids.flags.writeable = False
    return Form(
        width=width,
        codebook=codebook,
        rotation=rotation,
        per_length=np.float32(codebook.by_rms * math.sqrt(width) * codebook.grid / gain),
        per_peak=np.float32(codebook.by_peak * codebook.grid),
        decode_gain=np.float32(1 / (gain * 2.0**codebook.shift)),
        centroids=centroids,
    )


class CodedRows(NamedTuple):
    """Coded keys and values as a live cache holds them, which attention on codes reads: the rows of B sequences of one layer,
    TurboQuant's codes of the same kind throughout.

    `codes` uint32 (B, heads, T, key words + value words): the words of a row's key, then those of its value; `scales`
    uint16 (B, heads, T, 2): the key's scale, the value's. Both may be views of longer buffers: any strides but the last,
    which is 1.

    `key_levels`, `value_levels` float32 (2, B or 1, heads, width): the mean and the spread that the decoder applies
    (`Form.spread`), contiguous; None where rows aren't levelled. `first`, `last` int32 (B,): of sequence b the rows
    `first[b]` to `last[b]` (not included) count, others are never attended to; None: from 0, to T.
    """

    codes: mx.array
    scales: mx.array
    keys: Form
    values: Form
    key_levels: mx.array | None = None
    value_levels: mx.array | None = None
    first: mx.array | None = None
    last: mx.array | None = None

    @property
    def key_words(self) -> int:
        """Return where a row's value begins in `codes`."""
        return words_of(self.keys.width, self.keys.codebook.bits)


class AttentionPart(NamedTuple):
    """What attention to some of the rows gives: the output (B, query heads, L, value width) of the call's dtype, and, float32
    (B, query heads, L), the natural logarithm of the sum of exponentials of the scaled scores, without attention sinks. A
    query that attends to none of the rows has 0 and -inf.
    """

    out: mx.array
    total: mx.array


class AttentionCall(NamedTuple):
    """What a model asks of one layer's rows: softmax attention of `queries` (B, query heads, L, key width) to T of them.

    `mask`: bool (True attends) or floats to add, broadcastable to (B, query heads, L, T). `causal`: query i attends to the
    first T - L + i + 1 rows, as well as the mask says. `logits` (query heads,): those of attention sinks, which count in the
    denominator of the output alone. `dtype` is the output's; None: float32.
    """

    queries: mx.array
    scale: float
    mask: mx.array | None = None
    causal: bool = False
    logits: mx.array | None = None
    dtype: mx.Dtype | None = None

    def mask_of(self, rows: int) -> mx.array | None:
        """Return the mask, broadcast to (B, query heads, L, rows)."""
        wanted = (*self.queries.shape[:3], rows)
        return self.mask if self.mask is None or self.mask.shape == wanted else mx.broadcast_to(self.mask, wanted)
