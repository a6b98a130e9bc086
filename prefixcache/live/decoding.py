"""Rows of a coded layer as attention means them: decoded, or as they were kept."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from prefixcache.codecs.interchange import element
from prefixcache.codecs.packing import words_of
from prefixcache.codecs.turboquant.live import LevelStack, decode
from prefixcache.live.layer_state import LayerState
from prefixcache.live.ragged import Pair


def decoded_heads(layer: LayerState, first: int, heads: int) -> Pair:
    """Return keys and values of some heads: (B, `heads`, rows, width), zero where padding is."""
    some = slice(first, first + heads)
    if layer.waiting is not None and layer.waiting.arrays is not None:
        return layer.waiting.cut_out(slice(layer.rows), some)
    sequences = [decoded_sequence(layer, b, some) for b in range(layer.batch)]
    return sequences[0] if len(sequences) == 1 else joined(sequences, axis=0)


def decoded_sequence(layer: LayerState, b: int, heads: slice) -> Pair:
    """Return keys and values of one sequence, from its parts: (1, heads, rows, width) each."""
    pad, end, count = layer.pads[b], layer.alignment.end_of(b), heads.stop - heads.start
    pieces: list[Pair] = []
    if pad:
        pieces.append(_padding(layer, count, min(pad, layer.rows)))
    if layer.sinks.arrays is not None and (leading := min(layer.choice.sink_tokens, max(end - pad, 0))):
        keys, values = layer.sinks.arrays
        pieces.append((keys[b : b + 1, heads, :leading], values[b : b + 1, heads, :leading]))
    for span in layer.coded_spans(b):
        stacks = [stack.of_heads(heads.start, count) for stack in layer.stacks_of([span.levels])]
        pieces.append(decoded_codes(layer, b, heads, slice(span.first, span.last), stacks))
    pieces += layer.recent.pieces(b, heads, max(layer.recent.first(b, end), pad + layer.choice.sink_tokens), end)
    if (behind := layer.rows - max(end, min(pad, layer.rows))) or not pieces:  # padding on the right
        pieces.append(_padding(layer, count, behind))
    return pieces[0] if len(pieces) == 1 else joined(pieces, axis=2)


def decoded_codes(layer: LayerState, b: int, heads: slice, rows: slice, stacks: Sequence[LevelStack]) -> Pair:
    """Return rows of a sequence by their codes, coded with these levels: (1, heads, rows, width) each."""
    codes, scales = layer.codes.cut_out(rows, heads, slice(b, b + 1))
    (keys, values), dtype = stacks, layer.known_kind().dtype
    key_words = words_of(keys.form.width, keys.form.codebook.bits)
    return (
        decode(codes[..., :key_words], scales[..., 0], dtype, keys),
        decode(codes[..., key_words:], scales[..., 1], dtype, values),
    )


def joined(pieces: list[Pair], axis: int) -> Pair:
    """Return keys and values of all pieces, one behind the other."""
    return mx.concatenate([keys for keys, _ in pieces], axis), mx.concatenate([values for _, values in pieces], axis)


def _padding(layer: LayerState, heads: int, rows: int) -> Pair:
    """Return rows of zeros: (1, heads, rows, width) each."""
    kind = layer.known_kind()
    keys, values = (mx.zeros((1, heads, rows, width), element(kind.dtype).mlx) for width in kind.widths)
    return keys, values
