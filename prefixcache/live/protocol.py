"""The calls of mlx-lm that all caches of codes answer alike, of one sequence or of many (`live.turboquant` has the others),
and the stand-ins that such a cache gives a model in the place of keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import mlx.core as mx

from prefixcache.codecs.interchange import element
from prefixcache.codecs.turboquant.coding import Choice, LayerRows
from prefixcache.live.attention import attend, plain
from prefixcache.live.decoding import decoded_heads
from prefixcache.live.layer import CodedLayer
from prefixcache.upstream import attention_is_hooked, hook_attention

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
        """Return the bits of keys where codes are fetched. mlx-lm's own attention, while it isn't hooked, then takes its
        quantised way, and the stand-in that it meets there says what to do."""
        if self._layer.waiting is not None:
            raise AttributeError("bits")
        return self._layer.choice.key_bits

    @property
    def group_size(self) -> int:
        """Return what mlx-lm asks for beside `bits`."""
        return self._layer.known_kind().key_width

    def size(self) -> int:
        """Count the rows: of a batch, padding included."""
        return self._layer.rows

    def empty(self) -> bool:
        return self._layer.kind is None

    @property
    def nbytes(self) -> int:
        """Count the bytes of codes and scales, the buffers' room to grow included, of rows kept as they are, and of levels.
        Nothing is evaluated."""
        return self._layer.nbytes

    def is_trimmable(self) -> bool:
        return True

    @property
    def meta_state(self) -> str:
        """Return nothing: `state` says all."""
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
        """Become the cache of this layer."""
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
        """Return how rows are coded: bits, levelling, sink_tokens, seed, recent_tokens."""
        return self._layer.choice

    @property
    def kind(self) -> LayerRows | None:
        """Return heads, widths and dtype of the rows; None before the first."""
        return self._layer.kind


class CodesStandIn:
    """What `update_and_fetch` returns in place of keys or values: their shape and dtype, but no array.

    The cache that made it attends to it, through the hook. Any other use raises TypeError.
    """

    def __init__(self, cache: Any, shape: tuple[int, ...], dtype: Any):
        self._cache, self.shape, self.dtype = cache, shape, dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def _refuse(self, use: str) -> NoReturn:
        why = (
            "mlx-lm's attention was unhooked (call prefixcache.upstream.hook_attention())"
            if not attention_is_hooked()
            else "this model works on fetched keys or values itself"
        )
        raise TypeError(
            f"{type(self._cache).__name__} keeps codes, and {use} asks for an array: {why}. "
            "Call dequantize() on it, or keep this model's caches plain"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__mlx_array__":
            raise AttributeError(name)
        self._refuse(f".{name}")

    def __getitem__(self, index: Any) -> NoReturn:
        self._refuse("[...]")

    def __iter__(self) -> NoReturn:
        self._refuse("iteration")

    def __len__(self) -> NoReturn:
        self._refuse("len()")

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("NumPy")


def _refusing(name: str) -> Any:
    def operator(self: CodesStandIn, *others: Any) -> NoReturn:
        self._refuse(name)

    return operator


for _name in "add sub mul matmul truediv pow and or xor lshift rshift mod floordiv".split():  # noqa: SIM905
    for _form in (f"__{_name}__", f"__r{_name}__"):
        setattr(CodesStandIn, _form, _refusing(_form))
for _name in ("neg", "abs", "invert", "bool", "float", "int", "lt", "le", "gt", "ge"):
    setattr(CodesStandIn, f"__{_name}__", _refusing(f"__{_name}__"))
