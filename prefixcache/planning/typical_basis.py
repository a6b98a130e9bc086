"""In the place of a model's basis that isn't here: groups of its layers, whose rows are as long as is typical.

It says sizes and codes nothing. `sizes` and the simulator take the codec that it makes like any other.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from prefixcache.blocks.node import Window
from prefixcache.codecs import Codec
from prefixcache.codecs.transform.basis import QUALITIES, Basis, LayerGroup
from prefixcache.codecs.transform.codec import TYPICAL_BITS, Calibrated, Transform
from prefixcache.codecs.transform.layer import Layer, grouped
from prefixcache.codecs.transform.rope import NO_ROPE
from prefixcache.codecs.transform.tables import first_guess
from prefixcache.codecs.turboquant.codec import is_latent
from prefixcache.layers.adapters import PLAIN_CACHE, ROTATING_CACHE, layer_rows
from prefixcache.layers.image_layout import Plan

HASH = "0" * 32  # no file's


class TypicalBasis(Basis):
    """The basis that a model with these layers could have. `nbytes` is what it would take with all of its vectors."""

    def __init__(self, layers: list[Layer]):
        groups, _ = grouped(layers)
        self.hash, self.model, self.metric, self.texts, self.sinks, self.measured = HASH, "", "", "", 0, None
        self.tables = first_guess()
        self.groups = tuple(map(_group, groups))
        self.nbytes = sum(map(_nbytes, self.groups))


def typical(codec: Codec, plan: Plan) -> Codec:
    """Return a `Transform` as it is for a model with a basis, whose layers a plan has; another codec as it is, and a
    `Transform` where no layer could be transformed.
    """
    if not isinstance(codec, Transform):
        return codec
    basis = TypicalBasis(_layers(plan))
    return Calibrated(codec.quality, codec.otherwise, basis) if basis.groups else codec.otherwise


def _layers(plan: Plan) -> list[Layer]:
    """Return those that a calibration may take: plain caches of keys and values, and windows that keep no first tokens; no
    latents.
    """
    caches, layers = Counter(plan.layer_of), []
    for leaf, index in zip(plan.leaves, plan.layer_of, strict=True):
        window = Window(*leaf.get("window", (0,)))
        known = leaf["class"] in (PLAIN_CACHE, ROTATING_CACHE) and not window.keep
        rows = layer_rows(leaf) if known and caches[index] == 1 else None
        if rows is not None and not is_latent(rows.heads, *rows.widths):
            layers.append(Layer(index, *rows, NO_ROPE, window.size))
    return layers


def _group(layers: list[Layer]) -> LayerGroup:
    channels = sum(layer.channels for layer in layers)
    bits = np.interp(QUALITIES, list(TYPICAL_BITS), list(TYPICAL_BITS.values()))
    words = np.maximum(bits * channels / 16 - 1, 0).astype(np.float32)  # without the head
    none = np.zeros(0, np.float32)
    return LayerGroup(tuple(layers), np.zeros(channels, np.float32), (), np.zeros((channels, 0)), none, words)


def _nbytes(group: LayerGroup) -> int:
    """Return the bytes of a basis: vectors in fp16; factors and their inverses, means and spreads in float32."""
    factors = sum(layer.heads * (layer.key_width**2 + layer.value_width**2) for layer in group.layers)
    return 2 * group.channels**2 + 4 * (2 * factors + 2 * group.channels)
