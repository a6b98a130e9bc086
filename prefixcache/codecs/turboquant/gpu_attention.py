"""Attention on TurboQuant's codes in kernels of its own, for MLX's GPUs: Metal's and CUDA's.

A few queries at a time, as in decoding: longer ones are better served by decoded rows. Beside it, the encoding of what a
decoding step adds. `kernels` has the text.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

from prefixcache.codecs.interchange import FLOATS, name_of
from prefixcache.codecs.packing import words_of
from prefixcache.codecs.turboquant import gpu_rows
from prefixcache.codecs.turboquant.format import AttentionCall, AttentionPart, CodedRows, Form
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


def attend(rows: CodedRows, call: AttentionCall) -> AttentionPart:
    """Return what attention to coded rows gives, lazy. Masks are read as they lie."""
    batch, _, tokens, _ = rows.codes.shape
    _, query_heads, length, _ = call.queries.shape
    result = mx.float32 if call.dtype is None else call.dtype
    if batch == 0 or tokens == 0:
        shape = (batch, query_heads, length)
        return AttentionPart(mx.zeros((*shape, rows.values.width), result), mx.full(shape, -mx.inf, mx.float32))
    mask = call.mask_of(tokens)
    kernels = _kernels(
        _AttentionTraits(
            rows.keys,
            rows.values,
            query_heads // rows.codes.shape[1] * length > turboquant_attention.QUERIES,
            (call.queries.dtype, result),
            call.scale,
            call.causal and length > 1,
            mask.dtype if mask is not None else None,
            call.logits.dtype if call.logits is not None else None,
            (rows.key_levels is not None, rows.value_levels is not None),
            (rows.first is not None, rows.last is not None),
        )
    )
    out, total = kernels(
        rows.codes,
        rows.scales,
        call.queries,
        [array for array in (rows.key_levels, rows.first, rows.last, mask) if array is not None],
        [array for array in (rows.value_levels, call.logits) if array is not None],
    )
    return AttentionPart(out, total)


class _AttentionTraits(NamedTuple):
    """What kernels of attention are compiled for."""

    keys: Form
    values: Form
    many: bool
    dtypes: tuple[mx.Dtype, mx.Dtype]  # of queries, of the output
    scale: float
    causal: bool
    mask: mx.Dtype | None
    logits: mx.Dtype | None
    levelled: tuple[bool, bool]  # keys, values
    bounds: tuple[bool, bool]  # first, last


@lru_cache(maxsize=64)
def _kernels(traits: _AttentionTraits) -> Attention:
    kind = CodedAttentionKind(
        keys=gpu_rows._kind(traits.keys, name_of(traits.dtypes[0]), traits.levelled[0]),
        values=gpu_rows._kind(traits.values, name_of(traits.dtypes[1]), traits.levelled[1]),
        tiles=turboquant_attention.tiles_for(traits.keys.width, traits.values.width, traits.many),
        scale=traits.scale,
        causal=traits.causal,
        mask=name_of(traits.mask) if traits.mask is not None else "",
        first=traits.bounds[0],
        last=traits.bounds[1],
        sinks=name_of(traits.logits) if traits.logits is not None else "",
    )
    return Attention(gpu_rows.dialect(), kind)


def encode_pair(
    keys: mx.array,
    values: mx.array,
    key_form: Form,
    value_form: Form,
    key_levels: mx.array | None = None,
    value_levels: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """Encode keys (B, heads, L, key width), values (B, heads, L, value width) of one float dtype -> codes uint32 (B, heads,
    L, key words + value words), scales uint16 (B, heads, L, 2), lazy: of each part what `gpu_rows.encode_arrays` gives.

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
    """Do the work of `encode_pair` where keys and values have one form and dtype, and both have `levels`, or neither has."""
    coded: tuple[mx.array, mx.array] = _pair_encoder(form, dtype, bool(levels))(keys, values, *levels)
    return coded


def _encoded(rows: mx.array, form: Form, levels: mx.array | None) -> tuple[mx.array, mx.array]:
    """Encode (B, heads, L, width) -> codes (B, heads, L, words), scales (B, heads, L)."""
    coded = []
    for b in range(rows.shape[0]):
        of_sequence = None if levels is None else mx.contiguous(levels[:, b if levels.shape[1] > 1 else 0])
        coded.append(gpu_rows.encode_arrays(mx.swapaxes(rows[b], 0, 1), form, of_sequence))
    codes, scales = (mx.stack(list(part)) for part in zip(*coded, strict=True))
    return mx.swapaxes(codes, 1, 2), mx.swapaxes(scales, 1, 2)


@lru_cache(maxsize=64)
def _pair_encoder(form: Form, dtype: mx.Dtype, levelled: bool) -> PairEncoder:
    return PairEncoder(gpu_rows.dialect(), gpu_rows._kind(form, name_of(dtype), levelled))
