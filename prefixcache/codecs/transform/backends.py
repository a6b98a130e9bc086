"""Which code does the entropy coder's work here: the C kernel, or NumPy. Both give the same, so the choice is one of speed
alone; it is made here and nowhere else.
"""

from __future__ import annotations

import numpy as np

from prefixcache.codecs.c_library import warn_that_numpy_serves
from prefixcache.codecs.interchange import Array
from prefixcache.codecs.transform import c_entropy, entropy
from prefixcache.codecs.transform.tables import Tables, quantised


def encode(values: Array, classes: Array, tables: Tables) -> tuple[Array, Array, Array]:
    """Encode values in steps, float32 (rows, components), classes int32 (components,) -> heads uint16 (rows,), all
    rows' words uint16 in their order, and what `decode` gives, float32 (rows, components).

    A row that can't be coded has head 0xffff, no words, and zeros: the caller keeps it as it is. What is no number is coded
    as 0.
    """
    if _in_c(classes):
        decoded = np.empty(values.shape, np.float32)
        heads, words = c_entropy.encode(values, classes, tables, decoded)
        return heads, words, decoded
    steps = quantised(values)
    heads, of_rows = entropy.pack(steps, classes, tables)
    words = np.concatenate([np.empty(0, np.uint16), *of_rows])
    return heads, words, entropy.decoded(steps, heads, classes, tables)


def decode(heads: Array, words: Array, first: Array, classes: Array, tables: Tables) -> Array:
    """Decode heads uint16 (rows,), words uint16, each row's from `first` (int64 (rows,)) on -> values in steps, float32
    (rows, components); zeros of rows that are kept as they are.

    entropy.DamagedCodes for words that no encoder wrote, where that shows.
    """
    if not _in_c(classes):
        return entropy.unpack(heads, words, first, classes, tables)
    values = np.empty((len(heads), len(classes)), np.float32)
    c_entropy.decode(heads, words, first, classes, tables, values)
    return values


def _in_c(classes: Array) -> bool:
    if not c_entropy.available():
        warn_that_numpy_serves(c_entropy.describe())
        return False
    return c_entropy.takes(classes)


def describe() -> str:
    """Return what runs on this CPU, for people: "C", or "NumPy (C kernel: not built)"."""
    return "C" if c_entropy.available() else f"NumPy (C kernel: {c_entropy.describe()})"
