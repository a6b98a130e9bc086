"""placeholder: NumPy only"""

from __future__ import annotations

import numpy as np

from prefixcache.codecs.interchange import Array
from prefixcache.codecs.transform import entropy
from prefixcache.codecs.transform.tables import Tables, quantised


def encode(values: Array, classes: Array, tables: Tables) -> tuple[Array, Array, Array]:
    steps = quantised(values)
    heads, words = entropy.pack(steps, classes, tables)
    joined = np.concatenate(words) if words else np.zeros(0, np.uint16)
    counts = entropy.words_of(heads) * (entropy.gain_of(heads) != entropy.AS_IT_IS)
    ends = np.cumsum(counts)
    return heads, joined, entropy.unpack(heads, joined, ends - counts, classes, tables)


def decode(heads: Array, words: Array, first: Array, classes: Array, tables: Tables) -> Array:
    return entropy.unpack(heads, words, first, classes, tables)
