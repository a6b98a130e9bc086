"""The prompt caches of the soak's models: made, grown and judged by the rows that `prompts` gives for the tokens."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from tools.soak.prompts import Tenant, prefixes, rows

WINDOW = 300
SINKS = 4
CHUNK = 256  # tokens of one step of prefill
OFF = 100.0  # what coded rows may be off by, on average of their values: rows of another prefix are off by 341


def empty(tenant: Tenant) -> list[Any]:
    if tenant.kind == "sliceable":
        return [KVCache(), KVCache()]
    if tenant.kind == "hybrid":
        return [KVCache(), ArraysCache(2)]
    return [KVCache(), RotatingKVCache(WINDOW, SINKS if tenant.kind == "sinks" else 0)]


def prefill(cache: list[Any], tenant: Tenant, tokens: np.ndarray, start: int) -> None:
    """Take a prompt cache from `start` to the end of `tokens`."""
    hashes = prefixes(tokens, tenant)
    for number, layer in enumerate(cache):
        if isinstance(layer, ArraysCache):
            layer[0] = mx.array(rows(hashes[-1:], 9))
            layer[1] = mx.array([[len(tokens)]])
            continue
        step = CHUNK if isinstance(layer, RotatingKVCache) else max(len(tokens), 1)
        for at in range(start, len(tokens), step):
            new = hashes[at : at + step]
            layer.update_and_fetch(*(mx.array(rows(new, 2 * number + part)[None, None]) for part in (0, 1)))


def faults(cache: list[Any], tenant: Tenant, tokens: np.ndarray, exact: bool = True) -> list[str]:
    """What of a prompt cache is not the state after exactly `tokens`. Where the codec is not `exact`, rows are near it."""
    made = empty(tenant)
    if list(map(type, cache)) != list(map(type, made)):
        return [f"layers of {[type(layer).__name__ for layer in cache]}, wanted {tenant.kind}"]
    hashes = prefixes(tokens, tenant)
    return [
        f"layer {number} ({type(layer).__name__}): {fault}"
        for number, layer in enumerate(cache)
        if (fault := _fault(layer, number, hashes, exact))
    ]


def first_keys(cache: list[Any], count: int) -> np.ndarray:
    return np.array(cache[0].keys[0, 0, :count])


def _fault(layer: Any, number: int, hashes: np.ndarray, exact: bool) -> str:
    count = len(hashes)
    if isinstance(layer, ArraysCache):
        same = np.array_equal(np.array(layer[0]), rows(hashes[-1:], 9)) and layer[1].item() == count
        return "" if same else "another prefix's state"
    if layer.offset != count:
        return f"offset {layer.offset}, wanted {count}"
    for part, array in enumerate((layer.keys, layer.values)):
        want, got = rows(hashes, 2 * number + part), np.array(array[0, 0])
        if isinstance(layer, RotatingKVCache):
            if (layer.max_size, layer.keep) not in ((WINDOW, 0), (WINDOW, SINKS)):
                return f"a window of {layer.max_size}, {layer.keep} kept"
            if count > layer.max_size:
                held = layer.max_size - 1 - layer.keep
                got = np.concatenate([got[: layer.keep], got[layer.keep + 1 : layer.max_size]])
                want = np.concatenate([want[: layer.keep], want[count - held :]])
        if len(got) < len(want):
            return f"{len(got)} rows of {('keys', 'values')[part]}, wanted {len(want)}"
        off = np.abs(got[: len(want)] - want)
        bad = off.max(-1) > 0 if exact else ~(off.mean(-1) < OFF)
        if bad.any():
            wrong = int(bad.sum())
            return f"{wrong} of {len(want)} rows of {('keys', 'values')[part]} are others"
    return ""
