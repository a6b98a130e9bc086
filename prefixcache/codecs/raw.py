"""The codec that changes nothing: rows are kept as they are, bit for bit.

It is a choice of its own, and what the other codecs fall back to for streams that they can't or shouldn't take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx

from prefixcache.codecs.base import Decoding, EncodedBlocks, Encoding, Plane, RowCodec, Stream, heads_first
from prefixcache.codecs.interchange import Array, bring_in, check_rows, copy_out, element
from prefixcache.codecs.levels import LazyLevels, Levels
from prefixcache.codecs.threads import SHARE, WORTH_A_THREAD, share_out


@dataclass(frozen=True)
class RawRows:
    """Rows of `width` values (0 allowed) of any dtype that safetensors names, in one plane "rows" of that dtype.

    ValueError at construction for another dtype.
    """

    width: int
    dtype: str

    levelled: ClassVar[bool] = False
    centred: ClassVar[bool] = False

    def __post_init__(self) -> None:
        element(self.dtype)

    @property
    def planes(self) -> tuple[Plane, ...]:
        return (Plane("rows", element(self.dtype).safetensors, (self.width,)),)

    def encode(self, rows: mx.array, levels: Levels | None = None) -> list[Array]:
        """Encode (tokens, heads, width) -> [the same bits, (tokens, heads, width), bf16 as uint16]."""
        check_rows(rows, self.width, self.dtype)
        return [copy_out(rows)]

    def encode_all(self, batch: Sequence[Encoding]) -> None:
        for rows, (copied,), _ in batch:
            copied[...] = rows

    def encode_blocks(
        self, rows: mx.array, blocks: int, levels: Sequence[Levels], measured_from: Sequence[int], decoded: bool
    ) -> EncodedBlocks:
        apart = rows.reshape(len(rows), blocks, rows.shape[1] // blocks, self.width)
        return EncodedBlocks([copy_out(mx.transpose(apart, (1, 2, 0, 3)))], None, rows if decoded else None)

    def decode(self, planes: Sequence[Array], levels: Levels | None = None) -> mx.array:
        """Decode [(tokens, heads, width)] -> (heads, tokens, width) of `dtype`."""
        return bring_in(planes[0].swapaxes(0, 1), self.dtype)

    def decode_blocks(self, planes: Sequence[mx.array], levels: LazyLevels | None) -> mx.array:
        return heads_first(mx.swapaxes(planes[0].view(element(self.dtype).mlx), 1, 2))

    def decode_all(self, batch: Sequence[Decoding]) -> None:
        """Copy, shared out among threads: while one waits for memory, the others copy."""

        def copy(first: int, last: int) -> None:
            for (source,), rows, _ in batch[first:last]:
                rows[...] = source.swapaxes(0, 1)

        nbytes = sum(rows.nbytes for _, rows, _ in batch)
        share_out(len(batch), -(-len(batch) * SHARE // max(nbytes, 1)), nbytes // WORTH_A_THREAD, copy)


@dataclass(frozen=True)
class Raw:
    """Keeps every stream bit-exactly."""

    sink_tokens: ClassVar[int] = 0

    def spec(self) -> dict[str, Any]:
        return {"name": "raw", "version": 1}

    def row_codec(self, stream: Stream) -> RowCodec:
        return RawRows(stream.width, stream.dtype)

    def __str__(self) -> str:
        return "raw"
