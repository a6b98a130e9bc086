"""The state of layers that can't be cut by token, as a snapshot's header describes it, and back.

A description is JSON. None, bool, int, float and str stand for themselves; all else is a list of a kind and its content:
["array", number], ["float", "inf"], ["list" or "tuple", items], ["dict", items by key]. Arrays are tensors `s<number>`, as
they are; recurrent state is coded as rows are (decision 0053), those of a head with levels of their own: `s<number>.<plane>`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from prefixcache.codecs import RowCodec
from prefixcache.codecs.interchange import CopyOut, borrow, bring_in, element, name_of
from prefixcache.codecs.levels import Levels, PackedLevels
from prefixcache.image_format import DTYPES, Image, Spec
from prefixcache.keys import canonical
from prefixcache.layers.adapters import CacheError

Shape = Sequence[int]
CodecOf = Callable[[Shape, str], RowCodec | None]  # of an array of this shape and dtype; None: it stays as it is


class State(NamedTuple):
    """Snapshot layers as JSON without their arrays (`described`); and the arrays in order, with the codecs of their rows."""

    described: list[Any]
    arrays: list[mx.array]
    codecs: list[RowCodec | None]

    @property
    def extra(self) -> str:
        """Return the state's part of the image's header, as JSON."""
        said: dict[str, Any] = {"state": self.described, "dtypes": [name_of(array.dtype) for array in self.arrays]}
        if any(self.codecs):
            coded = zip(self.arrays, self.codecs, strict=True)
            said["coded"] = [None if codec is None else list(array.shape) for array, codec in coded]
        return canonical(said)

    def specs(self) -> list[Spec]:
        of_arrays = enumerate(zip(self.arrays, self.codecs, strict=True))
        return [spec for i, (of, codec) in of_arrays for spec in _specs(i, name_of(of.dtype), of.shape, codec)]


def _specs(number: int, dtype: str, shape: Shape, codec: RowCodec | None) -> Iterator[Spec]:
    """Yield the tensors of an array of a state, which is (1, heads, rows, width) where it has a codec."""
    if codec is None:
        yield Spec(f"s{number}", element(dtype).safetensors, tuple(shape))
        return
    _, heads, rows, width = shape
    for plane in codec.planes:
        yield Spec(f"s{number}.{plane.name}", plane.dtype, (rows, heads, *plane.shape))
    if codec.levelled:
        yield Spec(f"s{number}.root", "U8", (heads, width))


def describe_state(leaves: Sequence[tuple[str, dict[str, Any], CodecOf]]) -> State:
    """Describe all attributes of leaves, each given with the name that errors have for it and what codes its arrays.
    CacheError for one that can't be kept.
    """
    arrays: list[mx.array] = []
    described: list[Any] = []
    codecs: list[RowCodec | None] = []
    for leaf, attributes, codec_of in leaves:
        described.append({name: _describe(value, arrays, f"{leaf}.{name}") for name, value in attributes.items()})
        codecs += [codec_of(array.shape, name_of(array.dtype)) for array in arrays[len(codecs) :]]
    return State(described, arrays, codecs)


def _describe(value: Any, arrays: list[mx.array], at: str) -> Any:
    if isinstance(value, mx.array):
        arrays.append(value)
        return ["array", len(arrays) - 1]
    if value is None or isinstance(value, (int, str)):
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


class EncodedState(NamedTuple):
    """The `copies` that the caller has yet to make, as after `encode`; and `decoded`: each live array that was coded, with
    the values that a fetch will give in its place.
    """

    copies: list[CopyOut]
    decoded: list[tuple[mx.array, mx.array]]


def encode_state(state: State, tensors: dict[str, np.ndarray], *, decoded: bool) -> EncodedState:
    """Write a state's arrays into its image's tensors, and with `decoded` decode what was coded."""
    copies, back = [], []
    for i, (array, codec) in enumerate(zip(state.arrays, state.codecs, strict=True)):
        if codec is None:
            tensors[f"s{i}"][...] = borrow(array)
            continue
        encoded = codec.encode_blocks(array[0], 1, (), [0] if codec.levelled else (), decoded)
        for plane, values in zip(codec.planes, encoded.planes, strict=True):
            copies.append(CopyOut(values, [tensors[f"s{i}.{plane.name}"]]))
        if encoded.levels is not None:
            mx.async_eval(encoded.levels)
            copies.append(CopyOut(encoded.levels.steps, [tensors[f"s{i}.root"]]))
        if encoded.decoded is not None:
            back.append((array, encoded.decoded[None]))
    return EncodedState(copies, back)


class StoredState:
    """The state that a snapshot has. `codecs` gives for each leaf the codec of an array."""

    def __init__(self, snapshot: Image, codecs: Sequence[CodecOf]):
        meta, self._tensors = snapshot.header()
        header = json.loads(meta.extra)
        self._leaves, self._dtypes, self._codecs = header["state"], header["dtypes"], codecs
        self._coded = header.get("coded", [None] * len(self._dtypes))

    def leaf(self, number: int) -> dict[str, Any]:
        """Return the attributes of one of the leaves."""
        return dict(self._revived(["dict", self._leaves[number]], self._codecs[number]))

    def beside(self, state: State) -> list[tuple[mx.array, mx.array]]:
        """Pair each array of a live cache with its stored values; no pairs where the stored state has other arrays."""
        if self._leaves != state.described:
            return []
        pairs = [
            (state.arrays[i], self._array(i, codec_of))
            for leaf, codec_of in zip(self._leaves, self._codecs, strict=True)
            for i in _array_numbers(["dict", leaf])
        ]
        alike = all((live.shape, live.dtype) == (stored.shape, stored.dtype) for live, stored in pairs)
        return pairs if alike else []

    def leaf_nbytes(self, number: int) -> int:
        """Return the bytes of the arrays of one of the leaves."""
        owners = {f"s{i}" for i in _array_numbers(["dict", self._leaves[number]])}
        return sum(tensor.nbytes for name, tensor in self._tensors.items() if name.split(".")[0] in owners)

    def _array(self, number: int, codec_of: CodecOf) -> mx.array:
        dtype, shape = self._dtypes[number], self._coded[number]
        if shape is None:
            return bring_in(self._tensors[f"s{number}"], dtype)
        codec, levels = codec_of(shape, dtype), None
        assert codec is not None
        if codec.levelled:
            levels = Levels.unpacked(PackedLevels(None, self._tensors[f"s{number}.root"]))
        planes = [self._tensors[f"s{number}.{plane.name}"] for plane in codec.planes]
        return codec.decode(planes, levels)[None]

    def _revived(self, value: Any, codec_of: CodecOf) -> Any:
        """Return the value that was described so, with its arrays."""
        if not isinstance(value, list):
            return value
        kind, content = value
        if kind == "array":
            return self._array(content, codec_of)
        if kind == "float":
            return float(content)
        if kind == "dict":
            return {k: self._revived(v, codec_of) for k, v in content.items()}
        items = [self._revived(v, codec_of) for v in content]
        return tuple(items) if kind == "tuple" else items


def fits(extra: str, tensors: dict[str, np.ndarray], codecs: Sequence[CodecOf], tokens: int) -> bool:
    """Tell whether a snapshot's header, `extra`, describes the state of as many leaves as there are `codecs`, and its tensors
    are those of just these arrays and of the `tokens` behind its block.
    """
    try:
        described = json.loads(extra)
        state, dtypes = described["state"], described["dtypes"]
        coded = described.get("coded", [None] * len(dtypes))
        if not (len(state) == len(codecs) and len(dtypes) == len(coded)):
            return False
        specs = [Spec("tokens", "I64", (tokens,))]
        for leaf, codec_of in zip(state, codecs, strict=True):
            if not _is_described(["dict", leaf], len(dtypes)):
                return False
            for i in _array_numbers(["dict", leaf]):
                shape, codec = coded[i], None
                if shape is None:
                    shape = tensors[f"s{i}"].shape
                elif not all(type(n) is int for n in shape) or (codec := codec_of(shape, dtypes[i])) is None:
                    return False
                specs += _specs(i, dtypes[i], shape, codec)
        wanted = {spec.name: (DTYPES[spec.dtype], spec.shape) for spec in specs}
        return wanted == {name: (array.dtype, array.shape) for name, array in tensors.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def _is_described(value: Any, arrays: int) -> bool:
    """Tell whether a value is a description that `describe_state` can give, where there are so many arrays."""
    if not isinstance(value, list):
        return value is None or isinstance(value, (int, float, str))
    kind, content = value
    if kind == "array":
        return type(content) is int and 0 <= content < arrays
    if kind == "float":
        return content in ("inf", "-inf", "nan")
    items = content.values() if kind == "dict" else content
    return kind in ("dict", "list", "tuple") and all(_is_described(item, arrays) for item in items)


def _array_numbers(value: Any) -> Iterator[int]:
    """Yield the numbers of the arrays in a description of `describe_state`."""
    if isinstance(value, list):
        kind, content = value
        if kind == "array":
            yield content
        elif kind != "float":
            for item in content.values() if kind == "dict" else content:
                yield from _array_numbers(item)
