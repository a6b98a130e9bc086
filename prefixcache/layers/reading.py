"""Reads live prompt caches: into a *layout* (JSON, the same for all caches of a model) and their leaves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from prefixcache.keys import canonical
from prefixcache.layers.adapters import (
    LISTS,
    REGISTRY,
    SNAPSHOT,
    CacheError,
    Layout,
    Leaf,
    NotPlain,
    adapter_of,
    class_path,
)
from prefixcache.layers.allowed_classes import find_class


class Reading(NamedTuple):
    """A prompt cache, read: its layout, its leaves in depth-first order, and the tokens that all of them have seen.

    `positions` is None when no layer counts tokens. `agreed`: all layers that count say the same.
    """

    layout: Layout
    leaves: list[Leaf]
    positions: int | None
    agreed: bool


def read(prompt_cache: Any) -> Reading:
    """Read a list of layer caches. CacheError names the layer that can't be kept and what to do."""
    if not isinstance(prompt_cache, (list, tuple)) or not prompt_cache:
        raise CacheError(
            f"prompt cache of type {type(prompt_cache).__name__}: pass the list of layer caches, "
            "as make_prompt_cache gives"
        )
    leaves: list[Leaf] = []
    kinds: dict[str, int] = {}
    order = []
    for i, cache in enumerate(prompt_cache):
        layer = _read_layer(cache, f"layer {i}", leaves)
        kind = canonical(layer)
        if kind not in kinds:
            _check_kept(layer, f"layer {i}")
            kinds[kind] = len(kinds)
        order.append(kinds[kind])
    counted = [leaf.positions for leaf in leaves if leaf.positions is not None]
    layout = {"kinds": [json.loads(kind) for kind in kinds], "layers": order}
    return Reading(layout, leaves, min(counted, default=None), len(set(counted)) <= 1)


def _read_layer(cache: Any, at: str, leaves: list[Leaf]) -> Layout:
    if is_list(type(cache)):
        children = [_read_layer(c, f"{at}.{i}", leaves) for i, c in enumerate(cache.caches)]
        path, is_tuple = class_path(type(cache)), isinstance(cache.caches, tuple)
        return {"class": path, "kind": "list", "tuple": is_tuple, "children": children}
    leaf = read_leaf(cache, at)
    leaves.append(leaf)
    return leaf.layout


def _check_kept(layer: Layout, at: str) -> None:
    """Raise CacheError where a layer read at `at` could not be made again."""
    for i, child in enumerate(layer.get("children", ())):
        _check_kept(child, f"{at}.{i}")
    try:
        find_class(layer["class"])
    except CacheError as error:
        raise CacheError(f"{at}: {error}") from None


def live_arrays(prompt_cache: Sequence[Any]) -> list[mx.array]:
    """Return every array of a prompt cache, live or restored, however its lists nest."""
    arrays: list[mx.array] = []
    for cache in prompt_cache:
        arrays += live_arrays(cache.caches) if is_list(type(cache)) else adapter_of(type(cache)).arrays(cache)
    return arrays


def is_list(cls: type) -> bool:
    return any(class_path(base) in LISTS for base in cls.__mro__)


def read_leaf(cache: Any, at: str) -> Leaf:
    """Read one layer cache. A subclass that holds more beside its rows than its base is kept as a snapshot."""
    try:
        return adapter_of(type(cache)).read(cache, at)
    except NotPlain:
        if class_path(type(cache)) in REGISTRY:
            raise
        return SNAPSHOT.read(cache, at)
