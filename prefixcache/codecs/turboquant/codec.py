"""TurboQuant: rows are levelled, rotated and quantised to 1 to 4 or 8 bits a value, with a 16-bit scale a row.

This module has the user's choices and decides which streams are coded; the format is in `format`, the arithmetic in the
back ends, which agree bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import mlx.core as mx
import numpy as np

from prefixcache.codecs.base import (
    Decoding,
    EncodedBlocks,
    Encoding,
    Plane,
    RowCodec,
    Stream,
    heads_first,
    side_by_side,
)
from prefixcache.codecs.interchange import FLOATS, Array, borrow, bring_in, check_rows, element
from prefixcache.codecs.levels import LazyLevels, Levels
from prefixcache.codecs.packing import words_of
from prefixcache.codecs.raw import RawRows
from prefixcache.codecs.turboquant import backends, gpu_rows
from prefixcache.codecs.turboquant.codebook import CODEBOOKS
from prefixcache.codecs.turboquant.format import Form, form_of
from prefixcache.codecs.turboquant.measure_levels import measure_levels_lazily

# Below this the scale costs more than half a bit a value, and rotated values are no longer close to normal.
LEAST_WIDTH = 32
# K or V of one head, as wide as this and wider than the other: a compressed latent (MLA), not a head's rows.
LATENT_WIDTH = 256
SEEDS = 1 << 63
STATE_BITS = 8  # decision 0053
MOST_SINKS = 256  # they stand in the first block


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
    levelled: bool = False
    centred: bool = False

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

    def encode(self, rows: mx.array, levels: Levels | None = None) -> list[Array]:
        """Encode (tokens, heads, width) -> [codes uint32 (tokens, heads, words), scale uint16 (tokens, heads)]."""
        check_rows(rows, self.width, self.dtype)
        if rows.size and backends.on_gpu(self.form):
            return list(gpu_rows.encode(rows, self.form, levels))
        tokens, heads, _ = rows.shape
        codes = np.empty((tokens, heads, words_of(self.width, self.bits)), np.uint32)
        scales = np.empty((tokens, heads), np.uint16)
        self.encode_all([Encoding(borrow(rows), (codes, scales), levels)])
        return [codes, scales]

    def encode_all(self, batch: Sequence[Encoding]) -> None:
        """Encode rows, bf16 as uint16 -> into codes uint32 (tokens, heads, words), scale uint16 (tokens, heads)."""
        backends.encode_all(batch, self.dtype, self.form)

    def encode_blocks(
        self, rows: mx.array, blocks: int, levels: Sequence[Levels], measured_from: Sequence[int], decoded: bool
    ) -> EncodedBlocks:
        sides = side_by_side(rows, blocks)
        check_rows(sides, self.width, self.dtype)
        by_kernel = rows.size > 0 and backends.on_gpu(self.form)
        measured = None
        if measured_from and by_kernel:
            measured = gpu_rows.measure_levels(sides, self.centred, measured_from)
        elif measured_from:
            measured = measure_levels_lazily(sides.astype(mx.float32), self.centred, measured_from)
        planes: Sequence[mx.array | Array]
        if by_kernel:
            planes, back = self._encode_in_kernels(sides, blocks, levels, measured, decoded)
        else:
            known = Levels.interleaved(levels) if levels else None
            if measured is not None:
                known = Levels.unpacked(measured.packed(self.centred))
            of_sides = self.encode(sides, known)
            planes, back = _planes_by_block(of_sides, blocks), self.decode(of_sides, known) if decoded else None
        by_block = LazyLevels(*(_by_block(part, blocks) for part in measured)) if measured is not None else None
        return EncodedBlocks(planes, by_block, back.reshape(rows.shape) if back is not None else None)

    def _encode_in_kernels(
        self, sides: mx.array, blocks: int, levels: Sequence[Levels], measured: LazyLevels | None, decoded: bool
    ) -> tuple[list[mx.array], mx.array | None]:
        """Return planes and decoded rows of blocks side by side. Nothing waits for the GPU."""
        to_encode: mx.array | Levels | None = Levels.interleaved(levels) if levels else None
        to_decode = to_encode
        if measured is not None:
            to_encode, to_decode = gpu_rows.for_both(measured, self.form)
        planes = gpu_rows.encode_arrays(sides, self.form, to_encode)
        by_block = [mx.contiguous(plane) for plane in _planes_by_block(planes, blocks)]
        mx.async_eval(by_block, *(measured or ()))
        back = None
        if decoded:
            back = gpu_rows.decode_arrays(*planes, self.dtype, self.form, to_decode)
            mx.async_eval(back)
        return by_block, back

    def decode(self, planes: Sequence[Array], levels: Levels | None = None) -> mx.array:
        """Decode [codes (tokens, heads, words), scale (tokens, heads)] -> (heads, tokens, width)."""
        codes, scales = planes
        tokens, heads = scales.shape
        if heads * tokens == 0:
            return mx.zeros((heads, tokens, self.width), element(self.dtype).mlx)
        if backends.on_gpu(self.form):
            return gpu_rows.decode(codes, scales, self.dtype, self.form, levels)
        rows = np.empty((heads, tokens, self.width), element(self.dtype).numpy)
        self.decode_all([Decoding((codes, scales), rows, levels)])
        return bring_in(rows, self.dtype)

    def decode_blocks(self, planes: Sequence[mx.array], levels: LazyLevels | None) -> mx.array:
        blocks, tokens, heads, words = planes[0].shape
        sides = blocks * heads  # to a kernel other blocks are more heads
        codes = mx.swapaxes(planes[0], 0, 1).reshape(tokens, sides, words)
        scales = mx.swapaxes(planes[1], 0, 1).reshape(tokens, sides)
        flat = LazyLevels(*(part.reshape(sides, self.width) for part in levels)) if levels is not None else None
        if backends.on_gpu(self.form):
            to_decode = gpu_rows.for_decoding_lazily(flat, self.form) if flat is not None else None
            rows = gpu_rows.decode_arrays(codes, scales, self.dtype, self.form, to_decode)
        else:
            unpacked = Levels.unpacked(flat.packed(self.centred)) if flat is not None else None
            rows = self.decode([borrow(codes), borrow(scales)], unpacked)
        return heads_first(rows.reshape(blocks, heads, tokens, self.width))

    def decode_all(self, batch: Sequence[Decoding]) -> None:
        """Decode codes uint32 (tokens, heads, words), scale uint16 (tokens, heads) -> into rows, bf16 as uint16."""
        backends.decode_all(batch, self.dtype, self.form)


def _planes_by_block(planes: Sequence[Any], blocks: int) -> list[Any]:
    """Turn planes (tokens, heads * blocks, ...), of MLX or NumPy -> (blocks, tokens, heads, ...)."""
    apart = [plane.reshape(len(plane), -1, blocks, *plane.shape[2:]) for plane in planes]
    return [plane.transpose(2, 0, 1, *range(3, plane.ndim)) for plane in apart]


def _by_block(levels: mx.array, blocks: int) -> mx.array:
    """Turn (heads * blocks, width) -> (blocks, heads, width)."""
    return mx.swapaxes(levels.reshape(-1, blocks, levels.shape[1]), 0, 1)


@dataclass(frozen=True)
class TurboQuant:
    """TurboQuant (arXiv 2504.19874, the variant for mean squared error): `key_bits` and `value_bits` a value.

    Bits are 1, 2, 3, 4 or 8. `levelling` (False: none, as in the paper) evens out each head's channels, and centres those of
    keys, by the rows of each block. The first and last `fp16_layers` layers stay exact. So do a prompt's first `sink_tokens`
    tokens (at most 256), because most heads attend to them whatever they contain. `layers` says otherwise
    for single layers: {7: 8, -1: (8, 4), 0: None} is 8 bits for layer 7, 8 and 4 for keys and values of the last, the
    first as it is; a number that a model has no layer for changes nothing there. `seed` (0 to 2**63 - 1) chooses the
    rotation's signs. Recurrent state (of gated delta nets, Mamba 2, KDA) has `state_bits`, unless its layer stays exact;
    None: all of it does.

    Kept raw as well: rows that are no floats, rows narrower than 32, and, unless `raw_latents` is False, the latents of
    MLA models (one head, keys and values of different width, the wider 256 or more), because rotated and quantised latents
    are known to give garbage. ValueError for a value that is none of these.
    """

    key_bits: int = 4
    value_bits: int = 4
    levelling: bool = True
    fp16_layers: int = 0
    sink_tokens: int = 4  # decision 0018
    layers: Mapping[int, int | tuple[int, int] | None] = field(default_factory=dict)
    seed: int = 0
    raw_latents: bool = True
    state_bits: int | None = STATE_BITS

    def __post_init__(self) -> None:
        _check_bits("key_bits", self.key_bits)
        _check_bits("value_bits", self.value_bits)
        if self.state_bits is not None:
            _check_bits("state_bits", self.state_bits)
        if type(self.fp16_layers) is not int or self.fp16_layers < 0:
            raise ValueError(
                f"fp16_layers={self.fp16_layers!r}: give the number of layers at each end to leave, 0 or more"
            )
        if type(self.sink_tokens) is not int or not 0 <= self.sink_tokens <= MOST_SINKS:
            raise ValueError(f"sink_tokens={self.sink_tokens!r}: give a number of tokens, 0 to {MOST_SINKS}")
        if type(self.seed) is not int or not 0 <= self.seed < SEEDS:
            raise ValueError(f"seed={self.seed!r}: not a seed; choose a whole number from 0 to 2**63 - 1")
        for name in ("levelling", "raw_latents"):
            if type(getattr(self, name)) is not bool:
                raise ValueError(f"{name}={getattr(self, name)!r}: not a choice; write True or False")
        overrides = dict[int, tuple[int, int] | None]()
        for layer, bits in map(_override, _items(self.layers)):
            if layer in overrides:
                raise ValueError(f"layers={self.layers!r}: layer {layer} stands there twice; give it once")
            overrides[layer] = bits
        object.__setattr__(self, "layers", {layer: overrides[layer] for layer in sorted(overrides)})

    def __hash__(self) -> int:
        return hash(json.dumps(self.spec()))

    def spec(self) -> dict[str, Any]:
        chosen = {field.name: getattr(self, field.name) for field in fields(self)}
        chosen["layers"] = {str(i): None if bits is None else list(_pair(bits)) for i, bits in self.layers.items()}
        if self.state_bits == STATE_BITS:
            del chosen["state_bits"]  # so that models without such state keep their names
        return {"name": "turboquant", "version": 2, **chosen}

    def row_codec(self, stream: Stream) -> RowCodec:
        bits = self._bits(stream)
        if bits is None or stream.dtype not in FLOATS or stream.width < LEAST_WIDTH:
            return RawRows(stream.width, stream.dtype)
        if self.raw_latents and is_latent(stream.heads, stream.width, stream.other_width):
            return RawRows(stream.width, stream.dtype)
        # Values are not centred: the first tokens' are almost zero and get much attention, so centring would add the mean's
        # error to them.
        centred = self.levelling and stream.part == "keys"
        return TurboQuantRows(stream.width, stream.dtype, bits, self.seed, self.levelling, centred)

    def _bits(self, stream: Stream) -> int | None:
        """Return the bits of a stream's values; None where they stay as they are."""
        keys_and_values: int | tuple[int, int] | None = (self.key_bits, self.value_bits)
        if min(stream.layer, stream.layers - 1 - stream.layer) < self.fp16_layers:
            keys_and_values = None
        for index in (stream.layer - stream.layers, stream.layer):
            keys_and_values = self.layers.get(index, keys_and_values)
        if keys_and_values is None:
            return None
        if stream.part == "state":
            return self.state_bits
        return _pair(keys_and_values)[stream.part == "values"]

    def __str__(self) -> str:
        parts = [f"turboquant k{self.key_bits} v{self.value_bits}"]
        parts += ["plain"] * (not self.levelling)
        parts += [f"fp16 layers {self.fp16_layers}"] * (self.fp16_layers > 0)
        parts += [f"sinks {self.sink_tokens}"] * (self.sink_tokens != 4)
        for layer, bits in self.layers.items():
            parts.append(f"layer {layer} raw" if bits is None else "layer {} k{} v{}".format(layer, *_pair(bits)))
        parts += [f"seed {self.seed}"] * (self.seed > 0)
        parts += ["with latents"] * (not self.raw_latents)
        if self.state_bits != STATE_BITS:
            parts.append("state raw" if self.state_bits is None else f"state {self.state_bits}")
        return " ".join(parts)


def _check_bits(name: str, bits: object) -> None:
    if type(bits) is not int or bits not in CODEBOOKS:
        raise ValueError(f"{name}={bits!r}: not a bit depth of TurboQuant; choose 1, 2, 3, 4 or 8")


def _items(layers: object) -> Iterable[tuple[object, object]]:
    if not isinstance(layers, Mapping):
        raise ValueError(f"layers={layers!r}: give a dict such as {{0: 8, -1: None}}")
    return layers.items()


def _pair(bits: int | tuple[int, int]) -> tuple[int, int]:
    return (bits, bits) if isinstance(bits, int) else bits


def _override(item: tuple[object, object]) -> tuple[int, tuple[int, int] | None]:
    """Check one of `layers`, as a user writes it or as JSON has it."""
    layer, bits = item
    if isinstance(layer, str) and layer.removeprefix("-").isdecimal():
        layer = int(layer)
    if type(layer) is not int:
        raise ValueError(f"layers={{{layer!r}: ...}}: not a layer; give its number, from the end if below 0")
    if bits is None:
        return layer, None
    pair = tuple(bits) if isinstance(bits, (tuple, list)) else (bits, bits)
    if len(pair) != 2:
        raise ValueError(f"layers={{{layer}: {bits!r}}}: give bits, a pair of bits for keys and values, or None")
    for bits_of_part in pair:
        _check_bits(f"layers[{layer}]", bits_of_part)
    return layer, pair


def is_latent(heads: int, width: int, other_width: int) -> bool:
    """Tell whether rows are compressed latents of an MLA model: one head, keys and values of different width, one wide."""
    return heads == 1 and width != other_width and max(width, other_width) >= LATENT_WIDTH
