"""Rows of layers that are transformed together: from live leaves and known codes to an image's tensors, and back."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prefixcache.codecs.interchange import borrow, copy_out, on_cpu
from prefixcache.codecs.transform.coding import Codes
from prefixcache.codecs.transform.entropy import Damaged
from prefixcache.layers.adapters import Leaf
from prefixcache.layers.image_layout import Joined

Tensors = dict[str, np.ndarray]


def encode_joined(
    joined: Joined, leaves: Sequence[Leaf], first: int, last: int, sinks: int, known: tuple[Tensors, int] | None = None
) -> Codes:
    """Codes of tokens `first` to `last` (not included), a block's; those before token `sinks` are kept elsewhere.

    `known`: the tensors of another block's image, and how many of its first tokens are this one's, too: their codes are
    taken over, unless they can't be decoded.
    """
    taken, copied = None, 0
    if known is not None:
        tensors, copied = known
        taken = _leading(joined, tensors, copied)
        try:
            joined.coder.decode(taken, first)
        except Damaged:
            taken, copied = None, 0
    if copied < last - first:
        rows = [_rows_of(leaves[leaf], stream, first + copied, last) for leaf, stream in joined.streams]
        skip = min(max(sinks - first - copied, 0), last - first - copied)
        made = joined.coder.encode(rows, first + copied, skip, taken)
        if taken is None:
            return made
        taken = taken._replace(
            heads=np.concatenate([taken.heads, made.heads]), words=np.concatenate([taken.words, made.words])
        )
    assert taken is not None
    return taken


def decode_joined(joined: Joined, tensors: Tensors, start: int, count: int) -> list[np.ndarray]:
    """The first `count` rows of a block that begins at token `start`: (count, heads, width) of each stream. Damaged for codes
    that no encoder wrote.
    """
    return joined.coder.decode(_leading(joined, tensors, count), start)


def write_joined(joined: Joined, codes: Codes, tensors: Tensors) -> None:
    for name, values in zip(joined.names, codes, strict=True):
        tensors[name][...] = values


def _leading(joined: Joined, tensors: Tensors, count: int) -> Codes:
    """The codes of an image's first rows."""
    heads, words, offsets, offset_steps = (tensors[name] for name in joined.names)
    heads = heads[:count]
    return Codes(heads, words[: int(joined.coder.row_words(heads).sum())], offsets, offset_steps)


def _rows_of(leaf: Leaf, stream: str, first: int, last: int) -> np.ndarray:
    """(tokens, heads, width), bf16 as uint16."""
    where = leaf.where(first, last)
    assert isinstance(where, slice)  # of layers that keep every token
    array = leaf.arrays[stream]
    rows = borrow(array)[0][:, where] if on_cpu() else copy_out(array[0][:, where])
    return rows.swapaxes(0, 1)
