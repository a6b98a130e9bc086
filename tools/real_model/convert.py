"""A GGUF file of SmolLM2 to a folder that `mlx_lm.load` takes: config, tokenizer, and weights in float16.

Only what this model needs is here: the Llama architecture, dense, with SmolLM's tokenizer. Anything else is refused, never
half converted. `fetch` calls this.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
HEAD = {"output": "lm_head"}  # missing where the head is the embedding
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL, USER_DEFINED = 3, 4  # types of a token in GGUF: those that text never gives


class NotConverted(ValueError):
    """The file isn't one that can be converted here. The text says what it has."""


def convert(gguf: Path, out: Path) -> int:
    """Write the model of `gguf` into `out`, a new folder, and return the number of tensors. NotConverted."""
    try:
        reader = GGUFReader(gguf)
    except ValueError as error:
        raise NotConverted(f"no GGUF file, or one that was cut off: {error}") from None
    config = config_of(reader)
    tokenizer = tokenizer_of(reader)
    weights = dict(weights_of(reader, config))
    out.mkdir(parents=True)
    save_file(weights, out / "model.safetensors", metadata={"format": "mlx"})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokenizer.save(str(out / "tokenizer.json"))
    words = {name: _text_of(reader, config[f"{name}_id"]) for name in ("bos_token", "eos_token")}
    template = _value(reader, "tokenizer.chat_template", None)
    own = {"tokenizer_class": "PreTrainedTokenizerFast", **words, **({"chat_template": template} if template else {})}
    (out / "tokenizer_config.json").write_text(json.dumps(own, indent=2) + "\n")
    return len(weights)


def config_of(reader: GGUFReader) -> dict[str, Any]:
    """mlx-lm's config of the model."""
    _expect(reader, "general.architecture", "llama")
    hidden, heads = _value(reader, "llama.embedding_length"), _value(reader, "llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": _value(reader, "llama.block_count"),
        "intermediate_size": _value(reader, "llama.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": _value(reader, "llama.attention.head_count_kv", heads),
        "head_dim": _value(reader, "llama.attention.key_length", hidden // heads),
        "rms_norm_eps": float(_value(reader, "llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": float(_value(reader, "llama.rope.freq_base", 10000.0)),
        "max_position_embeddings": _value(reader, "llama.context_length"),
        "vocab_size": len(_value(reader, "tokenizer.ggml.tokens")),
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "bos_token_id": _value(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _value(reader, "tokenizer.ggml.eos_token_id"),
        "torch_dtype": "float16",
    }


def weights_of(reader: GGUFReader, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """(mlx-lm's name, float16 weights) of every tensor. NotConverted where one is missing or too many."""
    names = names_of(config["num_hidden_layers"], tied=config["tie_word_embeddings"])
    found = {tensor.name for tensor in reader.tensors}
    if found != names.keys():
        odd = sorted(found ^ names.keys())
        raise NotConverted(
            f"{len(found)} tensors where this Llama has {len(names)} ({odd[0]} is "
            f"{'missing' if odd[0] in names else 'unknown'}): another architecture"
        )
    heads = {".attn_q.": config["num_attention_heads"], ".attn_k.": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        for part, count in heads.items():
            if part in tensor.name:
                values = values[halves(len(values), count)]
        yield names[tensor.name], values.astype(np.float16)


def names_of(layers: int, tied: bool) -> dict[str, str]:
    """GGUF's name of each tensor -> mlx-lm's."""
    top = TOP if tied else {**TOP, **HEAD}
    pairs = [*top.items()]
    for i in range(layers):
        pairs += [(f"blk.{i}.{theirs}", f"model.layers.{i}.{ours}") for theirs, ours in LAYER.items()]
    return {f"{theirs}.weight": f"{ours}.weight" for theirs, ours in pairs}


def halves(rows: int, heads: int) -> np.ndarray:
    """The order of a projection's rows for mlx-lm, which turns channels i and i + width/2 of a head together; GGUF of a
    Llama keeps those that are turned together side by side.
    """
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).transpose(0, 2, 1).reshape(-1)


def tokenizer_of(reader: GGUFReader) -> Tokenizer:
    """SmolLM's: digit by digit, then byte pairs."""
    _expect(reader, "tokenizer.ggml.model", "gpt2")
    _expect(reader, "tokenizer.ggml.pre", "smollm")
    tokens = _value(reader, "tokenizer.ggml.tokens")
    merges = [tuple(pair.split(" ")) for pair in _value(reader, "tokenizer.ggml.merges")]
    made = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    digits, of_bytes = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([digits, of_bytes])
    made.decoder = decoders.ByteLevel()
    special = [
        AddedToken(token, special=True, normalized=False)
        for token, kind in zip(tokens, _value(reader, "tokenizer.ggml.token_type"), strict=True)
        if kind in (CONTROL, USER_DEFINED)
    ]
    made.add_special_tokens(special)
    return made


def _text_of(reader: GGUFReader, token: int) -> str:
    return str(_value(reader, "tokenizer.ggml.tokens")[token])


_REQUIRED = object()


def _value(reader: GGUFReader, key: str, default: Any = _REQUIRED) -> Any:
    field = reader.get_field(key)
    if field is None:
        if default is _REQUIRED:
            raise NotConverted(f"it has no {key}: another architecture")
        return default
    return field.contents()


def _expect(reader: GGUFReader, key: str, wanted: str) -> None:
    found = _value(reader, key, None)
    if found != wanted:
        raise NotConverted(f"{key} is {found!r}, and only {wanted!r} can be converted here")
