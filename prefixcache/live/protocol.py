"""What mlx-lm asks of every cache of codes, of one sequence or of many. What differs is in `live.turboquant`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from prefixcache.codecs.interchange import element
from prefixcache.codecs.turboquant.coding import Choice, LayerRows
from prefixcache.live.attention import attend, plain
from prefixcache.live.decoding import decoded_heads
from prefixcache.live.layer import CodedLayer
from prefixcache.live.stand_in import CodesStandIn
from prefixcache.upstream import hook_attention

if TYPE_CHECKING:
    from typing_extensions import Self


class LiveCache:
    """The parts of mlx-lm's protocol that are the same for one sequence and for many."""

    _layer: CodedLayer

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return what stands for all keys and values of this cache, as `update_and_fetch` returns it."""
        layer, kind = self._layer, self._layer.known_kind()
        if layer.waiting is not None:
            return decoded_heads(layer, 0, kind.heads)
        shape, dtype = (layer.batch, kind.heads, layer.rows), element(kind.dtype).mlx
        keys, values = (CodesStandIn(self, (*shape, width), dtype) for width in (kind.key_width, kind.value_width))
        return keys, values

    def attend_to_codes(
        self, queries: mx.array, keys: Any, values: Any, *, scale: float, mask: Any, sinks: mx.array | None = None
    ) -> mx.array:
        """Attend, as the hook asks, with what `update_and_fetch` returned: see `attention.attend`. On arrays it is
        MLX's own.
        """
        if isinstance(keys, mx.array):
            return plain(queries, keys, values, scale, mask, sinks)
        return attend(self._layer, queries, scale, mask, sinks)

    @property
    def bits(self) -> int:
        """Bits of keys, where codes are what is fetched: mlx-lm's own function, while it isn't hooked, then takes its
        quantised way, and what it meets says what to do."""
        if self._layer.waiting is not None:
            raise AttributeError("bits")
        return self._layer.choice.key_bits

    @property
    def group_size(self) -> int:
        """Beside `bits`."""
        return self._layer.known_kind().key_width

    def size(self) -> int:
        """Count the rows: of a batch, padding included."""
        return self._layer.rows

    def empty(self) -> bool:
        return self._layer.kind is None

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales, the buffers' room to grow included, of rows kept as they are, and of levels. Nothing
        is evaluated."""
        return self._layer.nbytes

    def is_trimmable(self) -> bool:
        return True

    @property
    def meta_state(self) -> str:
        """Nothing: `state` says all."""
        return ""

    @meta_state.setter
    def meta_state(self, value: Any) -> None:
        if value:
            raise ValueError(f"meta_state={value!r}: a {type(self).__name__} has none")

    @classmethod
    def from_state(cls, state: Sequence[mx.array], meta_state: Any = "") -> Self:
        """Return the cache whose `state` this was, its codec included. ValueError for any other state."""
        cache = cls.__new__(cls)
        cache.state, cache.meta_state = state, meta_state  # type: ignore[attr-defined]
        hook_attention()
        return cache

    @classmethod
    def of_layer(cls, layer: CodedLayer) -> Self:
        """Make the cache of these rows."""
        cache = cls.__new__(cls)
        cache._adopt(layer)
        hook_attention()
        return cache

    def _adopt(self, layer: CodedLayer) -> None:
        """Be this layer's cache."""
        self._layer = layer

    def copy(self) -> Self:
        """Return another cache of the same rows. It costs nothing until one of the two changes, which the other never
        shows.
        """
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._layer = self._layer.copy()
        return other

    def __copy__(self) -> Self:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> Self:
        return self.copy()

    @property
    def choice(self) -> Choice:
        """How rows are coded: bits, levelling, sink_tokens, seed, recent_tokens."""
        return self._layer.choice

    @property
    def kind(self) -> LayerRows | None:
        """Heads, widths and dtype of the rows; None before the first."""
        return self._layer.kind
