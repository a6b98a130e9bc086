"""Live compressed caches for a model: made empty before a prefill, or converted after one. Here it is decided which layers
are coded, and the result says why the others are not.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_caches
from mlx_lm.models.cache import CacheList, KVCache

from prefixcache.codecs import Codec, Stream, TurboQuant, as_codec
from prefixcache.codecs.interchange import FLOATS, name_of
from prefixcache.codecs.turboquant.coding import RECENT, Choice, LayerRows
from prefixcache.live import families
from prefixcache.live.levels import SharedLevels
from prefixcache.live.turboquant import TurboQuantKVCache


class LivePromptCache(list[Any]):
    """mlx-lm's list of layer caches, some of which keep codes.

    `coded`: the layers with codes, be it in part; `left`: why each other layer stays as it is.
    """

    def __init__(self, layers: Sequence[Any], coded: tuple[int, ...], left: Mapping[int, str]):
        super().__init__(layers)
        self.coded = coded
        self.left = dict(left)


def make_prompt_cache(
    model: Any,
    codec: Codec | str | Mapping[str, Any] | None = None,
    *,
    recent_tokens: int = RECENT,
    levels: SharedLevels | None = None,
) -> LivePromptCache:
    """Return what mlx-lm's `make_prompt_cache(model)` gives, with codes in its plain layers, still empty.

    `codec`: a `TurboQuant`, or its text. Layers of mlx-lm's KVCache, and those in a CacheList, are coded where the codec
    takes their rows; sliding windows, chunks, recurrent state, MLA latents and the codec's `fp16_layers`
    stay. What rows a layer has is found by sketching one step of the model; nothing of it is computed.

    Attention reads the codes: for models whose attention is mlx-lm's own. Of each sequence the last
    `recent_tokens` are attended to as they are: nothing helps codes as much. `levels`: to share among
    the caches of one tenant, so that channels are measured once.

    ValueError where no layer qualifies, or where the model doesn't attend by mlx-lm's function.
    """
    codec = _checked(codec)
    families.check(model)
    fresh = mlx_caches.make_prompt_cache(model)
    rows = rows_of(model)
    if len(rows) != len(fresh):
        raise ValueError(f"{type(model).__module__}: {len(fresh)} caches, of which {len(rows)} could be sketched")
    return _Making(codec, len(fresh), recent_tokens, levels).all(fresh, rows)


def convert_prompt_cache(
    prompt_cache: Sequence[Any],
    codec: Codec | str | Mapping[str, Any] | None = None,
    *,
    model: Any = None,
    recent_tokens: int = RECENT,
    levels: SharedLevels | None = None,
) -> LivePromptCache:
    """Return a prompt cache after its prefill, with codes in its plain layers: which ones, see `make_prompt_cache`.

    Never convert in the middle of a prefill: what comes after would be computed from codes in some layers and not in
    others. `prompt_cache` stays as it is. With `model` it is checked that the cache's layers are those of the model, and
    that it can attend to codes; without, a model that can't raises TypeError when it runs.

    ValueError where no layer qualifies (one that is coded already does), or the layers aren't the model's.
    """
    return _Making(_checked(codec), _layers_of(prompt_cache, model), recent_tokens, levels).all(prompt_cache, None)


def convert_in_place(
    prompt_cache: list[Any],
    codec: Codec | str | Mapping[str, Any] | None = None,
    *,
    model: Any = None,
    recent_tokens: int = RECENT,
    levels: SharedLevels | None = None,
) -> LivePromptCache:
    """Do as `convert_prompt_cache`, but replace the layers of `prompt_cache` one by one: no more than one is there twice."""
    making = _Making(_checked(codec), _layers_of(prompt_cache, model), recent_tokens, levels)
    return making.all(prompt_cache, None, into=prompt_cache)


def _layers_of(prompt_cache: Sequence[Any], model: Any) -> int:
    """Return how many layers a prompt cache has. ValueError where it is none, or not one of the model."""
    if not isinstance(prompt_cache, (list, tuple)) or not prompt_cache:
        raise ValueError(f"prompt cache of type {type(prompt_cache).__name__}: pass the list of layer caches")
    if model is not None:
        families.check(model)
        check_layers(prompt_cache, model)
    return len(prompt_cache)


def check_layers(prompt_cache: Sequence[Any], model: Any) -> None:
    """Raise ValueError where a prompt cache is not one of this model: another number of layers, or other rows in one."""
    sketched = rows_of(model)
    if len(prompt_cache) != len(sketched):
        raise ValueError(
            f"a prompt cache of {len(prompt_cache)} layers for a model of {len(sketched)}: it is of another model, or the "
            "model has changed; compute the prompt again"
        )
    for layer, (cache, expected) in enumerate(zip(prompt_cache, sketched, strict=True)):
        for there, wanted in zip(_rows_in(cache), expected, strict=False):
            if there is not None and wanted is not None and there[:3] != wanted[:3]:
                raise ValueError(
                    f"layer {layer} holds {there}, the model makes {wanted}: it is of another model, or the model has "
                    "changed; compute the prompt again"
                )


# -- which layers ------------------------------------------------------------------------------------------------------


class _Making:
    """Makes a live prompt cache layer by layer, with one codec."""

    def __init__(self, codec: TurboQuant, layers: int, recent: int, levels: SharedLevels | None):
        self._codec, self._layers, self._recent = codec, layers, recent
        self._levels = levels if levels is not None else SharedLevels()
        self._left: dict[int, str] = {}
        self._coded: set[int] = set()
        self._number = 0  # of leaves: what shared levels go by

    def all(
        self, caches: Sequence[Any], rows: list[list[LayerRows | None]] | None, into: list[Any] | None = None
    ) -> LivePromptCache:
        """Convert all layers, whose `rows` are those that they hold unless given, in place where they are in `into`. What
        stays as it is is copied, since the model writes into it.
        """
        layers = into if into is not None else [None] * len(caches)
        for layer, cache in enumerate(caches):
            converted = self._layer(cache, layer, iter(rows[layer]) if rows is not None else None)
            layers[layer] = copy.deepcopy(cache) if converted is cache and into is None else converted
        if not self._coded:
            reasons = "; ".join(f"{why} ({_spoken(on)})" for why, on in _grouped(self._left).items())
            raise ValueError(f"no layer can be coded by {self._codec}: {reasons or 'there are none'}")
        left = {layer: why for layer, why in self._left.items() if layer not in self._coded}
        return LivePromptCache(layers, tuple(sorted(self._coded)), left)

    def _layer(self, cache: Any, layer: int, rows: Any) -> Any:
        if isinstance(cache, CacheList):
            children = [self._layer(child, layer, rows) for child in cache.caches]
            both = list(zip(cache.caches, children, strict=True))
            if all(converted is child for child, converted in both):
                return cache
            listed = copy.copy(cache)
            listed.caches = type(cache.caches)(
                copy.deepcopy(child) if converted is child else converted for child, converted in both
            )
            return listed
        kind = next(rows) if rows is not None else next(iter(_rows_in(cache)))
        number, self._number = self._number, self._number + 1
        if isinstance(cache, TurboQuantKVCache):
            self._check_coded(cache, layer, kind)
            self._coded.add(layer)
            return cache
        codec = self._codec_for(cache, layer, kind)
        if isinstance(codec, str):
            self._left[layer] = codec
            return cache
        self._coded.add(layer)
        live = TurboQuantKVCache(codec, recent_tokens=self._recent, levels=self._levels, layer=number)
        return live.filled_from(cache)

    def _check_coded(self, cache: TurboQuantKVCache, layer: int, rows: LayerRows | None) -> None:
        """Raise ValueError for a layer that is coded already, by another codec."""
        if rows is not None and not cache.choice.same_codes(self._choice_for(layer, rows)):
            raise ValueError(
                f"layer {layer} is coded already, by {cache.choice}, not {self._codec}: dequantize it first"
            )

    def _codec_for(self, cache: Any, layer: int, rows: LayerRows | None) -> TurboQuant | str:
        """Return the codec of a layer's live cache; or why the layer stays as it is."""
        if type(cache) is not KVCache:
            return f"{type(cache).__name__} is no plain KVCache"
        if rows is None:
            return "it holds no rows"
        if rows.dtype not in FLOATS:
            return f"rows of {rows.dtype}"
        choice = self._choice_for(layer, rows)
        return choice.codec() if choice is not None else f"the codec leaves {rows} as they are"

    def _choice_for(self, layer: int, rows: LayerRows) -> Choice | None:
        """Return how the codec codes a layer's rows; None where it leaves some as they are."""
        keys = Stream(layer, self._layers, "keys", rows.heads, rows.key_width, rows.value_width, rows.dtype)
        values = keys._replace(part="values", width=keys.other_width, other_width=keys.width)
        return Choice.of(self._codec.row_codec(keys), self._codec.row_codec(values), self._codec.sink_tokens)


def _checked(codec: Codec | str | Mapping[str, Any] | None) -> TurboQuant:
    chosen = TurboQuant() if codec is None else as_codec(codec)
    if not isinstance(chosen, TurboQuant):
        raise ValueError(f"codec {chosen}: live caches keep codes of TurboQuant; choose that")
    return chosen


def _grouped(left: Mapping[int, str]) -> dict[str, list[int]]:
    grouped: dict[str, list[int]] = {}
    for layer, why in left.items():
        grouped.setdefault(why, []).append(layer)
    return grouped


def _spoken(layers: list[int]) -> str:
    return f"layer {layers[0]}" if len(layers) == 1 else f"{len(layers)} layers, {layers[0]} to {layers[-1]}"


# -- what rows there are -----------------------------------------------------------------------------------------------


def _rows_in(cache: Any) -> list[LayerRows | None]:
    """Return the rows of each leaf of a layer's cache, depth first."""
    if isinstance(cache, CacheList):
        return [rows for child in cache.caches for rows in _rows_in(child)]
    if isinstance(cache, TurboQuantKVCache):
        return [cache.kind]
    keys, values = getattr(cache, "keys", None), getattr(cache, "values", None)
    if not isinstance(keys, mx.array) or not isinstance(values, mx.array) or keys.ndim != 4:
        return [None]
    return [LayerRows(keys.shape[1], keys.shape[3], values.shape[3], name_of(keys.dtype))]


def rows_of(model: Any) -> list[list[LayerRows | None]]:
    """Return the rows that each layer of a model makes, in each leaf of its cache. One step is built as a graph and
    never evaluated, which takes a millisecond or a few.
    """
    caches = mlx_caches.make_prompt_cache(model)
    model(mx.array([[0]]), cache=caches)
    return [_rows_in(cache) for cache in caches]
