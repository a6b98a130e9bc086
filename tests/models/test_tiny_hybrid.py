"""What `tools.tiny_hybrid` trains with is mlx-lm's arithmetic."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.gated_delta import compute_g, gated_delta_ops

from tools.tiny_hybrid import CHUNK, CONFIG, Convolution, gated_delta_in_chunks


@pytest.mark.parametrize(
    "alike", [False, True]
)  # keys: then the triangular system is as far from the identity as can be
@pytest.mark.parametrize("step", [-1.0, -7.0])  # heads that forget at once, and that keep for long
def test_the_delta_rule_in_chunks_is_the_recurrence(alike: bool, step: float) -> None:
    rng = np.random.default_rng(0)
    tokens, heads, width = 3 * CHUNK, CONFIG["linear_num_value_heads"], 32

    def drawn(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape).astype(np.float32))

    query, key, value = (drawn(2, tokens, heads, width) for _ in range(3))
    key = key / mx.linalg.norm(key, axis=-1, keepdims=True)
    if alike:
        key = mx.broadcast_to(key[:, :1], key.shape)
    raw_decay, raw_beta = drawn(2, tokens, heads), drawn(2, tokens, heads) + 3
    rate, bias = mx.array([0.1, 1.0]), mx.array([step, step - 1])
    own, _ = gated_delta_in_chunks(query, key, value, raw_decay, raw_beta, rate, bias)
    decay = compute_g(rate, raw_decay, bias)
    other, _ = gated_delta_ops(query, key, value, decay, mx.sigmoid(raw_beta))
    assert mx.abs(own - other).max().item() < 0.01 * mx.abs(other).max().item()


def test_the_convolution_is_mlx_s() -> None:
    convolution = nn.Conv1d(6, 6, 4, groups=6, bias=False)
    x = mx.random.normal((2, 20, 6))
    assert mx.allclose(Convolution(convolution.weight)(x), convolution(x), atol=1e-6)
