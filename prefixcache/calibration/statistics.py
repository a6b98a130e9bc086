"""Statistics of a model's keys, with RoPE undone, and of its values, and how much its next token depends on each of them.

`collect` reads windows of tokens twice: all of them for means and covariances, then some for the Fisher information of the
next token's likelihood. Of windows that are held back from both it keeps a sample of rows. `design` makes a basis of the
statistics.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import mlx.nn as nn
import numpy as np

from prefixcache.calibration.checkpoint import Checkpoint
from prefixcache.calibration.gradients import Gradients, NoGradient
from prefixcache.calibration.rows import joined_rows, prefilled
from prefixcache.codecs.interchange import Array
from prefixcache.codecs.transform.layer import Layer
from prefixcache.codecs.transform.rope import Rope

log = logging.getLogger("prefixcache")

SINKS = 4  # a text's first tokens, which most heads attend to whatever they say; no codec here touches them
SAMPLE_ROWS = 4000
FISHER_WINDOWS = 12
DRAWS = 4
PREFIX = 1024  # tokens that are stored while gradients are taken,
CONTINUATION = 64  # and tokens that the model reads after them
VERSION = 2  # of what a checkpoint holds

PREFILL_PHASE, FISHER_PHASE = "prefill", "fisher"
FISHER, SPREAD = "fisher", "spread"
PARTS = ("keys", "values")

Progress = Callable[[str, int, int], None]  # a phase, "prefill" or "fisher"; windows or draws done; of how many
Blocks = dict[tuple[int, str], Array]


class GroupStatistics(NamedTuple):
    """Of the layers whose channels are joined: each layer's keys with RoPE undone, head by head, then its values.

    `mean` float64 (channels,); `covariance` float32 (channels, channels), the second moment about the mean;
    `sample` float16 (rows, channels), every n-th token of the windows held back, which are in neither of the other two: about
    4,000, or all.
    """

    layers: tuple[Layer, ...]
    mean: Array
    covariance: Array
    sample: Array


@dataclass(frozen=True)
class Statistics:
    """What `collect` gathers of `tokens` tokens, those held back not counted.

    `blocks[layer.index, part]` weighs an error of a stored key (part "keys", RoPE undone) or value (part "values"):
    float64 (heads, width, width), symmetric. With `metric` "fisher" it is the mean of g g', g being the gradient of the
    log-likelihood of tokens drawn from the model, 0 for rows that have left their window; with "spread", where a model can't
    be differentiated, the identity over the mean variance of the layer's keys, or values.
    """

    tokens: int
    layers: tuple[Layer, ...]
    groups: tuple[GroupStatistics, ...]
    metric: str
    blocks: Blocks


@dataclass(frozen=True)
class Collection:
    """How statistics are collected: without the first `sinks` tokens of a window, with gradients in `fisher_windows` of the
    windows, `draws` times each. `identity` says what the model is; `checkpoint` is a file, which stays when all is done.
    """

    sinks: int = SINKS
    fisher_windows: int = FISHER_WINDOWS
    draws: int = DRAWS
    identity: str = ""
    checkpoint: Path | None = None


def collect(
    model: nn.Module,
    groups: Sequence[Sequence[Layer]],
    windows: Sequence[Sequence[int]],
    held_back: Sequence[Sequence[int]],
    collection: Collection = Collection(),
    progress: Progress = lambda phase, done, of: None,
) -> Statistics:
    """Return statistics of `windows` of token ids, each a text of its own.

    `groups` are lists of `eligible_layers`' layers, a layer in one group at most; other layers are left out. Of windows
    `held_back` only the sample is taken: what is expected of unseen text can be measured on them.

    The same call gives the same bits on one machine. With a checkpoint an interrupted call goes on where it was when the same
    is asked for again: identity, windows, layers, counts. ValueError for what can't be collected; OSError where the
    checkpoint can't be written.
    """
    sinks, draws = collection.sinks, collection.draws
    windows, held_back = ([list(map(int, window)) for window in given] for given in (windows, held_back))
    _check(groups, windows, held_back, sinks)
    gathered = _Gathered(groups, held_back, sinks)
    counts = collection.identity, sinks, collection.fisher_windows, draws
    file = Checkpoint(collection.checkpoint, _hash_of(groups, *counts, windows, held_back))
    if (saved := file.load()) is not None:
        gathered.restore(saved)

    count = len(windows) + len(held_back)
    for done in range(gathered.windows_read, count):
        if done < len(windows):
            gathered.read(model, windows[done])
        else:
            gathered.read_sample(model, held_back[done - len(windows)])
        if file.due or done + 1 == count:
            file.save(gathered.arrays())
        progress(PREFILL_PHASE, done + 1, count)

    chosen = _evenly(len(windows), collection.fisher_windows)
    for done in range(gathered.windows_differentiated, len(chosen)):
        drawn = gathered.differentiate(model, windows[chosen[done]], range(done * draws, (done + 1) * draws))
        for number in drawn:
            progress(FISHER_PHASE, done * draws + number, len(chosen) * draws)
        if gathered.metric == SPREAD:
            break
        if file.due or done + 1 == len(chosen):
            file.save(gathered.arrays())
    return gathered.statistics()


def _check(
    groups: Sequence[Sequence[Layer]], windows: Sequence[Sequence[int]], held_back: Sequence[Sequence[int]], sinks: int
) -> None:
    indices = [[layer.index for layer in group] for group in groups]
    joined = [index for group in indices for index in group]
    if not indices or not all(indices) or len(joined) != len(set(joined)):
        raise ValueError(f"groups of layers {indices}: give lists of one layer or more, each layer in one list")
    if not windows or not held_back:
        raise ValueError("no windows of tokens, or none held back; give a text that is long enough for one of each")
    least = 2 * (sinks + 1)
    for number, window in enumerate((*windows, *held_back)):
        if len(window) < least:
            raise ValueError(f"window {number} has {len(window)} tokens; give windows of {least} or more")


def _hash_of(groups: Sequence[Sequence[Layer]], *asked: object) -> str:
    described = [[(*layer[:5], layer.window, *_described(layer.rotation)) for layer in group] for group in groups]
    request = (VERSION, SAMPLE_ROWS, PREFIX, CONTINUATION, described, *asked)
    return hashlib.sha256(json.dumps(request).encode()).hexdigest()


def _described(rotation: Rope) -> tuple[object, ...]:
    return rotation.frequencies.tolist(), rotation.interleaved, rotation.scale


def _evenly(windows: int, chosen: int) -> list[int]:
    """Return `chosen` of `windows` numbers, or all, evenly spaced."""
    count = min(windows, chosen)
    return [(2 * i + 1) * windows // (2 * count) for i in range(count)]


# -- what grows -------------------------------------------------------------------------------------------------------


class _Moments:
    """Sums of a group's rows and of their products, both about `shift`, the mean of the first rows that came.

    Products are float32, summed in float32 over windows: of 100 windows, exact to about 1e-6 of the variances.
    """

    def __init__(self, channels: int):
        self.count = 0
        self.shift = np.zeros(channels, np.float32)
        self.total = np.zeros(channels, np.float64)
        self.products = np.zeros((channels, channels), np.float32)

    def add(self, rows: Array) -> None:
        """Add rows, float32 (tokens, channels), which are used up."""
        if not self.count:
            self.shift = rows.mean(axis=0, dtype=np.float64).astype(np.float32)
        rows -= self.shift
        self.count += len(rows)
        self.total += rows.sum(axis=0, dtype=np.float64)
        self.products += rows.T @ rows

    def mean_and_covariance(self) -> tuple[Array, Array]:
        beside = self.total / self.count
        covariance = self.products / np.float32(self.count)
        covariance -= np.outer(beside, beside).astype(np.float32)
        return self.shift + beside, covariance


class _Gathered:
    """All that is gathered so far: whole windows, whenever a checkpoint is made of it."""

    def __init__(self, groups: Sequence[Sequence[Layer]], held_back: Sequence[Sequence[int]], sinks: int):
        self._groups = tuple(tuple(group) for group in groups)
        self._layers = tuple(sorted((layer for group in groups for layer in group), key=lambda layer: layer.index))
        self._sinks = sinks
        self._stride = max(1, round(sum(len(window) - sinks for window in held_back) / SAMPLE_ROWS))
        self._moments = [_Moments(sum(layer.channels for layer in group)) for group in groups]
        self._samples = [[np.empty((0, len(moments.total)), np.float16)] for moments in self._moments]
        self._sampled = 0  # rows that the samples were taken of
        self._blocks = {
            (layer.index, part): np.zeros((layer.heads, width, width))
            for layer in self._layers
            for part, width in zip(PARTS, (layer.key_width, layer.value_width), strict=True)
        }
        self._gradients = 0  # of each layer's stored keys, in _blocks
        self.windows_read = 0
        self.windows_differentiated = 0
        self.metric = FISHER

    def read(self, model: nn.Module, window: Sequence[int]) -> None:
        prompt_cache = prefilled(model, window)
        for group, moments in zip(self._groups, self._moments, strict=True):
            moments.add(joined_rows(prompt_cache, group, self._sinks))
        self.windows_read += 1

    def read_sample(self, model: nn.Module, window: Sequence[int]) -> None:
        prompt_cache = prefilled(model, window)
        first, limit = -self._sampled % self._stride, np.finfo(np.float16).max
        for group, sample in zip(self._groups, self._samples, strict=True):
            rows = joined_rows(prompt_cache, group, self._sinks)[first :: self._stride]
            sample.append(rows.clip(-limit, limit).astype(np.float16))
        self._sampled += len(window) - self._sinks
        self.windows_read += 1

    def differentiate(self, model: nn.Module, window: Sequence[int], seeds: Sequence[int]) -> Iterator[int]:
        """Draw for each seed; yields how many are done. Where there is no gradient `metric` becomes "spread"."""
        prefix = min(PREFIX, len(window) // 2)
        try:
            gradients = Gradients(model, self._layers, window[: prefix + CONTINUATION], prefix)
            for done, seed in enumerate(seeds, 1):
                for layer, pair in zip(self._layers, gradients.draw(seed), strict=True):
                    self._weigh(layer, *pair)
                self._gradients += prefix - self._sinks
                yield done
        except NoGradient as why:
            log.warning("no gradient of this model (%s): errors are weighed by each layer's spread instead", why)
            self.metric = SPREAD
        self.windows_differentiated += 1

    def _weigh(self, layer: Layer, keys: Array, values: Array) -> None:
        rows = np.ascontiguousarray(keys[:, self._sinks :].swapaxes(0, 1))
        # Rotations are orthogonal: the gradient by what was turned is turned back as the rows are, but for their length.
        by_key = layer.rotation.undo(rows, self._sinks, rows).swapaxes(0, 1) * np.float32(layer.rotation.scale**2)
        for part, gradient in zip(PARTS, (by_key, values[:, self._sinks :]), strict=True):
            self._blocks[layer.index, part] += gradient.swapaxes(1, 2) @ gradient

    def statistics(self) -> Statistics:
        groups = []
        for group, moments, sample in zip(self._groups, self._moments, self._samples, strict=True):
            groups.append(GroupStatistics(group, *moments.mean_and_covariance(), np.concatenate(sample)))
        if self.metric == SPREAD:
            blocks = _spread_blocks(groups)
        else:
            blocks = {key: block / self._gradients for key, block in self._blocks.items()}
        return Statistics(self._moments[0].count, self._layers, tuple(groups), self.metric, blocks)

    # -- as a checkpoint keeps it

    def arrays(self) -> dict[str, Array]:
        counts = (
            self.windows_read,
            self.windows_differentiated,
            self._gradients,
            self._moments[0].count,
            self._sampled,
        )
        arrays: dict[str, Array] = {"counts": np.array(counts, np.int64)}
        for number, (moments, sample) in enumerate(zip(self._moments, self._samples, strict=True)):
            arrays[f"shift {number}"], arrays[f"total {number}"] = moments.shift, moments.total
            arrays[f"products {number}"], arrays[f"sample {number}"] = moments.products, np.concatenate(sample)
        return arrays | {f"{part} {index}": block for (index, part), block in self._blocks.items()}

    def restore(self, arrays: Mapping[str, Array]) -> None:
        counts = arrays["counts"].tolist()
        self.windows_read, self.windows_differentiated, self._gradients, count, self._sampled = counts
        for number, moments in enumerate(self._moments):
            moments.count = count
            moments.shift, moments.total = arrays[f"shift {number}"], arrays[f"total {number}"]
            moments.products, self._samples[number] = arrays[f"products {number}"], [arrays[f"sample {number}"]]
        for index, part in self._blocks:
            self._blocks[index, part] = arrays[f"{part} {index}"]


def _spread_blocks(groups: Sequence[GroupStatistics]) -> Blocks:
    blocks = {}
    for group in groups:
        variances, start = np.diag(group.covariance).astype(np.float64), 0
        for layer in group.layers:
            for part, width in zip(PARTS, (layer.key_width, layer.value_width), strict=True):
                spread = variances[start : start + layer.heads * width].mean()
                start += layer.heads * width
                blocks[layer.index, part] = np.tile(np.eye(width) / max(spread, 1e-30), (layer.heads, 1, 1))
    return blocks
