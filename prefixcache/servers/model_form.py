"""The form of the prompt caches that a loaded model makes, for servers: what another release of its code, or other options,
had stored is then a miss.
"""

from __future__ import annotations

import logging
from typing import Any

import mlx.core as mx
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache

from prefixcache.layers.form import CacheForm

log = logging.getLogger("prefixcache")


def form_of(
    *models: Any, max_kv_size: int | None = None, kv_bits: int | None = None, kv_group_size: int = 64
) -> CacheForm | None:
    """The form of the prompt caches of these models, one behind the other. None, which is any, where the first can't be kept.

    Each model is called with one token, and nothing of that is evaluated: an array that is yet to be computed has its shape
    and dtype. With `kv_bits` the rows of a prompt may be quantised, or not yet.
    """
    layers: list[Any] = []
    for model in models:
        made = make_prompt_cache(model, max_kv_size)
        try:
            model(mx.array([[0]]), cache=made)
        except Exception as error:  # it takes more than tokens: then its layers' classes must do
            log.debug("no widths of a model's layers: %s: %s", type(error).__name__, error)
            made = make_prompt_cache(model, max_kv_size)
        layers += made
    forms = [layers]
    if kv_bits is not None:
        forms.append(list(layers))
        maybe_quantize_kv_cache(forms[1], 0, kv_group_size, kv_bits)
    return CacheForm.of_kept(*forms)
