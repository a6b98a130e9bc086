"""What `collect` gathers of tiny models; the judges are NumPy's covariance and finite differences."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from prefixcache.calibration import checkpoint as checkpoint_module
from prefixcache.calibration import statistics
from prefixcache.calibration.gradients import Gradients
from prefixcache.calibration.layers import eligible_layers
from prefixcache.calibration.statistics import Collection, Statistics, collect
from prefixcache.codecs.interchange import as_float32, copy_out
from prefixcache.codecs.transform.layer import Layer
from tests.models.families import BASE, FAMILIES, _build

SINKS = 4


def windows_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(128), k=length) for length in lengths]


WINDOWS, HELD_BACK = windows_of(90, 40, 120, 60), windows_of(50, 30, seed=1)


@cache
def tiny(name: str) -> tuple[nn.Module, list[Layer]]:
    model = FAMILIES[name].build()
    return model, eligible_layers(model)[0]


def rows_at_once(model: nn.Module, layers: list[Layer], window: list[int]) -> np.ndarray:
    """float64 (tokens, channels): the rows that are calibrated on, of a prefill in one call."""
    prompt_cache = make_prompt_cache(model)
    mx.eval(model(mx.array([window]), cache=prompt_cache))
    parts = []
    for layer in layers:
        cache = prompt_cache[layer.index]
        pair = (copy_out(array[0, :, : len(window)]) for array in (cache.keys, cache.values))
        keys, values = (as_float32(rows, layer.dtype).swapaxes(0, 1) for rows in pair)
        parts += [layer.rotation.undo(keys, 0), values]
    return np.concatenate([part.reshape(len(window), -1) for part in parts], axis=1)[SINKS:].astype(np.float64)


def same(one: Statistics, other: Statistics) -> bool:
    pairs = [(one.blocks[key], other.blocks[key]) for key in one.blocks]
    for mine, yours in zip(one.groups, other.groups, strict=True):
        pairs += zip(mine[1:], yours[1:], strict=True)
    counts = (one.tokens, one.metric, one.layers) == (other.tokens, other.metric, other.layers)
    return counts and all(np.array_equal(mine, yours) for mine, yours in pairs)


# -- means, covariances, samples --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "llama-bf16", "openelm", "mimo_v2_flash", "qwen3_next"])
def test_mean_and_covariance_are_those_of_the_rows(name):
    model, layers = tiny(name)
    groups = [layers[:1], layers[1:]] if len(layers) > 1 else [layers]
    windows = windows_of(700, 90, 300)
    gathered = collect(model, groups, windows, HELD_BACK, Collection(fisher_windows=1, draws=1))
    assert gathered.tokens == sum(len(window) - SINKS for window in windows)
    for group, found in zip(groups, gathered.groups, strict=True):
        rows = np.concatenate([rows_at_once(model, group, window) for window in windows])
        spread = rows.std(axis=0)
        bound = 2e-2 if name == "llama-bf16" else 1e-3  # bf16 rounds otherwise in chunks
        assert np.abs((found.mean - rows.mean(axis=0)) / spread).max() < bound
        assert np.abs((found.covariance - np.cov(rows.T, bias=True)) / np.outer(spread, spread)).max() < 2 * bound
        assert found.layers == tuple(group)
        assert np.array_equal(found.covariance, found.covariance.T)


def test_a_sample_is_every_nth_row_of_the_windows_held_back(monkeypatch):
    monkeypatch.setattr(statistics, "SAMPLE_ROWS", 30)
    model, layers = tiny("llama")
    held_back = windows_of(60, 45, 80, 25)
    gathered = collect(model, [layers], WINDOWS, held_back, Collection(fisher_windows=1, draws=1))
    rows = np.concatenate([rows_at_once(model, layers, window) for window in held_back])
    stride = round(len(rows) / 30)
    assert gathered.groups[0].sample.dtype == np.float16
    np.testing.assert_allclose(gathered.groups[0].sample, rows[::stride], rtol=2e-3, atol=2e-3)


def test_all_rows_are_the_sample_of_few():
    model, layers = tiny("llama")
    gathered = collect(model, [layers], WINDOWS, windows_of(60, 45), Collection(fisher_windows=1, draws=1))
    assert len(gathered.groups[0].sample) == 97


def test_windows_held_back_are_in_nothing_but_the_sample():
    model, layers = tiny("llama")
    one, other = (
        collect(model, [layers], WINDOWS, windows_of(60, 45, seed=seed), Collection(fisher_windows=4, draws=1))
        for seed in (1, 2)
    )
    assert not np.array_equal(one.groups[0].sample, other.groups[0].sample)
    assert same(one, replace(other, groups=(other.groups[0]._replace(sample=one.groups[0].sample),)))
    assert one.tokens == sum(len(window) - SINKS for window in WINDOWS)


# -- the Fisher metric ------------------------------------------------------------------------------------------------


def said(model: nn.Module, prompt_cache: list[Any], continuation: list[int], drawn: mx.array | None, seed: int) -> Any:
    logits = model(mx.array([continuation]), cache=prompt_cache)[0].astype(mx.float32)
    if drawn is None:
        return mx.random.categorical(logits, key=mx.random.key(seed))
    logits = np.array(logits, np.float64)
    peak = logits.max(axis=-1, keepdims=True)
    logits -= peak + np.log(np.exp(logits - peak).sum(axis=-1, keepdims=True))
    return logits[np.arange(len(continuation)), np.array(drawn)].sum()


@pytest.mark.parametrize(("name", "at"), [("llama", 1), ("llama4_text", 0), ("yarn", 2), ("gpt_oss", 1)])
def test_the_fisher_metric_is_that_of_finite_differences(name, at):
    if name == "yarn":
        scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 4096}
        model = _build("llama", BASE | {"rope_scaling": scaling}, mx.float32)
    else:
        model, _ = tiny(name)
    layer = eligible_layers(model)[0][at]
    window, prefix, head, step = windows_of(18)[0], 9, 1, 2e-2
    gathered = collect(model, [[layer]], [window], HELD_BACK, Collection(draws=1))

    filled = make_prompt_cache(model)
    mx.eval(model(mx.array([window[:prefix]]), cache=filled))
    drawn = said(model, copy.deepcopy(filled), window[prefix:], None, seed=0)
    for part, width in (("keys", layer.key_width), ("values", layer.value_width)):
        gradients = np.zeros((prefix - SINKS, width))
        for token in range(SINKS, prefix):
            for channel in range(width):
                for sign in (1, -1):
                    prompt_cache = copy.deepcopy(filled)
                    rows = getattr(prompt_cache[layer.index], part)
                    changed = np.array(rows[0, :, :prefix]).swapaxes(0, 1)
                    if part == "keys":
                        changed = layer.rotation.undo(changed, 0)
                    changed[token, head, channel] += sign * step
                    if part == "keys":
                        changed = layer.rotation.redo(changed, 0)
                    rows[..., :prefix, :] = mx.array(changed.swapaxes(0, 1)[None])
                    likelihood = said(model, prompt_cache, window[prefix:], drawn, seed=0)
                    gradients[token - SINKS, channel] += sign * likelihood / (2 * step)
        expected = gradients.T @ gradients / len(gradients)
        error = np.linalg.norm(gathered.blocks[layer.index, part][head] - expected) / np.linalg.norm(expected)
        assert error < 0.02, part


def test_the_fisher_metric_is_the_mean_over_windows_and_draws():
    model, layers = tiny("llama")
    windows = windows_of(40, 30, 60)
    gathered = collect(model, [layers[1:2]], windows, HELD_BACK, Collection(fisher_windows=2, draws=3))
    expected, count = np.zeros((2, 32, 32)), 0
    for number, window in enumerate((windows[0], windows[2])):
        gradients = Gradients(model, layers[1:2], window, len(window) // 2)
        for draw in range(3):
            values = gradients.draw(3 * number + draw)[0][1][:, SINKS:].astype(np.float64)
            expected += np.einsum("hta,htb->hab", values, values)
            count += values.shape[1]
    np.testing.assert_allclose(gathered.blocks[1, "values"], expected / count, rtol=1e-4, atol=1e-9)


def relative(found: Statistics, expected: Statistics) -> float:
    return max(
        float(np.linalg.norm(found.blocks[key] - expected.blocks[key]) / np.linalg.norm(expected.blocks[key]))
        for key in expected.blocks
    )


def calm(dtype: mx.Dtype, likelihood: float = 1.0) -> nn.Module:
    """A model whose draws don't hang on rounding, of the same weights in every dtype, rounded to bf16."""
    model = _build("llama", BASE, mx.bfloat16)
    model.set_dtype(mx.float32)
    for module in (model.lm_head, model.model.norm):  # half of it each, so that float16 can hold both
        module.weight = module.weight * likelihood**0.5
    model.set_dtype(dtype)
    return model


@pytest.mark.parametrize("likelihood", [2.0**-4, 2.0**-20])  # the second's gradients are below what float16 has
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_gives_nearly_the_metric_of_float32(dtype, likelihood):
    found, expected = (
        collect(model, [eligible_layers(model)[0]], windows_of(120, 120), HELD_BACK, Collection(draws=2))
        for model in (calm(dtype, likelihood), calm(mx.float32, likelihood))
    )
    assert relative(found, expected) < (0.03 if dtype == mx.float16 else 0.2)


def test_quantised_weights_give_the_metric_of_what_they_stand_for():
    quantised = calm(mx.float32, 2.0**-4)
    nn.quantize(quantised, group_size=32, bits=4)
    plain = calm(mx.float32, 2.0**-4)
    for (_, theirs), (_, mine) in zip(quantised.named_modules(), plain.named_modules(), strict=True):
        if isinstance(mine, (nn.Linear, nn.Embedding)):
            mine.weight = mx.dequantize(theirs.weight, theirs.scales, theirs.biases, group_size=32, bits=4)
    layers = eligible_layers(plain)[0]
    found, expected = (
        collect(model, [layers], windows_of(120), HELD_BACK, Collection(draws=2)) for model in (quantised, plain)
    )
    assert relative(found, expected) < 1e-2


@pytest.mark.parametrize(
    "name",
    sorted(
        {
            "qwen2",
            "gemma2",
            "llama4_text",
            "openelm",
            "nanbeige",
            "nemotron-nas",
            "llama-sliding",
            "gemma3_text",
            "gemma3n",
            "gemma4_text",
            "gpt_oss",
            "cohere2",
            "mimo_v2_flash",
            "step3p5",
            "iquestloopcoder",
            "llama4-256",
            "lfm2",
            "jamba",
            "nemotron_h",
            "granitemoehybrid",
            "plamo2",
            "qwen3_next",
            "qwen3_5",
            "qwen3_5-bf16",
            "olmo_hybrid",
            "bailing_moe_linear",
            "gear",
        }
        & FAMILIES.keys()
    ),
)
def test_families_are_differentiated(name):
    model, layers = tiny(name)
    gathered = collect(model, [layers], windows_of(150), HELD_BACK, Collection(draws=1))
    assert gathered.metric == "fisher"
    assert np.isfinite(gathered.groups[0].covariance).all()
    for layer in layers:
        for part, width in (("keys", layer.key_width), ("values", layer.value_width)):
            block = gathered.blocks[layer.index, part]
            assert block.shape == (layer.heads, width, width)
            assert np.isfinite(block).all()
            assert (np.trace(block, axis1=1, axis2=2) > 0).all()
    assert not model.training


class Undifferentiable(nn.Module):
    def __init__(self, head: nn.Module):
        super().__init__()
        self.head = head

    def __call__(self, x: mx.array) -> mx.array:
        return self.head(x) + 0 * mx.linalg.svd(x.reshape(-1, x.shape[-1]), compute_uv=False, stream=mx.cpu).sum()


def test_without_a_gradient_errors_are_weighed_by_the_spread_of_keys_and_values(caplog):
    model = FAMILIES["llama"].build()
    layers = eligible_layers(model)[0]
    model.lm_head = Undifferentiable(model.lm_head)
    gathered = collect(model, [layers[:1], layers[1:]], windows_of(100), HELD_BACK)
    assert gathered.metric == "spread"
    assert "no gradient of this model" in caplog.text
    rows = rows_at_once(model, layers, windows_of(100)[0])
    values_of_layer_2 = rows[:, 2 * 128 + 64 : 3 * 128]
    expected = np.eye(32) / values_of_layer_2.var(axis=0).mean()
    np.testing.assert_allclose(gathered.blocks[2, "values"], np.stack([expected] * 2), rtol=1e-3)


# -- again, interrupted, refused --------------------------------------------------------------------------------------


def asked(path: Any = None, progress: Any = lambda *_: None, **changes: Any) -> Statistics:
    model, layers = tiny("qwen3_5-bf16" if changes.pop("hybrid", False) else "llama")
    windows = (changes.pop("windows", WINDOWS), changes.pop("held_back", HELD_BACK))
    collection = replace(Collection(fisher_windows=3, draws=2, checkpoint=path), **changes)
    groups = [layers[:3], layers[3:]] if len(layers) > 1 else [layers]
    return collect(model, groups, *windows, collection, progress)


@pytest.mark.parametrize("hybrid", [False, True])
def test_the_same_call_gives_the_same_bits(hybrid):
    assert same(asked(hybrid=hybrid), asked(hybrid=hybrid))


def test_progress_counts_windows_and_draws():
    calls: list[tuple[str, int, int]] = []
    asked(progress=lambda *call: calls.append(call))
    assert calls == [("prefill", i, 6) for i in range(1, 7)] + [("fisher", i, 6) for i in range(1, 7)]


class Interruption(Exception):
    pass


@pytest.mark.parametrize("interval", [0.0, 1e9])
def test_an_interrupted_calibration_goes_on_and_ends_with_the_same_bits(tmp_path, monkeypatch, interval):
    monkeypatch.setattr(checkpoint_module, "INTERVAL", interval)
    monkeypatch.setattr(checkpoint_module, "SHARE", 0)
    path, calls = tmp_path / "calibration.npz", []

    def interrupted_at(phase: str, done: int, of: int) -> None:
        calls.append((phase, done))
        if (phase, done) in stops:
            stops.remove((phase, done))
            raise Interruption

    stops = {("prefill", 2), ("prefill", 4), ("prefill", 5), ("fisher", 3), ("fisher", 4)}
    for _ in range(5):
        with pytest.raises(Interruption):
            asked(path, interrupted_at)
    found = asked(path, interrupted_at)
    assert same(found, asked())
    expected = 6 + 6 + 1 + 2 if interval == 0 else 6 + 2 + 4 + 5 + 6 + 3 + 4  # all, and what was read anew
    assert len(calls) == expected
    assert [file.name for file in tmp_path.iterdir()] == ["calibration.npz"]


def test_what_is_complete_is_not_read_again(tmp_path):
    calls: list[Any] = []
    first = asked(tmp_path / "calibration.npz")
    assert same(first, asked(tmp_path / "calibration.npz", lambda *call: calls.append(call)))
    assert not calls


@pytest.mark.parametrize(
    "change",
    [
        {"identity": "another"},
        {"windows": windows_of(90, 40, 120, 61)},
        {"held_back": HELD_BACK[:1]},
        {"draws": 1},
        {"sinks": 3},
    ],
)
def test_a_checkpoint_of_something_else_is_ignored(tmp_path, caplog, change):
    caplog.set_level("INFO", "prefixcache")
    path = tmp_path / "calibration.npz"
    asked(path)
    assert same(asked(path, **change), asked(**change))
    assert "of another model, text or grouping" in caplog.text


@pytest.mark.parametrize("damage", ["cut", "flipped", "method", "flags", "text", "empty"])
def test_a_damaged_checkpoint_is_ignored(tmp_path, caplog, damage):
    path = tmp_path / "calibration.npz"
    expected = asked(path)
    data = bytearray(path.read_bytes())
    half, member = len(data) // 2, data.index(b"PK\x01\x02")  # of the zip's directory
    at, bit = {"method": (member + 10, 4), "flags": (member + 8, 1)}.get(damage, (half, 1))
    data[at] ^= bit
    path.write_bytes({"cut": data[:half], "text": b"a text", "empty": b""}.get(damage, data))
    assert same(asked(path), expected)
    assert "damaged checkpoint" in caplog.text


def test_groups_and_windows_that_cannot_be_collected_are_refused():
    model, layers = tiny("llama")
    for groups in ([], [[]], [layers[:2], layers[1:]]):
        with pytest.raises(ValueError, match="give lists of one layer or more"):
            collect(model, groups, WINDOWS, HELD_BACK)
    with pytest.raises(ValueError, match="no windows of tokens"):
        collect(model, [layers], [], HELD_BACK)
    with pytest.raises(ValueError, match="or none held back"):
        collect(model, [layers], WINDOWS, [])
    with pytest.raises(ValueError, match="window 1 has 9 tokens; give windows of 10 or more"):
        collect(model, [layers], windows_of(40, 9), HELD_BACK)
