"""A basis that no calibration made, and rows of the kind that it expects: layers of Llama 3 8B's shape, with the spectrum of
SmolLM2-135M-Instruct.

Components are drawn with the spreads of a real model's and turned into channels by Hadamard's matrix with random signs. So
codes are about as long, and products as large, as those of a model; what joined layers have in common isn't there.
"""

from __future__ import annotations

from functools import cache

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from prefixcache.codecs.transform import backends, basis
from prefixcache.codecs.transform.basis import QUALITIES, LayerGroup, finer
from prefixcache.codecs.transform.layer import Layer
from prefixcache.codecs.transform.rope import Rope
from prefixcache.codecs.transform.tables import Tables, class_of, fit

HEADS, WIDTH = 8, 128
CHANNELS = 2 * HEADS * WIDTH  # of a layer
DTYPE = "float16"
THETA = 500_000.0
# log2 of the spreads, in steps at quality 4, of the components at `AT` times a group's channels, and how many components a
# basis keeps to a channel: means of the groups of SmolLM2-135M-Instruct, calibrated on 24 windows with 48 draws.
AT = (0, 1 / 64, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8, 0.91)
LOG2_SPREADS = (6.4, 3.6, 2.2, 1.2, 0.0, -1.0, -1.9, -2.7, -3.5, -4.5, -5.0)
SHARE = 0.91
FACTOR = 4.0  # of a channel in the metric: rows of float16 have some units then
SAMPLE = 128  # rows, for tables and lengths


def group(number: int, layers: int) -> LayerGroup:
    """Of `layers` layers, the `number`-th of as many."""
    chance = np.random.default_rng(number)
    channels, spreads = layers * CHANNELS, _spreads(layers)
    factor = np.eye(WIDTH) * FACTOR + np.tril(chance.normal(scale=FACTOR / WIDTH, size=(WIDTH, WIDTH)), -1)
    factors = np.tile(factor.astype(np.float32), (HEADS, 1, 1))
    return LayerGroup(
        tuple(Layer(number * layers + i, HEADS, WIDTH, WIDTH, DTYPE, _rotation()) for i in range(layers)),
        chance.normal(size=channels).astype(np.float32),
        ((factors, factors),) * layers,
        _vectors(channels, len(spreads), chance),
        spreads,
        _words(layers),
    )


def basis_bytes(model: str, layers: int, joined: int) -> bytes:
    """A basis of a model of so many layers, of which `joined` are a group."""
    groups = [group(number, joined) for number in range(layers // joined)]
    return basis.basis_bytes(groups, tables(joined), basis.BasisOrigin(model, 4, "spread", "rows that no model made"))


@cache
def tables(layers: int) -> Tables:
    """The entropy coder's, for groups of so many layers."""
    spreads = _spreads(layers)
    return fit([(values(spreads, SAMPLE, 0), class_of(spreads))])


def values(spreads: np.ndarray, tokens: int, seed: int) -> np.ndarray:
    """Components as tokens have them, float32 (tokens, components): some tokens are louder than others."""
    chance = np.random.default_rng(seed)
    loudness = np.exp2(chance.normal(scale=0.4, size=(tokens, 1)))
    return (chance.standard_normal((tokens, len(spreads)), np.float32) * spreads * loudness).astype(np.float32)


def rows(of: LayerGroup, tokens: int, seed: int) -> list[np.ndarray]:
    """Float16 (tokens, heads, width) of each stream of tokens 0 and on."""
    channels = values(of.spreads, tokens, seed) @ of.vectors.T.astype(np.float32)
    streams = []
    parts = np.split(channels, len(of.layers) * 2, axis=1)
    inverses = [inverse for pair in of.inverses for inverse in pair]
    for i, (part, inverse, mean) in enumerate(zip(parts, inverses, np.split(of.mean, len(parts)), strict=True)):
        stream = np.matmul(part.reshape(tokens, HEADS, WIDTH).swapaxes(0, 1), inverse).swapaxes(0, 1)
        stream = stream + mean.reshape(HEADS, WIDTH)
        streams.append((of.layers[i // 2].rotation.redo(stream, 0) if i % 2 == 0 else stream).astype(np.float16))
    return streams


def prompt_cache(groups: tuple[LayerGroup, ...], tokens: int) -> list[KVCache]:
    """What a prefill of so many tokens leaves behind, of a model with these groups of layers."""
    made = []
    for number, of in enumerate(groups):
        streams = [mx.array(stream.swapaxes(0, 1)[None]) for stream in rows(of, tokens, number)]
        for keys, held in zip(streams[::2], streams[1::2], strict=True):
            made.append(KVCache())
            made[-1].update_and_fetch(keys, held)
    mx.eval([layer.state for layer in made])
    return made


@cache
def _rotation() -> Rope:
    return Rope(THETA ** (-np.arange(0, WIDTH, 2) / WIDTH))


def _vectors(channels: int, components: int, chance: np.random.Generator) -> np.ndarray:
    """Columns of Hadamard's matrix in any order, its rows with any sign: float16 (channels, components), orthonormal."""
    matrix = np.array([[1.0]], np.float32)
    while len(matrix) < channels:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    signs = chance.choice(np.float32([-1, 1]), channels)
    chosen = matrix[:, chance.permutation(channels)[:components]] * signs[:, None]
    return (chosen / np.sqrt(np.float32(channels))).astype(np.float16)


def _spreads(layers: int) -> np.ndarray:
    channels = layers * CHANNELS
    return np.exp2(np.interp(np.arange(int(SHARE * channels)) / channels, AT, LOG2_SPREADS)).astype(np.float32)


@cache
def _words(layers: int) -> np.ndarray:
    """The mean length of a coded row, in 16-bit words, by quality."""
    means = []
    for quality in QUALITIES:
        spreads = _spreads(layers) * np.float32(finer(quality))
        spreads = spreads[spreads >= basis.LEAST_SPREAD]
        _, words, _ = backends.encode(values(spreads, SAMPLE, 1), class_of(spreads), tables(layers))
        means.append(len(words) / SAMPLE)
    return np.array(means, np.float32)
