"""Gradients of what a model says next with respect to the keys and values that it has stored.

For any family that mlx-lm can train: the eligible layers' caches give the model arrays that MLX differentiates, the
others are copies of the prefilled ones and stay constant.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from prefixcache.calibration.rows import EveryRow, prefilled
from prefixcache.codecs.interchange import Array, element
from prefixcache.codecs.transform.layer import Layer

# What the likelihood is multiplied by, so that float16 doesn't round small gradients to 0; the next where it overflows.
LOSS_SCALES = (2.0**12, 2.0**8, 2.0**4, 1.0)


class NoGradient(Exception):
    """MLX can't differentiate the model, or what comes out isn't finite; says why."""


class _Prefixed(EveryRow):
    """A cache that holds a prefix and gives it back beside the new rows, all of it differentiable."""

    def __init__(self, keys: mx.array, values: mx.array, window: int):
        super().__init__(window)
        self.keys, self.values, self.offset = keys, values, keys.shape[2]

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys = mx.concatenate([self.keys, keys], axis=2)
        self.values = mx.concatenate([self.values, values], axis=2)
        self.offset += keys.shape[2]
        return self.keys, self.values


class Gradients:
    """Draws tokens from the model after each token of a continuation, and differentiates their likelihood.

    `model` reads `tokens`, `prefix` of which are stored. Every draw is one pass forth and one back.
    """

    def __init__(self, model: nn.Module, layers: Sequence[Layer], tokens: Sequence[int], prefix: int):
        self._model, self._layers = model, layers
        self._continuation = mx.array(list(tokens[prefix:]))[None]
        self._prompt_cache = prefilled(model, tokens[:prefix])
        self._stored = [
            (cache.keys[..., :prefix, :].astype(mx.float32), cache.values[..., :prefix, :].astype(mx.float32))
            for cache in (self._prompt_cache[layer.index] for layer in layers)
        ]
        mx.eval(self._stored)
        halves = any(layer.dtype == "float16" for layer in layers)
        self._scales: Sequence[float] = LOSS_SCALES if halves else LOSS_SCALES[-1:]

    def draw(self, seed: int) -> list[tuple[Array, Array]]:
        """Draw a token after each token of the continuation, and differentiate the sum of their log p. Return each layer's
        gradients by its stored keys, as RoPE turned them, and by its values: float32 (heads, prefix, width).

        The same `seed` draws the same tokens. NoGradient where there is none.
        """
        while True:
            scale = self._scales[0]
            gradients = self._differentiated(seed, scale)
            finite = mx.all(mx.stack([mx.all(mx.isfinite(g)) for pair in gradients for g in pair]))
            if finite.item():
                break
            if len(self._scales) == 1:
                raise NoGradient("the gradients aren't finite")
            self._scales = self._scales[1:]
        scaled = np.float32(scale)
        rows = [(np.array(keys)[0] / scaled, np.array(values)[0] / scaled) for keys, values in gradients]
        mx.clear_cache()
        return rows

    def _differentiated(self, seed: int, scale: float) -> list[tuple[mx.array, mx.array]]:
        def likelihood(stored: list[tuple[mx.array, mx.array]]) -> mx.array:
            logits = self._model(self._continuation, cache=self._caches(stored))[0].astype(mx.float32)
            drawn = mx.random.categorical(mx.stop_gradient(logits), key=mx.random.key(seed))
            log_likelihoods = mx.take_along_axis(logits, drawn[:, None], axis=-1)[:, 0] - mx.logsumexp(logits, axis=-1)
            return scale * log_likelihoods.sum()

        with _training(self._model):
            try:
                gradients = mx.grad(likelihood)(self._stored)
                mx.eval(gradients)
            except (RuntimeError, ValueError, NotImplementedError) as error:
                if "vjp" not in str(error).lower():
                    raise
                raise NoGradient(str(error).strip()) from error
        return gradients

    def _caches(self, stored: list[tuple[mx.array, mx.array]]) -> list[Any]:
        of_layer = {
            layer.index: (pair, element(layer.dtype).mlx, layer.window)
            for layer, pair in zip(self._layers, stored, strict=True)
        }
        caches = []
        for index, cache in enumerate(self._prompt_cache):
            if index in of_layer:
                (keys, values), dtype, window = of_layer[index]
                caches.append(_Prefixed(keys.astype(dtype), values.astype(dtype), window))
            else:
                caches.append(copy.deepcopy(cache))  # the model writes into it
        return caches


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """Train as mlx-lm does: recurrent layers then do without kernels of theirs that have no gradient."""
    before = model.training
    model.train()
    try:
        yield
    finally:
        model.train(before)
