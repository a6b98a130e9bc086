"""Small bases that no calibration made, and rows that are distributed as they say."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prefixcache.codecs.transform.basis import QUALITIES, BasisOrigin, LayerGroup, basis_bytes
from prefixcache.codecs.transform.layer import Layer
from prefixcache.codecs.transform.rope import NO_ROPE, Rope
from prefixcache.codecs.transform.tables import Tables, first_guess

WEIGHTS = "0123456789abcdef01234567"
MODEL = f"tiny@{WEIGHTS}"
ROPE = Rope(np.array([1.0, 0.1, 0.01]))
INTERLEAVED = Rope(np.array([0.7, 0.07]), True, 1.25)


def layer(index: int = 0, dtype: str = "float16", rotation: Rope = ROPE, heads: int = 2) -> Layer:
    """Keys of 8 values, values of 5: an odd number of channels with one head."""
    return Layer(index, heads, 8, 5, dtype, rotation)


def group_of(layers: Sequence[Layer], widest: float = 40, narrowest: float = 0.5, seed: int = 0) -> LayerGroup:
    """As many components as channels, spread over `widest` to `narrowest` steps at quality 4."""
    chance = np.random.default_rng(seed)
    channels = sum(of.channels for of in layers)
    factors = []
    for of in layers:
        pair = []
        for width in (of.key_width, of.value_width):
            lower = np.tril(0.2 * chance.standard_normal((of.heads, width, width)), -1)
            pair.append((lower + 8 * np.eye(width)).astype(np.float32))
        factors.append((pair[0], pair[1]))
    vectors = np.linalg.qr(chance.standard_normal((channels, channels)))[0].astype(np.float16)
    spreads = np.geomspace(widest, narrowest, channels).astype(np.float32)
    mean = chance.standard_normal(channels).astype(np.float32)
    return LayerGroup(tuple(layers), mean, tuple(factors), vectors, spreads, np.full(len(QUALITIES), 20, np.float32))


def bytes_of(groups: Sequence[LayerGroup] = (), model: str = MODEL, tables: Tables | None = None) -> bytes:
    """A basis's file; of two groups, three layers in all, unless others are given."""
    if not groups:
        groups = [group_of([layer(0), layer(1, rotation=NO_ROPE)]), group_of([layer(5, rotation=INTERLEAVED)])]
    return basis_bytes(groups, tables or first_guess(), BasisOrigin(model, 4, "fisher", "none"))


def rows_of(group: LayerGroup, tokens: int, first: int = 0, seed: int = 0) -> list[np.ndarray]:
    """A stream (tokens, heads, width) for keys and values of each layer, as a model with this basis has them."""
    chance = np.random.default_rng(seed)
    values = chance.standard_normal((tokens, len(group.spreads))) * group.spreads
    measured, streams, at = values @ group.vectors.T.astype(np.float64), [], 0
    for of, pair in zip(group.layers, group.inverses, strict=True):
        for inverse, is_keys in zip(pair, (True, False), strict=True):
            heads, width, _ = inverse.shape
            part = slice(at, at + heads * width)
            blocks = measured[:, part].reshape(tokens, heads, width).swapaxes(0, 1) @ inverse
            rows = blocks.swapaxes(0, 1) + group.mean[part].reshape(heads, width)
            rows = np.ascontiguousarray(rows, np.float32)
            streams.append(of_dtype(of.rotation.redo(rows, first) if is_keys else rows, of.dtype))
            at = part.stop
    return streams


def of_dtype(rows: np.ndarray, dtype: str) -> np.ndarray:
    """Float32 as another type, bf16 as uint16."""
    if dtype != "bfloat16":
        return rows.astype(dtype)
    bits = np.ascontiguousarray(rows, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
