"""Which layers of mlx-lm's families can be transformed, and whether their rotation is the one that was found."""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from prefixcache.calibration.layers import eligible_layers, measure
from prefixcache.codecs.interchange import as_float32, copy_out, name_of
from prefixcache.codecs.transform.rope import Rope
from tests.models.families import BASE, FAMILIES, WIDE, WINDOW, _build

NO_MODULE = "keys depend on the position, and no RoPE module of the model explains how"
VALUES = "values depend on the position"
RECURRENT, CHUNKED = "recurrent state", "chunked attention"
SEVERAL = "several caches in one"

# Per family: (pairs that turn, interleaved) of each eligible layer, and why the others aren't.
LAYERS: dict[str, tuple[dict[int, tuple[int, bool]], dict[int, str]]] = {
    "llama": (dict.fromkeys(range(4), (16, False)), {}),
    "llama-bf16": (dict.fromkeys(range(4), (16, False)), {}),
    "qwen2": (dict.fromkeys(range(4), (16, False)), {}),
    "gemma2": (dict.fromkeys(range(4), (16, False)), {}),
    "openelm": (dict.fromkeys(range(4), (16, False)), {}),
    "nanbeige": (dict.fromkeys(range(4), (16, False)), {}),
    "llama4_text": ({i: (0, False) if i == 3 else (16, True) for i in range(5)}, {}),
    "nemotron-nas": (dict.fromkeys((0, 2), (16, False)), {1: "no keys or values"}),
    "afm7": ({}, dict.fromkeys(range(2), NO_MODULE)),  # it normalises keys by channels after RoPE
    "deepseek_v2": ({}, dict.fromkeys(range(4), NO_MODULE)),  # a key's last values turn
    "deepseek_v3": ({}, dict.fromkeys(range(4), VALUES)),
    "deepseek_v32": ({}, dict.fromkeys(range(4), SEVERAL)),
    "llama-sliding": (dict.fromkeys(range(4), (16, False)), {}),
    "gemma3_text": (dict.fromkeys(range(4), (16, False)), {}),
    "gemma3n": (dict.fromkeys(range(4), (16, False)), {}),  # asks layer 0 for the position
    "gemma4_text": (dict.fromkeys((0, 2), (16, False)) | dict.fromkeys((1, 3), (32, False)), {}),
    "gpt_oss": (dict.fromkeys(range(4), (16, False)), {}),
    "cohere2": (dict.fromkeys(range(3), (16, True)) | {3: (0, False)}, {}),
    "mimo_v2_flash": (dict.fromkeys(range(4), (12, False)), {}),
    "llama4-256": ({3: (0, False)}, dict.fromkeys((0, 1, 2, 4), CHUNKED)),
    "mamba": ({}, dict.fromkeys(range(4), RECURRENT)),
    "jamba": (dict.fromkeys((1, 3), (0, False)), dict.fromkeys((0, 2), RECURRENT)),
    "falcon_h1": ({}, dict.fromkeys(range(4), SEVERAL)),
    "qwen3_next": ({3: (8, False)}, dict.fromkeys(range(3), RECURRENT)),
    "qwen3_5-bf16": ({3: (4, False)}, dict.fromkeys(range(3), RECURRENT)),
    "recurrent_gemma": ({2: (8, False)}, dict.fromkeys((0, 1, 3), RECURRENT)),
    "deepseek_v41": ({}, dict.fromkeys(range(4), "a cache of its own, LayerCache")),
}

# The layers with windows of WINDOW tokens.
WINDOWED = {
    "llama-sliding": [0, 1, 3],
    "gemma3_text": [0, 1, 3],
    "gemma3n": [0, 2],
    "gemma4_text": [0, 2],
    "gpt_oss": [0, 2],
    "cohere2": [0, 1, 2],
    "mimo_v2_flash": [1, 2],
    "recurrent_gemma": [2],
}

LONGROPE = {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [1 + i / 4 for i in range(16)]}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}

# name: (module of mlx-lm, config, dtype, (pairs, interleaved, scale) of the first and of the last layer)
VARIANTS: dict[str, tuple[str, dict[str, Any], mx.Dtype, tuple[int, bool, float], tuple[int, bool, float]]] = {
    "smollm3": ("smollm3", BASE | {"no_rope_layers": [1, 1, 1, 0]}, mx.float32, (16, False, 1), (0, False, 1)),
    "phi3-longrope": (
        "phi3",
        WIDE | {"rope_scaling": LONGROPE, "original_max_position_embeddings": 2048},
        mx.float32,
        (16, False, 1.04447),
        (16, False, 1.04447),
    ),
    "phi3-partial": ("phi3", WIDE | {"partial_rotary_factor": 0.5}, mx.float32, (8, False, 1), (8, False, 1)),
    "glm4": ("glm4", WIDE | {"partial_rotary_factor": 0.5}, mx.float16, (8, True, 1), (8, True, 1)),
    "llama3": ("llama", BASE | {"rope_scaling": LLAMA3}, mx.float32, (16, False, 1), (16, False, 1)),
    "linear": (
        "llama",
        BASE | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        mx.float32,
        (16, False, 1),
        (16, False, 1),
    ),
    "yarn": ("llama", BASE | {"rope_scaling": YARN}, mx.bfloat16, (16, False, 1.20794), (16, False, 1.20794)),
    "qwen3": ("qwen3", BASE, mx.float32, (16, False, 1), (16, False, 1)),
}


def of_first_layer_repeated(model: nn.Module, index: int, rotation: Rope) -> np.ndarray:
    """Undone keys (tokens, heads, width) of one token read 40 times, from a cache that mlx-lm filled."""
    prompt_cache = make_prompt_cache(model)
    mx.eval(model(mx.array([[33] * 40]), cache=prompt_cache))
    keys = prompt_cache[index].keys[0, :, :40]
    rows = as_float32(copy_out(keys), name_of(keys.dtype)).swapaxes(0, 1)
    return rotation.undo(rows, 0)


@pytest.mark.parametrize("name", sorted(LAYERS.keys() & FAMILIES.keys()))
def test_families_have_the_layers_that_are_listed(name):
    expected, reasons = LAYERS[name]
    model = FAMILIES[name].build()
    layers, refused = eligible_layers(model)
    rotations = {layer.index: (len(layer.rotation.frequencies), layer.rotation.interleaved) for layer in layers}
    assert rotations == expected
    assert refused == reasons
    assert all(layer.rotation.scale == 1 for layer in layers)
    assert {layer.index: layer.window for layer in layers if layer.window} == dict.fromkeys(
        WINDOWED.get(name, ()), WINDOW
    )


@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_rope_are_measured(name):
    module, config, dtype, *expected = VARIANTS[name]
    layers, refused = eligible_layers(_build(module, config, dtype))
    assert len(layers) == 4
    assert not refused
    for layer, (pairs, interleaved, scale) in zip((layers[0], layers[-1]), expected, strict=True):
        assert (len(layer.rotation.frequencies), layer.rotation.interleaved) == (pairs, interleaved)
        assert layer.rotation.scale == pytest.approx(scale, rel=1e-5)


FIRST_LAYERS = {
    **{
        name: FAMILIES[name].build
        for name in ("llama", "llama-bf16", "qwen2", "gemma2", "llama4_text", "mimo_v2_flash")
    },
    **{name: partial(_build, *VARIANTS[name][:3]) for name in VARIANTS},
}


@pytest.mark.parametrize("name", FIRST_LAYERS)
def test_a_repeated_token_has_one_key_in_the_first_layer_once_the_rotation_is_undone(name):
    model = FIRST_LAYERS[name]()
    layer = eligible_layers(model)[0][0]
    assert layer.index == 0
    undone = of_first_layer_repeated(model, 0, layer.rotation)
    bound = (1e-4 if layer.dtype == "float32" else 0.02) * np.abs(undone).max()
    assert np.abs(undone - undone[:1]).max() < bound


def test_a_layer_is_described_as_its_cache_is():
    layers, _ = eligible_layers(FAMILIES["mimo_v2_flash"].build())
    last = layers[-1]
    assert (last.index, last.heads, last.key_width, last.value_width, last.dtype) == (3, 2, 48, 32, "float32")
    assert last.channels == 2 * (48 + 32)


def test_latents_are_refused_by_their_widths():
    model = _build("kimi_linear", FAMILIES["kimi_linear"].build.args[1] | {"kv_lora_rank": 256}, mx.float32)
    layers, refused = eligible_layers(model)
    assert not layers
    assert refused[3] == "keys of 256 values and values of 32: a latent"


class Sines(nn.Module):
    """RoPE, applied by hand instead of by a module."""

    def __call__(self, x: mx.array, offset: int = 0) -> mx.array:
        return mx.fast.rope(x, x.shape[-1], traditional=False, base=777.0, scale=1.0, offset=offset)


def test_rope_without_a_module_of_that_name_is_not_taken_for_none():
    model = FAMILIES["llama"].build()
    model.layers[2].self_attn.rope = Sines()
    layers, refused = eligible_layers(model)
    assert [layer.index for layer in layers] == [0, 1, 3]
    assert refused == {2: NO_MODULE}


def test_frequencies_are_as_exact_as_the_module_has_them():
    rotation = measure(nn.RoPE(128, base=1e7), 128)
    assert rotation is not None
    np.testing.assert_allclose(rotation.frequencies, 1e7 ** -(np.arange(64) / 64), rtol=3e-6)
    assert rotation.scale == 1


def test_a_base_that_moves_with_the_length_is_no_rotation():
    config = BASE | {"max_position_embeddings": 512, "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}
    layers, refused = eligible_layers(_build("llama", config, mx.float32))
    assert not layers
    assert set(refused.values()) == {NO_MODULE}
