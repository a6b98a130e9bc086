"""From a calibration's statistics to a basis: which layers are joined, the vectors of each group, steps and tables.

A group's covariance is brought into the metric that the Fisher information gives; its eigenvectors are the basis's, and
one step serves all components of all groups, which shares bits out as reverse water-filling does. The step is a guess at
where quality 4 errs as 4 bits of TurboQuant do, until somebody who has the model measures that, and designs with another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from prefixcache.calibration.statistics import GroupStatistics, Statistics
from prefixcache.codecs.base import Decoding, Encoding
from prefixcache.codecs.interchange import Array
from prefixcache.codecs.transform import basis as bases
from prefixcache.codecs.transform.basis import QUALITIES, BasisOrigin, LayerGroup, Measured, finer
from prefixcache.codecs.transform.layer import Layer
from prefixcache.codecs.transform.tables import (
    COST,
    DEAD_ZONE,
    Tables,
    class_of,
    fit,
    gains_of,
    quantised,
    shifted,
    symbol_of,
)
from prefixcache.codecs.turboquant.codec import TurboQuantRows
from prefixcache.codecs.turboquant.measure_levels import measure_levels

SHRINK = 0.1  # of a block's mean diagonal, added to it: few draws say little of directions that matter little
FINEST = bases.MOST_QUALITY
REFERENCE_BITS, REFERENCE_QUALITY = 4, 4.0
# Of the error in the metric that 4 bits of TurboQuant have: the first guess. The metric knows nothing of errors that tokens
# share, as those of left-out components are, and of few draws it is noise; so KL of the next token is what decides.
SHARE = 0.27
_ROWS = 1024  # of a sample, for steps and tables


def design(statistics: Statistics, model: str, texts: str, sinks: int) -> bytes:
    """Return the bytes of the basis, by the first guess of its step, of `model`, an identity as `model_identity` gives it,
    whose statistics these are.
    """
    return Design(statistics, model, texts, sinks).at(REFERENCE_QUALITY).data()


class Designed(NamedTuple):
    """A basis before its quality is measured."""

    groups: list[LayerGroup]
    tables: Tables
    origin: BasisOrigin

    def data(self, measured: Measured | None = None) -> bytes:
        return bases.basis_bytes(self.groups, self.tables, self.origin, measured)


class Design:
    """A basis of which only the step is open."""

    def __init__(self, statistics: Statistics, model: str, texts: str, sinks: int):
        drafts = [_draft(group, statistics) for group in statistics.groups]
        step = _first_step(drafts)
        self._drafts = [draft.scaled(1 / step) for draft in drafts]
        self._origin = BasisOrigin(model, sinks, statistics.metric, texts)

    def at(self, quality: float) -> Designed:
        """Return the basis whose quality 4 has the step of `quality` by the first guess."""
        drafts = [draft.scaled(finer(quality)) for draft in self._drafts]
        tables = fit((draft.values(), class_of(draft.spreads)) for draft in drafts)
        return Designed([draft.group(tables) for draft in drafts], tables, self._origin)


class _GroupDraft(NamedTuple):
    """A group in the making. `factors` by stream, in the order of the channels; `sample` float32 rows without their mean."""

    layers: tuple[Layer, ...]
    mean: Array
    factors: list[Array]
    vectors: Array
    spreads: Array
    sample: Array

    def scaled(self, factor: float) -> _GroupDraft:
        return self._replace(factors=[part * factor for part in self.factors], spreads=self.spreads * factor)

    def in_metric(self, rows: Array) -> Array:
        """Return float32 rows (rows, channels) in the metric."""
        turned, at = np.empty_like(rows), 0
        for factor in self.factors:
            heads, width, _ = factor.shape
            part = slice(at, at + heads * width)
            blocks = rows[:, part].reshape(len(rows), heads, width).swapaxes(0, 1)
            turned[:, part] = np.matmul(blocks, factor.astype(np.float32)).swapaxes(0, 1).reshape(len(rows), -1)
            at = part.stop
        return turned

    def values(self) -> Array:
        """Return the sample along the vectors."""
        return self.in_metric(self.sample) @ self.vectors.astype(np.float32)

    def group(self, tables: Tables) -> LayerGroup:
        kept = int((self.spreads * finer(FINEST) >= bases.LEAST_SPREAD).sum())
        spreads = np.minimum.accumulate(self.spreads[:kept].astype(np.float32))
        values = self.values()[:, :kept]
        words = [_row_words(values * finer(quality), spreads * finer(quality), tables) for quality in QUALITIES]
        parts = [factor.astype(np.float32) for factor in self.factors]
        pairs = tuple(zip(parts[::2], parts[1::2], strict=True))
        vectors = self.vectors[:, :kept].astype(np.float16)
        return LayerGroup(
            self.layers, self.mean.astype(np.float32), pairs, vectors, spreads, np.array(words, np.float32)
        )


def _draft(group: GroupStatistics, statistics: Statistics) -> _GroupDraft:
    factors = [np.linalg.cholesky(block) for block in _metric(group.layers, statistics)]
    mean, at = group.mean, 0
    covariance = group.covariance.astype(np.float64)
    for factor in factors:
        for head in factor:
            part = slice(at, at + len(head))
            covariance[part] = head.T @ covariance[part]
            covariance[:, part] = covariance[:, part] @ head
            at = part.stop
    variances, vectors = np.linalg.eigh((covariance + covariance.T) / 2)
    order = slice(None, None, -1)
    spreads = np.sqrt(np.maximum(variances[order], 1e-30))
    vectors = vectors[:, order]
    vectors = vectors * np.where(vectors[np.abs(vectors).argmax(axis=0), np.arange(len(mean))] < 0, -1, 1)
    rows = np.linspace(0, len(group.sample) - 1, min(_ROWS, len(group.sample))).astype(int)
    sample = group.sample[rows].astype(np.float32) - mean.astype(np.float32)
    return _GroupDraft(group.layers, mean, factors, vectors, spreads, sample)


def _metric(layers: Sequence[Layer], statistics: Statistics) -> Iterator[Array]:
    """Return the metric by stream, (heads, width, width), positive definite."""
    for layer in layers:
        for part in ("keys", "values"):
            blocks = statistics.blocks[layer.index, part]
            width = blocks.shape[1]
            diagonal = np.trace(blocks, axis1=1, axis2=2) / width
            least = max(float(diagonal.max()), 1e-30) * 1e-6
            yield blocks + (SHRINK * np.maximum(diagonal, least))[:, None, None] * np.eye(width)


def _first_step(drafts: Sequence[_GroupDraft]) -> float:
    """Return the step at which the samples err as much as they should."""
    wanted = SHARE * sum(_reference_error(draft) for draft in drafts)
    values = [draft.values() for draft in drafts]
    low, high = 1e-12, float(max(draft.spreads[0] for draft in drafts))
    for _ in range(40):  # to a part in 10**4 of the range's logarithm
        step = float(np.sqrt(low * high))
        error = sum(_error(of_group, step) for of_group in values)
        low, high = (step, high) if error < wanted else (low, step)
    return step


def _error(values: Array, step: float) -> float:
    magnitudes = np.abs(values) / np.float32(step)
    return float(np.square((magnitudes - np.floor(magnitudes + DEAD_ZONE)) * step).sum(axis=1).mean())


def _reference_error(draft: _GroupDraft) -> float:
    """Return what TurboQuant's codes of the sample err by."""
    rows = draft.sample + draft.mean.astype(np.float32)
    errors, at = np.empty_like(rows), 0
    for i, factor in enumerate(draft.factors):
        heads, width, _ = factor.shape
        part, layer = slice(at, at + heads * width), draft.layers[i // 2]
        stream = rows[:, part].reshape(-1, heads, width).copy()
        turned = layer.rotation.redo(stream, 0) if i % 2 == 0 else stream
        back = _turboquant(turned, centred=i % 2 == 0)
        back = layer.rotation.undo(back, 0) if i % 2 == 0 else back
        errors[:, part] = (back - stream).reshape(len(rows), -1)
        at = part.stop
    return float(np.square(draft.in_metric(errors)).sum(axis=1).mean())


def _turboquant(rows: Array, centred: bool) -> Array:
    """Return float32 rows (tokens, heads, width), coded and decoded."""
    codec = TurboQuantRows(rows.shape[2], "float32", REFERENCE_BITS, 0, True, centred)
    levels = measure_levels(rows, centred)
    codes = np.empty((*rows.shape[:2], *codec.planes[0].shape), np.uint32)
    scales, decoded = np.empty(rows.shape[:2], np.uint16), np.empty(rows.swapaxes(0, 1).shape, np.float32)
    codec.encode_all([Encoding(rows, (codes, scales), levels)])
    codec.decode_all([Decoding((codes, scales), decoded, levels)])
    return decoded.swapaxes(0, 1)


def _row_words(values: Array, spreads: Array, tables: Tables) -> float:
    """Return the mean length of coded rows, in 16-bit words: the tables' costs, and what the coder's last words add."""
    kept = spreads >= bases.LEAST_SPREAD
    steps, classes = quantised(values[:, kept].astype(np.float32)), class_of(spreads[kept])
    of_rows = shifted(classes, gains_of(steps, classes, tables))
    costs = tables.costs[of_rows, symbol_of(np.abs(steps))].sum(axis=1) / COST
    return float(np.where(steps.any(axis=1), costs / 16 + 1.5, 0).mean())
