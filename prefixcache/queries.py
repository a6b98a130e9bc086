"""What a model's queries look at: the root mean square of each query channel, measured on a text.

Levels that know it spend a key's error where queries look least. A server measures once, after it loaded a model, and
tells the cache (`PrefixCache.calibrate`); nothing here is needed otherwise.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx_lm.models import base
from mlx_lm.models.cache import make_prompt_cache

CHUNK = 256  # tokens of a forward pass
_watching = threading.Lock()

Array = npt.NDArray[np.float32]


def query_rms(model: Any, tokens: Sequence[int]) -> list[Array | None]:
    """The root mean square of the queries at each channel, while `model` (an mlx-lm model) reads `tokens`.

    One float32 array (key heads, width) a layer, the mean over the queries that share a key head; None for a layer that
    has no attention, or whose attention is not mlx-lm's own function. A few hundred tokens of usual text are enough.
    ValueError for no tokens. While it runs, attention of other threads is watched as well, but not counted.
    """
    if not len(tokens):
        raise ValueError("tokens are empty: give some hundreds of usual text")
    caches = make_prompt_cache(model)
    sums: list[Any] = [None] * len(caches)

    def note(queries: mx.array, keys: mx.array, cache: Any) -> None:
        for i, own in enumerate(caches):
            here = any(cache is child for child in getattr(own, "caches", (own,)))
            if here and queries.shape[-1] == keys.shape[-1]:
                heads = keys.shape[1]
                squares = mx.square(queries[0].astype(mx.float32)).reshape(heads, -1, queries.shape[-1]).sum(1)
                sums[i] = squares if sums[i] is None else sums[i] + squares

    with _watching, _watched(note):
        for start in range(0, len(tokens), CHUNK):
            model(mx.array(list(tokens[start : start + CHUNK]))[None], cache=caches)
            mx.eval([one for one in sums if one is not None], [cache.state for cache in caches])
    return [None if one is None else np.sqrt(np.array(one / len(tokens))) for one in sums]


@contextmanager
def _watched(note: Callable[[mx.array, mx.array, Any], None]) -> Iterator[None]:
    """mlx-lm's attention function, in every model module that has it by name, also tells `note` what it was given."""
    original = base.scaled_dot_product_attention

    def watching(queries: mx.array, keys: mx.array, values: mx.array, cache: Any, *rest: Any, **named: Any) -> Any:
        note(queries, keys, cache)
        return original(queries, keys, values, cache, *rest, **named)

    name = original.__name__
    users = [module for path, module in list(sys.modules.items()) if path.startswith("mlx_lm.models.")]
    users = [module for module in users if getattr(module, name, None) is original]
    for module in users:
        setattr(module, name, watching)
    try:
        yield
    finally:
        for module in users:
            setattr(module, name, original)
