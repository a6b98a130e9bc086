"""What attention reads of a coded layer: codes, run of levels by run, and the rows that are kept as they are."""

from __future__ import annotations

from typing import NamedTuple

from prefixcache.codecs.raw_attention_gpu import UncodedRows
from prefixcache.codecs.turboquant.coding import CodedSpan
from prefixcache.codecs.turboquant.format import CodedRows
from prefixcache.live.buffers import Two
from prefixcache.live.decoding import joined
from prefixcache.live.layer_state import LayerState


class NumberedRows(NamedTuple):
    """Keys and values (B, heads, n, width), and of each sequence and each of the n the row that it is, -1 for none."""

    rows: Two
    numbers: list[list[int]]


def coded_parts(layer: LayerState) -> list[CodedRows]:
    """Return what is attended to by its codes: each part one run of every sequence, the last of each in the last.

    Rows behind the last that is attended to so are not among a part's.
    """
    if layer.codes.arrays is None:
        return []
    spans = [layer.coded_spans(b) for b in range(layer.batch)]
    if len(spans) == 1 and len(spans[0]) == 1:  # as most often
        return [_coded_part(layer, spans[0], spans[0][0].last)]
    end = max((of_sequence[-1].last for of_sequence in spans if of_sequence), default=0)
    parts = []
    for behind in range(max(map(len, spans), default=0), 0, -1):
        part = [of_sequence[-behind] if len(of_sequence) >= behind else None for of_sequence in spans]
        some = next(span for span in part if span is not None)
        nothing = CodedSpan(end, end, some.levels)
        parts.append(_coded_part(layer, [span or nothing for span in part], end))
    return parts


def _coded_part(layer: LayerState, spans: list[CodedSpan], end: int) -> CodedRows:
    """Return the codes of these rows of each sequence, all before row `end`."""
    keys, values = layer.stacks_of([span.levels for span in spans])
    first = layer.numbers.of([span.first for span in spans], 0)
    last = layer.numbers.of([span.last for span in spans], end)
    codes, scales = layer.codes.cut_out(slice(end))
    return CodedRows(codes, scales, keys.form, values.form, keys.decoding, values.decoding, first, last)


def has_uncoded(layer: LayerState) -> bool:
    """Tell whether some rows are attended to uncoded."""
    return layer.sinks.arrays is not None or layer.recent.arrays is not None


def uncoded_rows(layer: LayerState) -> NumberedRows:
    """Return what is attended to uncoded: sinks and recent rows."""
    arrays = [part.arrays for part in (layer.sinks, layer.recent) if part.arrays is not None]
    most = layer.choice.sink_tokens
    listed: list[list[int]] = []
    for b, pad in enumerate(layer.pads):
        numbers: list[int] = []
        if layer.sinks.arrays is not None:
            numbers += [row if row < layer.rows else -1 for row in range(pad, pad + most)]
        if layer.recent.arrays is not None:
            end = layer.alignment.end_of(b)
            numbers += layer.recent.numbers(max(layer.recent.first(b, end), pad + most), end)
        listed.append(numbers)
    return NumberedRows(arrays[0] if len(arrays) == 1 else joined(arrays, axis=2), listed)


def uncoded_for_kernel(layer: LayerState) -> UncodedRows | None:
    """Return the same as the GPU's kernel reads it; None where it can't: no ring, or padding on the right."""
    recent, pads = layer.recent, layer.pads
    if recent.arrays is None or layer.alignment.ends is not None:
        return None
    low = layer.rows - recent.size
    whole = all(floor <= max(low, pad) for floor, pad in zip(recent.floors, pads, strict=True))
    floors = None if whole else layer.numbers.of(recent.floors, -1)
    return UncodedRows(layer.rows, recent.arrays, layer.sinks.arrays, layer.numbers.of(pads, 0), floors)
