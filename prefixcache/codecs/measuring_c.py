"""What levels are made of, in C where it was built, else in NumPy: called by `levelling` with a block's rows.

Each channel's sums are float32, token by token, on either way and on every processor: the means and spreads are the same.
"""

from __future__ import annotations

import numpy as np

from .interchange import Array
from .turboquant_c import DTYPES, MEASURING, WORTH_A_THREAD, address_of, loaded, path_number, share_out

TILE = 16  # channels that the kernel takes at a time
_NUMBERS = {np.dtype(np.float16): 0, np.dtype(np.uint16): 1, np.dtype(np.float32): 2}  # in the order of DTYPES
assert len(_NUMBERS) == len(DTYPES)


def measure_rows(rows: Array, centred: bool) -> tuple[Array, Array, Array]:
    """(tokens, heads, width) -> by head and channel the mean, 0 where rows aren't `centred`, and the mean absolute deviation,
    (heads, width); by row its mean squared deviation, each channel's in spreads (where one is 0: in ones), (tokens, heads).

    Rows are one or more, of float32, float16 or bf16's bits (uint16), strided as they may be; results are float32. What is
    not finite makes its channels and its row so.
    """
    number = _NUMBERS.get(rows.dtype)
    if number is None:
        raise ValueError(f"rows of {rows.dtype}: these are float32, float16 or bf16's bits as uint16")
    tokens, heads, width = rows.shape
    library, _ = loaded()
    if library is None or width % TILE or rows.strides[2] != rows.itemsize or not rows.size:
        return measure_rows_numpy(rows, centred)
    mean, spread = np.empty((2, heads, width), np.float32)
    size = np.empty((tokens, heads), np.float32)
    job = MEASURING.pack(
        address_of(rows), rows.strides[0], rows.strides[1], address_of(mean), address_of(spread), address_of(size),
        tokens, heads, width, number, centred,
    )  # fmt: skip
    function, path = library.turboquant_measure, path_number()
    share_out(heads, 1, rows.nbytes // WORTH_A_THREAD, lambda first, last: function(job, first, last, path))
    return mean, spread, size


def measure_rows_numpy(rows: Array, centred: bool) -> tuple[Array, Array, Array]:
    """The same without a compiler; sizes differ in their last bits."""
    if rows.dtype == np.uint16:
        rows = (rows.astype(np.uint32) << 16).view(np.float32)
    rows = np.ascontiguousarray(rows, np.float32)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        mean = rows.mean(0) if centred else np.zeros(rows.shape[1:], np.float32)
        apart = rows - mean
        spread = np.abs(apart).mean(0)
        size = np.square(apart / np.where(spread > 0, spread, 1)).mean(2)
    return mean, spread, size
