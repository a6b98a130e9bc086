"""Attention of a model's queries to what a live cache holds: on the codes themselves where a kernel does it, else head by
head on rows that are decoded for the moment.

What is attended to are parts: the codes of each run of levels, and the rows that are kept as they are. Each gives
its output and the logarithm of its sum of exponentials, and these are put together.
"""

from __future__ import annotations

import mlx.core as mx

from prefixcache.codecs import raw_attention_gpu
from prefixcache.codecs.coded_rows import CodedRows
from prefixcache.codecs.turboquant.live import attend as attend_to_part
from prefixcache.codecs.turboquant.live import with_logits
from prefixcache.live.coded import Coded

Mask = mx.array | str | None


def attend(held: Coded, queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None) -> mx.array:
    """Queries (B, query heads, L, key width) -> (B, query heads, L, value width), of their dtype.

    `mask`: None, "causal" (the queries are the last L rows), or an array that broadcasts to (B, query heads, L, rows),
    of booleans (True: attend) or added to the scores. `sinks` (query heads,): logits of nothing, beside the keys'. A
    query that may attend to nothing gets zeros. ValueError for shapes that don't go together.
    """
    _check(held, queries, mask, sinks)
    if queries.size == 0 or held.rows == 0:
        raise ValueError("attention of no queries, or to a cache that holds no rows")
    if isinstance(mask, mx.array) and mask.ndim == 0:
        mask = mask.reshape(1)
    causal, array = mask == "causal" if isinstance(mask, str) else False, None if isinstance(mask, str) else mask
    parts, raw = held.parts(), held.has_raw
    if len(parts) == 1 and not raw:
        whole = _coded_part(parts[0], held.rows, queries, scale, array, causal, queries.dtype, sinks)
        return _by_heads(held, queries, scale, mask, sinks) if whole is None else whole[0]
    done = []
    for part in parts:
        one = _coded_part(part, held.rows, queries, scale, array, causal)
        if one is None:
            return _by_heads(held, queries, scale, mask, sinks)
        done.append(one)
    if raw and done and (fused := held.raw_for_kernel()) is not None and raw_attention_gpu.takes(fused, queries):
        return raw_attention_gpu.attend(fused, _together(done), queries, scale, array, causal, sinks)
    if raw:
        done.append(_raw_part(held, queries, scale, array, causal))
    if not done:
        raise ValueError("attention to a cache that holds no rows")
    out, total = _together(done)
    return with_logits(out, total, sinks).astype(queries.dtype)


def _coded_part(
    part: CodedRows,
    rows: int,
    queries: mx.array,
    scale: float,
    mask: mx.array | None,
    causal: bool,
    dtype: mx.Dtype | None = None,
    logits: mx.array | None = None,
) -> tuple[mx.array, mx.array] | None:
    """The part of rows that are attended to by their codes; None where no kernel does that here."""
    count, length = part.codes.shape[2], queries.shape[2]
    if mask is not None and mask.shape[-1] > 1:
        mask = mask[..., :count]
    early = length - (rows - count)  # queries that don't see all of the part
    if not causal or early <= 0 or early == length:
        return attend_to_part(part, queries, scale, mask, causal and early == length, dtype, logits)
    some = attend_to_part(part, queries[:, :, :early], scale, _of_queries(mask, 0, early), True, dtype, logits)
    rest = attend_to_part(part, queries[:, :, early:], scale, _of_queries(mask, early, length), False, dtype, logits)
    if some is None or rest is None:
        return None
    return mx.concatenate([some[0], rest[0]], axis=2), mx.concatenate([some[1], rest[1]], axis=2)


def _of_queries(mask: mx.array | None, first: int, last: int) -> mx.array | None:
    if mask is None or mask.ndim < 2 or mask.shape[-2] == 1:
        return mask
    return mask[..., first:last, :]


def plain(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Mask, sinks: mx.array | None
) -> mx.array:
    """MLX's own attention, but zeros for a query that may attend to nothing."""
    own = sinks.astype(queries.dtype) if sinks is not None else None
    out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=own)
    if isinstance(mask, mx.array):
        seen = mx.any(mask if mask.dtype == mx.bool_ else mask > -mx.inf, axis=-1, keepdims=True)
        out = mx.where(seen, out, mx.zeros((), out.dtype))
    return out


def _check(held: Coded, queries: mx.array, mask: Mask, sinks: mx.array | None) -> None:
    assert held.kind is not None
    if sinks is not None and tuple(sinks.shape) != (queries.shape[1],):
        raise ValueError(f"sinks of shape {tuple(sinks.shape)} for {queries.shape[1]} query heads: give one for each")
    batch, heads, length, width = queries.shape
    if batch != held.batch:
        raise ValueError(f"queries of {batch} sequences for a cache of {held.batch}: batch sizes must match")
    if heads % held.kind.heads or width != held.kind.key_width:
        raise ValueError(
            f"{heads} query heads of {width} for {held.kind.heads} key heads of {held.kind.key_width}: the widths must be "
            "equal, the query heads a multiple"
        )
    if isinstance(mask, str):
        if mask != "causal":
            raise ValueError(f'mask={mask!r}: give "causal", an array, or None')
    elif mask is not None:
        wanted = (batch, heads, length, held.rows)
        padded = (1,) * (4 - mask.ndim) + tuple(mask.shape)
        if len(padded) > 4 or any(own not in (1, full) for own, full in zip(padded, wanted, strict=True)):
            raise ValueError(f"a mask of shape {tuple(mask.shape)} doesn't broadcast to {wanted}")


def _together(parts: list[tuple[mx.array, mx.array]]) -> tuple[mx.array, mx.array]:
    """Outputs float32 (B, query heads, L, width) and their logarithms (B, query heads, L) -> those of all."""
    if len(parts) == 1:
        return parts[0]
    logs = mx.stack([log for _, log in parts])
    most = mx.max(logs, axis=0)
    most = mx.where(most == -mx.inf, 0.0, most)
    weights = mx.exp(logs - most)
    shares = mx.sum(weights, axis=0)
    nothing = shares == 0
    weights = weights / mx.where(nothing, 1.0, shares)
    out = mx.zeros_like(parts[0][0])
    for i, (own, _) in enumerate(parts):
        out = out + weights[i, ..., None] * own
    return out, mx.where(nothing, -mx.inf, mx.log(shares) + most)


def _raw_part(
    held: Coded, queries: mx.array, scale: float, mask: mx.array | None, causal: bool
) -> tuple[mx.array, mx.array]:
    """The part of the rows that are kept as they are."""
    (keys, values), listed = held.raw_rows()
    rows = mx.array(listed)[:, None, None]  # (B, 1, 1, n)
    batch, heads, count, _ = keys.shape
    length = queries.shape[2]
    grouped = queries.astype(mx.float32).reshape(batch, heads, -1, queries.shape[3])
    scores = (grouped @ mx.swapaxes(keys.astype(mx.float32), -1, -2)).reshape(*queries.shape[:3], count) * scale
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
        mask = mx.broadcast_to(mask, (batch, *mask.shape[1:3], held.rows))
        at = mx.broadcast_to(mx.maximum(rows, 0), (*mask.shape[:3], count))
        own = mx.take_along_axis(mask, at, axis=-1)
        scores = mx.where(own, scores, -mx.inf) if own.dtype == mx.bool_ else scores + own.astype(mx.float32)
    allowed = rows >= 0
    if causal:
        allowed = allowed & (rows <= held.rows - length + mx.arange(length)[:, None])
    scores = mx.where(allowed, scores, -mx.inf)
    total = mx.logsumexp(scores, axis=-1)
    weights = mx.exp(scores - mx.where(total == -mx.inf, 0.0, total)[..., None])
    out = weights.reshape(batch, heads, -1, count) @ values.astype(mx.float32)
    return out.reshape(*queries.shape[:3], values.shape[3]), total


def _by_heads(held: Coded, queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None) -> mx.array:
    """MLX's own attention, on one key head's rows at a time: no more than those is ever decoded at once."""
    assert held.kind is not None
    group, length = queries.shape[1] // held.kind.heads, queries.shape[2]
    if any(held.pads):  # rows that count for nobody
        mask = _with_pads(held, length, mask)
    made = []
    for head in range(held.kind.heads):
        keys, values = held.decoded_heads(head, 1)
        own = slice(head * group, (head + 1) * group)
        one = mask[:, own] if isinstance(mask, mx.array) and mask.ndim == 4 and mask.shape[1] > 1 else mask
        made.append(
            plain(
                queries[:, own], keys.astype(queries.dtype), values.astype(queries.dtype), scale, one,
                sinks[own] if sinks is not None else None,
            )
        )  # fmt: skip
    return mx.concatenate(made, axis=1)


def _with_pads(held: Coded, length: int, mask: Mask) -> mx.array:
    column = mx.arange(held.rows)
    seen = column >= mx.array(held.pads)[:, None, None, None]
    if isinstance(mask, str):
        return seen & (column <= held.rows - length + mx.arange(length)[:, None])
    if mask is None:
        return seen
    return seen & mask if mask.dtype == mx.bool_ else mx.where(seen, mask, mx.array(-mx.inf, mask.dtype))
