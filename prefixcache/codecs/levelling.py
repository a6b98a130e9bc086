"""Levelling: each channel of a head is centred and brought nearer to the others before its row is rotated.

A key channel with a huge constant (Qwen2's k_proj bias) or a large spread would otherwise own the row: rotation spreads
it over every value, and the code is spent on what all keys have in common. The statistics are taken once per namespace
from the first rows stored, so they cost no bits a value; they are kept as a file named by its content. Here is what they
are and how they are measured; where they are kept `prefixcache.layers.levels` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .interchange import Array

LEAST_ROWS = 256  # fewer give a mean too rough to subtract
MOST_ROWS = 2048  # more give nothing
MOST_ROOT = 2.0**30  # beyond it float32 itself would leave nothing of the smaller channels
FAR = 16.0  # times the median of the rows' squared sizes, in deviations: such rows don't count
ROUNDS = 3
FLOOR = 0.1  # of the head's median spread: a channel that hardly moved may yet


@dataclass(frozen=True, eq=False)
class Levels:
    """Per head and channel: what to subtract, and the root of the spread that is left. Both float32 (heads, width).

    `root` is 1 or more: levelled values are never larger than centred ones, so nothing overflows on the way.
    """

    mean: Array
    root: Array

    @cached_property
    def weight(self) -> Array:
        """float32 (heads, width): 1 / root, rounded once."""
        return np.float32(1) / self.root

    def of(self, first: int, heads: int) -> Levels:
        """The levels of some of the heads."""
        return Levels(self.mean[first : first + heads], self.root[first : first + heads])


def measure(rows: Array) -> Levels | None:
    """Levels of float32 rows (tokens, heads, width). None from fewer than 256 rows that are finite, or too large to add.

    mean is the channel's; root is sqrt(s / smallest s), s the channel's mean absolute deviation, at least `FLOOR` of the
    median of its head's. Dividing by sqrt(s), half-way to equal channels, is what leaves the least squared error after
    the way back: the error is white in between, so channel c's is root_c**2 times the mean of (s / root)**2.

    Rows far larger than most of their head's, as those of a prompt's first tokens often are, don't count: one of 256 that
    is a hundred times as large would move the mean by four tenths of a deviation, for all prompts to come.
    """
    rows = rows[np.isfinite(rows).all(axis=(1, 2))]
    if len(rows) < LEAST_ROWS:
        return None
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        mean, spread = _mean_and_spread(rows, None)
        for _ in range(ROUNDS):
            size = np.square((rows - mean) / np.where(spread > 0, spread, 1)).mean(2)  # (tokens, heads)
            usual = size <= FAR * np.median(size, axis=0)
            if usual.all():
                break
            mean, spread = _mean_and_spread(rows, usual)
    if not (np.isfinite(mean).all() and np.isfinite(spread).all()):
        return None
    spread = np.maximum(spread, FLOOR * np.median(spread, axis=1, keepdims=True))
    least = spread.min(axis=1, keepdims=True).astype(np.float64)
    root = np.sqrt(np.divide(spread, least, out=np.ones_like(spread, np.float64), where=least > 0))
    return Levels(mean, np.minimum(root, MOST_ROOT).astype(np.float32))


def _mean_and_spread(rows: Array, usual: Array | None) -> tuple[Array, Array]:
    """Mean and mean absolute deviation by head and channel, of all rows or the `usual` ones (tokens, heads)."""
    if usual is None:
        mean = rows.mean(0)
        apart = rows - mean
        return mean, np.abs(apart, out=apart).mean(0)
    count = usual.sum(0)[:, None].astype(np.float32)
    chosen = usual[..., None]
    mean = np.where(chosen, rows, 0).sum(0) / count
    apart = np.where(chosen, rows - mean, 0)
    return mean, np.abs(apart, out=apart).sum(0) / count
