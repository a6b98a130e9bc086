"""What a model's context leaves a request."""

from __future__ import annotations

from prefixcache.servers.request_schema import RequestRefused

NO_LIMIT = 2**63 - 1


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
