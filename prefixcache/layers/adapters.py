"""One adapter for each kind of layer cache of mlx-lm and mlx-vlm: how it is read, and how one like it is made for a boundary.

Adapters read and set attributes, never `state`: its meaning differs between mlx-lm's releases. What is constant of an
object (its class, its constructor's attributes, the streams of rows that it holds) goes into the *layout*, JSON that
is part of the namespace; what grows with the tokens goes into images. Where the streams' bytes go is `image_layout`'s
business.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from prefixcache.blocks.node import Window
from prefixcache.codecs.interchange import Array, borrow, name_of
from prefixcache.codecs.packing import words_of
from prefixcache.codecs.turboquant.coding import Choice, LayerRows, Run
from prefixcache.keys import BLOCK

CACHE_MODULES = ("mlx_lm.models.cache.", "mlx_vlm.models.cache.")  # the same names and attributes in both
PLAIN_CACHE, ROTATING_CACHE = CACHE_MODULES[0] + "KVCache", CACHE_MODULES[0] + "RotatingKVCache"
LISTS = tuple(module + "CacheList" for module in CACHE_MODULES)
RECURRENT = tuple(module + "ArraysCache" for module in CACHE_MODULES)
PARTS = ("keys", "values")

Layout = dict[str, Any]


class CacheError(ValueError):
    """A prompt cache that can't be stored, or can't be made again; says which layer and what to do."""


class NotPlain(CacheError):
    """An attribute beside the rows that only a snapshot could keep."""


class LiveCodes(NamedTuple):
    """Rows that a live cache keeps as TurboQuant's codes: row t of the buffers is token t's.

    `codes` uint32 (1, heads, rows, words of a key, then of its value), `scales` uint16 (1, heads, rows, 2); `runs`: from
    which token on rows are coded with which levels.
    """

    choice: Choice
    key_words: int
    codes: mx.array
    scales: mx.array
    runs: tuple[Run, ...]

    def planes(self, stream: str) -> tuple[Array, Array]:
        """Return codes (rows, heads, words) and scales (rows, heads) of "keys" or "values": read-only views."""
        words = slice(self.key_words) if stream == "keys" else slice(self.key_words, None)
        codes, scales = borrow(self.codes)[0, :, :, words], borrow(self.scales)[0, :, :, int(stream == "values")]
        return codes.swapaxes(0, 1), scales.swapaxes(0, 1)


class Leaf(NamedTuple):
    """A live layer cache, read. Valid until its owner changes it.

    `positions` is the number of tokens that it has seen, None when it can't tell; `held` the runs of tokens whose
    rows it still has; `arrays` its streams, (1, heads, physical rows, width) each; `where(a, b)` the physical rows of
    tokens a to b, all of which it holds; `state` what a snapshot keeps. With `codes`, the rows are the codes; `arrays` then
    has the exact first tokens, if any.
    """

    layout: Layout
    positions: int | None
    held: tuple[tuple[int, int], ...] = ()
    arrays: dict[str, mx.array] = {}
    where: Callable[[int, int], slice | np.ndarray] = slice
    state: dict[str, Any] = {}
    codes: LiveCodes | None = None

    def rows(self, stream: str, first: int, last: int) -> mx.array:
        """Return the rows (heads, tokens, width) of tokens `first` to `last` (not included)."""
        return taken(self.arrays[stream], self.where(first, last))[0]


def taken(array: mx.array, rows: slice | np.ndarray) -> mx.array:
    """Return physical rows of an array (1, heads, physical rows, width)."""
    return array[:, :, rows if isinstance(rows, slice) else mx.array(rows)]


class Adapter:
    """How one kind of layer cache is read and made. `at` in errors names the layer."""

    can_make = True  # whether `make` may be called

    def read(self, cache: Any, at: str) -> Leaf:
        raise NotImplementedError

    def arrays(self, cache: Any) -> list[mx.array]:
        """Return every array that the cache holds: what must be evaluated before another thread may use it."""
        return arrays_in(vars(cache)) if hasattr(cache, "__dict__") else []

    def capacity(self, layout: Layout, boundary: int, room: int) -> int:
        """Return physical rows that a cache made for `boundary` has, when `room` more tokens are expected."""
        raise NotImplementedError

    def make(self, cls: type, layout: Layout, boundary: int, streams: dict[str, mx.array]) -> Any:
        """Return a new object of the layout's class for this boundary; streams are (1, heads, capacity, width)."""
        raise NotImplementedError


def arrays_in(value: Any) -> list[mx.array]:
    """Return the arrays in plain data: lists, tuples and dicts. Objects are not looked into: an `Adapter` knows what is
    in one.
    """
    if isinstance(value, mx.array):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [array for item in value for array in arrays_in(item)] if isinstance(value, (list, tuple)) else []


def class_path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def blank(cls: Any, attributes: dict[str, Any]) -> Any:
    """Return an object of a class with these attributes, made without its constructor."""
    cache = cls.__new__(cls)
    cache.__dict__.update(attributes)
    return cache


def _constants(cache: Any, growing: Iterable[str], at: str) -> dict[str, Any]:
    """Return the attributes that don't grow with the tokens; CacheError for one that JSON can't keep."""
    kept = {}
    for name, value in vars(cache).items():
        if name not in growing:
            if not (value is None or isinstance(value, (bool, int, float, str))):
                raise NotPlain(
                    f"{at} ({type(cache).__name__}): attribute {name!r} is a {type(value).__name__}, "
                    "which can't be kept beside rows; store a class without it"
                )
            if isinstance(value, float) and not math.isfinite(value):
                raise CacheError(f"{at} ({type(cache).__name__}): attribute {name!r} is {value}, not a finite number")
            kept[name] = value
    return kept


def _one_sequence(array: mx.array, cache: Any, at: str) -> None:
    if array.ndim != 4:
        raise CacheError(f"{at} ({type(cache).__name__}): rows of shape {array.shape}, not (1, heads, tokens, width)")
    if array.shape[0] != 1:
        raise _several(cache, at, array.shape[0])


def _several(cache: Any, at: str, batch: int) -> CacheError:
    return CacheError(
        f"{at} ({type(cache).__name__}): a batch of {batch} sequences; store one at a time, cut out of it"
    )


def _streams(arrays: dict[str, mx.array], cache: Any, at: str, exact: bool) -> list[list[Any]]:
    """Return [name, part, heads, width, dtype, exact] of each stream, for the layout."""
    streams = []
    for name, array in arrays.items():
        _one_sequence(array, cache, at)
        part = name.split(".")[0]
        streams.append([name, part, array.shape[1], array.shape[3], name_of(array.dtype), exact])
    return streams


def layer_rows(layout: Layout) -> LayerRows | None:
    """Return the rows of a layout of keys and values; None for none, or where the two differ in more than width."""
    if not layout["streams"]:
        return None
    (_, _, heads, key_width, dtype, _), (_, _, value_heads, value_width, value_dtype, _) = layout["streams"]
    return LayerRows(heads, key_width, value_width, dtype) if (heads, dtype) == (value_heads, value_dtype) else None


def _layout(cache: Any, kind: str, attributes: dict[str, Any], **more: Any) -> Layout:
    """Return the layout of a layer whose streams are not known yet."""
    return {"class": class_path(type(cache)), "kind": kind, "attrs": attributes, "streams": None, **more}


def _unused(layout: Layout, offset: int) -> Leaf:
    """Return a layer without rows. `streams`: None if it was never used, [] if it counts tokens but keeps no rows."""
    layout["streams"] = [] if offset else None
    return Leaf(layout, offset or None)


def _with_rows(cls: type, layout: Layout, boundary: int, streams: Mapping[str, Any]) -> Any:
    """Make an object of the layout's class for this boundary, with the streams of keys and values, where there are some."""
    cache = blank(cls, layout["attrs"])
    cache.keys, cache.values = streams.get("keys"), streams.get("values")
    cache.offset = 0 if layout["streams"] is None else boundary
    return cache


def _position(value: Any, at: str, cache: Any) -> int:
    if isinstance(value, mx.array) and value.size == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise CacheError(f"{at} ({type(cache).__name__}): offset is {value!r}, not a number of tokens")
    return value


class Sliceable(Adapter):
    """KVCache and its like: K and V rows of every token, in order; cut at any token."""

    def __init__(self, exact: bool = False, spare: bool = True):
        self.exact = exact  # the rows are codes already: kept as they are
        self.spare = spare  # the buffer may be longer than its tokens

    def read(self, cache: Any, at: str) -> Leaf:
        arrays = self._arrays(cache)
        layout = _layout(cache, "sliceable", _constants(cache, ("keys", "values", "offset"), at))
        offset = _position(cache.offset, at, cache)
        if not arrays:
            return _unused(layout, offset)
        layout["streams"] = _streams(arrays, cache, at, self.exact)
        rows = min(array.shape[2] for array in arrays.values())
        if rows < offset:
            raise CacheError(f"{at} ({type(cache).__name__}): offset {offset}, but only {rows} rows")
        return Leaf(layout, offset, ((0, offset),), arrays)

    def _arrays(self, cache: Any) -> dict[str, mx.array]:
        if cache.keys is None or cache.values is None:
            return {}
        if self.exact:
            arrays: dict[str, mx.array] = {}
            for part in PARTS:
                arrays |= {f"{part}.{i}": a for i, a in enumerate(getattr(cache, part)) if a is not None}
            return arrays
        return {"keys": cache.keys, "values": cache.values}

    def capacity(self, layout: Layout, boundary: int, room: int) -> int:
        return boundary if not self.spare else -(-(boundary + room + BLOCK) // BLOCK) * BLOCK

    def make(self, cls: type, layout: Layout, boundary: int, streams: dict[str, mx.array]) -> Any:
        if not self.exact or not streams:
            return _with_rows(cls, layout, boundary, streams)
        names = {part: sorted(name for name in streams if name.startswith(part + ".")) for part in PARTS}
        rows = {part: tuple(streams[name] for name in names[part]) for part in PARTS}
        return _with_rows(cls, layout, boundary, rows)


class Compressed(Adapter):
    """Our own TurboQuantKVCache, read as the KVCache that it stands for, so that both share blocks.

    Stored state never names it, but KVCache, which a fetch makes; `StoredPrompt.live` makes a TurboQuantKVCache of the codes.
    """

    can_make = False

    def read(self, cache: Any, at: str) -> Leaf:
        layer = cache._layer
        layout: Layout = {"class": PLAIN_CACHE, "kind": "sliceable", "attrs": {}, "streams": None}
        if layer.kind is None:
            return _unused(layout, 0)
        if layer.batch != 1:
            raise _several(cache, at, layer.batch)
        heads, *widths, dtype = layer.kind
        layout["streams"] = [
            [part, part, heads, width, dtype, False] for part, width in zip(PARTS, widths, strict=True)
        ]
        uncoded, codes = layer.sinks.arrays if layer.waiting is None else layer.waiting.arrays, None
        if layer.codes.arrays is not None:
            key_words = words_of(layer.kind.key_width, layer.choice.key_bits)
            words, scales = layer.codes.arrays
            codes = LiveCodes(layer.choice, key_words, words, scales, layer.runs[0])
        arrays = dict(zip(PARTS, uncoded, strict=True)) if uncoded is not None else {}
        return Leaf(layout, layer.rows, ((0, layer.rows),), arrays, codes=codes)

    def arrays(self, cache: Any) -> list[mx.array]:
        arrays: list[mx.array] = cache._layer.arrays()
        return arrays


class Rotating(Adapter):
    """RotatingKVCache: the first `keep` tokens' rows and the last ones', in a ring after `max_size`.

    A full ring is made without its oldest row, the next to be overwritten, which nothing reads. The row at that place is not
    the oldest token's; `_missing` is that token's number, so that a store skips it.
    """

    _growing = ("keys", "values", "offset", "_idx", "_missing")

    def read(self, cache: Any, at: str) -> Leaf:
        attrs = _constants(cache, self._growing, at)
        size, keep = attrs.get("max_size"), attrs.get("keep", 0)
        if type(size) is not int or type(keep) is not int or not 0 <= keep < size:
            raise CacheError(f"{at} ({type(cache).__name__}): max_size {size!r} and keep {keep!r} make no window")
        layout = _layout(cache, "windowed", attrs, window=list(Window(size, keep, chunked=False)))
        offset, index = _position(cache.offset, at, cache), _position(cache._idx, at, cache)
        if cache.keys is None:
            return _unused(layout, offset)
        arrays = {"keys": cache.keys, "values": cache.values}
        layout["streams"] = _streams(arrays, cache, at, False)
        rows = cache.keys.shape[2]
        # Physical rows in the order of their tokens.
        if index == rows:
            order = np.arange(rows)
        elif index < offset:
            order = np.concatenate([np.arange(keep), np.arange(index, rows), np.arange(keep, index)])
        else:
            order = np.arange(index)
        if len(order) > offset:
            order = order[:offset]
        if len(order) == offset:
            return Leaf(layout, offset, ((0, offset),) if offset else (), arrays, lambda a, b: order[a:b])
        first = offset - (len(order) - keep)  # the token of the first row behind the kept ones

        def where(a: int, b: int) -> np.ndarray:
            return order[a:b] if b <= keep else order[a - first + keep : b - first + keep]

        known = max(first, getattr(cache, "_missing", -1) + 1)
        ranges = ((0, keep), (known, offset)) if keep else ((known, offset),)
        return Leaf(layout, offset, ranges, arrays, where)

    def capacity(self, layout: Layout, boundary: int, room: int) -> int:
        return min(boundary, Window(*layout["window"]).size)

    def make(self, cls: type, layout: Layout, boundary: int, streams: dict[str, mx.array]) -> Any:
        cache = _with_rows(cls, layout, boundary, streams)
        cache._idx = cache.keys.shape[2] if streams else cache.offset
        window = Window(*layout["window"])
        if streams and boundary > window.size:
            cache._missing = boundary - window.size + window.keep
        return cache


class Chunked(Adapter):
    """ChunkedKVCache: rows from the start of the current chunk, which a boundary's own chunk decides."""

    _growing = ("keys", "values", "offset", "start_position")

    def read(self, cache: Any, at: str) -> Leaf:
        attrs = _constants(cache, self._growing, at)
        size = attrs.get("chunk_size")
        if type(size) is not int or size < 1:
            raise CacheError(f"{at} ({type(cache).__name__}): chunk_size {size!r} is not a number of tokens")
        layout = _layout(cache, "windowed", attrs, window=list(Window(size, chunked=True)))
        offset, start = _position(cache.offset, at, cache), _position(cache.start_position, at, cache)
        if cache.keys is None:
            return _unused(layout, offset)
        arrays = {"keys": cache.keys, "values": cache.values}
        layout["streams"] = _streams(arrays, cache, at, False)
        if not 0 <= offset - start <= cache.keys.shape[2]:
            raise CacheError(f"{at} ({type(cache).__name__}): tokens {start} to {offset} in {cache.keys.shape[2]} rows")
        return Leaf(layout, offset, ((start, offset),), arrays, lambda a, b: slice(a - start, b - start))

    def capacity(self, layout: Layout, boundary: int, room: int) -> int:
        # mlx-lm 0.31.3 takes the buffer's length for the number of its tokens when it drops a chunk: no spare blocks.
        return max(-(-(boundary - Window(*layout["window"]).first(boundary)) // BLOCK), 1) * BLOCK

    def make(self, cls: type, layout: Layout, boundary: int, streams: dict[str, mx.array]) -> Any:
        cache = _with_rows(cls, layout, boundary, streams)
        cache.start_position = Window(*layout["window"]).first(cache.offset)
        return cache


class Snapshot(Adapter):
    """Recurrent state, and every class that nothing is known of: its attributes, exactly, at one boundary."""

    def read(self, cache: Any, at: str) -> Leaf:
        path = class_path(type(cache))
        if not hasattr(cache, "__dict__"):
            raise CacheError(f"{at}: class {path} has no __dict__, so its state can't be read")
        batch = getattr(cache, "batch_size", 1)
        if isinstance(batch, int) and batch > 1:
            raise _several(cache, at, batch)
        offset = getattr(cache, "offset", None)
        positions = None if offset is None else _position(offset, at, cache)
        return Leaf({"class": path, "kind": "snapshot"}, positions, state=vars(cache))


class Batched(Adapter):
    """Batches: several sequences in one object."""

    can_make = False

    def read(self, cache: Any, at: str) -> Leaf:
        raise CacheError(
            f"{at}: {type(cache).__name__} holds a batch; call extract(i) and store one sequence at a time"
        )


SNAPSHOT, BATCHED = Snapshot(), Batched()
_BY_NAME: dict[str, Adapter] = {
    "KVCache": Sliceable(),
    "ConcatenateKVCache": Sliceable(spare=False),
    "QuantizedKVCache": Sliceable(exact=True),
    "RotatingKVCache": Rotating(),
    "ChunkedKVCache": Chunked(),
    "ArraysCache": SNAPSHOT,
}
REGISTRY: dict[str, Adapter] = {
    **{module + name: adapter for module in CACHE_MODULES for name, adapter in _BY_NAME.items()},
    "prefixcache.live.turboquant.TurboQuantKVCache": Compressed(),
}
_by_class: dict[type, Adapter] = {}


def adapter_of(cls: type) -> Adapter:
    """Return the adapter of a cache class: its own, else its nearest base's, else a snapshot's."""
    if cls not in _by_class:
        _by_class[cls] = BATCHED if "Batch" in cls.__name__ else _nearest(cls)
    return _by_class[cls]


def _nearest(cls: type) -> Adapter:
    for base in cls.__mro__:
        if class_path(base) in REGISTRY:
            return REGISTRY[class_path(base)]
        if "update_and_fetch" in vars(base):
            break  # it may lay its rows out in another way than its base: decision 0005
    return SNAPSHOT
