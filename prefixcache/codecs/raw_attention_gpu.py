"""Attention to the rows that a live cache keeps as they are, in a kernel of its own, for MLX's GPUs; `kernels` has its
text."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

from prefixcache.codecs.interchange import FLOATS, name_of
from prefixcache.codecs.turboquant import gpu_rows
from prefixcache.codecs.turboquant.format import AttentionCall, AttentionPart
from prefixcache.kernels import raw_attention
from prefixcache.kernels.raw_attention import RawAttentionKind


class UncodedRows(NamedTuple):
    """The rows that are kept as they are of B sequences, which have `rows` rows each, padding included.

    `recent` keys and values (B, heads, ring, width): row r in place r % ring, contiguous; `sinks` the same of the first
    tokens, (B, heads, n, width), or None. `pads` int32 (B,): the row of each sequence's first token, None: 0. `floors`
    int32 (B,): the first row that the ring has, None: as many as it has places for.
    """

    rows: int
    recent: tuple[mx.array, mx.array]
    sinks: tuple[mx.array, mx.array] | None
    pads: mx.array | None
    floors: mx.array | None


def takes(uncoded: UncodedRows, queries: mx.array) -> bool:
    """Tell whether the kernel is there and made for such rows and queries."""
    keys, values = uncoded.recent
    slots = keys.shape[2] + (uncoded.sinks[0].shape[2] if uncoded.sinks is not None else 0)
    return (
        gpu_rows.available()
        and name_of(queries.dtype) in FLOATS
        and slots <= raw_attention.MOST_ROWS
        and max(keys.shape[3], values.shape[3]) <= 256
    )


@lru_cache(maxsize=1)
def _nothing() -> mx.array:
    nothing = mx.zeros((1,))
    mx.eval(nothing)
    return nothing


def attend(uncoded: UncodedRows, coded: AttentionPart, call: AttentionCall) -> mx.array:
    """Return what attention to all rows gives, (B, query heads, L, value width) of the queries' dtype, lazy.

    `coded` is what attention to the codes gave. The mask is of all rows.
    """
    keys, values = uncoded.recent
    queries, mask, logits = call.queries, call.mask_of(uncoded.rows), call.logits
    kind = RawAttentionKind(
        key_width=keys.shape[3],
        value_width=values.shape[3],
        sinks=uncoded.sinks[0].shape[2] if uncoded.sinks is not None else 0,
        ring=keys.shape[2],
        scale=call.scale,
        causal=call.causal and queries.shape[2] > 1,
        rows=name_of(keys.dtype),
        queries=name_of(queries.dtype),
        mask=name_of(mask.dtype) if mask is not None else "",
        logits=name_of(logits.dtype) if logits is not None else "",
        pads=uncoded.pads is not None,
        floors=uncoded.floors is not None,
    )
    room = mx.broadcast_to(_nothing(), (uncoded.rows,))  # a number reaches a kernel as a shape for nothing
    given = (*coded, queries, room, keys, values, *(uncoded.sinks or ()), uncoded.pads, uncoded.floors, mask, logits)
    result: mx.array = raw_attention.attend(gpu_rows.dialect(), kind, [array for array in given if array is not None])
    return result
