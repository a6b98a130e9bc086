"""Compares what a model says on restored caches with what it says on the live one, for `evaluate` and `calibrate`.

A text at a time: the live cache is filled, every codec's `PrefixCache` stores it, the live cache goes on as the
reference, and then each codec's restored cache does. So only one text's logits are in memory, whatever the number of codecs,
and each codec has one cache for all texts, as on a server.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from prefixcache import PrefixCache
from prefixcache.cli.evaluate.texts import Excerpt
from prefixcache.cli.text import Refused
from prefixcache.codecs import Codec
from prefixcache.layers.adapters import CacheError
from prefixcache.layers.image_layout import Plan
from prefixcache.store_fetch_remove.namespaces import BASES_SHARE
from prefixcache.store_fetch_remove.store import Stored

PREFILL = 512  # tokens in one call of the model, as mlx-lm's servers do it
CHUNK = 64  # the same where logits are looked at: 64 x 250,000 float32 logits are 64 MB
SPARE = 64 << 20


# -- two outputs ------------------------------------------------------------------------------------------------------
# Logits come in a few rows at a time. All arithmetic is float32, the sums over rows float64.


class RowScores(NamedTuple):
    """One value a row of logits: nats of the target, nats of KL(reference || other), whether both choose one token."""

    nll: np.ndarray
    kl: np.ndarray
    same: np.ndarray


def _log_probabilities(logits: mx.array) -> mx.array:
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def surprise(logits: mx.array, targets: Sequence[int]) -> np.ndarray:
    """Return the negative log-likelihood of each row's target, in nats: float64 (rows,)."""
    chosen = mx.take_along_axis(_log_probabilities(logits), mx.array(list(targets))[:, None], axis=-1)[:, 0]
    return -np.array(chosen).astype(np.float64)


def divergence(reference: mx.array, logits: mx.array) -> np.ndarray:
    """Return KL(reference || other) of each row's distributions, in nats: float64 (rows,).

    Never below 0, though rounding alone would bring near-equal rows there. A token that the reference never gives
    (a logit of -inf) adds nothing.
    """
    p, q = _log_probabilities(reference), _log_probabilities(logits)
    terms = mx.where(p == -mx.inf, 0.0, mx.exp(p) * (p - q))
    nats = np.array(terms.sum(axis=-1)).astype(np.float64)
    return np.maximum(nats, 0.0)


def compare(reference: mx.array, logits: mx.array, targets: Sequence[int]) -> RowScores:
    same = np.array(mx.argmax(reference, axis=-1) == mx.argmax(logits, axis=-1))
    return RowScores(surprise(logits, targets), divergence(reference, logits), same)


def joined(parts: Sequence[RowScores]) -> RowScores:
    """Return the rows of several calls as one."""
    return RowScores(*(np.concatenate(column) for column in zip(*parts, strict=True)))


class Mean(NamedTuple):
    """A mean, and its standard error; None from fewer than two values, or where one isn't finite."""

    mean: float
    error: float | None


def mean_and_error(values: Sequence[float]) -> Mean:
    mean = sum(values) / len(values)
    if len(values) < 2 or not math.isfinite(mean):
        return Mean(mean, None)
    return Mean(mean, float(np.std(values, ddof=1)) / math.sqrt(len(values)))


# -- one text ---------------------------------------------------------------------------------------------------------


class NotRestored(Refused):
    """A model's prompt cache can't be restored, so there is nothing to compare."""


class Reference:
    """The model on its live cache, and its results."""

    def __init__(self, model: Any):
        self.model = model
        self.nll: list[np.ndarray] = []  # of each window
        self.right: list[list[bool]] = []  # of each haystack, by depth

    def fill(self, prompt: list[int]) -> list[Any]:
        """Return a prompt cache that has seen these tokens."""
        prompt_cache = make_prompt_cache(self.model)
        for at in range(0, len(prompt), PREFILL):
            self.model(mx.array([prompt[at : at + PREFILL]]), cache=prompt_cache)
            mx.eval([layer.state for layer in prompt_cache])
            mx.clear_cache()
        return prompt_cache

    def go_on(self, prompt_cache: list[Any], inputs: list[int]) -> Iterator[mx.array]:
        """Yield logits (rows, vocabulary) of what follows each input, some rows at a time."""
        for at in range(0, len(inputs), CHUNK):
            logits = self.model(mx.array([inputs[at : at + CHUNK]]), cache=prompt_cache)[0]
            mx.eval(logits)
            yield logits


class Trial:
    """One codec: its cache, and what came of it."""

    def __init__(self, spec: str, codec: Codec, ram: int, model: str, basis_dir: Path):
        self.spec, self.codec = spec, codec
        self._model = model
        try:  # variables may name a server's directory and its fleet, which are not for this
            self.cache = PrefixCache(
                codec=codec,
                ram=ram,
                memory_reserve=0,
                ssd_dir=None,
                ssd=0,
                remote=None,
                basis_dir=basis_dir,
                trace=None,
            )
        except ValueError as error:  # another variable is bad
            raise Refused(str(error)) from None
        self.stored: list[Stored] = []  # of each window
        self.windows: list[RowScores] = []
        self.identical = True  # logits that are the reference's bit for bit
        self.right: list[list[bool]] = []
        self.plan: Plan | None = None
        self._last: list[int] = []

    def keep(self, prompt: list[int], live: list[Any]) -> Stored:
        """Store the prompt, and let the one before go: the namespace stays. NotRestored where that can't be done."""
        try:
            stored = self.cache.store(prompt, live, model=self._model)
        except CacheError as error:
            raise NotRestored(f"this model's prompt cache can't be stored: {error}") from error
        if self._last != prompt:
            if self._last:
                self.cache.remove(self._last, model=self._model)
            self._last = prompt
        entry = self.cache.lookup(prompt, model=self._model)
        if entry is None or entry.tokens != len(prompt):
            raise NotRestored(
                f"codec {self.spec}: of {len(prompt)} tokens that were stored {entry.tokens if entry else 0} can be "
                "found: this model's state can't be restored there, so there is nothing to compare"
            )
        self.plan = entry.plan
        return stored

    def restore(self) -> list[Any]:
        """Return the prompt kept last, decoded: a new live cache."""
        prompt_cache, rest = self.cache.fetch(self._last, model=self._model, leave=0)
        assert prompt_cache is not None
        assert not rest
        return prompt_cache


@contextmanager
def begun(
    codecs: Mapping[str, Codec], model: str, basis_dir: Path, basis_bytes: int, first: list[int], live: list[Any]
) -> Iterator[list[Trial]]:
    """Yield a trial of each codec, by its spec. As on a server, each cache has another prompt already: `first`, whose state
    is `live`. A basis takes `basis_bytes`, where a codec needs one.
    """
    # Two prompts are stored at once, and a basis may take a part of the RAM. This is a limit, not what is taken.
    ram = 4 * _nbytes(live) + SPARE + BASES_SHARE * basis_bytes
    with ExitStack() as closing:
        trials = []
        for spec, codec in codecs.items():
            trials.append(Trial(spec, codec, ram, model, basis_dir))
            closing.callback(trials[-1].cache.close)
        for trial in trials:
            trial.keep(first, live)
        del live  # its memory goes
        yield trials


def read_on(reference: Reference, trials: list[Trial], window: Excerpt) -> None:
    """Read the tokens after a prompt, given one after the other: on the live cache, then on each restored one."""
    live = reference.fill(window.prompt)
    for trial in trials:
        trial.stored.append(trial.keep(window.prompt, live))
    expected = list(reference.go_on(live, window.inputs))
    targets = [window.targets[at : at + CHUNK] for at in range(0, len(window.targets), CHUNK)]
    reference.nll.append(np.concatenate([surprise(*pair) for pair in zip(expected, targets, strict=True)]))
    del live
    for trial in trials:
        parts = []
        logits = reference.go_on(trial.restore(), window.inputs)
        for before, after, chunk in zip(expected, logits, targets, strict=True):
            parts.append(compare(before, after, chunk))
            trial.identical = trial.identical and bool(mx.array_equal(before, after))
        trial.windows.append(joined(parts))
        mx.clear_cache()


def _nbytes(prompt_cache: list[Any]) -> int:
    leaves = tree_flatten([layer.state for layer in prompt_cache])
    return sum(leaf.nbytes for _, leaf in leaves if isinstance(leaf, mx.array))
