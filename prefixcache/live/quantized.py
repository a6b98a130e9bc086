"""mlx-lm's quantised rows in a batch: `mx.quantize` triples of several sequences, and attention on them.

mlx-lm's QuantizedKVCache knows one sequence only, and its attention knows neither sinks nor, before 0.32, the masks of
a batch. `QuantizedKVCache` here is that class with what batching asks of it; `BatchQuantizedKVCache` follows mlx-lm's
BatchKVCache. Both enter a model through `upstream.hook_attention`. TurboQuant codes are not here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as mlx_lm_cache
from mlx_lm.models.base import create_causal_mask

from prefixcache.live import ragged
from prefixcache.live.ragged import Arrays
from prefixcache.upstream import LayerCache, hook_attention

SCORES = 2**25  # float32 scores that a prefill holds at once: 128 MiB; more queries than that go in pieces
ALIKE = "make every cache of a batch with the same bits and group_size, and for one model"


class Triple(tuple[mx.array, mx.array, mx.array]):
    """(codes, scales, biases) of `mx.quantize`, (B, H, T, w) each; `shape` and `dtype` are of what they stand for.

    Some models read the dtype of what they fetched (phi, phixtral).
    """

    group_size: int
    bits: int

    @classmethod
    def of(cls, arrays: Sequence[mx.array], group_size: int, bits: int) -> Triple:
        triple = cls(arrays)
        triple.group_size, triple.bits = group_size, bits
        return triple

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self[1].shape[:3], self[1].shape[3] * self.group_size)

    @property
    def dtype(self) -> mx.Dtype:
        return self[1].dtype

    def decoded(self, dtype: mx.Dtype) -> mx.array:
        codes, scales, biases = self
        scales, biases = scales.astype(dtype), biases.astype(dtype)
        return mx.dequantize(codes, scales, biases, group_size=self.group_size, bits=self.bits)


def attention(
    queries: mx.array,
    keys: Triple,
    values: Triple,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Return softmax(scale queries keys^T + mask) values, (B, Hq, L, Dv) in the queries' dtype.

    `queries` (B, Hq, L, D); `keys` and `values` of (B, H, T, ...), Hq a multiple of H; `mask` None, "causal" or
    bool or additive and broadcastable to (B, Hq, L, T); `sinks` (Hq,), the logit of a key that has no value. A query
    that may attend to nothing gets zeros. At most `SCORES` scores are held at once, but one row of queries always.
    """
    batch, heads, length, _ = queries.shape
    kv_heads, total = keys[0].shape[1:3]
    grouped = (batch, kv_heads, heads // kv_heads)
    multiply: Any = partial(mx.quantized_matmul, group_size=keys.group_size, bits=keys.bits)
    key_arrays, value_arrays, on_cuda = tuple(keys), tuple(values), _on_cuda()
    if on_cuda:  # MLX 0.32 multiplies few shapes of quantised rows there, no float32, and some of them wrongly
        key_arrays, value_arrays = ((triple.decoded(queries.dtype),) for triple in (keys, values))
        multiply = _plain_matmul
    causal = isinstance(mask, str)
    if isinstance(mask, str) and mask != "causal":
        raise ValueError(f'mask {mask!r}: give None, "causal" or an array')
    allowed = _by_group(mask, kv_heads) if isinstance(mask, mx.array) else None

    def piece(start: int, end: int) -> mx.array:
        seen = total - length + end if causal else total  # keys behind the last query's own are for none of the piece
        rows = (queries[:, :, start:end] * scale).reshape(batch, kv_heads, -1, queries.shape[3])
        scores = multiply(rows, *(a[:, :, :seen] for a in key_arrays), transpose=True)
        scores = scores.reshape(*grouped, end - start, seen).astype(mx.float32)
        if causal:
            rows_of_queries = mx.arange(total - length + start, seen)
            scores = mx.where(rows_of_queries[:, None] >= mx.arange(seen), scores, -mx.inf)
        elif allowed is not None:
            part = allowed if allowed.shape[3] == 1 else allowed[:, :, :, start:end]
            scores = mx.where(part, scores, -mx.inf) if part.dtype == mx.bool_ else scores + part.astype(mx.float32)
        norm = mx.logsumexp(scores, axis=-1, keepdims=True)
        if sinks is not None:
            norm = mx.logaddexp(norm, sinks.astype(mx.float32).reshape(kv_heads, -1, 1, 1))
        # Not softmax: where all scores are -inf its result is NaN, and this is 0.
        weights = mx.exp(scores - mx.maximum(norm, mx.finfo(mx.float32).min))
        weights = weights.astype(queries.dtype).reshape(batch, kv_heads, -1, seen)
        out = multiply(weights, *(a[:, :, :seen] for a in value_arrays), transpose=False)
        return out.reshape(batch, heads, end - start, -1).astype(queries.dtype)

    at_once = max(SCORES // (batch * heads * total), 1)
    pieces = []
    for start in range(0, length, at_once):
        pieces.append(piece(start, min(start + at_once, length)))
        if on_cuda and length > at_once:  # else many pieces' scores are there at once
            mx.eval(pieces[-1])
    return pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=2)


def _on_cuda() -> bool:
    return mx.cuda.is_available() and mx.default_device().type == mx.DeviceType.gpu


def _plain_matmul(rows: mx.array, other: mx.array, transpose: bool) -> mx.array:
    return rows @ (mx.swapaxes(other, -1, -2) if transpose else other)


def _by_group(mask: mx.array, kv_heads: int) -> mx.array:
    """Return a mask broadcastable to (B, Hq, L, T) as one that is to (B, H, Hq / H, L, T)."""
    mask = mask.reshape(*[1] * (4 - mask.ndim), *mask.shape)
    batch, heads, *rest = mask.shape
    return mask.reshape(batch, *((1, 1) if heads == 1 else (kv_heads, heads // kv_heads)), *rest)


def _appended(arrays: Arrays | None, used: int, new: Sequence[mx.array], step: int) -> Arrays:
    """Return `arrays` (B, H, T, w) with `new` (B, H, L, w) at row `used`, in room for a multiple of `step` rows more.

    Where there is room, the arrays themselves change.
    """
    end = used + new[0].shape[2]
    if arrays is None or end > arrays[0].shape[2]:
        room = -(-new[0].shape[2] // step) * step
        grown = [mx.zeros((*a.shape[:2], room, a.shape[3]), a.dtype) for a in (new if arrays is None else arrays)]
        if arrays is not None:
            grown = [mx.concatenate([a[:, :, :used], more], axis=2) for a, more in zip(arrays, grown, strict=True)]
        arrays = tuple(grown)
    for array, rows in zip(arrays, new, strict=True):
        array[:, :, used:end] = rows
    return arrays


class _Quantized:
    """What one sequence and a batch of them have in common. An object is plain data: keys, values, numbers."""

    step = 256
    keys: Arrays | None
    values: Arrays | None
    group_size: int
    bits: int

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        hook_attention()  # here and not in __init__: copies and restored caches are made without it
        return super().__new__(cls)

    def attend_to_codes(
        self, queries: mx.array, keys: Any, values: Any, *, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array:
        """Attend as `attention` does; the hook calls it."""
        return attention(queries, self._triple(keys), self._triple(values), scale=scale, mask=mask, sinks=sinks)

    def empty(self) -> bool:
        return self.keys is None

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays() or ())

    def _arrays(self) -> Arrays | None:
        return None if self.keys is None or self.values is None else (*self.keys, *self.values)

    def _hold(self, arrays: Sequence[mx.array] | None) -> None:
        self.keys, self.values = (None, None) if arrays is None else (tuple(arrays[:3]), tuple(arrays[3:]))

    def _append(self, used: int, keys: mx.array, values: mx.array) -> None:
        new = [a for rows in (keys, values) for a in mx.quantize(rows, group_size=self.group_size, bits=self.bits)]
        self._hold(_appended(self._arrays(), used, new, self.step))

    def _fetch(self, used: int) -> tuple[Triple, Triple]:
        arrays = [array[:, :, :used] for array in self._arrays() or ()]
        return self._triple(arrays[:3]), self._triple(arrays[3:])

    def _triple(self, arrays: Sequence[mx.array]) -> Triple:
        return Triple.of(arrays, self.group_size, self.bits)


def _traits(cache: Any) -> dict[str, Any]:
    """Return what all caches of a batch must have in common."""
    traits = {"bits": cache.bits, "group_size": cache.group_size}
    if cache.keys is not None:
        keys, values = cache.keys[1], cache.values[1]
        widths = {"key width": keys.shape[3], "value width": values.shape[3]}
        traits |= {"heads": keys.shape[1], "dtype": keys.dtype}
        traits |= {name: width * cache.group_size for name, width in widths.items()}
    return traits


class QuantizedKVCache(_Quantized, mlx_lm_cache.QuantizedKVCache):
    """mlx-lm's QuantizedKVCache, which can join a batch. Rows, attributes, state and what it fetches are the same."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Triple, Triple]:
        """Append (B, H, L, D) keys and values. ValueError when D is no multiple of the group size."""
        self._append(self.offset, keys, values)
        self.offset += keys.shape[2]
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Triple, Triple]:
        return self._fetch(self.offset)

    def size(self) -> int:
        return self.offset

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> BatchQuantizedKVCache:
        return BatchQuantizedKVCache.merge(caches)


class BatchQuantizedKVCache(_Quantized, LayerCache):
    """Quantised rows of B sequences, left-padded so that their last tokens are in the same row.

    The protocol is that of mlx-lm's BatchKVCache. Sequence b has its tokens in rows `left_padding[b]` to `_idx`, of
    `keys` and `values`: triples of (B, H, T >= _idx, w), or None before the first token.
    """

    def __init__(self, left_padding: list[int], group_size: int = 64, bits: int = 8):
        self.keys = self.values = None
        self.left_padding = mx.array(left_padding, mx.int32)
        self.group_size, self.bits = group_size, bits
        self._idx = 0
        self._right_padding: mx.array | None = None

    @property
    def offset(self) -> mx.array:
        """(B,) int32: the position of each sequence's next token, negative within its left padding."""
        return self._idx - self.left_padding

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Triple, Triple]:
        """Append (B, H, L, D) keys and values. ValueError for another B, H or D than before."""
        self._check_shapes(keys, values)
        self._append(self._idx, keys, values)
        self._idx += keys.shape[2]
        return self.keys_and_values()

    def _check_shapes(self, keys: mx.array, values: mx.array) -> None:
        sequences = self.left_padding.shape[0]
        if not keys.shape[0] == values.shape[0] == sequences:
            raise ValueError(f"keys and values of {keys.shape[0]} and {values.shape[0]} sequences, not {sequences}")
        given = {"heads": keys.shape[1], "key width": keys.shape[3], "value width": values.shape[3]}
        ragged.check_alike(_traits(self), given, ALIKE)

    def keys_and_values(self) -> tuple[Triple, Triple]:
        return self._fetch(self._idx)

    def prepare(
        self,
        *,
        left_padding: list[int] | None = None,
        lengths: list[int] | None = None,
        right_padding: list[int] | None = None,
    ) -> None:
        """Announce padding: at the left of the first tokens, or at the right of what comes until `finalize`."""
        ragged.check_numbers((left_padding, lengths, right_padding), self.left_padding.shape[0])
        if left_padding is not None:
            if self.keys is not None:
                raise ValueError("left padding for a batch that has tokens: only an empty one can be padded there")
            self.left_padding = self.left_padding + mx.array(left_padding, mx.int32)
        if right_padding is not None and max(right_padding) > 0:
            self._right_padding = mx.array(right_padding, mx.int32)

    def finalize(self) -> None:
        """Turn the right padding that was announced into left padding."""
        padding, arrays = self._right_padding, self._arrays()
        self._right_padding = None
        if padding is not None and arrays is not None:
            self._hold(ragged.rolled(arrays, padding))
            self.left_padding = self.left_padding + padding

    meta_state = ""

    # Numbers are an array, and not beside the state as in 0.31 or among it as in 0.32: both can save that.
    @property
    def state(self) -> tuple[Any, ...]:
        return self.keys, self.values, self.left_padding, mx.array([self._idx, self.group_size, self.bits])

    @state.setter
    def state(self, state: Sequence[Any]) -> None:
        keys, values, self.left_padding, numbers = state
        self._hold(None if keys is None else (*keys, *values))
        self._idx, self.group_size, self.bits = ragged.numbers(numbers)
        self._right_padding = None

    @classmethod
    def from_state(cls, state: Sequence[Any], meta_state: Any = None) -> BatchQuantizedKVCache:
        cache = cls.__new__(cls)
        cache.state = state
        return cache

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        """Drop the last `n` tokens of every sequence, of a shorter one all; returns how many of the longest."""
        n = min(self._idx, n)
        if n > 0:
            begun = self.left_padding <= self._idx
            self._idx -= n
            self.left_padding = mx.where(begun, mx.minimum(self.left_padding, self._idx), self.left_padding)
        return n

    def make_mask(self, N: int, return_array: bool = False, **kwargs: Any) -> mx.array:
        """Return a mask (B, 1, N, _idx + N) bool."""
        return create_causal_mask(N, offset=self._idx, left_padding=self.left_padding, **kwargs)

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep these sequences, in this order, without the padding that none of them needs. IndexError."""
        indices = ragged.chosen(batch_indices, self.left_padding.shape[0])
        arrays = self._arrays()
        self.left_padding = self.left_padding[indices]
        if self._right_padding is not None:
            self._right_padding = self._right_padding[indices]
        if arrays is None:
            return
        if indices.size == 0:
            self._hold(None)
            self._idx = 0
            return
        spare = min(self._idx, *ragged.numbers(self.left_padding))
        self._hold(ragged.selected(tuple(a[:, :, spare:] for a in arrays), indices))
        self._idx -= spare
        self.left_padding = self.left_padding - spare

    def extend(self, other: BatchQuantizedKVCache) -> None:
        """Append the sequences of `other`, which stays as it is. ValueError when they can't be in one batch."""
        if not isinstance(other, BatchQuantizedKVCache):
            raise ValueError(f"a {type(other).__name__} can't extend a BatchQuantizedKVCache: {ALIKE}")
        if self._right_padding is not None or other._right_padding is not None:
            raise ValueError("a batch with padding on the right: finalize() it first")
        ragged.check_alike(_traits(self), _traits(other), ALIKE)
        used = max(self._idx, other._idx)
        mine, others = self._arrays(), other._arrays()
        shaped = mine or others
        if shaped is not None:
            mine = mine or ragged.without_rows(shaped, self.left_padding.shape[0])
            others = others or ragged.without_rows(shaped, other.left_padding.shape[0])
            self._hold(ragged.joined(mine, self._idx, others, other._idx))
        self.left_padding = mx.concatenate(
            [self.left_padding + (used - self._idx), other.left_padding + (used - other._idx)]
        )
        self._idx = used

    def extract(self, idx: int) -> QuantizedKVCache:
        """Return sequence `idx` by itself, copied out."""
        ragged.chosen([idx], self.left_padding.shape[0])
        cache = QuantizedKVCache(self.group_size, self.bits)
        arrays, padding = self._arrays(), ragged.numbers(self.left_padding)[idx]
        if arrays is not None and padding < self._idx:
            cache._hold([mx.contiguous(a[idx : idx + 1, :, padding : self._idx]) for a in arrays])
            cache.offset = self._idx - padding
        return cache

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> BatchQuantizedKVCache:
        """Return a batch of single caches, mlx-lm's QuantizedKVCache or this module's. ValueError when they are not alike."""
        if not caches:
            raise ValueError("merge([]): give one cache or more")
        for cache in caches:
            if not isinstance(cache, mlx_lm_cache.QuantizedKVCache):
                raise ValueError(f"a {type(cache).__name__} in a batch of QuantizedKVCache: {ALIKE}")
            if cache.keys is not None and cache.keys[0].shape[0] != 1:
                raise ValueError(f"merge() of a cache of {cache.keys[0].shape[0]} sequences: give it one of each")
        traits = [_traits(cache) for cache in caches]
        for traits_of_one in traits:
            ragged.check_alike(max(traits, key=len), traits_of_one, ALIKE)
        longest = max(cache.offset for cache in caches)
        batch = cls([longest - cache.offset for cache in caches], caches[0].group_size, caches[0].bits)
        if longest > 0:
            rows = [(None if c.keys is None else (*c.keys, *c.values), c.offset) for c in caches]
            batch._hold(ragged.stacked(rows))
            batch._idx = longest
        return batch

    def size(self) -> int:
        return self._idx
