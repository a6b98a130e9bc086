"""What live caches ask of TurboQuant: MLX rows to codes that stay MLX arrays, back to rows, and attention on the codes.

All back ends give the same codes. On the CPU the arrays are evaluated on the way, on a GPU everything stays lazy where
there is a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial

import mlx.core as mx
import numpy as np

from prefixcache.codecs.base import Decoding, Encoding
from prefixcache.codecs.interchange import Array, borrow, bring_in, element, name_of, on_cpu
from prefixcache.codecs.levels import Levels
from prefixcache.codecs.packing import words_of
from prefixcache.codecs.turboquant import backends, c_attention, gpu_attention, gpu_rows
from prefixcache.codecs.turboquant.format import AttentionCall, AttentionPart, CodedRows, Form

Encoder = Callable[[mx.array, mx.array], tuple[mx.array, mx.array]]
MOST_QUERIES = 16  # a sequence's queries at a time that the GPU's fused kernel is for; more are a prefill


class LevelStack:
    """The levels of B sequences, or one that all share; None for a sequence whose rows aren't levelled."""

    def __init__(self, each: Sequence[Levels | None], form: Form, heads: int):
        self.each = tuple(each)
        self.form = form
        self.levelled = any(levels is not None for levels in self.each)
        self.heads = heads
        self._slices: dict[tuple[int, int], LevelStack] = {}

    def of(self, sequence: int) -> Levels | None:
        return self.each[sequence if len(self.each) > 1 else 0]

    def of_heads(self, first: int, heads: int) -> LevelStack:
        """Return the stack of some of the heads: the same object each time."""
        if heads == self.heads:
            return self
        if (first, heads) not in self._slices:
            of_heads = [None if levels is None else levels.of(first, heads) for levels in self.each]
            self._slices[first, heads] = LevelStack(of_heads, self.form, heads)
        return self._slices[first, heads]

    @cached_property
    def encoding(self) -> mx.array | None:
        """Return mean and weight, float32 (2, B or 1, heads, width); None where nothing is levelled."""
        pairs = [None if levels is None else (levels.mean, levels.weight) for levels in self.each]
        return self._stacked(pairs, np.float32(1))

    @cached_property
    def decoding(self) -> mx.array | None:
        """Return mean and spread, float32 (2, B or 1, heads, width), as `CodedRows` has them."""
        spreads = [None if levels is None else (levels.mean, self.form.spread(levels)) for levels in self.each]
        return self._stacked(spreads, self.form.spread(None))

    def _stacked(self, pairs: Sequence[tuple[Array, Array] | None], plain: Array | np.float32) -> mx.array | None:
        if not self.levelled:
            return None
        shape = (self.heads, self.form.width)
        default = np.zeros(shape, np.float32), np.broadcast_to(plain, shape)
        # Times one: on a GPU the product lies in its own memory (`gpu_rows`).
        stacked = mx.array(np.stack([np.stack(pair or default) for pair in pairs], axis=1)) * 1
        mx.eval(stacked)
        return stacked


def encode(
    keys: mx.array, values: mx.array, key_levels: LevelStack, value_levels: LevelStack
) -> tuple[mx.array, mx.array]:
    """Encode keys (B, heads, L, key width), values (B, heads, L, value width) of one float dtype -> codes uint32 (B,
    heads, L, key words + value words), scales uint16 (B, heads, L, 2), as `CodedRows` has them.
    """
    forms = key_levels.form, value_levels.form
    if all(map(backends.on_gpu, forms)):
        return gpu_attention.encode_pair(keys, values, *forms, key_levels.encoding, value_levels.encoding)
    batch, heads, tokens, _ = keys.shape
    key_words = words_of(forms[0].width, forms[0].codebook.bits)
    codes = np.zeros((batch, heads, tokens, key_words + words_of(forms[1].width, forms[1].codebook.bits)), np.uint32)
    scales = np.zeros((batch, heads, tokens, 2), np.uint16)
    planes = (codes[..., :key_words], scales[..., 0]), (codes[..., key_words:], scales[..., 1])
    for rows, (own_codes, own_scales), stack in zip((keys, values), planes, (key_levels, value_levels), strict=True):
        if not rows.size:
            continue
        targets = [(own_codes[b].swapaxes(0, 1), own_scales[b].swapaxes(0, 1)) for b in range(batch)]
        borrowed = borrow(rows)
        whole = [Encoding(borrowed[b].swapaxes(0, 1), targets[b], stack.of(b)) for b in range(batch)]
        backends.encode_all(whole, name_of(rows.dtype), stack.form)
    return mx.array(codes), mx.array(scales)


def encoder(key_levels: LevelStack, value_levels: LevelStack, dtype: mx.Dtype) -> Encoder:
    """Return a function that encodes rows as `encode` does, for many calls with rows of one kind: it looks up less."""
    form = key_levels.form
    if backends.on_gpu(form):
        levels = [stack.encoding for stack in (key_levels, value_levels) if stack.encoding is not None]
        if form is value_levels.form and len(levels) != 1:
            return partial(gpu_attention.encode_alike, form, dtype, levels)
    return lambda keys, values: encode(keys, values, key_levels, value_levels)


def decode(codes: mx.array, scales: mx.array, dtype: str, levels: LevelStack) -> mx.array:
    """Decode codes uint32 (B, heads, T, words), scales uint16 (B, heads, T) of keys or of values, views as they lie ->
    rows (B, heads, T, width) of `dtype`.
    """
    form, (batch, heads, tokens, _) = levels.form, codes.shape
    if codes.size == 0:
        return mx.zeros((batch, heads, tokens, form.width), element(dtype).mlx)
    if backends.on_gpu(form):
        sequences = [_decoded_on_gpu(codes[b], scales[b], dtype, levels, b) for b in range(batch)]
        return sequences[0][None] if batch == 1 else mx.stack(sequences)
    rows = np.empty((batch, heads, tokens, form.width), element(dtype).numpy)
    mx.eval(codes, scales)
    own_codes, own_scales = borrow(codes), borrow(scales)
    whole = [
        Decoding((own_codes[b].swapaxes(0, 1), own_scales[b].swapaxes(0, 1)), rows[b], levels.of(b))
        for b in range(batch)
    ]
    backends.decode_all(whole, dtype, form)
    return bring_in(rows, dtype)


def _decoded_on_gpu(codes: mx.array, scales: mx.array, dtype: str, levels: LevelStack, sequence: int) -> mx.array:
    """Decode one sequence's rows on a GPU."""
    codes, scales = mx.swapaxes(codes, 0, 1), mx.swapaxes(scales, 0, 1)
    mean_and_spread = levels.decoding
    if mean_and_spread is not None:
        one_for_all = mean_and_spread.shape[1] == 1
        mean_and_spread = mean_and_spread[:, 0] if one_for_all else mx.contiguous(mean_and_spread[:, sequence])
    return gpu_rows.decode_arrays(codes, scales, dtype, levels.form, mean_and_spread)


def attend(rows: CodedRows, call: AttentionCall) -> AttentionPart | None:
    """Attend to codes, in one pass over them. None where no kernel does it here: then decode, head by head."""
    if on_cpu():
        if not c_attention.takes(rows):
            return None
        part = c_attention.attend(rows, call)
        return AttentionPart(with_logits(part, call.logits).astype(call.dtype or mx.float32), part.total)
    if call.queries.shape[2] <= MOST_QUERIES and gpu_attention.takes(rows, call.queries):
        return gpu_attention.attend(rows, call)
    return None


def with_logits(part: AttentionPart, logits: mx.array | None) -> mx.array:
    """Return the output where attention sinks have these logits."""
    if logits is None:
        return part.out
    return part.out * mx.sigmoid(part.total - logits.astype(mx.float32)[:, None])[..., None]
