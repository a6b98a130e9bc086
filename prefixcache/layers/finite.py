"""Where the state of a live cache holds NaN or infinity: what is computed on it is of the same kind, so nothing from there on
is worth keeping.

Where MLX computes on the CPU the bits are looked at where they lie; on a GPU one reduction of all streams is waited for, or
nothing is, and the images that are made of it are looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from prefixcache.codecs.interchange import ELEMENTS, Array, borrow, name_of, on_cpu
from prefixcache.codecs.threads import WORTH_A_THREAD, share_out
from prefixcache.layers.adapters import Leaf, arrays_in, taken
from prefixcache.layers.image_layout import Section, Tensors

AT_ONCE = 1024  # tokens of a stream that a thread looks at

# The bits of a float's exponent, which are all set where it isn't finite. So no finite one is as large as these, taken as an
# integer with a sign, or where it is negative, as these with the sign's bit, taken as one without: two maxima tell, and no
# array is made for it.
_EXPONENTS = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000, "float64": 0x7FF0000000000000}

_NAME_IN_MLX = {element.safetensors: name for name, element in ELEMENTS.items()}


class NotFinite(NamedTuple):
    """A leaf of a prompt cache whose state isn't finite, and from which token on; of recurrent state none is known."""

    leaf: int
    token: int | None = None


class LeafRows(NamedTuple):
    """Rows of a leaf, of tokens `first` to `last` (not included), in a buffer (1, heads, rows, ...)."""

    leaf: int
    first: int
    last: int
    buffer: mx.array
    where: slice | np.ndarray

    def taken(self) -> mx.array:
        return taken(self.buffer, self.where)


def is_finite(values: Array, dtype: str) -> bool:
    """Tell whether no value is NaN or infinite. `values` are the bits of MLX's `dtype`; what is no float is finite."""
    if dtype == "complex64":
        return bool(np.isfinite(values).all())
    if dtype not in _EXPONENTS or not values.size:
        return True
    exponent, size = _EXPONENTS[dtype], values.itemsize
    return bool(values.view(f"i{size}").max() < exponent and values.view(f"u{size}").max() < _negative(exponent, size))


def _negative(exponent: int, size: int) -> int:
    """Return the bits of an exponent with the sign's, in a float of `size` bytes."""
    return exponent | 1 << (8 * size - 1)


def first_not_finite(leaves: Sequence[Leaf], first: int, last: int) -> NotFinite | None:
    """Return the first token, of `first` to `last` (not included), of which a leaf holds a row that isn't finite."""
    step = AT_ONCE if on_cpu() else max(last - first, 1)
    rows = [
        each
        for number, leaf in enumerate(leaves)
        for at in range(first, last, step)
        for each in _rows_of(number, leaf, at, min(at + step, last))
    ]
    if _all_finite(rows) if on_cpu() else _all_finite_on_gpu(rows):
        return None
    lost = []
    for each in rows:  # it is rare: that the rows are looked at twice doesn't matter
        finite = mx.isfinite(each.taken())
        tokens = np.array(mx.all(finite, axis=[axis for axis in range(finite.ndim) if axis != 2]))
        if not tokens.all():
            lost.append(NotFinite(each.leaf, each.first + int(tokens.argmin())))
    return min(lost, key=lambda row: row.token or 0)


def image_not_finite(section: Section, tensors: Tensors, start: int) -> NotFinite | None:
    """Return the first of an image's rows, which are of the tokens from `start` on, that isn't finite. Coded rows are judged
    by their scales: that of a row which isn't finite isn't, either; those of others of its block need not be.
    """
    lost = []
    for group in section.groups:
        for name, plane in zip(group.names, group.codec.planes, strict=True):
            dtype, rows = _NAME_IN_MLX[plane.dtype], tensors[name]
            if not is_finite(rows, dtype):
                row = next(i for i in range(len(rows)) if not is_finite(rows[i], dtype))
                head = next(h for h in range(group.heads) if not is_finite(rows[row, h], dtype))
                leaf = next(m.leaf for m in group.members if m.head <= head < m.head + m.heads)
                lost.append(NotFinite(leaf, start + row))
    return min(lost, key=lambda row: row.token or 0, default=None)


def state_not_finite(leaves: Sequence[Leaf]) -> NotFinite | None:
    """Return the first leaf whose recurrent state isn't finite."""
    for number, leaf in enumerate(leaves):
        if not all(is_finite(borrow(array), name_of(array.dtype)) for array in arrays_in(leaf.state)):
            return NotFinite(number)
    return None


def _rows_of(number: int, leaf: Leaf, first: int, last: int) -> Iterator[LeafRows]:
    for a, b in leaf.held:
        low, high = max(a, first), min(b, last)
        for array in leaf.arrays.values():
            # Beside codes there are the first tokens' rows only.
            end = high if leaf.codes is None else min(high, array.shape[2])
            if low < end and array.size and name_of(array.dtype) in _EXPONENTS:
                yield LeafRows(number, low, end, array, leaf.where(low, end))
        if leaf.codes is not None and low < high:
            scales = leaf.codes.scales.view(mx.bfloat16)  # that of a row which isn't finite isn't, either
            yield LeafRows(number, low, high, scales, slice(low, high))


def _all_finite_on_gpu(rows: Sequence[LeafRows]) -> bool:
    """Tell whether all rows are finite: the maxima of all streams are on their way before one is waited for."""
    maxima: dict[str, tuple[list[mx.array], list[mx.array]]] = {}
    for each in rows:
        array, bits = each.taken(), 8 * each.buffer.itemsize
        signed, unsigned = maxima.setdefault(name_of(array.dtype), ([], []))
        signed.append(mx.max(array.view(getattr(mx, f"int{bits}"))))
        unsigned.append(mx.max(array.view(getattr(mx, f"uint{bits}"))))
    flags = []
    for dtype, (signed, unsigned) in maxima.items():
        exponent, size = _EXPONENTS[dtype], ELEMENTS[dtype].numpy.itemsize
        positive = mx.max(mx.stack(signed)) >= exponent
        flags.append(positive | (mx.max(mx.stack(unsigned)) >= _negative(exponent, size)))
    mx.eval(flags)
    return not any(flag.item() for flag in flags)


def _all_finite(rows: Sequence[LeafRows]) -> bool:
    buffers = [borrow(each.buffer) for each in rows]
    finite = [True] * len(rows)

    def look(start: int, end: int) -> None:
        for i in range(start, end):
            finite[i] = is_finite(buffers[i][:, :, rows[i].where], name_of(rows[i].buffer.dtype))

    nbytes = sum(buffer[:, :, 0].nbytes * (each.last - each.first) for buffer, each in zip(buffers, rows, strict=True))
    share_out(len(rows), 1, nbytes // WORTH_A_THREAD, look)
    return all(finite)
