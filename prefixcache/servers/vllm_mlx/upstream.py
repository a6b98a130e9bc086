"""What is mended in vllm-mlx, where it remembers the pixels that its processor made of a prompt; each with when it goes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any


def in_order(hash_of: Callable[[str], str]) -> Callable[[list[str]], str]:
    """Return `compute_images_hash`, which names pictures by their hashes in the prompt's order.

    Patch: vllm-mlx 0.6.0 sorts the hashes, so that two pictures are answered as the same two in the other order. Issue: none
    filed. Goes when it doesn't.
    """
    return lambda images: "_".join(map(hash_of, images))


def with_own_arguments(keep: Callable[..., None]) -> Callable[..., None]:
    """Return `VisionEmbeddingCache.set_pixel_cache`, which keeps what else the model is given in a dict of its own.

    Patch: vllm-mlx 0.6.0 keeps the request's dict, which is emptied after its prefill. Then Gemma 4 is no longer told which
    tokens are pictures, and answers the same prompt otherwise. Issue: none filed. Goes when it copies the dict.
    """

    @functools.wraps(keep)
    def kept(self: Any, *args: Any, extra_kwargs: Mapping[str, Any] | None = None, **options: Any) -> None:
        keep(self, *args, extra_kwargs=dict(extra_kwargs or {}), **options)

    return kept
