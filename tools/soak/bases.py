"""Bases for rows that no model made: those of tokens' hashes, of which a soak and a crash know what they must be."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from prefixcache.calibration.design import design
from prefixcache.calibration.statistics import SPREAD, GroupStatistics, Statistics
from prefixcache.codecs.transform.bases import Bases
from prefixcache.codecs.transform.layer import Layer
from prefixcache.codecs.transform.rotation import NO_ROTATION
from tools.soak.prompts import WIDTH

MODELS = ("soak-a", "soak-b")


def basis_of(identity: str, groups: Sequence[Sequence[tuple[np.ndarray, np.ndarray]]], sinks: int = 4) -> bytes:
    """The basis of layers of one head whose keys and values are like these, (rows, width) float32, of magnitudes below 65504.
    The layers are numbered from 0 on, group by group.
    """
    layers: list[Layer] = []
    made, blocks = [], {}
    for group in groups:
        joined = np.concatenate([part for pair in group for part in pair], axis=1).astype(np.float64)
        of_group = []
        for keys, values in group:
            of_group.append(Layer(len(layers), 1, keys.shape[1], values.shape[1], "float32", NO_ROTATION))
            layers.append(of_group[-1])
            for part, rows in (("keys", keys), ("values", values)):
                blocks[layers[-1].index, part] = np.eye(rows.shape[1])[None]
        covariance = np.cov(joined.T, bias=True).astype(np.float32)
        made.append(GroupStatistics(tuple(of_group), joined.mean(axis=0), covariance, joined.astype(np.float16)))
    statistics = Statistics(len(made[0].sample), tuple(layers), tuple(made), SPREAD, blocks)
    return design(statistics, identity, "rows of hashes", sinks).data


def save_bases(folder: Path) -> None:
    """Those of the soak's models: each layer is a group, for not all kinds of prompt caches have two of whole rows."""
    for number, model in enumerate(MODELS):
        chance = np.random.default_rng(number)
        rows = chance.integers(0, 1 << 10, (4, 3000, WIDTH)).astype(np.float32)
        Bases(folder).save(basis_of(model, [[(rows[0], rows[1])], [(rows[2], rows[3])]]))
