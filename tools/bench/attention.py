"""Keys like those of real models, and what a key codec does to attention on them.

The data are synthetic: normal values with the troubles that real key channels have. What is compared is not the rows but
the attention that they give, because the error of rows does not tell whether keys are good enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
WIDTH, ROWS, QUERIES, SEEDS = 128, 2048, 64, (0, 1, 2)
SPREAD = 2.5  # of a query's logits over the keys, without what all keys have in common
LOW, HIGH = [60, 62, 124, 126], [2, 5, 66, 69]  # channels that RoPE turns slowly, and fast


class Head(NamedTuple):
    """Keys of one head (2048, 128) fp16, `earlier` as many of other text of the same head, queries (64, 128)."""

    keys: npt.NDArray[np.float16]
    earlier: npt.NDArray[np.float16]
    queries: Array


def roped(rows: Array) -> Array:
    """Rotary embedding, base 1e6, of rows at positions 0, 1, 2 ..."""
    half = WIDTH // 2
    angle = np.arange(len(rows))[:, None] * 1e6 ** (-np.arange(half) / half)
    a, b = rows[:, :half], rows[:, half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], 1)


def _gaussian(rng: np.random.Generator, rows: Array, four: Array) -> tuple[Array, Array]:
    return rows, np.zeros_like(rows)


def _channels(rng: np.random.Generator, rows: Array, four: Array) -> tuple[Array, Array]:
    rows[:, four] *= 20
    return rows, np.zeros_like(rows)


def _offset(rng: np.random.Generator, rows: Array, four: Array) -> tuple[Array, Array]:
    offset = np.zeros_like(rows)
    offset[:, four] = 20 * rng.choice([-1, 1], 4)
    return rows, offset


def _roped(rng: np.random.Generator, rows: Array, large: list[int]) -> tuple[Array, Array]:
    bias = rng.standard_normal(WIDTH)
    bias[large] += 100 * rng.choice([-1, 1], 4)
    return roped(rows), roped(np.tile(bias, (len(rows), 1)))


Trouble = Callable[[np.random.Generator, Array, Array], tuple[Array, Array]]

# By name: how unequal the channels' spreads are (of its logarithm), and what else is done to the rows.
TROUBLES: dict[str, tuple[float, Trouble]] = {
    "gaussian": (0.0, _gaussian),
    "log-normal": (1.0, _gaussian),
    "channels x20": (1.0, _channels),
    "offset 20": (1.0, _offset),
    "RoPE low": (0.5, lambda rng, rows, four: _roped(rng, rows, LOW)),
    "RoPE high": (0.5, lambda rng, rows, four: _roped(rng, rows, HIGH)),
}


def heads() -> Iterator[tuple[str, Head]]:
    """Each trouble, with each seed."""
    for name, (unequal, trouble) in TROUBLES.items():
        for seed in SEEDS:
            rng = np.random.default_rng(seed)
            rows = rng.standard_normal((2 * ROWS, WIDTH))
            if unequal:
                rows *= np.exp(unequal * rng.standard_normal(WIDTH))
            rows, offset = trouble(rng, rows, rng.choice(WIDTH, 4, False))
            queries = rng.standard_normal((QUERIES, WIDTH))
            spread = (queries @ rows[ROWS:].T / np.sqrt(WIDTH)).std(1, keepdims=True)
            keys = (rows + offset).astype(np.float16)
            yield name, Head(keys[ROWS:], keys[:ROWS], queries * SPREAD / spread)


def kl(head: Head, restored: Array) -> float:
    """Mean over the queries of KL(attention on the keys || attention on the restored ones), in nats."""
    p, q = (_log_softmax(head.queries @ rows.astype(np.float64).T / np.sqrt(WIDTH)) for rows in (head.keys, restored))
    return float((np.exp(p) * (p - q)).sum(1).mean())


def _log_softmax(x: Array) -> Array:
    x = x - x.max(1, keepdims=True)
    return x - np.log(np.exp(x).sum(1, keepdims=True))
