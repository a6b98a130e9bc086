"""Tiny models with random weights that run tensor-parallel and in pipelines, on 2 and 3 ranks."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

VOCABULARY = 192
WINDOW = 96
FULL, SLIDING = "full_attention", "sliding_attention"
TENSOR, PIPELINE = "tp", "pp"

# Without experts: whom a router chooses hangs on the last bit where two are equal.
BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
SLIDES = BASE | {"sliding_window": WINDOW, "layer_types": [SLIDING, SLIDING, FULL, SLIDING]}
HYBRID = {
    "text_config": BASE
    | {
        "linear_num_value_heads": 6,
        "linear_num_key_heads": 6,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 2,
    }
}
MLA = BASE | {
    "kv_lora_rank": 64,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": None,
    "moe_intermediate_size": 32,
    "n_shared_experts": None,
    "first_k_dense_replace": 9,
    "topk_method": "noaux_tc",
}
ROPE = {
    "rope_theta": 1e4,
    "rope_type": "default",
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 4096,
}

FAMILIES: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {
    (TENSOR, "dense"): ("llama", BASE),
    (TENSOR, "sliding"): ("llama", SLIDES),
    (TENSOR, "hybrid"): ("qwen3_5", HYBRID),
    (TENSOR, "mla"): ("deepseek_v3", MLA),
    (PIPELINE, "dense"): ("qwen2", BASE | {"num_attention_heads": 2, "num_key_value_heads": 2}),
    (PIPELINE, "sliding"): ("ministral3", SLIDES | {"rope_parameters": ROPE}),
    (PIPELINE, "hybrid"): ("qwen3_5", HYBRID),
    (PIPELINE, "mla"): ("deepseek_v3", MLA),
}


class Case(NamedTuple):
    """How a model is sharded, and of which kind it is."""

    how: str
    family: str


CASES = [Case(*case) for case in FAMILIES]


def build(case: Case) -> nn.Module:
    """The whole model, the same on every rank."""
    module, config = FAMILIES[case]
    family = import_module(f"mlx_lm.models.{module}")
    mx.random.seed(0)
    model = family.Model(family.ModelArgs.from_dict({"model_type": module, **config}))
    model.update(tree_map(lambda weight: weight * 2.0 if weight.ndim == 2 else weight, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def shard(model: Any, how: str, group: mx.distributed.Group) -> Any:
    """The rank's part of a model."""
    if how == PIPELINE:
        model.model.pipeline(group)
    else:
        model.shard(group)
    mx.eval(model.parameters())
    return model
