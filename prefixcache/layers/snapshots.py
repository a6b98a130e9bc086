"""The state of layers that can't be cut by token, as a snapshot's header describes it, and back.

A description is JSON. None, bool, int, float and str stand for themselves; all else is a list of a kind and its content:
["array", number], ["float", "inf"], ["list" or "tuple", items], ["dict", items by key]. Arrays are tensors `s<number>`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from prefixcache.codecs.interchange import borrow, bring_in, element, name_of
from prefixcache.image_format import Image, Spec
from prefixcache.layers.adapters import CacheError


class State(NamedTuple):
    """Snapshot layers, described: JSON with the arrays taken out, and the arrays in order."""

    described: list[Any]
    arrays: list[mx.array]

    def specs(self) -> list[Spec]:
        return [Spec(f"s{i}", element(name_of(a.dtype)).safetensors, tuple(a.shape)) for i, a in enumerate(self.arrays)]


def describe_state(leaves: Sequence[tuple[str, dict[str, Any]]]) -> State:
    """Describe all attributes of leaves, each given with the name that errors have for it. CacheError for one that can't be
    kept.
    """
    arrays: list[mx.array] = []
    described = [
        {name: _describe(value, arrays, f"{leaf}.{name}") for name, value in attributes.items()}
        for leaf, attributes in leaves
    ]
    return State(described, arrays)


def _describe(value: Any, arrays: list[mx.array], at: str) -> Any:
    if isinstance(value, mx.array):
        arrays.append(value)
        return ["array", len(arrays) - 1]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else ["float", repr(value)]
    if type(value) in (list, tuple):
        return [type(value).__name__, [_describe(v, arrays, f"{at}[{i}]") for i, v in enumerate(value)]]
    if type(value) is dict:
        if not all(isinstance(k, str) for k in value):
            raise CacheError(f"{at}: a dict with keys that are not str can't be kept")
        return ["dict", {k: _describe(v, arrays, f"{at}[{k!r}]") for k, v in value.items()}]
    raise CacheError(
        f"{at} is a {type(value).__name__}: a snapshot keeps None, bool, int, float, str, mx.array "
        "and lists, tuples and dicts of them"
    )


def write_state(state: State, tensors: dict[str, np.ndarray]) -> None:
    for i, array in enumerate(state.arrays):
        tensors[f"s{i}"][...] = borrow(array)


def leaf_state(snapshot: Image, number: int) -> dict[str, Any]:
    """Return the attributes of one of a snapshot's leaves."""
    meta, tensors = snapshot.header()
    header = json.loads(meta.extra)
    return {name: _revived(value, tensors, header["dtypes"]) for name, value in header["state"][number].items()}


def leaf_nbytes(snapshot: Image, number: int) -> int:
    """Return the bytes of the arrays of one of a snapshot's leaves."""
    meta, tensors = snapshot.header()
    described = json.loads(meta.extra)["state"][number].values()
    return sum(tensors[f"s{array}"].nbytes for value in described for array in _array_numbers(value))


def _revived(value: Any, tensors: dict[str, np.ndarray], dtypes: list[str]) -> Any:
    """Return the value that was described so, with its arrays."""
    if not isinstance(value, list):
        return value
    kind, content = value
    if kind == "array":
        return bring_in(tensors[f"s{content}"], dtypes[content])
    if kind == "float":
        return float(content)
    if kind == "dict":
        return {k: _revived(v, tensors, dtypes) for k, v in content.items()}
    items = [_revived(v, tensors, dtypes) for v in content]
    return tuple(items) if kind == "tuple" else items


def fits(extra: str, tensors: dict[str, np.ndarray], leaves: int, tokens: int) -> bool:
    """Tell whether a snapshot, with so many tokens behind its block, describes the state of so many leaves by arrays
    that it has.
    """
    arrays = {name: array for name, array in tensors.items() if name != "tokens"}
    if len(tensors) == len(arrays) or tensors["tokens"].shape != (tokens,):
        return False
    try:
        described = json.loads(extra)
        state, dtypes = described["state"], described["dtypes"]
        if not (len(state) == leaves and len(dtypes) == len(arrays)):
            return False
        sound = all(_is_described(value, len(dtypes)) for leaf in state for value in leaf.values())
        return sound and all(arrays[f"s{i}"].dtype == element(name).numpy for i, name in enumerate(dtypes))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def _is_described(value: Any, arrays: int) -> bool:
    """Tell whether `describe_state` describes an attribute so, with so many arrays at hand."""
    if not isinstance(value, list):
        return value is None or isinstance(value, (bool, int, float, str))
    kind, content = value
    if kind == "array":
        return type(content) is int and 0 <= content < arrays
    if kind == "float":
        return content in ("inf", "-inf", "nan")
    items = content.values() if kind == "dict" else content
    return kind in ("dict", "list", "tuple") and all(_is_described(item, arrays) for item in items)


def _array_numbers(value: Any) -> Iterator[int]:
    """Return the arrays in what is described so."""
    if isinstance(value, list):
        kind, content = value
        if kind == "array":
            yield content
        elif kind != "float":
            for item in content.values() if kind == "dict" else content:
                yield from _array_numbers(item)
