"""The rows of one request in a batch's layer caches, mlx-lm's or mlx-vlm's."""

from __future__ import annotations

from typing import Any

from prefixcache.layers.adapters import taken
from prefixcache.layers.reading import is_list, read_leaf
from prefixcache.upstream import row_count


def put_back(batched: Any, i: int, single: Any, since: int, end: int) -> None:
    """Put the rows of tokens `since` to `end` of a single sequence's layer cache where a batch has them, and its state."""
    if is_list(type(single)):
        for layer, child in zip(batched.caches, single.caches, strict=True):
            put_back(layer, i, child, since, end)
    elif type(single).__name__ == "ArraysCache":
        for number, array in enumerate(single.cache):
            if array is not None and len(batched.cache[number]) == 1:
                batched.cache[number] = array
            elif array is not None:
                batched.cache[number][i : i + 1] = array
    elif type(batched).__name__ in ("BatchKVCache", "BatchRotatingKVCache") and single.keys is not batched.keys:
        leaf, behind = read_leaf(single, "batch"), row_count(batched) - int(batched.offset[i].item())
        for first, last in leaf.held:
            low, high = max(first, since), min(last, end)
            if low < high:
                where, to = leaf.where(low, high), slice(behind + low, behind + high)
                batched.keys[i : i + 1, :, to] = taken(single.keys, where)
                batched.values[i : i + 1, :, to] = taken(single.values, where)
