"""How many tokens a model can attend to, as its config.json says it, and what that leaves a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefixcache.servers.request_schema import RequestRefused

LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx")
NO_LIMIT = 2**63 - 1
TEXT_PARTS = ("text_config", "language_config", "llm_config")  # of a model that takes images, too
STRETCHED = ("yarn", "dynamic")  # kinds of rope scaling whose config may name the length before it


def context_of(config: Mapping[str, Any]) -> int | None:
    """Return the longest prompt and answer together; None where the config doesn't say, as that of a recurrent model.

    YaRN and dynamic scaling stretch the length by their factor. Some configs have the length before it, others after:
    what is longer holds.
    """
    parts = [config, *(config[name] for name in TEXT_PARTS if isinstance(config.get(name), Mapping))]
    lengths = [(part[name], part) for part in reversed(parts) for name in LENGTHS if _is_length(part.get(name))]
    if not lengths:
        return None
    length, part = lengths[0]
    return max(length, _stretched(length, part.get("rope_scaling") or part.get("rope_parameters")))


def _stretched(length: int, scaling: Any) -> int:
    if not isinstance(scaling, Mapping) or scaling.get("rope_type", scaling.get("type")) not in STRETCHED:
        return length
    before, factor = scaling.get("original_max_position_embeddings"), scaling.get("factor")
    if not isinstance(factor, (int, float)) or not 1 <= factor < 1e6:
        return length
    return int((before if isinstance(before, int) and _is_length(before) else length) * factor)


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def room_for(prompt: int, context: int | None) -> int:
    """Return how many tokens the answer to a prompt of so many may have. RequestRefused where the context leaves none."""
    if context is None:
        return NO_LIMIT
    if prompt >= context:
        raise RequestRefused(too_long(f"{prompt}", context))
    return context - prompt


def too_long(tokens: str, context: int) -> str:
    """Return an error by whose words clients know that the chat must become shorter, and by how much."""
    return (
        f"the prompt is too long: {tokens} tokens > {context}, the model's maximum context length, for prompt and answer: "
        "send a shorter prompt"
    )
