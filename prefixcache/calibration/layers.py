"""Which layers of a loaded mlx-lm model can be transformed, and how RoPE turns their keys: measured, not parsed.

One rule decides: single tokens, run alone at several positions, must give a layer the same keys everywhere once the
rotation of one of the model's RoPE modules, or none, is undone. A token that attends to itself alone gets its own value
whatever its position is, so each layer's input is the same at every position, and only RoPE makes its keys differ.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from prefixcache.calibration.rows import window_of
from prefixcache.codecs.interchange import FLOATS, Array, as_float32, copy_out, name_of
from prefixcache.codecs.transform.layer import Layer
from prefixcache.codecs.transform.rope import NO_ROPE, Rope
from prefixcache.codecs.turboquant.codec import is_latent

POSITIONS = (7, 300, 2000)  # where a rotation is verified
TOKENS = (1, 33, 65, 97)  # each is a sequence by itself
# Of a key's length. bf16 rounds by .002; a rotation that isn't the layer's errs by more than .1 at some position.
TOLERANCE = 0.01
# float32 rounds a phase of 2,000 radians by 1e-4.
MODULE_TOLERANCE = 1e-3

REFUSED_CACHES: dict[type, str] = {
    RotatingKVCache: "a window that keeps first tokens",
    ChunkedKVCache: "chunked attention",
    ArraysCache: "recurrent state",
    QuantizedKVCache: "a quantised cache",
    CacheList: "several caches in one",
}


class Eligible(NamedTuple):
    """The layers that can be transformed, and why the others can't, by index: a short clause each."""

    layers: list[Layer]
    left_out: dict[int, str]


def eligible_layers(model: nn.Module) -> Eligible:
    """Return which of the model's layers can be transformed.

    Runs the model a few times on single tokens.
    """
    windows, refused = {}, {}
    for index, cache in enumerate(make_prompt_cache(model)):
        if (window := window_of(cache)) is not None:
            windows[index] = window
        else:
            refused[index] = REFUSED_CACHES.get(type(cache), f"a cache of its own, {type(cache).__name__}")
    at_zero, *elsewhere = (_rows_at(model, position) for position in (0, *POSITIONS))
    rotations = _Rotations(model)
    layers = []
    for index, first in at_zero.items():
        layer_or_reason = _measured(index, [first, *(rows[index] for rows in elsewhere)], rotations)
        if isinstance(layer_or_reason, Layer):
            layers.append(layer_or_reason._replace(window=windows[index]))
        else:
            refused[index] = layer_or_reason
    return Eligible(layers, dict(sorted(refused.items())))


# -- what a layer is given at a position ------------------------------------------------------------------------------


class _Alone(KVCache):
    """Says that `position` tokens came before, and holds none of them; keeps what it is given."""

    def __init__(self, position: int):
        super().__init__()
        self.offset = position
        self.given: list[tuple[mx.array, mx.array]] = []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.given.append((keys, values))
        self.keys, self.values = keys, values
        self.offset += keys.shape[2]
        return keys, values

    def make_mask(self, tokens: int, return_array: bool = False, **_: Any) -> mx.array | None:
        return mx.ones((tokens, tokens), mx.bool_) if return_array else None


Given = list[tuple[mx.array, mx.array]]


def _rows_at(model: nn.Module, position: int) -> dict[int, Given]:
    """Return what each cache of keys and values is given of single tokens at `position`: (sequences, heads, 1, width) arrays,
    by index.
    """
    caches = make_prompt_cache(model)
    wanted = [index for index, cache in enumerate(caches) if window_of(cache) is not None]
    caches = [_at(cache, position) for cache in caches]
    mx.eval(model(mx.array(TOKENS)[:, None], cache=caches))
    return {index: caches[index].given for index in wanted}


def _at(cache: Any, position: int) -> Any:
    """Return a fresh cache that says `position`: some models ask one layer's cache for the position in all of them."""
    if isinstance(cache, CacheList):
        return CacheList(*(_at(part, position) for part in cache.caches))
    if isinstance(cache, (KVCache, RotatingKVCache)):
        return _Alone(position)
    if isinstance(cache, ChunkedKVCache):
        cache.offset = cache.start_position = position
    return cache


def _measured(index: int, given: list[Given], rotations: _Rotations) -> Layer | str:
    """Return the layer, or why it isn't eligible; `given` at position 0 and at POSITIONS."""
    if not all(given):
        return "no keys or values"
    if any(len(calls) > 1 for calls in given):
        return "written more than once a token"
    pairs = [calls[0] for calls in given]
    keys, values = pairs[0]
    (_, heads, _, key_width), value_width = keys.shape, values.shape[3]
    dtype = name_of(keys.dtype)
    if dtype not in FLOATS or values.dtype != keys.dtype or values.shape[1] != heads:
        return f"keys of {heads} x {dtype} and values of {values.shape[1]} x {name_of(values.dtype)}"
    if is_latent(heads, key_width, value_width):
        return f"keys of {key_width} values and values of {value_width}: a latent"
    rows = [(_as_rows(keys), _as_rows(values)) for keys, values in pairs]
    if _error([values for _, values in rows], NO_ROPE) > TOLERANCE:
        return "values depend on the position"
    candidates = [NO_ROPE, *rotations.of(key_width)]
    errors = [_error([keys for keys, _ in rows], candidate) for candidate in candidates]
    least = int(np.argmin(errors))
    if not errors[least] <= TOLERANCE:
        return "keys depend on the position, and no RoPE module of the model explains how"
    return Layer(index, heads, key_width, value_width, dtype, candidates[least])


def _as_rows(array: mx.array) -> Array:
    """Return rows of one token: (sequences, heads, 1, width) -> float32 (1, sequences * heads, width)."""
    return as_float32(copy_out(array), name_of(array.dtype)).reshape(1, -1, array.shape[3])


def _error(rows: list[Array], rotation: Rope) -> float:
    """Return how far rows at POSITIONS are from those at 0 once `rotation` is undone, by their length; nan if they are."""
    first, *others = (rotation.undo(row, position) for row, position in zip(rows, (0, *POSITIONS), strict=True))
    length = np.linalg.norm(first)
    return max(float(np.linalg.norm(other - first) / length) if length else np.nan for other in others)


# -- what a RoPE module does ------------------------------------------------------------------------------------------


class _Rotations:
    """The distinct rotations of a model's RoPE modules, by the width of the keys that they are given."""

    def __init__(self, model: nn.Module):
        self._modules = [module for _, module in model.named_modules() if _is_rope(module)]
        self._by_width: dict[int, list[Rope]] = {}

    def of(self, width: int) -> list[Rope]:
        if width not in self._by_width:
            measured = (measure(module, width) for module in self._modules)
            self._by_width[width] = list(dict.fromkeys(rotation for rotation in measured if rotation is not None))
        return self._by_width[width]


def _is_rope(module: nn.Module) -> bool:
    return re.search("rope|rotary", type(module).__name__, re.IGNORECASE) is not None


def measure(module: nn.Module, width: int) -> Rope | None:
    """Return how a RoPE module turns keys of `width` values; None where it does something else to them.

    The module is asked for unit vectors. At position 1 the angle of each gives its frequency, relatively exact for slow
    pairs too; positions 32 and 1024, powers of two that round no phase, make it as exact as the module's own float32.
    """
    try:
        at_one = _turned_units(module, width, 1)
        pairing = _pairing(at_one)
        frequencies, scale = _turn(at_one, pairing)
        for position in (32, 1024):
            angles = _turn(_turned_units(module, width, position), pairing).angles
            turns = np.round((frequencies * position - angles) / (2 * np.pi))
            frequencies = (angles + 2 * np.pi * turns) / position
        rotation = Rope(frequencies, pairing.interleaved, scale)
        units = np.eye(width, dtype=np.float32)[None]
        agrees = all(
            np.abs(rotation.redo(units, position)[0] - _turned_units(module, width, position)).max() < MODULE_TOLERANCE
            for position in POSITIONS
        )
    except Exception:  # a module for images, or for narrower keys: what it raises has no common class
        return None
    return rotation if agrees else None


def _turned_units(module: nn.Module, width: int, position: int) -> Array:
    """Return what each unit vector becomes at `position`, a row each: float32 (width, width). The CPU's cosines are exact."""
    with mx.stream(mx.cpu):
        turned = module(mx.eye(width)[None, :, None], offset=position)
        return np.array(turned.astype(mx.float32)).reshape(width, width)


class _Pairing(NamedTuple):
    """How many pairs of values turn, and whether they are neighbours."""

    pairs: int
    interleaved: bool


def _pairing(turned: Array) -> _Pairing:
    """Return which values turn together. ValueError where none does."""
    partners = [i for i in range(len(turned)) if turned[0, i] != 0 and i]
    if len(partners) != 1:
        raise ValueError("the first value of a head turns with no other, or with several")
    if partners[0] > 1:
        return _Pairing(partners[0], False)
    changed = np.flatnonzero(np.any(turned != np.eye(len(turned)), axis=1))
    return _Pairing(int(changed[-1]) // 2 + 1, True)


class _Turn(NamedTuple):
    """The angles of the pairs, float64 (pairs,), and how many times as long they become."""

    angles: Array
    scale: float


def _turn(turned: Array, pairing: _Pairing) -> _Turn:
    """Return how the pairs turned. ValueError where they don't lengthen by one factor."""
    first = np.arange(pairing.pairs) * (2 if pairing.interleaved else 1)
    second = first + (1 if pairing.interleaved else pairing.pairs)
    x, y = turned[first, first].astype(np.float64), turned[first, second].astype(np.float64)
    lengths = np.hypot(x, y)
    scale = float(lengths.mean())
    if np.ptp(lengths) > 1e-5 * scale:
        raise ValueError(f"pairs that are {lengths.min()} to {lengths.max()} times as long")
    return _Turn(np.arctan2(y, x), 1.0 if abs(scale - 1) < 1e-6 else scale)
