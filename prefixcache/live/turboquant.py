"""`TurboQuantKVCache`: mlx-lm's cache protocol on codes, for one sequence, or several of equal length; and what it has in
common with a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import mlx.core as mx
from mlx_lm.models.cache import KVCache, create_attention_mask

from prefixcache.codecs.interchange import element
from prefixcache.live import hook
from prefixcache.live.attention import attend, plain
from prefixcache.live.coded import RECENT, Choice, Coded, Kind, Pair, SharedLevels, check_choice, put

if TYPE_CHECKING:
    from typing_extensions import Self

    from prefixcache.live.batch import BatchTurboQuantKVCache


class LiveCache:
    """What caches of codes have in common, for one sequence or many: the parts of mlx-lm's protocol that don't tell."""

    _held: Coded

    def keys_and_values(self) -> tuple[Any, Any]:
        """What stands for all keys and values that are held, as `update_and_fetch` returns it."""
        held, kind = self._held, self._held.known_kind()
        if held.waiting or held.attends == "buffer":
            return held.decoded_heads(0, kind.heads)
        shape, dtype = (held.batch, kind.heads, held.rows), element(kind.dtype).mlx
        return hook.Codes(self, (*shape, kind.key_width), dtype), hook.Codes(self, (*shape, kind.value_width), dtype)

    def attend_to_codes(
        self, queries: mx.array, keys: Any, values: Any, *, scale: float, mask: Any, sinks: mx.array | None = None
    ) -> mx.array:
        """What the hook calls with what `update_and_fetch` returned: see `attention.attend`. On arrays it is MLX's own."""
        if isinstance(keys, mx.array):
            return plain(queries, keys, values, scale, mask, sinks)
        return attend(self._held, queries, scale, mask, sinks)

    @property
    def bits(self) -> int:
        """Bits of keys, where codes are what is fetched: mlx-lm's own function, while it isn't hooked, then takes its
        quantised way, and what it meets says what to do."""
        if self._held.waiting or self._held.attends == "buffer":
            raise AttributeError("bits")
        return self._held.choice.key_bits

    @property
    def group_size(self) -> int:
        """Beside `bits`."""
        return self._held.known_kind().key_width

    def size(self) -> int:
        """Rows held: of a batch, padding included."""
        return self._held.rows

    def empty(self) -> bool:
        return self._held.kind is None

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales, the buffers' room to grow included, of rows kept as they are, of levels, and of the
        decoded copy where there is one. Nothing is evaluated."""
        return self._held.held_bytes

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
        """The cache whose `state` this was, its codec included. ValueError for any other state."""
        made = cls.__new__(cls)
        made.state, made.meta_state = state, meta_state  # type: ignore[attr-defined]
        hook_for(made._held)
        return made

    def copy(self) -> Self:
        """Another cache of the same rows. It costs nothing until one of the two changes, which the other never shows."""
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        made._held = Coded.__new__(Coded)
        made._held.take_over(self._held)
        return made

    def __copy__(self) -> Self:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> Self:
        return self.copy()

    @property
    def choice(self) -> Choice:
        """How rows are coded: bits, levelling, sink_tokens, seed, recent_tokens."""
        return self._held.choice

    @property
    def attends(self) -> str:
        """ "codes" or "buffer"."""
        return self._held.attends

    @property
    def kind(self) -> Kind | None:
        """Heads, widths and dtype of the rows; None before the first."""
        return self._held.kind


class TurboQuantKVCache(LiveCache):
    """Keys and values as TurboQuant's codes while a model generates: a step encodes its new row and nothing else.

    `attend="codes"`: attention reads the codes, and no decoded copy of the past is ever held; for models whose attention
    is mlx-lm's own (`prefixcache.live.families`). `attend="buffer"`: a decoded copy is held beside the codes and counted
    in `nbytes`; for any model, and no smaller than a plain cache.

    With `levelling` rows wait as they are until 256 are there, then channels are measured and all are coded. Beside their
    codes the first `sink_tokens` and the last `recent_tokens` rows are kept as they are, and attention reads those.
    `levels`, shared by caches of one model and one tenant, saves measuring again; `layer` is the number there.
    """

    def __init__(
        self,
        key_bits: int = 4,
        value_bits: int = 4,
        *,
        levelling: bool = True,
        sink_tokens: int = 4,
        seed: int = 0,
        recent_tokens: int = RECENT,
        attend: Literal["codes", "buffer"] = "codes",
        levels: SharedLevels | None = None,
        layer: int = 0,
    ):
        choice = check_choice(Choice(key_bits, value_bits, levelling, sink_tokens, seed, recent_tokens))
        self._held = Coded(choice, attend, levels, layer, None)
        hook_for(self._held)

    # -- mlx-lm's protocol --------------------------------------------------------------------------------------------

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Rows (B, heads, L, width) of one float dtype, coded and kept. Returns what stands for all keys and values: views
        that this cache's attention knows, or arrays where rows wait or a buffer is held.

        ValueError for rows of other heads, widths, dtype or batch size than those that are held.
        """
        self._held.append(keys, values)
        return self.keys_and_values()

    @property
    def offset(self) -> int:
        """Tokens held."""
        return self._held.rows

    def trim(self, n: int) -> int:
        """Forget the last `n` tokens. ValueError where fewer are held."""
        self._held.cut(n)
        return n

    def make_mask(self, *args: Any, **kwargs: Any) -> Any:
        return create_attention_mask(*args, offset=self._held.rows, **kwargs)

    @property
    def state(self) -> list[mx.array]:
        """All of it as arrays, the first of which says what the others are: to evaluate, to save, for `from_state`."""
        return self._held.described()

    @state.setter
    def state(self, state: Sequence[mx.array]) -> None:
        held = Coded.__new__(Coded)
        held.restore(state)
        if any(held.pads):
            raise ValueError("the state of a batch; use BatchTurboQuantKVCache.from_state")
        self._held = held

    @classmethod
    def merge(cls, caches: Sequence[TurboQuantKVCache]) -> BatchTurboQuantKVCache:
        """One batch of caches of one sequence each, any of them empty."""
        from prefixcache.live.batch import BatchTurboQuantKVCache

        return BatchTurboQuantKVCache.merge(caches)

    # -- beyond the protocol ------------------------------------------------------------------------------------------

    def dequantize(self) -> KVCache:
        """A plain cache of the original dtype, with the rows that attention means."""
        made, held = KVCache(), self._held
        if held.kind is not None:
            keys, values = held.decoded_heads(0, held.kind.heads)
            made.keys, made.values = put(None, keys, 0), put(None, values, 0)
            made.offset = held.rows
        return made

    @classmethod
    def from_cache(
        cls,
        cache: KVCache,
        key_bits: int = 4,
        value_bits: int = 4,
        *,
        levelling: bool = True,
        sink_tokens: int = 4,
        seed: int = 0,
        recent_tokens: int = RECENT,
        attend: Literal["codes", "buffer"] = "codes",
        levels: SharedLevels | None = None,
        layer: int = 0,
    ) -> TurboQuantKVCache:
        """The rows of a plain cache, coded. The plain cache stays as it is. TypeError for any other class."""
        if type(cache) is not KVCache:
            raise TypeError(f"{type(cache).__name__}: only mlx-lm's KVCache can be made a TurboQuantKVCache")
        made = cls(
            key_bits, value_bits, levelling=levelling, sink_tokens=sink_tokens, seed=seed, recent_tokens=recent_tokens,
            attend=attend, levels=levels, layer=layer,
        )  # fmt: skip
        if cache.keys is not None:
            made._held.append(cache.keys[..., : cache.offset, :], cache.values[..., : cache.offset, :])
            mx.eval(made._held.arrays())
        return made

    @classmethod
    def from_codes(
        cls, choice: Choice, kind: Kind, runs: Sequence[tuple[int, Pair]], codes: mx.array, scales: mx.array, rows: int,
        sinks: tuple[mx.array, mx.array] | None = None, attend: Literal["codes", "buffer"] = "codes",
    ) -> TurboQuantKVCache:  # fmt: skip
        """Codes that are there already, as `Coded` holds them, `rows` in use; `runs`: from which token on which levels.

        `sinks`: keys and values (B, heads, choice.sink_tokens, width) as they are, where the choice keeps some.
        """
        from prefixcache.live.coded import Run

        made = cls.__new__(cls)
        held = made._held = Coded(choice, attend, None, 0, codes.shape[0])
        held.kind, held.rows, held.waiting, held.floors = kind, rows, False, [rows] * codes.shape[0]
        held.codes, held.scales, held.raw = codes, scales, sinks
        held.runs = [tuple(Run(first, pair) for first, pair in runs)] * codes.shape[0]
        held.show_all()
        hook_for(held)
        return made

    def __repr__(self) -> str:
        return f"TurboQuantKVCache({self._held.choice}, {self._held.rows} tokens, attend={self.attends!r})"


def hook_for(held: Coded) -> None:
    """Codes need the hook."""
    if held.attends == "codes":
        hook.install()
