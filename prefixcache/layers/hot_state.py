"""The decoded state of a hot prompt: a prompt cache's own arrays, which MLX never changes in place once others hold them.

A hit gets new layer objects that share these arrays; appending to them copies. One that goes on with images copies them
into larger buffers. Runs on the caller's thread and stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from prefixcache.codecs.interchange import borrow, on_cpu
from prefixcache.codecs.pieces import Piece
from prefixcache.layers.adapters import CacheError, adapter_of, blank, class_path
from prefixcache.layers.image_layout import Plan
from prefixcache.layers.reading import is_list, live_arrays, read
from prefixcache.layers.stored_rows import DecodedBeginning

PLAIN = (bool, int, float, str, type(None))


class HotState:
    """Layer caches of the first `tokens` tokens of a prompt, which nobody changes."""

    def __init__(self, layers: Sequence[Any], tokens: int):
        self.tokens = tokens
        self._layers = layers
        self.nbytes = sum(array.nbytes for array in live_arrays(layers))
        self.is_sliceable = all(map(_is_sliceable, layers))

    @classmethod
    def of(cls, prompt_cache: Sequence[Any], tokens: int) -> HotState:
        """Hold the state of so many tokens, which the prompt cache has seen, or more where it can be cut. The arrays are
        evaluated, and have no row beyond these tokens. CacheError for layers that can't be shared.
        """
        held = cls([_shared(layer, tokens, mx.contiguous) for layer in prompt_cache], tokens)
        mx.eval(live_arrays(held._layers))
        return held

    def layers(self, tokens: int) -> list[Any]:
        """Return new layer caches of the first `tokens` tokens."""
        layers = [_shared(layer, tokens, lambda array: array) for layer in self._layers]
        mx.eval(live_arrays(layers))
        return layers

    def beginning(self, plan: Plan, tokens: int) -> DecodedBeginning:
        """Return the rows of the first `tokens` tokens, for other buffers; the layers are sliceable, and those of `plan`."""
        pieces = {}
        for number, leaf in enumerate(read(self._layers).leaves):
            for stream, array in leaf.arrays.items():
                codec = plan.tails.groups[plan.tail_places[number][stream][0]].codec
                if on_cpu():
                    pieces[number, stream] = Piece(codec, (borrow(array)[0, :, :tokens].swapaxes(0, 1),), 0)
                else:
                    pieces[number, stream] = Piece(codec, (), 0, rows=array[0, :, :tokens])
        return DecodedBeginning(tokens, pieces)


def nbytes_of(prompt_cache: Sequence[Any], tokens: int) -> int:
    """Return what `HotState.of` takes; nothing is evaluated. CacheError for layers that can't be shared."""
    return sum(array.nbytes for array in live_arrays([_shared(layer, tokens, lambda a: a) for layer in prompt_cache]))


def _is_sliceable(layer: Any) -> bool:
    if is_list(type(layer)):
        return all(map(_is_sliceable, layer.caches))
    return adapter_of(type(layer)).read(layer, "a hot layer").layout["kind"] == "sliceable"


def _shared(layer: Any, tokens: int, held: Any) -> Any:
    """Return another layer cache of the same state, whose arrays `held` makes from this one's."""
    if is_list(type(layer)):
        children = [_shared(child, tokens, held) for child in layer.caches]
        return blank(type(layer), {**vars(layer), "caches": type(layer.caches)(children)})
    adapter, at = adapter_of(type(layer)), "a hot layer"
    leaf = adapter.read(layer, at)
    if not adapter.can_make:
        raise CacheError(f"{class_path(type(layer))}: its codes are not decoded state")
    if leaf.layout["kind"] == "sliceable" and leaf.arrays:
        rows = {name: held(array[:, :, :tokens]) for name, array in leaf.arrays.items()}
        return adapter.make(type(layer), leaf.layout, tokens, rows)
    return blank(type(layer), _fresh(vars(layer), held))


def _fresh(value: Any, held: Any) -> Any:
    """Return plain data with new array objects, since `array[...] = rows` changes the object that it is said to."""
    if isinstance(value, mx.array):
        return held(value[...])
    if isinstance(value, dict):
        return {name: _fresh(item, held) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_fresh(item, held) for item in value)
    if not isinstance(value, PLAIN):
        raise CacheError(f"an attribute is a {type(value).__name__}, which can't be shared")
    return value
