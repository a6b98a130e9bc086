"""The codec that is MLX's own group quantisation: `mx.quantize` with a scale and a bias for each group of a row.

It is here for comparison, and for those who trust it already. The codes are those of the MLX in use; this package adds
no arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from prefixcache.codecs.base import Blocks, Decoding, Encoding, Plane, RowCodec, Stream, encode_blocks
from prefixcache.codecs.interchange import (
    FLOATS,
    Array,
    borrow,
    bring_in,
    check_capacity,
    check_rows,
    copy_out,
    element,
)
from prefixcache.codecs.raw import RawRows
from prefixcache.codecs.turboquant.levelling import Levels

BIT_DEPTHS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (128, 64, 32)


@dataclass(frozen=True)
class AffineRows:
    """Rows of `width` values, a multiple of `group_size`, as `mx.quantize` codes them.

    Planes: "codes" U32 (width * bits / 32,); "scales" and "biases" (width / group_size,) of the rows' dtype.
    """

    width: int
    dtype: str
    bits: int
    group_size: int

    levelled: ClassVar[bool] = False
    centred: ClassVar[bool] = False

    @property
    def planes(self) -> tuple[Plane, ...]:
        name = element(self.dtype).safetensors
        groups = self.width // self.group_size
        return (
            Plane("codes", "U32", (self.width * self.bits // 32,)),
            Plane("scales", name, (groups,)),
            Plane("biases", name, (groups,)),
        )

    def encode(self, rows: mx.array, levels: Levels | None = None) -> list[Array]:
        """(tokens, heads, width) -> [codes uint32, scales, biases], each (tokens, heads, ...)."""
        check_rows(rows, self.width, self.dtype)
        if rows.size == 0:
            tokens, heads, _ = rows.shape
            kinds = (np.dtype(np.uint32), element(self.dtype).numpy, element(self.dtype).numpy)
            return [
                np.zeros((tokens, heads, *plane.shape), kind) for plane, kind in zip(self.planes, kinds, strict=True)
            ]
        coded = mx.quantize(rows, group_size=self.group_size, bits=self.bits)
        mx.eval(coded)
        return [copy_out(plane) for plane in coded]

    def encode_all(self, batch: Sequence[Encoding]) -> None:
        """`encode` of each."""
        for rows, planes, _ in batch:
            for plane, coded in zip(planes, self.encode(bring_in(rows, self.dtype)), strict=True):
                plane[...] = coded

    def encode_blocks(
        self, rows: mx.array, blocks: int, levels: Sequence[Levels], measured_from: Sequence[int], decoded: bool
    ) -> Blocks:
        return encode_blocks(self, rows, blocks, None, decoded)

    def decode(self, planes: Sequence[Array], capacity: int, levels: Levels | None = None) -> mx.array:
        """[codes, scales, biases], each (tokens, heads, ...) -> (heads, capacity, width), zero from row `tokens` on."""
        tokens, heads, _ = planes[0].shape
        check_capacity(tokens, capacity)
        if heads * capacity == 0:
            return mx.zeros((heads, capacity, self.width), element(self.dtype).mlx)
        # A group of scale 0 and bias 0 decodes to zeros: padding the codes spares a copy of the rows.
        codes, scales, biases = (_grown(plane, capacity) for plane in planes)
        return mx.dequantize(
            bring_in(codes, "uint32"),
            scales=bring_in(scales, self.dtype),
            biases=bring_in(biases, self.dtype),
            group_size=self.group_size,
            bits=self.bits,
        )

    def decode_all(self, batch: Sequence[Decoding]) -> None:
        """`decode` of each."""
        for planes, rows, _ in batch:
            rows[...] = borrow(self.decode(planes, len(planes[0])))


def _grown(plane: Array, capacity: int) -> Array:
    """(tokens, heads, ...) -> (heads, capacity, ...)."""
    grown = np.zeros((plane.shape[1], capacity, *plane.shape[2:]), plane.dtype)
    grown[:, : plane.shape[0]] = plane.swapaxes(0, 1)
    return grown


@dataclass(frozen=True)
class Affine:
    """`mx.quantize` with `bits` a value and, for each group of `group_size` values, a scale and a bias.

    A width that `group_size` does not divide takes the largest smaller group that does; where none does, or the rows
    are no floats, they are kept raw. ValueError for bits that are not 2, 3, 4, 5, 6 or 8, or a group size that is not
    32, 64 or 128.
    """

    bits: int = 4
    group_size: int = 64

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in BIT_DEPTHS:
            raise ValueError(f"bits={self.bits!r}: not a bit depth of mx.quantize; choose 2, 3, 4, 5, 6 or 8")
        if type(self.group_size) is not int or self.group_size not in GROUP_SIZES:
            raise ValueError(f"group_size={self.group_size!r}: not a group size of mx.quantize; choose 32, 64 or 128")

    sink_tokens: ClassVar[int] = 0

    def spec(self) -> dict[str, Any]:
        return {"name": "affine", "version": 1, **asdict(self)}

    def row_codec(self, stream: Stream) -> RowCodec:
        if stream.dtype in FLOATS and stream.width > 0:
            for group_size in GROUP_SIZES:
                if group_size <= self.group_size and stream.width % group_size == 0:
                    return AffineRows(stream.width, stream.dtype, self.bits, group_size)
        return RawRows(stream.width, stream.dtype)

    def __str__(self) -> str:
        return f"affine {self.bits} bits, groups of {self.group_size}"
