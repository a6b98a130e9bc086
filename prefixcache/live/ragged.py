"""Arrays of several sequences at once: joined, stacked, rolled and selected, whatever their rows mean.

All take a pair of arrays (B, H, T, w), where B, H and T are the same in both and w and the dtype need not be: codes and
scales, or keys and values. Rows are right-justified to an index, `used`: row `used - 1` is the last token of every sequence,
rows before a sequence's own left padding are nobody's, rows from `used` are spare. The caches keep those numbers; nothing
here does.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import mlx.core as mx

Pair = tuple[mx.array, mx.array]


def as_pair(arrays: Iterable[mx.array]) -> Pair:
    first, second = arrays
    return first, second


def rolled(arrays: Pair, shifts: mx.array) -> Pair:
    """Return each sequence's rows moved right by its own `shifts[b]` (B,) integers, what falls off comes in at the left."""
    rows = arrays[0].shape[2]
    source = ((mx.arange(rows) - shifts[:, None]) % rows)[:, None, :, None]
    return as_pair(mx.take_along_axis(array, source, axis=2) for array in arrays)


def joined(first: Pair, first_used: int, second: Pair, second_used: int) -> Pair:
    """Return the sequences of `first`, then those of `second`, right-justified to the greater of both indices.

    A side's left padding grows by what its index does. The spare rows are as many as the longer side has room for.
    """
    used = max(first_used, second_used)
    capacity = max(used, first[0].shape[2], second[0].shape[2])

    def justified(array: mx.array, rows: int) -> mx.array:
        return mx.pad(array[:, :, :rows], [(0, 0), (0, 0), (used - rows, capacity - used), (0, 0)])

    return as_pair(
        mx.concatenate([justified(a, first_used), justified(b, second_used)])
        for a, b in zip(first, second, strict=True)
    )


def stacked(rows: Sequence[tuple[Pair | None, int]]) -> Pair:
    """Return one batch of single sequences, left-padded with zeros to the longest: (B, H, longest, w).

    Each is (its arrays (1, H, T, w), how many rows of them count); None or 0 rows make a sequence of zeros only.
    ValueError when none has arrays.
    """
    longest = max((length for _, length in rows), default=0)
    shape = next((arrays for arrays, _ in rows if arrays is not None), None)
    if shape is None:
        raise ValueError("stacked(): no sequence has arrays, so nothing says how wide a row is")
    absent = without_rows(shape, 1)

    def padded(which: int, arrays: Pair | None, length: int) -> mx.array:
        array = absent[which] if arrays is None else arrays[which][:, :, :length]
        return mx.pad(array, [(0, 0), (0, 0), (longest - length, 0), (0, 0)])

    return as_pair(mx.concatenate([padded(i, *row) for row in rows]) for i in range(len(shape)))


def selected(arrays: Pair, indices: mx.array) -> Pair:
    """Return the sequences of these `indices` (int32, see `chosen`), in their order."""
    return as_pair(array[indices] for array in arrays)


def without_rows(arrays: Pair, sequences: int) -> Pair:
    """Return (sequences, H, 0, w) arrays like these: a batch that has seen nothing, for `joined`."""
    return as_pair(mx.zeros((sequences, a.shape[1], 0, a.shape[3]), a.dtype) for a in arrays)


def chosen(indices: Sequence[int] | mx.array, sequences: int) -> mx.array:
    """Return int32 indices into a batch. IndexError for one outside it: MLX would read whatever is there. TypeError for
    what are no integers: a mask of booleans would be taken for them.
    """
    listed: list[Any] = list(indices.tolist() if isinstance(indices, mx.array) else indices)  # type: ignore[arg-type]
    for i in listed:
        if isinstance(i, bool) or not hasattr(i, "__index__"):
            raise TypeError(f"{i!r} of {indices!r}: give the numbers of sequences, whole numbers from 0")
        if not 0 <= i < sequences:
            raise IndexError(f"sequence {i} of a batch of {sequences}: count from 0 to {sequences - 1}")
    return mx.array([operator.index(i) for i in listed], mx.int32)


def check_numbers(given: Sequence[Sequence[int] | None], sequences: int) -> None:
    """Raise ValueError for a list that has not one number for each sequence."""
    for numbers_given in given:
        if numbers_given is not None and len(numbers_given) != sequences:
            raise ValueError(f"{len(numbers_given)} numbers for a batch of {sequences}: give one for each sequence")


def numbers(array: mx.array) -> list[int]:
    """Evaluate an array (n,) of integers, and return them."""
    return array.tolist()  # type: ignore[return-value]


def check_alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Raise ValueError that names the first thing that two caches don't have in common, and both values."""
    for name, value in one.items():
        if name in other and other[name] != value:
            remedy = "caches of one batch are coded alike; convert them with one codec"
            raise ValueError(f"{name} {value} and {name} {other[name]} in one batch: {remedy}")
