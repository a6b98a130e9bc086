"""How far one model output is from another: negative log-likelihood, KL divergence, agreement, and what sums them up.

Logits come in a few rows at a time, so that a large vocabulary costs little memory; all arithmetic is float32, the sums
over rows float64. Nothing here knows models, codecs or caches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np


class Rows(NamedTuple):
    """One value a row of logits: nats of the target, nats of KL(reference || other), whether both choose one token."""

    nll: np.ndarray
    kl: np.ndarray
    same: np.ndarray


def _log_probabilities(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def surprise(logits: mx.array, targets: Sequence[int]) -> np.ndarray:
    """Negative log-likelihood of each row's target, in nats: float64 (rows,)."""
    chosen = mx.take_along_axis(_log_probabilities(logits), mx.array(list(targets))[:, None], axis=-1)[:, 0]
    return -np.array(chosen).astype(np.float64)


def divergence(reference: mx.array, logits: mx.array) -> np.ndarray:
    """KL(reference || other) of each row's distributions, in nats: float64 (rows,).

    Never below 0, though rounding alone would bring near-equal rows there. A token that the reference never gives
    (a logit of -inf) adds nothing.
    """
    p, q = _log_probabilities(reference), _log_probabilities(logits)
    terms = mx.where(p == -mx.inf, 0.0, mx.exp(p) * (p - q))
    nats = np.array(terms.sum(axis=-1)).astype(np.float64)
    return np.maximum(nats, 0.0)


def compare(reference: mx.array, logits: mx.array, targets: Sequence[int]) -> Rows:
    same = np.array(mx.argmax(reference, axis=-1) == mx.argmax(logits, axis=-1))
    return Rows(surprise(logits, targets), divergence(reference, logits), same)


def joined(parts: Sequence[Rows]) -> Rows:
    """The rows of several calls as one."""
    return Rows(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean of independent values, and its standard error; None from fewer than two, or where one isn't finite."""
    mean = sum(values) / len(values)
    if len(values) < 2 or not math.isfinite(mean):
        return mean, None
    return mean, float(np.std(values, ddof=1)) / math.sqrt(len(values))
