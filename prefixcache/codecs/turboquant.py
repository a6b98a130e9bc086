"""The codec that most users want: rows rotated, quantised to 1 to 4 or 8 bits a value, with one 16-bit scale a row.

Here is what a user chooses, and which streams take it; the format is in `turboquant_format`, the arithmetic in the two
back ends, which agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import mlx.core as mx

from . import turboquant_mlx, turboquant_numpy
from .base import Plane, RowCodec, Stream
from .codebook import CODEBOOKS
from .interchange import FLOATS, Array, borrow, bring_in, check_capacity, check_rows, element
from .packing import words_of
from .raw import RawRows
from .turboquant_format import Form, form_of

# Below this the scale costs more than half a bit a value, and rotated values are no longer close to normal.
LEAST_WIDTH = 32
# K or V of one head, wider than this and wider than the other: a compressed latent (MLA), not a head's rows.
LATENT_WIDTH = 256
SEEDS = 1 << 63


@dataclass(frozen=True)
class TurboQuantRows:
    """Rows of `width` values (1 or more) of float16, bfloat16 or float32, at `bits` a value and 16 bits a row.

    Planes: "codes" U32 (ceil(width * bits / 32),), a little-endian bit stream; "scale" BF16 (), uint16 in NumPy. Rows
    are coded by themselves, so planes may be cut, joined and permuted by row. A decoded row has its length back, to
    bf16's precision, its values cut to the dtype's finite range. A row that holds NaN or infinity comes back as NaN
    throughout: what was lost stays visible. A row of an rms below about 1e-37 comes back as zeros.
    """

    width: int
    dtype: str
    bits: int
    seed: int = 0

    exact: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_bits("bits", self.bits)
        if self.width < 1:
            raise ValueError(f"width={self.width}: rows of no values can't be rotated; use RawRows")
        if self.dtype not in FLOATS:
            raise ValueError(f"dtype={self.dtype!r}: can't be rotated; use RawRows, or one of {', '.join(FLOATS)}")

    @property
    def planes(self) -> tuple[Plane, ...]:
        return (Plane("codes", "U32", (words_of(self.width, self.bits),)), Plane("scale", "BF16", ()))

    @property
    def form(self) -> Form:
        return form_of(self.width, self.bits, self.seed)

    def encode(self, rows: mx.array) -> list[Array]:
        """(tokens, heads, width) -> [codes uint32 (tokens, heads, words), scale uint16 (tokens, heads)]."""
        check_rows(rows, self.width, self.dtype)
        if rows.size and not _on_cpu():
            return list(turboquant_mlx.encode(rows, self.form))
        return list(turboquant_numpy.encode(borrow(rows), self.dtype, self.form))

    def decode(self, planes: Sequence[Array], capacity: int) -> mx.array:
        """[codes (heads, tokens, words), scale (heads, tokens)] -> (heads, capacity, width) of `dtype`.

        Rows from `tokens` on are zero.
        """
        codes, scales = planes
        heads, tokens, _ = codes.shape
        check_capacity(tokens, capacity)
        if heads * tokens == 0:
            return mx.zeros((heads, capacity, self.width), element(self.dtype).mlx)
        if not _on_cpu():
            return turboquant_mlx.decode(codes, scales, capacity, self.dtype, self.form)
        return bring_in(turboquant_numpy.decode(codes, scales, capacity, self.dtype, self.form), self.dtype)


def _on_cpu() -> bool:
    return bool(mx.default_device() == mx.Device(mx.cpu))


@dataclass(frozen=True)
class TurboQuant:
    """TurboQuant (arXiv 2504.19874, the variant for mean squared error): `key_bits` and `value_bits` a value.

    Bits are 1, 2, 3, 4 or 8. `seed` (0 to 2**63 - 1) chooses the rotation's signs. Kept raw: rows that are no floats,
    rows narrower than 32, and, unless `raw_latents` is False, the latents of MLA models (one head, keys and values of
    different width, the wider above 256), because rotated and quantised latents are known to give garbage.
    ValueError for other bits or seeds.
    """

    key_bits: int = 4
    value_bits: int = 4
    seed: int = 0
    raw_latents: bool = True

    def __post_init__(self) -> None:
        _check_bits("key_bits", self.key_bits)
        _check_bits("value_bits", self.value_bits)
        if type(self.seed) is not int or not 0 <= self.seed < SEEDS:
            raise ValueError(f"seed={self.seed!r}: not a seed; choose a whole number from 0 to 2**63 - 1")
        if type(self.raw_latents) is not bool:
            raise ValueError(f"raw_latents={self.raw_latents!r}: not a choice; write True or False")

    def spec(self) -> dict[str, Any]:
        return {"name": "turboquant", "version": 1, **asdict(self)}

    def row_codec(self, stream: Stream) -> RowCodec:
        if stream.dtype not in FLOATS or stream.width < LEAST_WIDTH or (self.raw_latents and _is_latent(stream)):
            return RawRows(stream.width, stream.dtype)
        bits = self.key_bits if stream.part == "keys" else self.value_bits
        return TurboQuantRows(stream.width, stream.dtype, bits, self.seed)

    def __str__(self) -> str:
        name = f"turboquant k{self.key_bits} v{self.value_bits}"
        if self.seed:
            name += f" seed {self.seed}"
        return name if self.raw_latents else name + " with latents"


def _check_bits(name: str, bits: object) -> None:
    if type(bits) is not int or bits not in CODEBOOKS:
        raise ValueError(f"{name}={bits!r}: not a bit depth of TurboQuant; choose 1, 2, 3, 4 or 8")


def _is_latent(stream: Stream) -> bool:
    widths = (stream.width, stream.other_width)
    return stream.heads == 1 and widths[0] != widths[1] and max(widths) > LATENT_WIDTH
