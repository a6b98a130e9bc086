"""Bases for rows that no model made, such as those of tokens' hashes, of which a soak knows what they must be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from prefixcache.calibration.design import design
from prefixcache.calibration.statistics import SINKS, SPREAD, GroupStatistics, Statistics
from prefixcache.codecs.transform.bases import Bases
from prefixcache.codecs.transform.layer import Layer
from prefixcache.codecs.transform.rope import NO_ROPE
from tools.soak.prompts import WIDTH

MODELS = ("soak-a", "soak-b")


class LayerRows(NamedTuple):
    """Rows (rows, heads, width), of magnitudes below 65504, that a layer's are like. It attends to the last `window` tokens,
    0: to all.
    """

    index: int  # type: ignore[assignment]  # not tuple's method
    keys: np.ndarray
    values: np.ndarray
    window: int = 0


def basis_of(identity: str, groups: Sequence[Sequence[LayerRows]], dtype: str = "float32") -> bytes:
    """The basis of layers whose rows, of this dtype and without RoPE, are like these."""
    layers: list[Layer] = []
    made, blocks = [], {}
    for group in groups:
        parts = [part for layer in group for part in (layer.keys, layer.values)]
        joined = np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1).astype(np.float64)
        first = len(layers)
        for index, keys, values, window in group:
            layers.append(Layer(index, keys.shape[1], keys.shape[2], values.shape[2], dtype, NO_ROPE, window))
            for part, (_, heads, width) in (("keys", keys.shape), ("values", values.shape)):
                blocks[index, part] = np.tile(np.eye(width), (heads, 1, 1))
        covariance = np.cov(joined.T, bias=True).astype(np.float32)
        made.append(GroupStatistics(tuple(layers[first:]), joined.mean(axis=0), covariance, joined.astype(np.float16)))
    statistics = Statistics(len(made[0].sample), tuple(layers), tuple(made), SPREAD, blocks)
    return design(statistics, identity, "rows that no model made", SINKS)


def save_bases(folder: Path) -> None:
    """Those of the soak's models: each layer is a group, for not all kinds of prompt caches have two of whole rows."""
    for number, model in enumerate(MODELS):
        chance = np.random.default_rng(number)
        rows = chance.integers(0, 1 << 10, (4, 3000, 1, WIDTH)).astype(np.float32)
        Bases(folder).save(basis_of(model, [[LayerRows(at, *rows[2 * at : 2 * at + 2])] for at in (0, 1)]))
