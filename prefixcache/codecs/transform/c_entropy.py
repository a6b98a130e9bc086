"""The entropy coder in C: heads, words and values of `entropy` bit for bit.

The kernel is `kernels/transform.c`, built with the package where there is a C compiler, and called through ctypes, which
lets other threads run meanwhile. Here every shape, dtype, stride and class is checked before a pointer goes there, and rows
are shared out among threads.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from prefixcache.codecs.c_library import Library, address_of, load
from prefixcache.codecs.interchange import Array
from prefixcache.codecs.threads import share_out
from prefixcache.codecs.transform import entropy
from prefixcache.codecs.transform.tables import (
    CLASSES,
    DIRECT,
    SYMBOLS,
    Tables,
    codes_of,
    extra_bits,
    least_magnitude,
    points_of,
    shifted_classes,
)

MOST_COMPONENTS = 1 << 16  # what a row costs fits int32
SHARE = 1 << 16  # values, about, that a thread takes at a time: half a millisecond
ROWS_AT_ONCE = 4  # that the kernel decodes side by side

_GAIN_LANES = 16
_RECIPROCAL_BITS = 44
_WRONG = ("", entropy.MISPLACED, entropy.TOO_FEW, entropy.TOO_MANY)  # in the order of the kernel's own numbers

# `struct packing`, `struct unpacking` and `struct code` of kernels/transform.c: the first two are pointers and int64 alone
_PACKING, _UNPACKING = struct.Struct("=11q"), struct.Struct("=11q")
_CODE = np.dtype([("reciprocal", "u8"), ("frequency", "u2"), ("start", "u2"), ("least", "u2"), ("open_bits", "u2")])
_SPAN = np.dtype([("frequency", "u2"), ("start", "u2"), ("open_bits", "u4"), ("mask", "u4"), ("least", "f4")])


# -- the library -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def loaded() -> Library:
    sizes = (
        ("packing", _PACKING.size),
        ("unpacking", _UNPACKING.size),
        ("code", _CODE.itemsize),
        ("span", _SPAN.itemsize),
    )
    library = load("_transform", [(f"transform_size_of_{name}", size) for name, size in sizes])
    if (functions := library.functions) is not None:
        functions.transform_pack.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
        functions.transform_pack.restype = ctypes.c_int64
        functions.transform_unpack.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64]
        functions.transform_unpack.restype = ctypes.c_int
    return library


def available() -> bool:
    """Tell whether the kernel was built and can be loaded here."""
    return loaded().functions is not None


def describe() -> str:
    """Return "C", or why there is no kernel: "not built"."""
    return loaded().reason or "C"


def takes(classes: Array) -> bool:
    """Tell whether the kernel can code rows of this many components."""
    return len(classes) <= MOST_COMPONENTS


# -- tables as the kernel reads them -----------------------------------------------------------------------------------


class _HostTables(NamedTuple):
    """Axes of 76: index c + g is class c under gain g (0 to 14, of which `GAINS // 2`, 7, shifts nothing)."""

    codes: Array
    """`struct code` (76, 57)"""
    costs: Array
    """int32 (57, 76): what a symbol costs beyond symbol 0, in 1/256 bits"""
    cost_of_0: Array
    """int32 (76,)"""
    symbols: Array
    """uint8 (76, 4096)"""
    spans: Array
    """`struct span` (76, 57)"""
    points: Array
    """float32 (76, 8): the values that magnitudes below 8 are decoded to"""


_prepared: WeakKeyDictionary[Tables, _HostTables] = WeakKeyDictionary()


def _prepare(tables: Tables) -> _HostTables:
    if tables not in _prepared:
        shifted = shifted_classes()
        costs = tables.costs[shifted].T
        points = points_of(tables)
        _prepared[tables] = _HostTables(
            codes=_codes(tables)[shifted],
            costs=np.ascontiguousarray(costs - costs[0], np.int32),
            cost_of_0=np.ascontiguousarray(costs[0], np.int32),
            symbols=tables.symbols[shifted],
            spans=_spans(tables, points)[shifted],
            points=points[shifted],
        )
    return _prepared[tables]


def _codes(tables: Tables) -> Array:
    codes, unpacked = np.empty((CLASSES, SYMBOLS), _CODE), codes_of(tables)
    for name, numbers in unpacked._asdict().items():
        codes[name] = numbers
    codes["reciprocal"] = -(-(1 << _RECIPROCAL_BITS) // unpacked.frequency.astype(np.int64))
    return codes


def _spans(tables: Tables, points: Array) -> Array:
    symbols = np.arange(SYMBOLS)
    spans = np.empty((CLASSES, SYMBOLS), _SPAN)
    spans["frequency"], spans["start"] = tables.frequencies, tables.starts
    spans["open_bits"] = np.where(symbols > 0, extra_bits(symbols) + 1, 0)
    spans["mask"] = (1 << spans["open_bits"]) - 1
    spans["least"] = least_magnitude(symbols)
    spans["least"][:, :DIRECT] = points
    return spans


# -- calls -------------------------------------------------------------------------------------------------------------


def encode(values: Array, classes: Array, tables: Tables, decoded: Array) -> tuple[Array, Array]:
    """Encode values in steps, float32 (rows, components) -> heads uint16 (rows,), all rows' words uint16 in their
    order, and into `decoded`, which is like the values and may be them, what `decode` gives.

    ValueError for arrays of other shapes, dtypes or classes, and where `takes(classes)` is False.
    """
    rows, components = _shape("values", values)
    _check_values("decoded", decoded, (rows, components), written=True)
    classes, prepared, function = _checked(classes, components), _prepare(tables), _function("transform_pack")
    heads = np.empty(rows, np.uint16)
    cost_of_0s = prepared.cost_of_0[classes[:, None] + np.arange(_GAIN_LANES)].sum(axis=0, dtype=np.int32)
    job = _PACKING.pack(
        address_of(values),
        values.strides[0],
        address_of(decoded),
        decoded.strides[0],
        address_of(heads),
        address_of(classes),
        address_of(prepared.codes),
        address_of(prepared.costs),
        address_of(cost_of_0s),
        address_of(prepared.points),
        components,
    )
    most = 2 * components + 2
    parts: dict[int, Array] = {}

    def work(first: int, last: int) -> None:
        words = np.empty((last - first) * min(most, entropy.MOST_WORDS) + most, np.uint16)
        parts[first] = words[: function(job, first, last, address_of(words))]

    _share_out(rows, components, work)
    return heads, np.concatenate([np.empty(0, np.uint16), *(parts[first] for first in sorted(parts))])


def decode(heads: Array, words: Array, first: Array, classes: Array, tables: Tables, values: Array) -> None:
    """Decode heads uint16 (rows,), words uint16, each row's from `first` (int64 (rows,)) on -> into values float32
    (rows, components).

    ValueError for arrays of other shapes, dtypes or classes, and where `takes(classes)` is False. entropy.DamagedCodes as of
    `entropy.unpack`: then the values are of no use.
    """
    rows, components = _shape("values", values)
    _check_values("values", values, (rows, components), written=True)
    heads, first = _contiguous("heads", heads, np.uint16, rows), _contiguous("first", first, np.int64, rows)
    words = _contiguous("words", words, np.uint16, len(words), aligned=False)
    classes, prepared, function = _checked(classes, components), _prepare(tables), _function("transform_unpack")
    job = _UNPACKING.pack(
        address_of(values),
        values.strides[0],
        address_of(heads),
        address_of(first),
        address_of(words),
        len(words),
        address_of(classes),
        address_of(prepared.symbols),
        address_of(prepared.spans),
        address_of(prepared.points),
        components,
    )
    wrong: list[int] = []
    _share_out(rows, components, lambda first, last: wrong.append(function(job, first, last)))
    if any(wrong):
        raise entropy.DamagedCodes(_WRONG[max(wrong)])


def _function(name: str) -> Any:
    library, reason = loaded()
    if library is None:
        raise RuntimeError(f"the C kernel of transform coding: {reason}; ask available(), and use entropy")
    return getattr(library, name)


def _shape(name: str, values: Array) -> tuple[int, int]:
    if values.ndim != 2:
        raise ValueError(f"{name} of shape {values.shape}: these take (rows, components)")
    _check_values(name, values, values.shape, written=False)
    rows, components = values.shape
    return rows, components


def _check_values(name: str, values: Array, shape: tuple[int, ...], written: bool) -> None:
    if values.shape != shape or values.dtype != np.float32:
        raise ValueError(f"{name} of shape {values.shape} and dtype {values.dtype}: these take {shape} of float32")
    if values.size and shape[1] > 1 and values.strides[1] != values.itemsize:
        raise ValueError(f"{name} {values.strides[1]} bytes apart: give rows that are contiguous")
    if written and not values.flags.writeable:
        raise ValueError(f"{name} is a read-only array; give one that can be written")


def _contiguous(name: str, array: Array, dtype: Any, length: int, aligned: bool = True) -> Array:
    if array.shape != (length,) or array.dtype != dtype:
        raise ValueError(
            f"{name} of shape {array.shape} and dtype {array.dtype}: these take ({length},) of {np.dtype(dtype)}"
        )
    return np.require(array, requirements=["C", "A"] if aligned else ["C"])


def _checked(classes: Array, components: int) -> Array:
    classes = _contiguous("classes", classes, np.int32, components)
    if not takes(classes):
        raise ValueError(f"{components} components: the C kernel takes {MOST_COMPONENTS}; ask takes(), and use entropy")
    if components and not 0 <= classes.min() <= classes.max() < CLASSES:
        raise ValueError(f"classes from {classes.min()} to {classes.max()}: there are 0 to {CLASSES - 1}")
    return classes


def _share_out(rows: int, components: int, work: Callable[[int, int], None]) -> None:
    share = -(-SHARE // max(1, components))
    share = -(-share // ROWS_AT_ONCE) * ROWS_AT_ONCE
    share_out(rows, share, -(-rows // share), work)
