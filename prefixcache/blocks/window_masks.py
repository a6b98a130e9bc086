"""Which of a block's tokens a window image has: a mask with a bit a token, its form in a header, its part of the key."""

from __future__ import annotations

import json

from prefixcache.keys import BLOCK, canonical, chain


def mask_of(first: int, last: int) -> int:
    """Return the bits of a block's tokens from `first` to `last` (not included); there are none outside the block."""
    first, last = max(first, 0), min(last, BLOCK)
    return (1 << last) - (1 << first) if last > first else 0


def runs_of(mask: int) -> list[tuple[int, int]]:
    """Return the runs of set bits, as (first, last not included)."""
    runs, at = [], 0
    while mask:
        low = (mask & -mask).bit_length() - 1
        at, mask = at + low, mask >> low
        length = (~mask & (mask + 1)).bit_length() - 1
        runs.append((at, at + length))
        at, mask = at + length, mask >> length
    return runs


RowPairs = list[tuple[slice, slice]]  # rows to write, rows to read


def row_pairs(tokens: int, into: int, out: int) -> RowPairs:
    """Say where the tokens in a mask stand among those in the mask `into`, and among those in `out`."""
    pairs = []
    for first, last in runs_of(tokens):
        a, b = ((mask & mask_of(0, first)).bit_count() for mask in (into, out))
        pairs.append((slice(a, a + last - first), slice(b, b + last - first)))
    return pairs


def held_mask(held: tuple[tuple[int, int], ...], start: int, keep: int, limit: int) -> int:
    """Return the mask of the tokens in `held`, of the block that begins at `start`, from `keep` on and below `limit`."""
    mask = 0
    for a, b in held:
        mask |= mask_of(max(a, keep) - start, min(b, limit) - start)
    return mask


def window_key(block: bytes, mask: tuple[int, ...]) -> bytes:
    """Return the key of the window that has these rows of the block with this key."""
    return chain(block, b"window" + canonical([f"{m:x}" for m in mask]).encode())


def extra_of(mask: tuple[int, ...]) -> str:
    """Return a window image's header field: the ranges of tokens that each window has, within the block."""
    return canonical({"ranges": [[list(run) for run in runs_of(m)] for m in mask]})


def mask_from(extra: str) -> tuple[int, ...]:
    """Return the masks that `extra_of` wrote; ValueError when the text is none of its."""
    try:
        ranges = json.loads(extra)["ranges"]
        masks = []
        for runs in ranges:
            mask = 0
            for first, last in runs:
                if not (type(first) is type(last) is int and 0 <= first < last <= BLOCK):
                    raise ValueError("a window's range outside its block")
                mask |= mask_of(first, last)
            masks.append(mask)
    except (KeyError, TypeError, RecursionError):
        raise ValueError("a window without ranges") from None
    return tuple(masks)
