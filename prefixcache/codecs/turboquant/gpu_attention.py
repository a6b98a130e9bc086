"""Attention on TurboQuant's codes in kernels of its own, for MLX's GPUs: Metal's and CUDA's.

A few queries at a time, as in decoding: longer ones are better served by decoded rows. Beside it, the encoding of what a
decoding step adds. `kernels` has the text.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from prefixcache.codecs.interchange import FLOATS, name_of
from prefixcache.codecs.packing import words_of
from prefixcache.codecs.turboquant import gpu_rows
from prefixcache.codecs.turboquant.format import CodedRows, Form
from prefixcache.kernels import turboquant_attention
from prefixcache.kernels.turboquant_attention import Attention, CodedAttentionKind
from prefixcache.kernels.turboquant_encode import PairEncoder

WIDTHS = range(64, 257)


def takes(rows: CodedRows, queries: mx.array) -> bool:
    """Tell whether the kernels are there and made for such rows and queries: widths of 64 to 256 that `gpu_rows` takes,
    at most 64 query rows (queries a head of keys, times their length) for each head of keys."""
    if not gpu_rows.available() or name_of(queries.dtype) not in FLOATS:
        return False
    heads, query_heads, length = rows.codes.shape[1], queries.shape[1], queries.shape[2]
    forms = (rows.keys, rows.values)
    return (
        all(form.width in WIDTHS and gpu_rows.takes(form) for form in forms)
        and query_heads % heads == 0
        and 0 < query_heads // heads * length <= turboquant_attention.MOST_ROWS
    )


def attend(
    rows: CodedRows,
    queries: mx.array,
    scale: float,
    mask: mx.array | None = None,
    causal: bool = False,
    dtype: mx.Dtype | None = None,
    sinks: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Queries (B, query heads, L, key width) -> out (B, query heads, L, value width) of `dtype`, float32 if None, and
    lse float32 (B, query heads, L): the natural logarithm of the sum of exponentials of the scaled scores. Lazy.

    `mask`: bool (True attends) or floats to add, broadcastable to (B, query heads, L, T), read as it lies. `causal`:
    query i attends to the first T - L + i + 1 rows. `sinks` (query heads,): logits that count in the denominator of
    `out` alone. A query that attends to nothing gets out 0 and lse -inf.
    """
    batch, _, tokens, _ = rows.codes.shape
    _, query_heads, length, _ = queries.shape
    wanted = mx.float32 if dtype is None else dtype
    if batch == 0 or tokens == 0:
        shape = (batch, query_heads, length)
        return mx.zeros((*shape, rows.values.width), wanted), mx.full(shape, -mx.inf, mx.float32)
    if mask is not None and mask.shape != (batch, query_heads, length, tokens):
        mask = mx.broadcast_to(mask, (batch, query_heads, length, tokens))
    kernels = _kernels(
        rows.keys,
        rows.values,
        query_heads // rows.codes.shape[1] * length > turboquant_attention.QUERIES,
        queries.dtype,
        wanted,
        scale,
        causal and length > 1,
        mask.dtype if mask is not None else None,
        sinks.dtype if sinks is not None else None,
        (rows.key_levels is not None, rows.value_levels is not None, rows.first is not None, rows.last is not None),
    )
    return kernels(
        rows.codes,
        rows.scales,
        queries,
        [array for array in (rows.key_levels, rows.first, rows.last, mask) if array is not None],
        [array for array in (rows.value_levels, sinks) if array is not None],
    )


@lru_cache(maxsize=64)
def _kernels(
    keys: Form,
    values: Form,
    many: bool,
    queries: mx.Dtype,
    result: mx.Dtype,
    scale: float,
    causal: bool,
    mask: mx.Dtype | None,
    sinks: mx.Dtype | None,
    there: tuple[bool, bool, bool, bool],
) -> Attention:
    key_levels, value_levels, first, last = there
    kind = CodedAttentionKind(
        keys=gpu_rows._kind(keys, name_of(queries), key_levels),
        values=gpu_rows._kind(values, name_of(result), value_levels),
        tiles=turboquant_attention.tiles_for(keys.width, values.width, many),
        scale=scale,
        causal=causal,
        mask=name_of(mask) if mask is not None else "",
        first=first,
        last=last,
        sinks=name_of(sinks) if sinks is not None else "",
    )
    return Attention(gpu_rows._dialect(), kind)


def encode_pair(
    keys: mx.array,
    values: mx.array,
    key_form: Form,
    value_form: Form,
    key_levels: mx.array | None = None,
    value_levels: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Keys (B, heads, L, key width), values (B, heads, L, value width) of one float dtype -> codes uint32 (B, heads, L,
    key words + value words), scales uint16 (B, heads, L, 2), lazy: of each part what `gpu_rows.encode_arrays` gives.

    Levels float32 (2, B or 1, heads, width): mean, weight. One launch where both parts have the same form and both are
    levelled or neither is; each part by itself, then joined, where not.
    """
    if keys.size == 0:
        words = words_of(key_form.width, key_form.codebook.bits) + words_of(value_form.width, value_form.codebook.bits)
        return mx.zeros((*keys.shape[:3], words), mx.uint32), mx.zeros((*keys.shape[:3], 2), mx.uint16)
    levels = [part for part in (key_levels, value_levels) if part is not None]
    if key_form is value_form and len(levels) != 1:
        return encode_alike(key_form, keys.dtype, levels, keys, values)
    parts = [_encoded(keys, key_form, key_levels), _encoded(values, value_form, value_levels)]
    return mx.concatenate([codes for codes, _ in parts], -1), mx.stack([scales for _, scales in parts], -1)


def encode_alike(
    form: Form, dtype: mx.Dtype, levels: list[mx.array], keys: mx.array, values: mx.array
) -> tuple[mx.array, mx.array]:
    """`encode_pair` of rows, not none, of one form and dtype, where `levels` are those of both or of neither."""
    made: tuple[mx.array, mx.array] = _pair_encoder(form, dtype, bool(levels))(keys, values, *levels)
    return made


def _encoded(rows: mx.array, form: Form, levels: mx.array | None) -> tuple[mx.array, mx.array]:
    """(B, heads, L, width) -> codes (B, heads, L, words), scales (B, heads, L)."""
    made = []
    for b in range(rows.shape[0]):
        of_sequence = None if levels is None else mx.contiguous(levels[:, b if levels.shape[1] > 1 else 0])
        made.append(gpu_rows.encode_arrays(mx.swapaxes(rows[b], 0, 1), form, of_sequence))
    codes, scales = (mx.stack(list(part)) for part in zip(*made, strict=True))
    return mx.swapaxes(codes, 1, 2), mx.swapaxes(scales, 1, 2)


@lru_cache(maxsize=64)
def _pair_encoder(form: Form, dtype: mx.Dtype, levelled: bool) -> PairEncoder:
    return PairEncoder(gpu_rows._dialect(), gpu_rows._kind(form, name_of(dtype), levelled))
