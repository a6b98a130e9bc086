"""Attention on coded rows as it should come out: decoded by the NumPy back end, attended to in float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from prefixcache.codecs.interchange import borrow
from prefixcache.codecs.levels import Levels
from prefixcache.codecs.turboquant import numpy_rows as turboquant_numpy
from prefixcache.codecs.turboquant.format import CodedRows, Form


def encode_rows(keys, values, key_form: Form, value_form: Form, key_levels=None, value_levels=None):
    """float32 (B, heads, T, width) arrays, Levels or None for all sequences -> codes, scales as `CodedRows` has them."""
    planes = []
    for rows, form, levels in ((keys, key_form, key_levels), (values, value_form, value_levels)):
        batch, heads, tokens, _ = rows.shape
        words = -(-form.width * form.codebook.bits // 32)
        codes = np.zeros((batch, tokens, heads, words), np.uint32)
        scales = np.zeros((batch, tokens, heads), np.uint16)
        for b in range(batch):
            turboquant_numpy.encode(rows[b].swapaxes(0, 1), "float32", form, levels, codes[b], scales[b])
        planes.append((codes.swapaxes(1, 2), scales.swapaxes(1, 2)))
    codes = mx.array(np.concatenate([planes[0][0], planes[1][0]], -1))
    return codes, mx.array(np.stack([planes[0][1], planes[1][1]], -1))


def spread_of(levels: Levels | None, form: Form) -> mx.array | None:
    """float32 (2, 1, heads, width)."""
    return None if levels is None else mx.array(np.stack([levels.mean, form.spread(levels)])[:, None])


def decoded(rows: CodedRows) -> tuple[np.ndarray, np.ndarray]:
    """float32 (B, heads, T, width) each, with the levels as `rows` gives them."""
    made = []
    codes, scales = np.array(borrow(rows.codes)), np.array(borrow(rows.scales))
    at = rows.key_words
    for part, form, levels in ((0, rows.keys, rows.key_levels), (1, rows.values, rows.value_levels)):
        own = codes[..., :at] if part == 0 else codes[..., at:]
        batch, heads, tokens, _ = own.shape
        out = np.zeros((batch, heads, tokens, form.width), np.float32)
        for b in range(batch):
            # Plain rows times the ratio of the spreads, plus the mean.
            turboquant_numpy.decode(
                own[b].swapaxes(0, 1), scales[b, ..., part].swapaxes(0, 1), "float32", form, None, out[b]
            )
            if levels is not None:
                mean, spread = np.array(borrow(levels))[:, b if levels.shape[1] > 1 else 0]
                out[b] = out[b] * (spread / form.spread(None))[:, None] + mean[:, None]
        made.append(out)
    return made[0], made[1]


def attention(rows: CodedRows, queries, scale: float, mask=None, causal: bool = False):
    """Out float64 (B, query heads, L, value width) and the logarithm of the sum of exponentials (B, query heads, L)."""
    keys, values = (x.astype(np.float64) for x in decoded(rows))
    q = np.array(queries.astype(mx.float32)).astype(np.float64)
    _, heads, tokens, _ = keys.shape
    group, length = q.shape[1] // heads, q.shape[2]
    keys, values = np.repeat(keys, group, 1), np.repeat(values, group, 1)
    scores = q @ keys.swapaxes(-1, -2) * scale
    if mask is not None:
        m = np.array(mask.astype(mx.float32) if mask.dtype != mx.bool_ else mask)
        scores = np.where(m, scores, -np.inf) if m.dtype == np.bool_ else scores + m
    column = np.arange(tokens)
    if causal:
        scores = np.where(column <= tokens - length + np.arange(length)[:, None], scores, -np.inf)
    for bound, inside in ((rows.first, column.__ge__), (rows.last, column.__lt__)):
        if bound is not None:
            seen = np.stack([inside(n) for n in np.array(bound)])
            scores = np.where(seen[:, None, None], scores, -np.inf)
    most = scores.max(-1, keepdims=True)
    most = np.where(np.isfinite(most), most, 0)
    p = np.exp(scores - most)
    total = p.sum(-1, keepdims=True)
    out = np.divide(p @ values, total, out=np.zeros((*total.shape[:3], values.shape[-1])), where=total > 0)
    with np.errstate(divide="ignore"):
        return out, (np.log(total) + most)[..., 0]
