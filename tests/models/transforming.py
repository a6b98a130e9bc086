"""Bases for tests of codec transform: of tiny models of random weights, calibrated on a few windows in half a second, and of
the states that `tests.models.states` makes of tokens, which need no model.
"""

from __future__ import annotations

import random
import tempfile
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
from tools.soak.bases import LayerRows, basis_of

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
def tiny(family: str, channels: int = 256, left_over: int = 0, *, windows: bool = True) -> Tiny:
    """A model of `tests.models.families`, or "llama float16", "qwen2 bias" and "smollm3", with groups of so many
    channels; its last `left_over` layers are in none, and without `windows` those that have one neither.
    """
    model = _model(family)
    layers = [layer for layer in eligible_layers(model).layers if windows or not layer.window]
    groups, _ = grouped(layers[: len(layers) - left_over], channels)
    read = [prompt(200, seed) for seed in (1, 2)]
    statistics = collect(model, groups, read, [prompt(200, 3)], Collection(fisher_windows=1, draws=2))
    identity = f"{family}@{channels}-{left_over}-{family}{windows}"
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


_folders: list[tempfile.TemporaryDirectory[str]] = []  # until the program ends


@cache
def uneven_bases(windows: tuple[int | None, ...] = (0, 0)) -> Path:
    """A folder with the `uneven_basis` of model "m"."""
    _folders.append(tempfile.TemporaryDirectory(prefix="bases-"))
    folder = Path(_folders[-1].name)
    Bases(folder).save(uneven_basis("m", windows))
    return folder


@cache
def uneven_basis(identity: str, windows: tuple[int | None, ...] = (0, 0)) -> bytes:
    """A basis of what `states.uneven` makes: one head of 32 values a layer, float32. Of each layer the window, 0 for none;
    those of one window are a group, and those of None in none.
    """
    tokens = prompt(2000, 3)
    groups: dict[int, list[LayerRows]] = {}
    for layer, window in enumerate(windows):
        if window is not None:
            rows = [states.uneven_rows(tokens, at)[0].swapaxes(0, 1) for at in (layer, layer + 7)]
            groups.setdefault(window, []).append(LayerRows(layer, rows[0], rows[1], window))
    return basis_of(identity, list(groups.values()))
