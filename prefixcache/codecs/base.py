"""What a codec is: how rows of attention state become bytes and come back.

A `Codec` is what a user chooses (`TurboQuant(key_bits=4)`); for each stream of rows of a model it names a `RowCodec`,
which turns rows into *planes* (fixed-size arrays per row) and back. Rows are coded by themselves, so planes can be cut
and joined by row. Called by `prefixcache.layers` only; nothing here knows blocks, images or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import mlx.core as mx

from prefixcache.codecs.interchange import Array
from prefixcache.codecs.levels import LazyLevels, Levels


class Plane(NamedTuple):
    """One fixed-size array per row: its name, its safetensors dtype ("F16", "BF16", "U32" ...), its shape per row."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Stream(NamedTuple):
    """One run of rows of a model's cache: layer `layer` of `layers`, its keys or values, `heads` rows of `width` each; or the
    rows of a layer's recurrent state, which belong to no token.

    `other_width` is the width of the layer's other part (values for keys, keys for values); `dtype` is MLX's name of
    the element type, such as "bfloat16".
    """

    layer: int
    layers: int
    part: Literal["keys", "values", "state"]
    heads: int
    width: int
    other_width: int
    dtype: str


class Encoding(NamedTuple):
    """Rows (tokens, heads, width) that go into planes (tokens, heads, ...). All may be strided."""

    rows: Array
    planes: tuple[Array, ...]
    levels: Levels | None = None


class Decoding(NamedTuple):
    """Planes (tokens, heads, ...) that go into rows (heads, tokens, width). All may be strided."""

    planes: tuple[Array, ...]
    rows: Array
    levels: Levels | None = None


class EncodedBlocks(NamedTuple):
    """Blocks of a prompt, encoded, lazily on a GPU: planes (blocks, tokens, heads, ...); levels (blocks, heads, width) where
    those were measured; what `decode` gives, (heads, blocks * tokens, width), where it was asked for.
    """

    planes: Sequence[mx.array | Array]
    levels: LazyLevels | None
    decoded: mx.array | None


@runtime_checkable
class RowCodec(Protocol):
    """How one row of `width` values of `dtype` is kept. Immutable and hashable: equal row codecs share one tensor.

    Rows and planes have the shape (tokens, heads, ...) on their way in and in images; what comes out for a live cache
    is (heads, tokens, width). bf16 is uint16 in NumPy.
    """

    @property
    def width(self) -> int: ...

    @property
    def dtype(self) -> str: ...

    @property
    def planes(self) -> tuple[Plane, ...]: ...

    @property
    def levelled(self) -> bool:
        """Tell whether rows are encoded with levels."""
        ...

    @property
    def centred(self) -> bool:
        """Tell whether levels have a mean."""
        ...

    def encode(self, rows: mx.array, levels: Levels | None = None) -> list[Array]:
        """Encode on MLX's default device: (tokens, heads, width) of `dtype` -> each plane, read-only, the caller's."""
        ...

    def encode_all(self, batch: Sequence[Encoding]) -> None:
        """Encode each of the batch on the CPU."""
        ...

    def encode_blocks(
        self, rows: mx.array, blocks: int, levels: Sequence[Levels], measured_from: Sequence[int], decoded: bool
    ) -> EncodedBlocks:
        """Encode blocks of equally many tokens, rows (heads, blocks * tokens, width), as `encode` does, and with `decoded`
        decode their codes on the device.

        `levels` are those of each block; or else they are measured, of each block from its row `measured_from` on. Both are
        empty for a codec that has none.
        """
        ...

    def decode(self, planes: Sequence[Array], levels: Levels | None = None) -> mx.array:
        """Decode on MLX's default device: planes (tokens, heads, ...) -> (heads, tokens, width)."""
        ...

    def decode_blocks(self, planes: Sequence[mx.array], levels: LazyLevels | None) -> mx.array:
        """Decode blocks of equally many tokens on MLX's default device, lazily: planes (blocks, tokens, heads, ...), levels
        (blocks, heads, width) -> (heads, blocks * tokens, width). Planes are unsigned integers.
        """
        ...

    def decode_all(self, batch: Sequence[Decoding]) -> None:
        """Decode each of the batch on the CPU."""
        ...


@runtime_checkable
class Codec(Protocol):
    """What a user chooses. `spec()` is its identity: all that changes a code is in it, as JSON types."""

    @property
    def sink_tokens(self) -> int:
        """Return how many of a prompt's first tokens stay as they are beside their codes, in windows while they hold them."""
        ...

    def spec(self) -> dict[str, Any]: ...

    def row_codec(self, stream: Stream) -> RowCodec:
        """Return the codec of this stream's rows; `Raw`'s where this codec can't or shouldn't take them."""
        ...


def side_by_side(rows: mx.array, blocks: int) -> mx.array:
    """Lay (heads, blocks * tokens, width) -> (tokens, heads * blocks, width): to a kernel other blocks are more heads."""
    heads, count, width = rows.shape
    return mx.swapaxes(rows.reshape(heads * blocks, count // blocks, width), 0, 1)


def heads_first(rows: mx.array) -> mx.array:
    """Lay (blocks, heads, tokens, width) -> (heads, blocks * tokens, width)."""
    blocks, heads, tokens, width = rows.shape
    return mx.swapaxes(rows, 0, 1).reshape(heads, blocks * tokens, width)
