"""Codes that the store shares with live caches: are a live cache's those of a plan, with which levels, and a live cache made
of stored ones. Nothing is encoded or decoded here.

Live caches are made by name: importing them imports mlx-lm, which takes seconds.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import numpy as np

from prefixcache.codecs import RowCodec, TurboQuant
from prefixcache.codecs.pieces import Piece
from prefixcache.codecs.turboquant.codec import LATENT_WIDTH, TurboQuantRows
from prefixcache.codecs.turboquant.levelling import Levels
from prefixcache.layers import levels
from prefixcache.layers.adapters import PARTS, PLAIN_CACHE, CacheError, Leaf
from prefixcache.layers.plan import Plan

if TYPE_CHECKING:
    from prefixcache.live.coded import Choice
    from prefixcache.live.turboquant import TurboQuantKVCache


# -- what goes in -------------------------------------------------------------------------------------------------------


def check(plan: Plan, leaves: Sequence[Leaf]) -> None:
    """CacheError for a live cache that is coded otherwise than this plan codes its layer."""
    for i, leaf in enumerate(leaves):
        if leaf.codes is None:
            continue
        keys, values = row_codecs(plan, i)
        choice = leaf.codes.choice
        own = (choice.key_bits, choice.value_bits, choice.levelling, choice.sink_tokens, choice.seed)
        if own != _choice(plan, keys, values):
            raise CacheError(
                f"layer {plan.layer_of[i]} (TurboQuantKVCache): its rows are coded by {choice}, and here the layer's are "
                f"kept {_said(plan, keys, values)}; open the PrefixCache with that codec, or store what dequantize() gives"
            )
        for part, own in [(part, getattr(run.levels, part)) for run in leaf.codes.runs for part in PARTS]:
            row = keys if part == "keys" else values
            heads = plan.places[i][part][1].heads
            if own is not None and not _can_be_kept(own, (heads, row.width), row.centred):
                raise CacheError(
                    f"layer {plan.layer_of[i]} (TurboQuantKVCache): the levels of its {part} are none that an image can keep "
                    f"of {heads} heads of {row.width}; store what dequantize() gives"
                )


def _can_be_kept(own: Levels, shape: tuple[int, int], centred: bool) -> bool:
    """Whether an image's tensors can say these levels, to the bit."""
    if (
        own.mean.shape != shape
        or own.root.shape != shape
        or not (np.isfinite(own.root).all() and (own.root >= 1).all())
    ):
        return False
    mean, root = own.kept
    return same(own, Levels.from_kept(mean if centred else None, root))


def row_codecs(plan: Plan, leaf: int) -> tuple[RowCodec, RowCodec]:
    """Of a sliceable leaf's keys and values."""
    keys, values = (plan.rows.groups[plan.places[leaf][part][0]].codec for part in PARTS)
    return keys, values


def _choice(plan: Plan, keys: RowCodec, values: RowCodec) -> tuple[int, int, bool, int, int] | None:
    """What a live cache would have to be made with to have these codes; None where they aren't TurboQuant's."""
    if not isinstance(keys, TurboQuantRows) or not isinstance(values, TurboQuantRows):
        return None
    return keys.bits, values.bits, keys.levelled, plan.sink_tokens, keys.seed


def _said(plan: Plan, keys: RowCodec, values: RowCodec) -> str:
    chosen = _choice(plan, keys, values)
    if chosen is None:
        kinds = [type(own).__name__.removesuffix("Rows").lower() for own in (keys, values)]
        return " and ".join(dict.fromkeys(kinds))
    key_bits, value_bits, levelling, sink_tokens, seed = chosen
    return f"by {TurboQuant(key_bits, value_bits, levelling, sink_tokens=sink_tokens, seed=seed)}"


def same(a: Levels | None, b: Levels | None) -> bool:
    """Whether rows have the same codes with both."""
    if a is b or a is None or b is None:
        return a is b
    return a.mean.shape == b.mean.shape and np.array_equal(a.mean, b.mean) and np.array_equal(a.root, b.root)


def differing(plan: Plan, leaves: Sequence[Leaf], first: int, last: int, wanted: Sequence[Levels | None]) -> int:
    """Of tokens `first` to `last` (not included), how many a live cache has coded with other levels than an image has, which
    are `wanted`, by group of `plan.rows`.
    """
    most = 0
    for group, whole in zip(plan.rows.groups, wanted, strict=True):
        for member in group.members if whole is not None else ():
            codes = leaves[member.leaf].codes
            if codes is not None:
                own = levels.of_member(whole, member)
                apart = [
                    high - low
                    for low, high, pair in codes.stretches(first, last)
                    if not same(getattr(pair, member.stream), own)
                ]
                most = max(most, sum(apart))
    return most


# -- what comes out -----------------------------------------------------------------------------------------------------


def choice_of(plan: Plan, leaf: int) -> Choice | None:
    """What a live compressed cache of this leaf would be made with. None where it must come back as it was stored: another
    class than KVCache, rows kept by another codec, latents."""
    layout = plan.leaves[leaf]
    if layout["class"] != PLAIN_CACHE or not layout["streams"]:
        return None
    (_, _, heads, key_width, dtype, _), (_, _, value_heads, value_width, value_dtype, _) = layout["streams"]
    latent = heads == 1 and key_width != value_width and max(key_width, value_width) >= LATENT_WIDTH
    chosen = _choice(plan, *row_codecs(plan, leaf))
    if chosen is None or latent or (heads, dtype) != (value_heads, value_dtype):
        return None
    made: Choice = _live("coded").Choice(*chosen)
    return made


def waiting(plain: Any, choice: Choice) -> TurboQuantKVCache:
    """A live cache that holds the rows of a plain one as they are, and measures levels when it has rows enough."""
    bits = choice.key_bits, choice.value_bits
    made: TurboQuantKVCache = _live("turboquant").TurboQuantKVCache.from_cache(
        plain, *bits, levelling=choice.levelling, sink_tokens=choice.sink_tokens, seed=choice.seed
    )
    return made


class CodedLeaf(NamedTuple):
    """The rows of a leaf, still coded: pieces of its keys and of its values; from which token on which levels of both; and
    where the codec keeps some, the first keys and values as they are (1, heads, sink_tokens, width)."""

    pieces: Sequence[Sequence[Piece]]
    runs: Sequence[tuple[int, Levels | None, Levels | None]]
    sinks: Sequence[mx.array]


def live(plan: Plan, leaf: int, choice: Choice, coded: CodedLeaf, rows: int, capacity: int) -> TurboQuantKVCache:
    """A live cache of `rows` rows that takes these codes as they are, evaluated."""
    (_, _, heads, key_width, dtype, _), (_, _, _, value_width, _, _) = plan.leaves[leaf]["streams"]
    module = _live("coded")
    codecs = [plan.rows.groups[plan.places[leaf][part][0]].codec for part in PARTS]
    runs = [(first, module.Pair(keys, values)) for first, keys, values in coded.runs]
    buffers = _buffers(coded.pieces, codecs, heads, capacity)
    made: TurboQuantKVCache = _live("turboquant").TurboQuantKVCache.from_codes(
        choice, module.Kind(heads, key_width, value_width, dtype), runs, *buffers, rows, tuple(coded.sinks) or None
    )
    return made


def _buffers(
    both: Sequence[Sequence[Piece]], codecs: Sequence[RowCodec], heads: int, capacity: int
) -> tuple[mx.array, mx.array]:
    """Pieces of keys and of values -> codes uint32 (1, heads, capacity, words of both) and scales uint16 (1, heads,
    capacity, 2), zero where no piece is."""
    # A row's codes are copied as one: word by word takes half as long again.
    kinds = [np.dtype(("V", 4 * codec.planes[0].shape[0])) for codec in codecs]
    codes = np.zeros((1, heads, capacity), list(zip(PARTS, kinds, strict=True)))
    scales = np.zeros((1, heads, capacity, 2), np.uint16)
    for i, (part, kind, pieces) in enumerate(zip(PARTS, kinds, both, strict=True)):
        for piece in pieces:
            own, scale = piece.planes
            codes[part][0, :, piece.at : piece.end] = own.view(kind)[..., 0].swapaxes(0, 1)
            scales[0, :, piece.at : piece.end, i] = scale.swapaxes(0, 1)
    return mx.array(codes.view(np.uint32).reshape(1, heads, capacity, -1)), mx.array(scales)


def _live(module: str) -> ModuleType:
    return importlib.import_module(f"prefixcache.live.{module}")
