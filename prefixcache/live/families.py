"""For which of mlx-lm's model families attention can read codes, and why not for the others.

Attention can read codes when every layer passes what `update_and_fetch` of its cache returned, untouched but for its shape
and dtype, to `mlx_lm.models.base.scaled_dot_product_attention` with that same cache: there the hook finds the codes. All
modules of mlx-lm 0.31.3 and 0.32.2 were read; the tests read them again, and run the families that they can build.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import mlx.nn as nn

MODELS = "mlx_lm.models."

# Modules of mlx_lm.models by the attention that they define. One that only wraps another's (mistral3, kimi_vl,
# qwen3_5, smollm3, ...) isn't here.
SUPPORTED = frozenset(
    """
    Klear afmoe apertus baichuan_m1 bailing_moe bailing_moe_linear bitnet cohere cohere2 dbrx deepseek deepseek_v2
    dots1 ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe falcon_h1 gear gemma gemma3_text gemma3n gemma4_text glm
    glm4 glm4_moe gpt2 gpt_bigcode gpt_neox gpt_oss gptj granite granitemoe granitemoehybrid helium hunyuan
    hunyuan_v1_dense internlm2 internlm3 jamba laguna lfm2 lfm2_moe lille-130m llama llama4 llama4_text mellum mimo
    mimo_v2_flash minicpm minicpm3 minimax ministral3 mixtral muse_glimmer muse_spark nanbeige nanochat nemotron
    nemotron-nas nemotron_h olmo2 olmo3 olmo_hybrid olmoe openelm phi phi3 phimoe phixtral plamo3 qwen qwen2
    qwen2_moe qwen3 qwen3_moe qwen3_next recurrent_gemma seed_oss spark2_5 starcoder2 step3p5 talkie telechat3
    youtu_llm
    """.split()  # noqa: SIM905
)

_LATENTS = "it makes keys and values again from the latents that it fetched"
_BY_HAND = "it multiplies fetched keys and values itself"

EXCLUDED = {
    "afm7": "its last layers attend to what an earlier layer's cache holds",
    "bailing_hybrid": _LATENTS,
    "bailing_moe_v3": _LATENTS,
    "deepseek_v3": _LATENTS,
    "deepseek_v32": _LATENTS,
    "deepseek_v41": "it has caches of its own and calls mx.fast.scaled_dot_product_attention itself",
    "gemma2": _BY_HAND,
    "glm4_moe_lite": _LATENTS,
    "iquestloopcoder": "its second loop attends to the first one's keys with another cache",
    "kimi_k3": _LATENTS,
    "kimi_linear": _LATENTS,
    "longcat_flash": _LATENTS,
    "minimax_m3_vl": "its indexer multiplies fetched keys itself, and it reads its cache's arrays",
    "mistral4": _LATENTS,
    "olmo": _BY_HAND,
    "phi3small": "its block-sparse layers multiply fetched keys and values themselves",
    "plamo": "it repeats fetched keys and values for its shared heads",
    "plamo2": "it calls mx.fast.scaled_dot_product_attention itself",
    "stablelm": "it casts fetched keys to float32",
}

# Supported, except models with a layer for which the predicate is true: (predicate, reason).
UNLESS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "gear": (lambda layer: bool(layer.attn_logit_softcapping), "with attn_logit_softcapping " + _BY_HAND),
    # 0.32 asks the cache for what it would fetch, and attends with that cache.
    "gemma3n": (lambda layer: "state" in type(layer).__call__.__code__.co_names, "its last layers read caches' state"),
    "gemma4_text": (lambda layer: not layer.has_kv, "layers that share keys get another layer's, without its cache"),
}

WITHOUT_ATTENTION = frozenset({"mamba", "mamba2", "rwkv7"})


def check(model: nn.Module) -> None:
    """Raise ValueError that names the family, why, and what to do, unless attention can read codes in every layer."""
    module_of_model, attends = type(model).__module__, False
    for layer in model.modules():
        for module in attention_modules(type(layer)):
            attends = True
            if (why := refusal(module, layer)) is not None:
                raise ValueError(_message(module_of_model, module, why))
    family = module_of_model.removeprefix(MODELS)
    if not attends and not (module_of_model.startswith(MODELS) and family in WITHOUT_ATTENTION):
        why = EXCLUDED.get(family, "no layer that updates a cache was found in it")
        raise ValueError(_message(module_of_model, module_of_model, why))


def refusal(module: str, layer: nn.Module) -> str | None:
    """Say why attention that is defined in `module` can't read codes in this layer; None when it can."""
    name = module.removeprefix(MODELS)
    if not module.startswith(MODELS):
        return "it is not one of mlx-lm's models, and what it does with fetched keys and values is not known"
    if name in EXCLUDED:
        return EXCLUDED[name]
    if name not in SUPPORTED:
        return "what it does with fetched keys and values is not known"
    excludes_layer, why = UNLESS.get(name, (None, ""))
    return why if excludes_layer is not None and excludes_layer(layer) else None


def attention_modules(cls: type) -> Iterator[str]:
    """Return the modules of a layer class's functions that update a cache: its own, its bases' and those put in their
    place.

    Where the function's code is decides, not the class: a subclass in a wrapper's module keeps its base's attention,
    and a server's patch of mlx-lm's class is not mlx-lm's any more.
    """
    for base in cls.__mro__:
        for function in vars(base).values():
            if isinstance(function, FunctionType) and _updates(function.__code__):
                yield function.__globals__["__name__"]


def _updates(code: CodeType) -> bool:
    return "update_and_fetch" in code.co_names or any(
        _updates(inner) for inner in code.co_consts if isinstance(inner, CodeType)
    )


def _message(module_of_model: str, module: str, why: str) -> str:
    family, attention = module_of_model.removeprefix(MODELS), module.removeprefix(MODELS)
    named = f"{family!r}" if family == attention else f"{family!r} (the attention of {attention!r})"
    return f"models of {named} can't attend to codes: {why}. Keep their caches plain"
