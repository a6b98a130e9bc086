"""Codes that the store shares with live caches: whether a live cache's codes are those of a plan, and with which levels; and
how a live cache is made of stored codes. Nothing is encoded here; rows of live codes are decoded for a transform alone.

The live cache's class is looked up by name: importing it imports mlx-lm, which takes seconds.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import numpy as np

from prefixcache.codecs import RowCodec
from prefixcache.codecs.levels import Levels, same_levels
from prefixcache.codecs.pieces import Piece
from prefixcache.codecs.turboquant.codec import is_latent
from prefixcache.codecs.turboquant.coding import Choice, Run, spans_of
from prefixcache.codecs.turboquant.live import LevelStack, decode
from prefixcache.layers.adapters import PARTS, PLAIN_CACHE, CacheError, Leaf, layer_rows
from prefixcache.layers.image_layout import Plan

if TYPE_CHECKING:
    from prefixcache.live.turboquant import TurboQuantKVCache


# -- what goes in -------------------------------------------------------------------------------------------------------


def check(plan: Plan, leaves: Sequence[Leaf]) -> None:
    """Raise CacheError for a live cache that is coded otherwise than this plan codes its layer, unless it transforms it."""
    for i, leaf in enumerate(leaves):
        if leaf.codes is None or is_transformed(plan, i):
            continue
        choice, row_codecs = leaf.codes.choice, _row_codecs(plan, i)
        kept = Choice.of(*row_codecs, plan.sink_tokens)
        if not choice.same_codes(kept):
            kinds = [type(rows).__name__.removesuffix("Rows").lower() for rows in row_codecs]
            how = f"by {kept}" if kept is not None else " and ".join(dict.fromkeys(kinds))
            raise CacheError(
                f"layer {plan.layer_of[i]} (TurboQuantKVCache): its rows are coded by {choice}, and here the layer's are "
                f"kept {how}; open the PrefixCache with that codec, or store what dequantize() gives"
            )
        for part, rows in zip(PARTS, row_codecs, strict=True):
            heads = plan.places[i][part][1].heads
            for run in leaf.codes.runs:
                levels: Levels | None = getattr(run.levels, part)
                if levels is not None and not _can_be_kept(levels, (heads, rows.width), rows.centred):
                    raise CacheError(
                        f"layer {plan.layer_of[i]} (TurboQuantKVCache): the levels of its {part} are none that an image can "
                        f"keep of {heads} heads of {rows.width}; store what dequantize() gives"
                    )


def is_transformed(plan: Plan, leaf: int) -> bool:
    """Tell whether a leaf's rows are transformed: codes that it has are of no use then, only what they decode to."""
    return (leaf, PARTS[0]) in plan.joined_places


def decoded(leaf: Leaf, first: int, last: int) -> Leaf:
    """Return a leaf without codes that has the rows of tokens `first` to `last` (not included): what its codes decode to, or
    the exact ones beside them.
    """
    codes, kind, arrays = leaf.codes, layer_rows(leaf.layout), {}
    assert codes is not None
    assert kind is not None
    forms = codes.choice.forms(kind)
    exact = min(max(first, codes.choice.sink_tokens), last)
    words = slice(codes.key_words), slice(codes.key_words, None)
    for i, part in enumerate(PARTS):
        pieces = [leaf.arrays[part][:, :, first:exact]] if first < exact else []
        for low, high, of_layer in spans_of(codes.runs, 0, exact, last):
            stack = LevelStack([getattr(of_layer, part)], forms[i], kind.heads)
            coded, scales = codes.codes[:, :, low:high, words[i]], codes.scales[:, :, low:high, i]
            pieces.append(decode(coded, scales, kind.dtype, stack))
        arrays[part] = mx.concatenate(pieces, axis=2)
    mx.eval(arrays)
    return Leaf(leaf.layout, leaf.positions, ((first, last),), arrays, lambda a, b: slice(a - first, b - first))


def _can_be_kept(levels: Levels, shape: tuple[int, int], centred: bool) -> bool:
    """Tell whether an image's tensors can keep these levels, to the bit."""
    mean, divisor = levels.mean, levels.divisor
    if mean.shape != shape or divisor.shape != shape or not (np.isfinite(divisor).all() and (divisor >= 1).all()):
        return False
    packed = levels.packed()
    return same_levels(levels, Levels.unpacked(packed if centred else packed._replace(mean=None)))


def _row_codecs(plan: Plan, leaf: int) -> tuple[RowCodec, RowCodec]:
    """Return the row codecs of a sliceable leaf's keys and values: of a transformed layer, what codes it in a live cache."""
    keys, values = (plan.row_codecs[leaf][part] for part in PARTS)
    return keys, values


def differing(plan: Plan, leaves: Sequence[Leaf], first: int, last: int, wanted: Sequence[Levels | None]) -> int:
    """Count the tokens from `first` to `last` (not included) that a live cache has coded with other levels than those of an
    image, which are `wanted`, by group of `plan.rows`.
    """
    most = 0
    for group, of_group in zip(plan.rows.groups, wanted, strict=True):
        for member in group.members if of_group is not None else ():
            codes = leaves[member.leaf].codes
            if codes is not None:
                of_member = member.levels_of(of_group)
                apart = [
                    high - low
                    for low, high, of_layer in spans_of(codes.runs, 0, first, last)
                    if not same_levels(getattr(of_layer, member.stream), of_member)
                ]
                most = max(most, sum(apart))
    return most


# -- what comes out -----------------------------------------------------------------------------------------------------


def choice_of(plan: Plan, leaf: int) -> Choice | None:
    """Return what a live compressed cache of this leaf would be made with. None where it must come back as it was
    stored: another class than KVCache, rows kept by another codec, latents.
    """
    layout = plan.leaves[leaf]
    kind = layer_rows(layout) if layout["class"] == PLAIN_CACHE else None
    if kind is None or is_latent(kind.heads, *kind.widths):
        return None
    return Choice.of(*_row_codecs(plan, leaf), plan.sink_tokens)


def waiting(plain: Any, choice: Choice) -> TurboQuantKVCache:
    """Make a live cache that holds the rows of a plain one as they are, and measures levels when it has rows enough."""
    return _live_class()(choice.codec()).filled_from(plain)


class CodedLeaf(NamedTuple):
    """The rows of a leaf, still coded: pieces of its keys and of its values, and their runs of levels; where the codec keeps
    some, the first keys and values as they are (1, heads, sink_tokens, width)."""

    pieces: Sequence[Sequence[Piece]]
    runs: Sequence[Run]
    sinks: Sequence[mx.array]


def live(plan: Plan, leaf: int, choice: Choice, coded: CodedLeaf, rows: int, capacity: int) -> TurboQuantKVCache:
    """Make a live cache of `rows` rows that takes these codes as they are, evaluated."""
    kind = layer_rows(plan.leaves[leaf])
    assert kind is not None
    codes = _buffers(coded.pieces, _row_codecs(plan, leaf), kind.heads, capacity)
    sinks = (coded.sinks[0], coded.sinks[1]) if coded.sinks else None
    return _live_class().from_codes(choice, kind, coded.runs, codes, rows, sinks)


def _buffers(
    both: Sequence[Sequence[Piece]], codecs: Sequence[RowCodec], heads: int, capacity: int
) -> tuple[mx.array, mx.array]:
    """Lay out pieces of keys and of values -> codes uint32 (1, heads, capacity, words of both) and scales uint16 (1,
    heads, capacity, 2), zero where no piece is.
    """
    # A row's codes are copied as one: word by word takes half as long again.
    kinds = [np.dtype(("V", 4 * codec.planes[0].shape[0])) for codec in codecs]
    codes = np.zeros((1, heads, capacity), list(zip(PARTS, kinds, strict=True)))
    scales = np.zeros((1, heads, capacity, 2), np.uint16)
    for i, (part, kind, pieces) in enumerate(zip(PARTS, kinds, both, strict=True)):
        for piece in pieces:
            code, scale = piece.planes
            codes[part][0, :, piece.at : piece.end] = code.view(kind)[..., 0].swapaxes(0, 1)
            scales[0, :, piece.at : piece.end, i] = scale.swapaxes(0, 1)
    return mx.array(codes.view(np.uint32).reshape(1, heads, capacity, -1)), mx.array(scales)


def _live_class() -> type[TurboQuantKVCache]:
    cls: type[TurboQuantKVCache] = importlib.import_module("prefixcache.live.turboquant").TurboQuantKVCache
    return cls
