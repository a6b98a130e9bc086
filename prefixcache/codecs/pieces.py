"""From pieces of coded rows to one buffer of a live cache, whichever codec and device: used by `prefixcache.layers`.

A stream's rows come back from many images, and not all need be coded alike: the first tokens may be raw, a prompt's
first blocks may be older than the levels of its later ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from prefixcache.codecs.base import Decoding, RowCodec
from prefixcache.codecs.interchange import Array, bring_in, bring_in_stacked, element, on_cpu
from prefixcache.codecs.levels import LazyLevels, Levels, PackedLevels

WORTH_A_LAUNCH = 8 << 20  # bytes of rows


class Piece(NamedTuple):
    """Coded rows, and the buffer's row that the first one goes to.

    `planes`: for each plane of `codec` (tokens, heads, *plane.shape); they may be views of an image, and `levels`, which the
    rows were encoded with, too. `rows`, in place of planes: (heads, tokens, width), decoded on a GPU already.
    """

    codec: RowCodec
    planes: tuple[Array, ...]
    at: int
    levels: PackedLevels | None = None
    rows: mx.array | None = None

    @property
    def tokens(self) -> int:
        return len(self.planes[0]) if self.rows is None else self.rows.shape[1]

    @property
    def heads(self) -> int:
        return int(self.planes[0].shape[1]) if self.rows is None else self.rows.shape[0]

    @property
    def end(self) -> int:
        return self.at + self.tokens

    def since(self, row: int) -> Piece:
        """Return the same without rows of the buffer before `row`."""
        skipped = min(max(row - self.at, 0), self.tokens)
        if not skipped:
            return self
        rows = self.rows[:, skipped:] if self.rows is not None else None
        return self._replace(planes=tuple(plane[skipped:] for plane in self.planes), at=self.at + skipped, rows=rows)

    def decoding(self, rows: Array) -> Decoding:
        """Return the work that brings the piece into `rows` (heads, tokens, width), on the CPU."""
        return Decoding(self.planes, rows, Levels.unpacked(self.levels) if self.levels is not None else None)

    def on_gpu(self) -> mx.array:
        """Return the rows (heads, tokens, width), decoded on a GPU, lazily."""
        if self.rows is not None:
            return self.rows
        levels = LazyLevels.brought_in([self.levels]) if self.levels is not None else None
        return self.codec.decode_blocks([bring_in_stacked([plane]) for plane in self.planes], levels)


def decode(pieces: Sequence[Piece], heads: int, capacity: int, width: int, dtype: str) -> mx.array:
    """Decode pieces of distinct rows, in any order -> (heads, capacity, width) of `dtype`, zero where no piece is.

    ValueError for pieces that overlap, don't fit, or are of other rows.
    """
    pieces = sorted((piece for piece in pieces if piece.tokens), key=lambda piece: piece.at)
    end = 0
    for piece in pieces:
        codec, heads_there = piece.codec, piece.heads
        if piece.at < end or piece.end > capacity:
            raise ValueError(f"rows {piece.at} to {piece.end}: {end} of a capacity of {capacity} are taken; no room")
        if (heads_there, codec.width, codec.dtype) != (heads, width, dtype):
            raise ValueError(
                f"a piece of {heads_there} heads of {codec.width} {codec.dtype} in a buffer of {heads} of {width} {dtype}"
            )
        end = piece.end
    if heads * capacity * width == 0:
        return mx.zeros((heads, capacity, width), element(dtype).mlx)
    launched = not on_cpu() or any(piece.rows is not None for piece in pieces)
    make = _launched if launched else _on_the_cpu
    return make(pieces, heads, capacity, width, dtype)


def _on_the_cpu(pieces: list[Piece], heads: int, capacity: int, width: int, dtype: str) -> mx.array:
    rows = np.empty((heads, capacity, width), element(dtype).numpy)  # not MLX's memory: decision 0021
    end = 0
    batches: dict[RowCodec, list[Decoding]] = {}
    for piece in pieces:
        rows[:, end : piece.at] = 0
        batches.setdefault(piece.codec, []).append(piece.decoding(rows[:, piece.at : piece.end]))
        end = piece.end
    rows[:, end:] = 0
    for codec, batch in batches.items():
        codec.decode_all(batch)
    # The copy into MLX's own memory costs what touching that memory costs: writing there directly was no quicker.
    return bring_in(rows, dtype)


def _launched(pieces: list[Piece], heads: int, capacity: int, width: int, dtype: str) -> mx.array:
    parts: list[mx.array] = []
    end = 0
    for piece in pieces:
        if piece.at > end:
            parts.append(mx.zeros((heads, piece.at - end, width), element(dtype).mlx))
        parts.append(piece.on_gpu())
        end = piece.end
    if end < capacity:
        parts.append(mx.zeros((heads, capacity - end, width), element(dtype).mlx))
    buffer = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)
    # Begun at once, where it is worth a launch: the GPU works while the next stream's codes are gathered, and MLX can use the
    # memory of these again.
    if buffer.nbytes >= WORTH_A_LAUNCH:
        mx.async_eval(buffer)
    return buffer
