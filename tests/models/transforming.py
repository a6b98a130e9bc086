"""Bases for tests of codec transform: of tiny models of random weights, calibrated on a few windows in half a second, and of
the states that `tests.models.states` makes of tokens, which need no model.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from prefixcache.calibration.design import design
from prefixcache.calibration.layers import eligible_layers
from prefixcache.calibration.statistics import Collection, collect
from prefixcache.codecs.transform.bases import Bases
from prefixcache.codecs.transform.layer import grouped
from tests.models import states
from tests.models.families import BASE, FAMILIES, WIDE, _build
from tools.soak.bases import basis_of

SINKS = 4
VOCABULARY = 128
DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}


class Tiny(NamedTuple):
    """A model, its identity, the bytes of its basis, and the layers of each of its groups."""

    model: nn.Module
    identity: str
    basis: bytes
    groups: list[list[int]]

    def saved(self, folder: Path) -> Path:
        Bases(folder).save(self.basis)
        return folder

    def prefill(self, tokens: Sequence[int], prompt_cache: list[Any] | None = None, step: int = 0) -> list[Any]:
        """The prompt cache after these tokens, computed `step` at a time."""
        prompt_cache = make_prompt_cache(self.model) if prompt_cache is None else prompt_cache
        for at in range(0, len(tokens), step or len(tokens)):
            self.model(mx.array(tokens[at : at + (step or len(tokens))])[None], cache=prompt_cache)
            mx.eval([layer.state for layer in prompt_cache])
        return prompt_cache


@cache
def tiny(family: str, channels: int = 256, left_over: int = 0) -> Tiny:
    """A model of `tests.models.families`, or "llama float16", "qwen2 bias" and "smollm3", with groups of so many
    channels; its last `left_over` layers are in none.
    """
    model = _model(family)
    layers, _ = eligible_layers(model)
    groups, _ = grouped(layers[: len(layers) - left_over], channels)
    windows = [prompt(200, seed) for seed in (1, 2)]
    statistics = collect(model, groups, windows, [prompt(200, 3)], Collection(fisher_windows=1, draws=2))
    identity = f"{family}@{channels}-{left_over}-{family}"
    basis = design(statistics, identity, "random tokens", SINKS)
    return Tiny(model, identity, basis, [[layer.index for layer in group] for group in groups])


def _model(family: str) -> nn.Module:
    if family.startswith("llama ") and family != "llama":
        return _build("llama", BASE, DTYPES[family.split()[1]])
    if family == "qwen2":  # its projections have biases, of zero unless they are drawn
        model = FAMILIES["qwen2"].build()
        for number, layer in enumerate(model.layers):
            for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                projection.bias = mx.random.normal(projection.bias.shape, key=mx.random.key(number))
        return model
    if family == "smollm3":
        return _build("smollm3", WIDE | {"no_rope_layer_interval": 2}, mx.float32)
    return FAMILIES[family].build()


def prompt(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=count)


# -- of states that are made of tokens -----------------------------------------------------------------------------------


@cache
def uneven_basis(identity: str, layers: int = 2) -> bytes:
    """A basis of what `states.uneven` makes: one head of 32 values a layer, float32, all in one group."""
    tokens = prompt(2000, 3)
    rows = [
        tuple(states.uneven_rows(tokens, at)[0].swapaxes(0, 1) for at in (layer, layer + 7)) for layer in range(layers)
    ]
    return basis_of(identity, [rows])
