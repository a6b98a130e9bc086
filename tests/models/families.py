"""Tiny random-weight models of every mlx-lm family whose prompt cache has a layout of its own.

Nothing is downloaded and no file is read: a family is a dict of config fields for mlx-lm's own `ModelArgs` and `Model`.
Left out is what another family already covers, class for class:

    llama            every module without `make_cache` that is not named here (qwen3, phi3, mixtral, olmo2, ...)
    llama-sliding    afmoe, exaone4, exaone_moe, laguna, mellum, ministral3, muse_glimmer, muse_spark, olmo3, plamo3,
                     spark2_5
    deepseek_v2      minicpm3, youtu_llm (V narrower than K, several heads)
    deepseek_v3      glm4_moe_lite, mistral4 (one latent head), kimi_k25, kimi_vl
    lfm2             lfm2_moe, lfm2-vl
    qwen3_5          qwen3_5_moe, prism_hadamard_qwen35
    the text model   gemma3, gemma4, mistral3, pixtral, qwen2_vl, qwen3_vl, qwen3_vl_moe
"""

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

Config = dict[str, Any]


class Family(NamedTuple):
    """`kinds`: what its prompt cache is made of; `exact_chunks`: prefill in pieces gives the same tokens as at once."""

    name: str
    build: Callable[[], nn.Module]
    kinds: frozenset[str]
    exact_chunks: bool


FAMILIES: dict[str, Family] = {}
SLICEABLE, WINDOWED, SNAPSHOT = "sliceable", "windowed", "snapshot"
FULL, SLIDING = "full_attention", "sliding_attention"
WINDOW = 32
MLX_LM_0_31 = version("mlx-lm").startswith("0.31.")


def greedy(model: nn.Module, prompt_cache: list[Any], tokens: list[int], n: int) -> list[int]:
    """The `n` tokens that follow `tokens`, fed in one call; the last of the `n` is not fed any more."""
    out: list[int] = []
    inputs = tokens
    for _ in range(n):
        logits = model(mx.array([inputs]), cache=prompt_cache)
        inputs = [int(mx.argmax(logits[0, -1]).item())]
        out += inputs
    return out


def _build(module: str, config: Config, dtype: mx.Dtype) -> nn.Module:
    family = import_module(f"mlx_lm.models.{module}")
    mx.random.seed(0)
    model = family.Model(family.ModelArgs.from_dict({"model_type": module, **config}))
    model.update(tree_unflatten(list(_weights(model, dtype))))
    model.eval()
    mx.eval(model.parameters())
    return model


def _weights(model: nn.Module, dtype: mx.Dtype) -> Iterator[tuple[str, mx.array]]:
    """The model's initial weights, changed so that what comes next depends on every layer's cache."""
    cast = getattr(model, "cast_predicate", lambda name: True)
    embeddings = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    for name, weight in tree_flatten(model.parameters()):
        if not name.endswith("bias") and not mx.any(weight).item():  # gates and mixers that training fills
            weight = mx.random.normal(weight.shape) * 0.25
        if name.endswith("A_log"):  # slow decay, so that a recurrent state remembers
            weight = weight - 3.0
        elif name in embeddings:  # the last token alone must not decide
            weight = weight * 0.5
        elif weight.ndim > 1:
            weight = weight * 3.0
        yield name, weight.astype(dtype) if cast(name) else weight


def _family(
    name: str, kinds: set[str], config: Config, *, module: str = "", exact: bool = True, dtype: mx.Dtype = mx.float32
) -> None:
    module = module or name
    if find_spec(f"mlx_lm.models.{module}"):
        FAMILIES[name] = Family(name, partial(_build, module, config, dtype), frozenset(kinds), exact)


# `from_dict` ignores the fields that a family does not know, so one dict serves all. MLX's CPU back end multiplies
# experts in float32 only: families with experts have no bf16 variant.
# fmt: off
BASE: Config = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-5, "layer_norm_epsilon": 1e-5, "norm_eps": 1e-5,
    "rope_theta": 10000.0, "max_position_embeddings": 4096, "sliding_window": WINDOW, "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False,
}
WIDE: Config = BASE | {"hidden_size": 128}  # where hidden_size // num_attention_heads is the heads' width
MOE: Config = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "n_shared_experts": 1, "num_shared_experts": 1, "moe_intermediate_size": 32,
    "shared_intermediate_size": 32, "shared_expert_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
    "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "first_k_dense_replace": 1, "moe_layer_freq": 1,
}
MLA: Config = {
    "num_key_value_heads": 4, "kv_lora_rank": 64, "q_lora_rank": 32, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
DSA: Config = {"index_head_dim": 32, "index_n_heads": 2, "index_topk": 64}
DELTA: Config = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
KDA: Config = {
    "linear_attn_config": {
        "num_heads": 2, "head_dim": 32, "kda_layers": [1, 2, 3], "full_attn_layers": [4], "short_conv_kernel_size": 4,
    },
}
MAMBA: Config = {"state_size": 16, "conv_kernel": 4, "use_bias": False, "use_conv_bias": True}
LLAMA4: Config = BASE | {
    "model_type": "llama4_text", "num_hidden_layers": 5, "intermediate_size_mlp": 64, "num_local_experts": 2,
    "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "rope_scaling": None, "use_qk_norm": True,
    "floor_scale": 64,
}
LONGCAT: Config = BASE | MOE | MLA | {
    "attention_method": "MLA", "zero_expert_type": "identity", "ffn_hidden_size": 64, "moe_topk": 2,
    "expert_ffn_hidden_size": 32, "zero_expert_num": 2, "num_layers": 2, "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}

# Sliceable.
_family("llama", {SLICEABLE}, BASE)
_family("llama-bf16", {SLICEABLE}, BASE, module="llama", dtype=mx.bfloat16)
_family("qwen2", {SLICEABLE}, WIDE)
_family("gemma2", {SLICEABLE}, BASE)
_family("llama4_text", {SLICEABLE}, LLAMA4 | {"no_rope_layers": [1, 1, 1, 0, 1]})
_family("openelm", {SLICEABLE}, BASE | {  # another number of heads in each layer
    "num_transformer_layers": 4, "model_dim": 64, "ffn_dim_divisor": 8, "num_query_heads": [4, 4, 4, 4],
    "num_kv_heads": [1, 2, 2, 4], "ffn_multipliers": [1, 1, 2, 2],
})
_family("afm7", {SLICEABLE}, BASE | {  # the last layers have no cache
    "hidden_dim": 64, "num_layers": 4, "num_kv_reuse_layers": 2, "num_heads": 2, "num_kv_heads": 1,
})
_family("nanbeige", {SLICEABLE}, BASE | {"num_hidden_layers": 2, "num_loops": 2})  # two caches a layer
_family("nemotron-nas", {SLICEABLE}, BASE | {  # one layer without a cache, and one whose cache stays empty
    "num_attention_heads": 2, "block_configs": [
        {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
        {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
        {"attention": {"replace_with_linear": True}, "ffn": {"no_op": True}},
        {"attention": {"n_heads_in_group": 1}, "ffn": {"replace_with_linear": True}},
    ],
})
_family("deepseek_v2", {SLICEABLE}, BASE | MOE | MLA | {"topk_method": "greedy", "rope_scaling": {"factor": 2.0}})
_family("deepseek_v3", {SLICEABLE}, BASE | MOE | MLA)
_family("deepseek_v32", {SLICEABLE}, BASE | MOE | MLA | DSA)
_family("glm_moe_dsa", {SLICEABLE}, BASE | MOE | MLA | DSA | {
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
})
_family("longcat_flash", {SLICEABLE}, LONGCAT)
_family("minimax_m3_vl", {SLICEABLE}, {"text_config": BASE | MOE | {
    "dense_intermediate_size": 64, "index_n_heads": 2, "index_head_dim": 32, "index_block_size": 16,
    "index_topk_blocks": 4, "layer_types": [FULL, "sparse", "sparse", "sparse"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
}})

# Windowed.
_family("llama-sliding", {SLICEABLE, WINDOWED}, BASE | {"layer_types": [SLIDING, SLIDING, FULL, SLIDING]},
        module="llama")
_family("gemma3_text", {SLICEABLE, WINDOWED}, BASE | {"sliding_window_pattern": 3, "query_pre_attn_scalar": 32})
# 0.31: a layer without a cache turns its queries by the owner's offset after the chunk, so the chunk's length counts.
_family("gemma3n", {SLICEABLE, WINDOWED}, {"text_config": BASE | {
    "model_type": "gemma3n_text", "num_hidden_layers": 6, "num_kv_shared_layers": 2, "layer_types": [SLIDING, FULL] * 3,
    "vocab_size_per_layer_input": 128, "rope_local_base_freq": 10000.0, "final_logit_softcapping": 30.0,
    "activation_sparsity_pattern": [0.9, 0, 0, 0, 0, 0], "hidden_size_per_layer_input": 16, "altup_num_inputs": 2,
    "altup_coef_clip": 120.0, "altup_correct_scale": True, "altup_active_idx": 0, "laurel_rank": 16,
}}, exact=not MLX_LM_0_31)
_family("gemma4_text", {SLICEABLE, WINDOWED}, BASE | {  # full layers twice as wide as sliding ones
    "num_hidden_layers": 6, "num_kv_shared_layers": 2, "layer_types": [SLIDING, FULL] * 3, "global_head_dim": 64,
    "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 128,
})
_family("gpt_oss", {SLICEABLE, WINDOWED}, BASE | MOE | {"layer_types": [SLIDING, FULL] * 2})
_family("cohere2", {SLICEABLE, WINDOWED}, WIDE | {"sliding_window_pattern": 4, "logit_scale": 1.0})
_family("mimo_v2_flash", {SLICEABLE, WINDOWED}, BASE | MOE | {  # V narrower than K, also in the window
    "hybrid_layer_pattern": [0, 1, 1, 0], "moe_layer_freq": [0, 1, 1, 1], "add_swa_attention_sink_bias": True,
    "add_full_attention_sink_bias": False, "sliding_window_size": WINDOW, "layernorm_epsilon": 1e-5,
    "swa_rope_theta": 10000.0, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "head_dim": 48,
    "v_head_dim": 32, "swa_head_dim": 48, "swa_v_head_dim": 32, "partial_rotary_factor": 0.5,
})
_family("step3p5", {SLICEABLE, WINDOWED}, BASE | {
    "num_attention_groups": 2, "layer_types": [FULL, SLIDING, SLIDING, SLIDING], "moe_num_experts": 4, "moe_top_k": 2,
    "moe_intermediate_size": 32, "share_expert_dim": 32, "moe_layers_enum": "1,2,3",
    "attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 3, "head_dim": 32},
})
_family("iquestloopcoder", {SLICEABLE, WINDOWED}, BASE | {"num_hidden_layers": 2, "loop_window_size": WINDOW})
# 0.31: ChunkedKVCache trims by its buffer, not by its rows, and loses rows of the chunk that it is in.
for chunk in (256, 512):
    _family(f"llama4-{chunk}", {SLICEABLE, WINDOWED}, {"text_config": LLAMA4 | {"attention_chunk_size": chunk}},
            module="llama4", exact=not MLX_LM_0_31)

# With snapshots.
_family("mamba", {SNAPSHOT}, BASE | MAMBA | {"time_step_rank": 8})
_family("mamba2", {SNAPSHOT}, BASE | MAMBA | {
    "num_heads": 4, "intermediate_size": 128, "n_groups": 2, "time_step_limit": (0.0, 100.0), "time_step_rank": "auto",
})
_family("rwkv7", {SNAPSHOT}, BASE | {
    "a_low_rank_dim": 16, "v_low_rank_dim": 16, "gate_low_rank_dim": 16, "decay_low_rank_dim": 16,
})
_family("deepseek_v41", {SNAPSHOT}, BASE | MOE | MLA | DSA | {
    "head_dim": 64, "o_groups": 2, "o_lora_rank": 32, "compress_ratios": (0, 4, 4, 1), "kv_source_layer_ids": (1, 3),
    "index_source_layer_ids": (1, 3), "hc_mult": 2, "hc_sinkhorn_iters": 4, "swiglu_limit": 1.0,
    "routed_scaling_factor": 0.2,
})
_family("recurrent_gemma", {WINDOWED, SNAPSHOT}, BASE | {
    "num_attention_heads": 2, "num_key_value_heads": 1, "conv1d_width": 4, "logits_soft_cap": 30.0,
    "attention_window_size": WINDOW, "block_types": ["recurrent", "recurrent", "attention"],
})
_family("lfm2", {SLICEABLE, SNAPSHOT}, WIDE | {
    "conv_bias": False, "conv_L_cache": 3, "block_dim": 128, "block_ff_dim": 64, "block_multiple_of": 8,
    "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False, "layer_types": ["conv", FULL, "conv", FULL],
})
_family("jamba", {SLICEABLE, SNAPSHOT}, WIDE | MOE | {
    "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1, "expert_layer_period": 2,
    "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_expand": 1,
})
_family("nemotron_h", {SLICEABLE, SNAPSHOT}, BASE | MAMBA | MOE | {  # feed-forward layers have no cache
    "num_hidden_layers": 5, "hybrid_override_pattern": list("M*-ME"), "mamba_num_heads": 4, "mamba_head_dim": 32,
    "mamba_proj_bias": False, "ssm_state_size": 16, "n_groups": 2, "time_step_limit": (0.0, 100.0),
    "moe_shared_expert_intermediate_size": 32,
})
_family("granitemoehybrid", {SLICEABLE, SNAPSHOT}, WIDE | MOE | {
    "embedding_multiplier": 1.0, "attention_multiplier": 0.2, "logits_scaling": 1.0, "residual_multiplier": 1.0,
    "layer_types": ["mamba", "attention", "mamba", "attention"], "mamba_n_heads": 4, "mamba_d_head": 32,
    "mamba_proj_bias": False, "mamba_d_state": 16, "mamba_d_conv": 4, "mamba_n_groups": 2, "mamba_conv_bias": True,
})
_family("plamo2", {SLICEABLE, SNAPSHOT}, BASE | {
    "hidden_size_per_head": 32, "mamba_d_state": 16, "mamba_num_heads": 4, "attention_window_size": WINDOW,
})
_family("falcon_h1", {SLICEABLE, SNAPSHOT}, BASE | {
    "mamba_d_head": 32, "mamba_d_ssm": 64, "mamba_d_state": 8, "mamba_n_heads": 2,
})
_family("qwen3_next", {SLICEABLE, SNAPSHOT}, BASE | MOE | DELTA | {
    "decoder_sparse_step": 1, "mlp_only_layers": [], "partial_rotary_factor": 0.5,
})
_family("qwen3_5", {SLICEABLE, SNAPSHOT}, {"text_config": BASE | DELTA})
_family("qwen3_5-bf16", {SLICEABLE, SNAPSHOT}, {"text_config": BASE | DELTA}, module="qwen3_5", dtype=mx.bfloat16)
_family("olmo_hybrid", {SLICEABLE, SNAPSHOT}, BASE | DELTA | {
    "linear_num_key_heads": 4, "linear_allow_neg_eigval": True,
})
_family("kimi_linear", {SLICEABLE, SNAPSHOT}, BASE | MOE | MLA | KDA | {"model_max_length": 4096})
_family("kimi_k3", {SLICEABLE, SNAPSHOT}, {"text_config": BASE | MOE | MLA | KDA | {"attn_res_block_size": 2}})
_family("bailing_moe_linear", {SLICEABLE, SNAPSHOT}, BASE | MOE | {"layer_group_size": 4, "group_norm_size": 4})
_family("bailing_hybrid", {SLICEABLE, SNAPSHOT}, BASE | MOE | MLA | {"layer_group_size": 4, "group_norm_size": 4})
_family("bailing_moe_v3", {SLICEABLE, SNAPSHOT}, BASE | MOE | MLA | {"layer_group_size": 4})
_family("longcat_flash_ngram", {SLICEABLE, SNAPSHOT}, LONGCAT | {  # the first cache belongs to no layer
    "ngram_vocab_size_ratio": 2, "emb_neighbor_num": 4, "emb_split_num": 2,
})
_family("baichuan_m1", {SLICEABLE, WINDOWED, SNAPSHOT}, WIDE | {
    "conv_window": 2, "sliding_window_layers": [1, 3], "num_swa_key_value_heads": 4,
})
_family("gear", {SLICEABLE, WINDOWED, SNAPSHOT}, BASE | {"layer_types": ["conv_mixer", SLIDING, "conv_mixer", FULL]})
# fmt: on
