"""What levels are made of, in C where it was built, else in NumPy: called by `levelling` with a block's rows.

Each channel's sums are float32, token by token, on either way and on every processor: the means and spreads are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prefixcache.codecs.c_library import address_of
from prefixcache.codecs.interchange import Array, as_float32
from prefixcache.codecs.threads import SHARE, WORTH_A_THREAD, share_out
from prefixcache.codecs.turboquant.c_rows import DTYPES, MEASURING, loaded, path_number

TILE = 16  # channels that the kernel takes at a time
_NUMBERS = {np.dtype(np.float16): 0, np.dtype(np.uint16): 1, np.dtype(np.float32): 2}  # in the order of DTYPES
assert len(_NUMBERS) == len(DTYPES)


def channel_statistics(parts: Sequence[Array], centred: bool) -> tuple[Array, Array, Array]:
    """Parts (tokens, heads, width) side by side -> by head and channel the mean, 0 where rows aren't `centred`, and the mean
    absolute deviation, (all heads, width); by row its mean squared deviation, each channel's in spreads (where one is 0: in
    ones), (all heads, tokens).

    Rows are one or more, of float32, float16 or bf16's bits (uint16), strided as they may be; results are float32. What is
    not finite makes its channels and its row so. ValueError for other elements.
    """
    for rows in parts:
        if rows.dtype not in _NUMBERS:
            raise ValueError(f"rows of {rows.dtype}: these are float32, float16 or bf16's bits as uint16")
    tokens, _, width = parts[0].shape
    library, _ = loaded()
    if library is None or width % TILE or not all(rows.size and rows.strides[2] == rows.itemsize for rows in parts):
        return channel_statistics_numpy(parts, centred)
    heads = sum(rows.shape[1] for rows in parts)
    mean, spread = np.empty((2, heads, width), np.float32)
    size = np.empty((heads, tokens), np.float32)
    jobs, at = [], 0
    for rows in parts:
        if rows.shape != (tokens, rows.shape[1], width):
            raise ValueError(f"rows of shape {rows.shape} beside {tokens} tokens of width {width}")
        where = (address_of(mean[at:]), address_of(spread[at:]), address_of(size[at:]))
        shape = (tokens, rows.shape[1], width, _NUMBERS[rows.dtype], centred)
        jobs.append(MEASURING.pack(address_of(rows), *rows.strides[:2], *where, *shape))
        at += rows.shape[1]
    packed, function, path = b"".join(jobs), library.turboquant_measure, path_number()
    nbytes = sum(rows.nbytes for rows in parts)
    share = -(-heads * SHARE // nbytes)
    share_out(heads, share, nbytes // WORTH_A_THREAD, lambda first, last: function(packed, first, last, path))
    return mean, spread, size


def channel_statistics_numpy(parts: Sequence[Array], centred: bool) -> tuple[Array, Array, Array]:
    """The same without a compiler; sizes differ in their last bits."""
    rows = np.concatenate(parts, axis=1)
    rows = as_float32(rows, "bfloat16" if rows.dtype == np.uint16 else rows.dtype.name)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        mean = rows.mean(0) if centred else np.zeros(rows.shape[1:], np.float32)
        apart = rows - mean
        spread = np.abs(apart).mean(0)
        size = np.square(apart / np.where(spread > 0, spread, 1)).mean(2)
    return mean, spread, size.T
