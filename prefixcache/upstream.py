"""What is patched in mlx-lm and in mlx-vlm's models, with or without a server, each patch with the issue that asks for a
better way and when it goes. What is patched in mlx-lm's server is in `prefixcache.servers.mlx_lm.upstream`.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import mlx.core as mx
from mlx_lm import utils
from mlx_lm.models import base, cache

LayerCache = cache._BaseCache  # what mlx-lm's layer caches have in common, which has no public name

# -- attention --------------------------------------------------------------------------------------------------------

AS_IT_WAS = "scaled_dot_product_attention_as_it_was"  # a name in mlx_lm.models.base while the hook is in place

_lock = threading.Lock()
_code_before: CodeType | None = None


def scaled_dot_product_attention(queries, keys, values, cache, scale, mask, sinks=None):  # type: ignore[no-untyped-def]
    """Attend as the cache does it, where it attends itself, or as mlx-lm does. Its globals are `mlx_lm.models.base`'s."""
    attend = getattr(cache, "attend_to_codes", None)
    if attend is not None:
        return attend(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
    return scaled_dot_product_attention_as_it_was(  # type: ignore[name-defined]  # noqa: F821
        queries, keys, values, cache, scale, mask, sinks
    )


def hook_attention() -> None:
    """Let mlx-lm's attention ask the cache first. Making a live cache does it; again changes nothing.

    Patch: models take what `update_and_fetch` returns straight to `base.scaled_dot_product_attention`, which each module has
    imported by its name. So the function stays the same object, and its code changes. Issue: none filed. Goes when a cache
    can bring its own attention. RuntimeError where another package has put something there that can't be hooked.
    """
    global _code_before
    with _lock:
        if _code_before is not None:
            return
        function = base.scaled_dot_product_attention
        if type(function) is not FunctionType or function.__closure__:
            raise RuntimeError(
                f"mlx_lm.models.base.scaled_dot_product_attention is {function!r}, put there by another package: make "
                "live caches before it does so, or keep plain ones"
            )
        _code_before = function.__code__
        setattr(base, AS_IT_WAS, FunctionType(_code_before, base.__dict__, AS_IT_WAS, function.__defaults__))
        function.__code__ = scaled_dot_product_attention.__code__


def unhook_attention() -> None:
    """Put mlx-lm's own code back. Live caches that attend to codes can't be used then, until `hook_attention`."""
    global _code_before
    with _lock:
        if _code_before is not None:
            base.scaled_dot_product_attention.__code__ = _code_before
            delattr(base, AS_IT_WAS)
            _code_before = None


def attention_is_hooked() -> bool:
    """Return whether mlx-lm's attention asks the cache first."""
    return _code_before is not None


# -- pictures ---------------------------------------------------------------------------------------------------------

OVERLAY = "_apply_blockwise_bidirectional_overlay"


def let_pictures_attend_behind_a_hit(model: Any) -> None:
    """Let the tokens of a picture attend to each other in a model of mlx-vlm's where its prompt cache has tokens already.

    Patch: gemma4's overlay of its causal mask is left out unless the mask is square (mlx-vlm 0.7.10), so that a picture
    behind a hit, or in a later chunk, comes out otherwise than in a prompt computed at once. Issue: none filed. Goes when the
    overlay takes a mask with more keys than tokens. A model without an overlay is left as it is.
    """
    layers = type(getattr(model.language_model, "model", None))
    if OVERLAY in vars(layers):
        setattr(layers, OVERLAY, _overlay)


def _overlay(layers: Any, mask: mx.array, kinds: mx.array) -> mx.array:
    """Return a mask (..., tokens, keys) in which the tokens of a picture see all of it. `kinds` (1, tokens): 1 and 2 are
    pictures; the last keys are the tokens'.
    """
    of_tokens = layers._block_sequence_ids_for_mask(kinds)
    before = mx.full((kinds.shape[0], mask.shape[-1] - kinds.shape[1]), -1, of_tokens.dtype)
    of_keys = mx.concatenate([before, of_tokens], axis=1)
    same = (of_tokens[..., None] != -1) & (of_tokens[..., None] == of_keys[:, None])
    return mask | same[:, None]


# -- batches ------------------------------------------------------------------------------------------------------------


def row_count(batched: Any) -> int:
    """Return how many rows of a batch's layer cache are used, padding included. Private: `_idx`. Issue: none filed."""
    return int(batched._idx)


def in_temporal_order(batched: Any) -> None:
    """Let a batch's window have its rows in the order of their tokens. Private: `_temporal_order`. Issue: none filed."""
    if hasattr(batched, "_temporal_order"):
        batched._temporal_order()


# -- loading ----------------------------------------------------------------------------------------------------------


@contextmanager
def any_backend() -> Iterator[None]:
    """Let `mlx_lm.utils.sharded_load` work with any of MLX's back ends.

    Patch: it ends with a collective on the CPU, where NCCL has none ("There is no Stream(gpu, 1) in current thread", mlx-lm
    0.31.3 to 0.32.2); within this, collectives run where the group's others do. Issue: none filed. Goes when `sharded_load`
    names no stream.
    """
    all_sum = mx.distributed.all_sum

    def where_the_group_is(x: Any, *, stream: Any = None, **options: Any) -> mx.array:
        return all_sum(x, **options)

    mx.distributed.all_sum = where_the_group_is
    try:
        yield
    finally:
        mx.distributed.all_sum = all_sum


def download(name: str, **options: Any) -> Path:
    """Return the folder of a model's files, fetched from Hugging Face where need be, as far as these options want them.

    Private: `_download`, which every release has. Issue: none filed. Goes when mlx-lm offers it.
    """
    return Path(utils._download(name, **options))


def classes_of(config: dict[str, Any]) -> tuple[Any, Any]:
    """Return mlx-lm's classes of a config's model and of its arguments.

    Private: `_get_classes`, which every release has. Issue: none filed. Goes when mlx-lm offers it.
    """
    model, arguments = utils._get_classes(config)
    return model, arguments


def known_options(call: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """Return those of the options that this release's call takes: mlx-lm 0.31 never asks whether code is trusted."""
    known = inspect.signature(call).parameters
    return {name: value for name, value in options.items() if name in known}
