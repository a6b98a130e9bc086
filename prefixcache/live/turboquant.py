"""`TurboQuantKVCache` and `BatchTurboQuantKVCache`: mlx-lm's cache protocol on codes, of one sequence or several of equal
length, and of sequences of any lengths, left-padded. Rows and codes are `live.layer`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import KVCache, create_attention_mask

from prefixcache.codecs.turboquant.codec import TurboQuant
from prefixcache.codecs.turboquant.coding import RECENT, Choice, LayerRows, Run
from prefixcache.live import batching
from prefixcache.live.decoding import decoded_heads
from prefixcache.live.layer import CodedLayer
from prefixcache.live.layer_state import NO_ROWS
from prefixcache.live.levels import SharedLevels
from prefixcache.live.protocol import LiveCache
from prefixcache.live.ragged import check_numbers, chosen, numbers
from prefixcache.live.state import from_arrays, to_arrays
from prefixcache.upstream import hook_attention

if TYPE_CHECKING:
    from typing_extensions import Self


class TurboQuantKVCache(LiveCache):
    """Keys and values as TurboQuant's codes while a model generates: a step encodes its new row and nothing else.

    Attention reads the codes, and no decoded copy of the past is ever held: for models whose attention is mlx-lm's own
    (`prefixcache.live.families`).

    With `levelling` rows wait as they are until 256 are there, then channels are measured and all are coded. Beside their
    codes the first `sink_tokens` and the last `recent_tokens` rows are kept as they are, and attention reads those.
    `levels`, shared by caches of one model and one tenant, saves measuring again; `layer` is the number there.

    Of the codec (None: `TurboQuant()`) bits, levelling, sinks and seed count; what it says of a model's layers doesn't.
    """

    def __init__(
        self,
        codec: TurboQuant | None = None,
        *,
        recent_tokens: int = RECENT,
        levels: SharedLevels | None = None,
        layer: int = 0,
    ):
        choice = Choice.of_codec(codec or TurboQuant(), recent_tokens)
        self._layer = CodedLayer.empty(choice, levels, layer)
        hook_attention()

    # -- mlx-lm's protocol --------------------------------------------------------------------------------------------

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Code and keep rows (B, heads, L, width) of one float dtype. Return what stands for all keys and values: stand-ins
        that this cache's attention knows, or arrays where rows wait.

        ValueError for rows of other heads, widths, dtype or batch size than those that are held.
        """
        self._layer.append(keys, values)
        return self.keys_and_values()

    @property
    def offset(self) -> int:
        """Return how many tokens are held."""
        return self._layer.rows

    def trim(self, n: int) -> int:
        """Forget the last `n` tokens. ValueError where fewer are held."""
        self._layer.cut(n)
        return n

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        return create_attention_mask(*args, offset=self._layer.rows, **kwargs)

    @property
    def state(self) -> list[mx.array]:
        """Return all of it as arrays, of which the first describes the others: to evaluate, to save, for `from_state`."""
        return to_arrays(self._layer)

    @state.setter
    def state(self, state: Sequence[mx.array]) -> None:
        layer = from_arrays(state).layer
        if any(layer.pads):
            raise ValueError("the state of a batch; use BatchTurboQuantKVCache.from_state")
        self._layer = layer

    @classmethod
    def merge(cls, caches: Sequence[TurboQuantKVCache]) -> BatchTurboQuantKVCache:
        """Return one batch of single caches, any of which may be empty."""
        return BatchTurboQuantKVCache.merge(caches)

    # -- beyond the protocol ------------------------------------------------------------------------------------------

    def dequantize(self) -> KVCache:
        """Return a plain cache of the original dtype, with the rows that attention means."""
        plain, layer = KVCache(), self._layer
        if layer.kind is not None:
            rows = NO_ROWS.put(*decoded_heads(layer, 0, layer.kind.heads), 0)
            plain.keys, plain.values = rows.arrays or (None, None)
            plain.offset = layer.rows
        return plain

    def filled_from(self, cache: KVCache) -> Self:
        """Append the rows of a plain cache, coded, and return this cache. The plain one stays as it is. TypeError for any
        other class.
        """
        if type(cache) is not KVCache:
            raise TypeError(f"{type(cache).__name__}: only mlx-lm's KVCache can be made a TurboQuantKVCache")
        if cache.keys is not None:
            self._layer.append(cache.keys[..., : cache.offset, :], cache.values[..., : cache.offset, :])
            mx.eval(self._layer.arrays())
        return self

    @classmethod
    def from_codes(
        cls,
        choice: Choice,
        kind: LayerRows,
        runs: Sequence[Run],
        codes: tuple[mx.array, mx.array],
        rows: int,
        sinks: tuple[mx.array, mx.array] | None = None,
    ) -> TurboQuantKVCache:
        """Take codes that are there already: uint32 (B, heads, T, words of a key, then of its value) and scales uint16
        (B, heads, T, 2), `rows` in use. Attention reads them.

        `sinks`: keys and values (B, heads, choice.sink_tokens, width) as they are, where the choice keeps some.
        """
        return cls.of_layer(CodedLayer.of_codes(choice, kind, runs, codes, rows, sinks))

    def __repr__(self) -> str:
        return f"TurboQuantKVCache({self._layer.choice}, {self._layer.rows} tokens)"


class BatchTurboQuantKVCache(LiveCache):
    """Codes of B sequences, token t of sequence b in row `left_padding[b] + t`; see `TurboQuantKVCache`.

    What mlx-lm's BatchKVCache is to KVCache: made by `merge`, or empty with the left padding of what is to come. Rows
    wait as they are until the batch has 256; sequences that join a batch whose levels are known are coded with these.
    """

    def __init__(self, left_padding: Sequence[int], like: TurboQuantKVCache | None = None):
        """Make an empty batch; rows are kept as the cache `like` keeps them, None: as `TurboQuantKVCache()` does.
        ValueError for negative padding.
        """
        pads = [int(n) for n in left_padding]
        if min(pads, default=0) < 0:
            raise ValueError(f"left_padding={pads}: give numbers of rows, 0 or more")
        layer = (like or TurboQuantKVCache())._layer
        self._adopt(CodedLayer.empty(layer.choice, layer.shared, layer.number, pads))
        hook_attention()

    def _adopt(self, layer: CodedLayer, right: Sequence[int] | None = None) -> None:
        """Become the cache of this layer. `right`: each sequence's padding on the right, until `finalize`."""
        self._layer = layer
        self._right = list(right) if right is not None else None
        self._place()

    def _place(self) -> None:
        """Keep padding and offsets as arrays, for masks and positions."""
        self.left_padding = mx.array(self._layer.pads, dtype=mx.int32)
        self.offset = self._layer.rows - self.left_padding

    # -- mlx-lm's protocol --------------------------------------------------------------------------------------------

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Code and keep rows (B, heads, L, width); see `TurboQuantKVCache.update_and_fetch`."""
        if keys.shape[0] != self._layer.batch:
            raise ValueError(
                f"rows of {keys.shape[0]} sequences for a cache of {self._layer.batch}: batch sizes must match"
            )
        self._layer.append(keys, values)
        self.offset = self.offset + keys.shape[2]
        return self.keys_and_values()

    @property
    def _idx(self) -> int:
        return self._layer.rows

    def trim(self, n: int) -> int:
        """Forget the last `n` rows of every sequence. ValueError where one has fewer."""
        tokens = [self._layer.alignment.tokens_of(b) for b in range(self._layer.batch)]
        if tokens and n > min(tokens):
            raise ValueError(f"trim({n}): sequence {tokens.index(min(tokens))} has {min(tokens)} tokens")
        self._layer.cut(n)
        self.offset = self.offset - n
        return n

    def make_mask(self, N: int, return_array: bool = False, **kwargs: Any) -> mx.array:
        return create_causal_mask(N, offset=self._layer.rows, left_padding=self.left_padding, **kwargs)

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Announce padding of what comes: on the left of an empty batch, or on the right, until `finalize`.

        `lengths`: tokens to come of each sequence; with them levels can be measured before the last of the padding.
        """
        layer = self._layer
        check_numbers((left_padding, lengths, right_padding), layer.batch)
        if left_padding is not None:
            if layer.kind is not None:
                raise ValueError("left padding can be added to an empty batch only")
            pads = tuple(pad + int(more) for pad, more in zip(layer.pads, left_padding, strict=True))
            layer.alignment = layer.alignment._replace(pads=pads)
            self._place()
        if right_padding is not None and max(right_padding, default=0) > 0:
            self._right = [int(n) for n in right_padding]
            ends = tuple(layer.rows + int(n) for n in lengths) if lengths is not None else None
            layer.alignment = layer.alignment._replace(ends=ends)

    def finalize(self) -> None:
        """Turn padding on the right into padding on the left."""
        if self._right is not None:
            self._adopt(batching.turned_left(self._layer, self._right))

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep these sequences, in this order. IndexError for one that isn't there."""
        indices = chosen(batch_indices, self._layer.batch)
        right = [self._right[i] for i in numbers(indices)] if self._right is not None and indices.size else None
        self._adopt(batching.selected(self._layer, indices), right)

    def extend(self, other: BatchTurboQuantKVCache) -> None:
        """Put the sequences of another batch behind those of this one; the other stays as it is.

        ValueError for another choice of codec, other widths, heads or dtype.
        """
        if not isinstance(other, BatchTurboQuantKVCache):
            raise TypeError(f"extend({type(other).__name__}): give a BatchTurboQuantKVCache")
        if self._right is not None or other._right is not None:
            raise ValueError("a batch with padding on the right: finalize() it first")
        self._adopt(batching.joined(self._layer, other._layer))

    def extract(self, idx: int) -> TurboQuantKVCache:
        """Return one sequence, by itself."""
        chosen([idx], self._layer.batch)
        return TurboQuantKVCache.of_layer(batching.sequence(self._layer, idx))

    @classmethod
    def merge(cls, caches: Sequence[TurboQuantKVCache]) -> BatchTurboQuantKVCache:
        """Return one batch of single caches, any of which may be empty. The caches don't change.

        ValueError for no caches, for a cache of several sequences, and where codec, widths, heads or dtype differ.
        """
        if not caches:
            raise ValueError("merge([]): give one cache or more")
        for cache in caches:
            if not isinstance(cache, TurboQuantKVCache):
                raise TypeError(f"{type(cache).__name__} and TurboQuantKVCache in one batch: convert all, or none")
            if cache._layer.batch > 1:
                raise ValueError(f"a cache of {cache._layer.batch} sequences can't be merged: one sequence each")
        return cls.of_layer(batching.merged([cache._layer for cache in caches]))

    @property
    def state(self) -> list[mx.array]:
        """Return the whole batch as arrays, of which the first describes the others."""
        return to_arrays(self._layer, right=self._right)

    @state.setter
    def state(self, state: Sequence[mx.array]) -> None:
        self._adopt(*from_arrays(state))

    def __repr__(self) -> str:
        layer = self._layer
        batch = f"{layer.batch} sequences, {layer.rows} rows"
        return f"BatchTurboQuantKVCache({layer.choice}, {batch})"
