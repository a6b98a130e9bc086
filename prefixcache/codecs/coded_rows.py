"""Coded keys and values as a live cache holds them: what attention on codes reads, whichever back end does it."""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from prefixcache.codecs.packing import words_of
from prefixcache.codecs.turboquant.format import Form


class CodedRows(NamedTuple):
    """The rows of B sequences of one layer, TurboQuant's codes of the same kind throughout.

    `codes` uint32 (B, heads, T, key words + value words): the words of a row's key, then those of its value; `scales`
    uint16 (B, heads, T, 2): the key's scale, the value's. Both may be views of longer buffers: any strides but the last,
    which is 1.

    `key_levels`, `value_levels` float32 (2, B or 1, heads, width): the mean and the spread that the decoder applies
    (`Form.spread`), contiguous; None where rows aren't levelled. `first`, `last` int32 (B,): of sequence b the rows
    `first[b]` to `last[b]` (not included) count, others are never attended to; None: from 0, to T.
    """

    codes: mx.array
    scales: mx.array
    keys: Form
    values: Form
    key_levels: mx.array | None = None
    value_levels: mx.array | None = None
    first: mx.array | None = None
    last: mx.array | None = None

    @property
    def key_words(self) -> int:
        """Where a row's value begins in `codes`."""
        return words_of(self.keys.width, self.keys.codebook.bits)
