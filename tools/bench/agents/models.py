"""Tiny random models of three kinds of layers, with a chat template that has tools behind the system text, or before it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.bench.agents.clients import Answer, Json
from tools.bench.serving import FIXTURE

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
KINDS = ("plain", "windowed", "hybrid")
BEHIND, FIRST = "tools behind the system text", "tools first"

_BASE = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 1 << 18,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
_CONFIGS: dict[str, Json] = {
    "plain": {"model_type": "qwen3", "num_hidden_layers": 1},
    "windowed": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 2,
        "sliding_window": 512,
        "sliding_window_pattern": 2,
    },
    "hybrid": {
        "model_type": "lfm2",
        "num_hidden_layers": 2,
        "layer_types": ["conv", "full_attention"],
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 64,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
    },
}

_SYSTEM = "{% if messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}"
_TOOLS = "{% if tools %}# Tools\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>\n{% endif %}"
_HEAD = "{% if tools or messages[0].role == 'system' %}<|system|>\nBOTH<|end|>\n{% endif %}"
_LAST_USER = (
    "{% set ns = namespace(user=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.user = loop.index0 %}"
    "{% endif %}{% endfor %}"
)
_TALK = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}<|user|>\n<tool_response>\n{{ m.content }}\n</tool_response><|end|>\n"
    "{% elif m.role == 'assistant' %}<|assistant|>\n"
    "{% if m.reasoning_content and loop.index0 > ns.user %}"
    "{{ '<think>\n' + m.reasoning_content.strip() + '\n</think>\n\n' + m.content.lstrip('\n') }}"
    "{% else %}{{ m.content or '' }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{% set tool_call = call.function or call %}CALL"
    "{% endfor %}<|end|>\n"
    "{% elif not (m.role == 'system' and loop.first) %}{{ '<|' + m.role + '|>\n' + m.content }}<|end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_JSON_CALL = (
    "{{ '\n<tool_call>\n' + ({'name': tool_call.name, 'arguments': tool_call.arguments} | tojson) + '\n</tool_call>' }}"
)
_XML_CALL = (
    "\n\n<tool_call>\n<function={{ tool_call.name }}>\n{% for key, value in tool_call.arguments.items() %}"
    "<parameter={{ key }}>\n{{ value }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)
TEMPLATES = {
    BEHIND: _HEAD.replace("BOTH", _SYSTEM + _TOOLS) + _LAST_USER + _TALK.replace("CALL", _JSON_CALL),
    FIRST: _HEAD.replace("BOTH", _TOOLS + _SYSTEM) + _LAST_USER + _TALK.replace("CALL", _XML_CALL),
}


def written(answer: Answer, order: str) -> str:
    """Return what a model writes that was taught with the template of this order: true is `true`, line breaks are its own."""
    text = f"<think>\n{answer.thought}\n</think>{answer.text}" if answer.thought else answer.text
    if not answer.tool:
        return text
    if order == BEHIND:
        return f"{text}\n<tool_call>\n{json.dumps({'name': answer.tool, 'arguments': answer.arguments})}\n</tool_call>"
    given = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in answer.arguments.items()
    )
    return f"{text}\n\n<tool_call>\n<function={answer.tool}>\n{given}</function>\n</tool_call>"


def save(folder: Path, kind: str, order: str) -> Path:
    """Write such a model under tiny-llama's tokenizer, with the marks of thoughts and calls, and return its folder."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.utils import _get_classes

    folder.mkdir()
    config = {**_BASE, **_CONFIGS[kind], "vocab_size": _save_tokenizer(folder, TEMPLATES[order])}
    model_class, arguments = _get_classes(config)
    mx.random.seed(1)
    weights: dict[str, Any] = {
        name: mx.random.normal(weight.shape) * 0.05 if weight.ndim > 1 else weight
        for name, weight in tree_flatten(model_class(arguments.from_dict(config)).parameters())
    }
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _save_tokenizer(folder: Path, template: str) -> int:
    """Write the tokenizer, and return how many tokens it has, up to a multiple of 64."""
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_file(str(FIXTURE / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((FIXTURE / "tokenizer_config.json").read_text())
    more = {"chat_template": template, "model_max_length": 1 << 18}
    (folder / "tokenizer_config.json").write_text(json.dumps(config | more))
    return -(-tokenizer.get_vocab_size() // 64) * 64
