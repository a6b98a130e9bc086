"""Attention of a model's queries to what a live cache holds: on the codes themselves where a kernel does it, else head by
head on rows that are decoded for the moment.

What is attended to are parts: the codes of each run of levels, and the rows that are kept uncoded. Each gives
its output and the logarithm of its sum of exponentials, and these are put together.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from prefixcache.codecs import raw_attention_gpu
from prefixcache.codecs.raw_attention_gpu import UncodedRows
from prefixcache.codecs.turboquant.coding import CodedSpan
from prefixcache.codecs.turboquant.format import AttentionCall, AttentionPart, CodedRows
from prefixcache.codecs.turboquant.live import attend as attend_to_part
from prefixcache.codecs.turboquant.live import with_logits
from prefixcache.live.decoding import decoded_heads, joined
from prefixcache.live.layer_state import LayerState
from prefixcache.live.ragged import Pair

Mask = mx.array | str | None


def attend(layer: LayerState, queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None) -> mx.array:
    """Attend with queries (B, query heads, L, key width): return (B, query heads, L, value width) of their dtype.

    `mask`: None, "causal" (the queries are the last L rows), or an array that broadcasts to (B, query heads, L, rows),
    of booleans (True: attend) or added to the scores. `sinks` (query heads,): logits of nothing, beside the keys'. A
    query that may attend to nothing gets zeros. ValueError for shapes that don't go together.
    """
    _check(layer, queries, mask, sinks)
    if queries.size == 0 or layer.rows == 0:
        raise ValueError("attention of no queries, or to a cache that holds no rows")
    if isinstance(mask, mx.array) and mask.ndim == 0:
        mask = mask.reshape(1)
    call = AttentionCall(queries, scale, None if isinstance(mask, str) else mask, isinstance(mask, str))
    coded, uncoded = coded_parts(layer), layer.has_uncoded
    if len(coded) == 1 and not uncoded:
        whole = _coded_part(coded[0], layer.rows, call._replace(logits=sinks, dtype=queries.dtype))
        return _by_heads(layer, queries, scale, mask, sinks) if whole is None else whole.out
    parts = []
    for rows in coded:
        part = _coded_part(rows, layer.rows, call)
        if part is None:
            return _by_heads(layer, queries, scale, mask, sinks)
        parts.append(part)
    if uncoded and parts:
        kept = uncoded_for_kernel(layer)
        if kept is not None and raw_attention_gpu.takes(kept, queries):
            return raw_attention_gpu.attend(kept, _together(parts), call._replace(logits=sinks))
    if uncoded:
        parts.append(_uncoded_part(layer, call))
    if not parts:
        raise ValueError("attention to a cache that holds no rows")
    return with_logits(_together(parts), sinks).astype(queries.dtype)


def _coded_part(coded: CodedRows, rows: int, call: AttentionCall) -> AttentionPart | None:
    """Attend to coded rows, the first ones of a layer of `rows` rows. None where no kernel does that here."""
    count, length, mask = coded.codes.shape[2], call.queries.shape[2], call.mask
    if mask is not None and mask.shape[-1] > 1:
        mask = mask[..., :count]
    early = length - (rows - count)  # queries that don't see all of the part
    if not call.causal or early <= 0 or early == length:
        return attend_to_part(coded, call._replace(mask=mask, causal=call.causal and early == length))
    halves = []
    for first, last in ((0, early), (early, length)):
        queries, seen = call.queries[:, :, first:last], _of_queries(mask, first, last)
        part = attend_to_part(coded, call._replace(queries=queries, mask=seen, causal=first == 0))
        if part is None:
            return None
        halves.append(part)
    return AttentionPart(*(mx.concatenate(list(both), axis=2) for both in zip(*halves, strict=True)))


def _of_queries(mask: mx.array | None, first: int, last: int) -> mx.array | None:
    if mask is None or mask.ndim < 2 or mask.shape[-2] == 1:
        return mask
    return mask[..., first:last, :]


def plain(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: Mask, sinks: mx.array | None
) -> mx.array:
    """Return MLX's own attention, but zeros for a query that may attend to nothing."""
    sinks = sinks.astype(queries.dtype) if sinks is not None else None
    out = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
    if isinstance(mask, mx.array):
        seen = mx.any(mask if mask.dtype == mx.bool_ else mask > -mx.inf, axis=-1, keepdims=True)
        out = mx.where(seen, out, mx.zeros((), out.dtype))
    return out


def _check(layer: LayerState, queries: mx.array, mask: Mask, sinks: mx.array | None) -> None:
    assert layer.kind is not None
    if sinks is not None and tuple(sinks.shape) != (queries.shape[1],):
        raise ValueError(f"sinks of shape {tuple(sinks.shape)} for {queries.shape[1]} query heads: give one for each")
    batch, heads, length, width = queries.shape
    if batch != layer.batch:
        raise ValueError(f"queries of {batch} sequences for a cache of {layer.batch}: batch sizes must match")
    if heads % layer.kind.heads or width != layer.kind.key_width:
        raise ValueError(
            f"{heads} query heads of {width} for {layer.kind.heads} key heads of {layer.kind.key_width}: the widths must be "
            "equal, the query heads a multiple"
        )
    if isinstance(mask, str):
        if mask != "causal":
            raise ValueError(f'mask={mask!r}: give "causal", an array, or None')
    elif mask is not None:
        wanted = (batch, heads, length, layer.rows)
        padded = (1,) * (4 - mask.ndim) + tuple(mask.shape)
        if len(padded) > 4 or any(size not in (1, full) for size, full in zip(padded, wanted, strict=True)):
            raise ValueError(f"a mask of shape {tuple(mask.shape)} doesn't broadcast to {wanted}")


def _together(parts: list[AttentionPart]) -> AttentionPart:
    """Return what attention to the rows of all parts gives, float32."""
    if len(parts) == 1:
        return parts[0]
    totals = mx.stack([part.total for part in parts])
    most = mx.max(totals, axis=0)
    most = mx.where(most == -mx.inf, 0.0, most)
    weights = mx.exp(totals - most)
    shares = mx.sum(weights, axis=0)
    nothing = shares == 0
    weights = weights / mx.where(nothing, 1.0, shares)
    out = mx.zeros_like(parts[0].out)
    for i, part in enumerate(parts):
        out = out + weights[i, ..., None] * part.out
    return AttentionPart(out, mx.where(nothing, -mx.inf, mx.log(shares) + most))


def _uncoded_part(layer: LayerState, call: AttentionCall) -> AttentionPart:
    """Attend to the rows that are kept uncoded, in float32."""
    (keys, values), listed = uncoded_rows(layer)
    queries, mask, rows = call.queries, call.mask, mx.array(listed)[:, None, None]  # (B, 1, 1, n)
    batch, heads, count, _ = keys.shape
    length = queries.shape[2]
    grouped = queries.astype(mx.float32).reshape(batch, heads, -1, queries.shape[3])
    scores = (grouped @ mx.swapaxes(keys.astype(mx.float32), -1, -2)).reshape(*queries.shape[:3], count) * call.scale
    if mask is not None:
        mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
        mask = mx.broadcast_to(mask, (batch, *mask.shape[1:3], layer.rows))
        at = mx.broadcast_to(mx.maximum(rows, 0), (*mask.shape[:3], count))
        mask = mx.take_along_axis(mask, at, axis=-1)
        scores = mx.where(mask, scores, -mx.inf) if mask.dtype == mx.bool_ else scores + mask.astype(mx.float32)
    allowed = rows >= 0
    if call.causal:
        allowed = allowed & (rows <= layer.rows - length + mx.arange(length)[:, None])
    scores = mx.where(allowed, scores, -mx.inf)
    total = mx.logsumexp(scores, axis=-1)
    weights = mx.exp(scores - mx.where(total == -mx.inf, 0.0, total)[..., None])
    out = weights.reshape(batch, heads, -1, count) @ values.astype(mx.float32)
    return AttentionPart(out.reshape(*queries.shape[:3], values.shape[3]), total)


def _by_heads(layer: LayerState, queries: mx.array, scale: float, mask: Mask, sinks: mx.array | None) -> mx.array:
    """Return MLX's own attention, on one key head's rows at a time: no more than those is ever decoded at once."""
    assert layer.kind is not None
    group, length = queries.shape[1] // layer.kind.heads, queries.shape[2]
    if isinstance(mask, mx.array):
        mask = mask.reshape((1,) * (4 - mask.ndim) + tuple(mask.shape))
    if any(layer.pads):  # rows that count for nobody
        mask = _with_pads(layer, length, mask)
    outputs = []
    for head in range(layer.kind.heads):
        keys, values = (rows.astype(queries.dtype) for rows in decoded_heads(layer, head, 1))
        asking = slice(head * group, (head + 1) * group)
        seen = mask[:, asking] if isinstance(mask, mx.array) and mask.shape[1] > 1 else mask
        logits = sinks[asking] if sinks is not None else None
        outputs.append(plain(queries[:, asking], keys, values, scale, seen, logits))
    return mx.concatenate(outputs, axis=1)


def _with_pads(layer: LayerState, length: int, mask: Mask) -> mx.array:
    column = mx.arange(layer.rows)
    seen = column >= mx.array(layer.pads)[:, None, None, None]
    if isinstance(mask, str):
        return seen & (column <= layer.rows - length + mx.arange(length)[:, None])
    if mask is None:
        return seen
    return seen & mask if mask.dtype == mx.bool_ else mx.where(seen, mask, mx.array(-mx.inf, mask.dtype))


# -- what a layer has to attend to ------------------------------------------------------------------------------------


class NumberedRows(NamedTuple):
    """Keys and values (B, heads, n, width), and for each sequence the numbers of these n rows, -1 for none."""

    rows: Pair
    numbers: list[list[int]]


def coded_parts(layer: LayerState) -> list[CodedRows]:
    """Return the codes that are attended to, as parts: each has one run of levels of every sequence, the last part the last
    runs. No part goes beyond the last row that is attended to by its code.
    """
    if layer.codes.arrays is None:
        return []
    spans = [layer.coded_spans(b) for b in range(layer.batch)]
    if len(spans) == 1 and len(spans[0]) == 1:  # as most often
        return [_codes_of(layer, spans[0], spans[0][0].last)]
    end = max((of_sequence[-1].last for of_sequence in spans if of_sequence), default=0)
    parts = []
    for behind in range(max(map(len, spans), default=0), 0, -1):
        part = [of_sequence[-behind] if len(of_sequence) >= behind else None for of_sequence in spans]
        known = next(span for span in part if span is not None)
        nothing = CodedSpan(end, end, known.levels)
        parts.append(_codes_of(layer, [span or nothing for span in part], end))
    return parts


def _codes_of(layer: LayerState, spans: list[CodedSpan], end: int) -> CodedRows:
    """Return the codes of these rows of each sequence, all before row `end`."""
    keys, values = layer.stacks_of([span.levels for span in spans])
    first = layer.numbers.of([span.first for span in spans], 0)
    last = layer.numbers.of([span.last for span in spans], end)
    codes, scales = layer.codes.cut_out(slice(end))
    return CodedRows(codes, scales, keys.form, values.form, keys.decoding, values.decoding, first, last)


def uncoded_rows(layer: LayerState) -> NumberedRows:
    """Return the rows that are attended to uncoded: sinks and recent ones."""
    arrays = [part.arrays for part in (layer.sinks, layer.recent) if part.arrays is not None]
    most = layer.choice.sink_tokens
    listed: list[list[int]] = []
    for b, pad in enumerate(layer.pads):
        numbers: list[int] = []
        if layer.sinks.arrays is not None:
            numbers += [row if row < layer.rows else -1 for row in range(pad, pad + most)]
        if layer.recent.arrays is not None:
            end = layer.alignment.end_of(b)
            numbers += layer.recent.numbers(max(layer.recent.first(b, end), pad + most), end)
        listed.append(numbers)
    return NumberedRows(arrays[0] if len(arrays) == 1 else joined(arrays, axis=2), listed)


def uncoded_for_kernel(layer: LayerState) -> UncodedRows | None:
    """Return those rows as the GPU's kernel reads them; None where it can't: no ring, or padding on the right."""
    recent, pads = layer.recent, layer.pads
    if recent.arrays is None or layer.alignment.ends is not None:
        return None
    low = layer.rows - recent.size
    whole = all(floor <= max(low, pad) for floor, pad in zip(recent.floors, pads, strict=True))
    floors = None if whole else layer.numbers.of(recent.floors, -1)
    return UncodedRows(layer.rows, recent.arrays, layer.sinks.arrays, layer.numbers.of(pads, 0), floors)
