"""Folders of tiny models with random weights, as mlx-vlm loads them: config, weights, tokenizer, processor, chat template.

Nothing is downloaded: the tokenizer is tiny-qwen2's, with tokens for pictures. Weights are large enough that answers vary and
depend on the pictures.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

TOKENIZER = Path(__file__).parent.parent / "fixtures" / "tiny-qwen2"
SPECIAL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|audio_pad|>",
)
IDS = {name: 3072 + place for place, name in enumerate(SPECIAL)}
VOCABULARY = 3072 + len(SPECIAL)

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type in ('image', 'image_url', 'input_image') %}"
    + IMAGE
    + "{% elif c.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif c.type in ('audio', 'input_audio') %}<|audio_pad|>"
    "{% elif c.text is defined %}{{ c.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# What a template of Gemma's puts where an image is, which its processor completes, and the settings of that.
OF_GEMMA: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("<|vision_start|>", {"image_seq_length": 64}),
    "gemma4": ("<|image_pad|>", {"image_seq_length": 70, "image_processor": {"patch_size": 16, "max_soft_tokens": 70}}),
}

TOKENS = {
    "image_token_id": IDS["<|image_pad|>"],
    "video_token_id": IDS["<|video_pad|>"],
    "vision_start_token_id": IDS["<|vision_start|>"],
    "vision_end_token_id": IDS["<|vision_end|>"],
    "eos_token_id": IDS["<|im_end|>"],
    "vocab_size": VOCABULARY,
}
TEXT = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": 128,
    "num_heads": 2,
    "in_channels": 3,
    "in_chans": 3,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
MROPE = {"type": "mrope", "mrope_section": [4, 6, 6]}

GEMMA = {"vocab_size": VOCABULARY, "hidden_size": 128, "eos_token_id": [IDS["<|im_end|>"]], "pad_token_id": 1}

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        **TEXT,
        **TOKENS,
        "num_hidden_layers": 3,
        "rope_theta": 1e4,
        "rope_scaling": MROPE,
        "vision_config": {**VISION, "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [1]},
    },
    "qwen3_vl": {
        **TOKENS,
        "text_config": {
            **TEXT,
            "model_type": "qwen3_vl_text",
            "num_hidden_layers": 3,
            "head_dim": 32,
            "rope_theta": 1e4,
            "rope_scaling": MROPE,
            "norm_topk_prob": True,
        },
        "vision_config": {
            **VISION,
            "model_type": "qwen3_vl",
            "patch_size": 16,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [0, 1],
        },
    },
    "qwen3_5": {
        **TOKENS,
        "text_config": {
            **TEXT,
            "model_type": "qwen3_5_text",
            "num_hidden_layers": 4,
            "head_dim": 32,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 2,
            "rope_parameters": {
                "type": "default",
                "mrope_section": [2, 1, 1],
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.25,
            },
        },
        "vision_config": {
            **VISION,
            "model_type": "qwen3_5",
            "patch_size": 16,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [],
        },
    },
    "gemma3": {
        **GEMMA,
        "image_token_index": IDS["<|image_pad|>"],
        "text_config": {
            **TEXT,
            "model_type": "gemma3_text",
            "num_hidden_layers": 3,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 128,
            "sliding_window_pattern": 3,
            "mm_tokens_per_image": 64,
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 2,
            "patch_size": 14,
            "image_size": 224,
        },
    },
    "gemma4": {
        **GEMMA,
        "image_token_id": IDS["<|image_pad|>"],
        "boi_token_id": IDS["<|vision_start|>"],
        "eoi_token_id": IDS["<|vision_end|>"],
        "video_token_id": IDS["<|video_pad|>"],
        "audio_token_id": IDS["<|audio_pad|>"],
        "text_config": {
            **TEXT,
            "model_type": "gemma4_text",
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 2,
            "head_dim": 32,
            "global_head_dim": 64,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
            "sliding_window": 128,
            "sliding_window_pattern": 3,
            "use_bidirectional_attention": "vision",
        },
        "vision_config": {
            "model_type": "gemma4_vision",
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "global_head_dim": 16,
            "patch_size": 16,
            "position_embedding_size": 256,
            "default_output_length": 70,
        },
        "audio_config": {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "subsampling_conv_channels": [8, 4],
            "output_proj_dims": 32,
        },
    },
}


def save(family: str, folder: Path, seed: int = 0, **changed: Any) -> Path:
    """Write a tiny model of this family, with random weights and what is changed of its config, and return its folder."""
    from mlx_vlm.utils import get_model_and_args

    folder.mkdir(parents=True, exist_ok=True)
    config = {"model_type": family, **CONFIGS[family], **changed}
    (folder / "config.json").write_text(json.dumps(config))
    module, _ = get_model_and_args(dict(config))
    model_config = module.ModelConfig.from_dict(dict(config))
    for part in ("text", "vision", "audio"):
        given = getattr(model_config, f"{part}_config", None)
        if isinstance(given, dict):
            cls = getattr(module, f"{part.capitalize()}Config")
            setattr(model_config, f"{part}_config", cls.from_dict(given))
    mx.random.seed(seed)
    model = module.Model(model_config)
    weights = {
        name: mx.random.normal(array.shape) * (0.05 if "embed_tokens" in name else 0.25) if array.ndim > 1 else array
        for name, array in tree_flatten(model.parameters())
    }
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    _save_processor(family, folder)
    return folder


def _save_processor(family: str, folder: Path) -> None:
    tokenizer = json.loads((TOKENIZER / "tokenizer.json").read_text())
    pattern = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [{**pattern, "id": token, "content": name} for name, token in IDS.items()]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    about = json.loads((TOKENIZER / "tokenizer_config.json").read_text())
    about |= {"chat_template": TEMPLATE, "eos_token": "<|im_end|>", "additional_special_tokens": list(SPECIAL)}
    if family in OF_GEMMA:
        placed, processor = OF_GEMMA[family]
        about["chat_template"] = TEMPLATE.replace(IMAGE, placed)
        about["extra_special_tokens"] = {
            "audio_token": "<|audio_pad|>",
            "boa_token": "<|vision_start|>",
            "eoa_token": "<|vision_end|>",
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "boi_token": "<|vision_start|>",
            "eoi_token": "<|vision_end|>",
        }
        (folder / "processor_config.json").write_text(json.dumps(processor))
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    (folder / "preprocessor_config.json").write_text(json.dumps(_pixels(family)))


def _pixels(family: str) -> dict[str, Any]:
    if family == "gemma3":
        return {
            "image_processor_type": "Gemma3ImageProcessor",
            "processor_class": "Gemma3Processor",
            "size": {"height": 224, "width": 224},
        }
    return {
        "patch_size": CONFIGS[family]["vision_config"]["patch_size"],
        "merge_size": 2,
        "temporal_patch_size": 2,
        "min_pixels": 56 * 56,
        "max_pixels": 448 * 448,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
    }
