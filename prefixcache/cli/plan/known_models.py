"""Configurations of well-known models, for users who have no config.json at hand: the fields that mlx-lm reads, as the makers
publish them. `--model` takes their names where no such path exists.
"""

from __future__ import annotations

from typing import Any

Config = dict[str, Any]

_LLAMA: Config = {
    "model_type": "llama",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
}
_QWEN3: Config = {
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": False,
}

KNOWN_MODELS: dict[str, Config] = {
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "num_hidden_layers": 24,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "vocab_size": 201_088,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "llama-3.1-8b": {
        **_LLAMA,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14_336,
        "num_attention_heads": 32,
    },
    "llama-3.3-70b": {
        **_LLAMA,
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "intermediate_size": 28_672,
        "num_attention_heads": 64,
    },
    "qwen3-8b": {
        **_QWEN3,
        "model_type": "qwen3",
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "intermediate_size": 12_288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "qwen3-30b-a3b": {
        **_QWEN3,
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
}
