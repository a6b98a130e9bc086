"""Coded layers of several sequences: put together, taken apart, their padding turned left. What goes in stays as it is."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from prefixcache.codecs.turboquant.coding import PLAIN, Run
from prefixcache.live.buffers import Alignment, CodeBuffer, FirstRows, RecentRows, RowBuffer
from prefixcache.live.layer import CodedLayer
from prefixcache.live.layer_state import NO_CODES, NO_ROWS
from prefixcache.live.ragged import check_alike


def merged(singles: Sequence[CodedLayer]) -> CodedLayer:
    """Return one batch of single sequences' layers, left-padded to the longest. ValueError where they are coded otherwise."""
    singles = _ready([_with_sequences(layer, 1) for layer in singles])
    rows = max(layer.rows for layer in singles)
    pads = [rows - layer.rows for layer in singles]
    batch = _batch_of(singles, Alignment(rows, tuple(pads)), pads)
    if batch.kind is None:
        return batch
    counts = [layer.rows for layer in singles]
    if batch.waiting is not None:
        waiting = [layer.waiting or NO_ROWS for layer in singles]
        batch.waiting = RowBuffer.stacked(list(zip(waiting, counts, strict=True)))
        batch.code_when_ready()
        return batch
    batch.codes = CodeBuffer.stacked([(layer.codes, layer.rows) for layer in singles])
    return batch


def joined(first: CodedLayer, second: CodedLayer) -> CodedLayer:
    """Return the sequences of both, one batch behind the other. ValueError where they aren't alike."""
    first, second = both = _ready([first.copy(), second.copy()])
    rows = max(first.rows, second.rows)
    shifts = [rows - layer.rows for layer in both for _ in layer.pads]
    pads = [pad + n for pad, n in zip((*first.pads, *second.pads), shifts, strict=True)]
    batch = _batch_of(both, Alignment(rows, tuple(pads)), shifts)
    if batch.kind is None:
        return batch
    where = first.rows, first.batch
    if batch.waiting is not None:
        waiting, other = first.waiting or NO_ROWS, second.waiting or NO_ROWS
        batch.waiting = waiting.joined(*where, other, second.rows, second.batch)
        batch.code_when_ready()
        return batch
    batch.codes = first.codes.joined(*where, second.codes, second.rows, second.batch)
    return batch


def _with_sequences(layer: CodedLayer, batch: int) -> CodedLayer:
    """Return a copy, of so many sequences where no rows have said how many there are."""
    if layer.pads:
        return layer.copy()
    alignment, recent = layer.alignment._replace(pads=(0,) * batch), layer.recent._replace(floors=(0,) * batch)
    return layer.changed(alignment=alignment, recent=recent)


def _ready(layers: list[CodedLayer]) -> list[CodedLayer]:
    """Return layers that can be one batch, as all of them wait or none does. ValueError where they can't."""
    first = layers[0]
    kinds = [layer.kind._asdict() for layer in layers if layer.kind is not None]
    for layer in layers:
        check_alike(first.choice._asdict(), layer.choice._asdict())
    for kind in kinds:
        check_alike(kinds[0], kind)
    coded = (layer.runs[0][-1].levels for layer in layers if layer.runs and layer.waiting is None)
    levels = next(coded, None)
    if levels is not None or not first.choice.levelling:
        for layer in layers:
            if layer.waiting is not None:
                layer.code_waiting(levels or PLAIN)
            elif not layer.runs:
                layer.runs = ((Run(0, levels or PLAIN),),) * layer.batch
    return layers


def _batch_of(layers: list[CodedLayer], alignment: Alignment, shifts: Sequence[int]) -> CodedLayer:
    """Return a layer of all their sequences, whose rows move by `shifts`, without those that wait or are coded."""
    first, sizes = layers[0], [layer.batch for layer in layers]
    waiting = first.waiting is not None
    ends = [end for layer in layers for end in layer.alignment.all_ends()]
    recent = RecentRows.listed([layer.recent for layer in layers], sizes)
    return first.changed(
        alignment=alignment,
        sinks=FirstRows.listed([layer.sinks for layer in layers], sizes),
        recent=recent.renumbered(shifts, ends, alignment.rows),
        kind=next((layer.kind for layer in layers if layer.kind is not None), None),
        runs=() if waiting else tuple(runs for layer in layers for runs in layer.runs),
        waiting=NO_ROWS if waiting else None,
        codes=NO_CODES,
        _stacks=None,
    )


def selected(layer: CodedLayer, indices: mx.array) -> CodedLayer:
    """Return these sequences, in this order, without the padding that none of them needs."""
    chosen: list[int] = indices.tolist()  # type: ignore[assignment]
    old = layer.alignment
    if not chosen:
        return CodedLayer.empty(layer.choice, layer.shared, layer.number)
    pads = [old.pads[b] for b in chosen]
    ends = [old.ends[b] for b in chosen] if old.ends is not None else None
    spare = min(*pads, old.rows) if layer.kind is not None else 0
    alignment = Alignment(
        old.rows - spare, tuple(pad - spare for pad in pads), tuple(e - spare for e in ends) if ends else None
    )
    recent = layer.recent.selected(indices, old.all_ends())
    if spare:
        recent = recent.renumbered([-spare] * len(chosen), [old.end_of(b) for b in chosen], alignment.rows)
    return layer.changed(
        alignment=alignment,
        sinks=layer.sinks.selected(indices),
        recent=recent,
        runs=tuple(layer.runs[b] for b in chosen) if layer.runs else (),
        waiting=layer.waiting.selected(indices).without_first(spare) if layer.waiting is not None else None,
        codes=layer.codes.selected(indices).without_first(spare),
    )


def sequence(layer: CodedLayer, b: int) -> CodedLayer:
    """Return one sequence by itself, copied out."""
    pad, count = layer.pads[b], layer.alignment.tokens_of(b)
    runs = layer.runs[b : b + 1]
    if not count:
        empty = CodedLayer.empty(layer.choice, layer.shared, layer.number, [0])
        empty.runs, empty.waiting = runs, empty.waiting if layer.waiting is not None else None
        return empty
    rows = slice(pad, pad + count)
    return layer.changed(
        alignment=Alignment(count, (0,)),
        sinks=layer.sinks.sequence(b),
        recent=layer.recent.sequence(b, pad, layer.alignment.end_of(b)),
        runs=runs,
        waiting=layer.waiting.sequence(b, rows) if layer.waiting is not None else None,
        codes=layer.codes.sequence(b, rows),
        _stacks=None,
    )


def turned_left(layer: CodedLayer, right: Sequence[int]) -> CodedLayer:
    """Return the layer, in which each sequence has so many rows of padding on its right, with them on its left."""
    old, shifts = layer.alignment, mx.array(list(right))
    pads = tuple(pad + more for pad, more in zip(old.pads, right, strict=True))
    turned = layer.changed(
        alignment=Alignment(old.rows, pads),
        recent=layer.recent.renumbered(right, old.all_ends(), old.rows),
        waiting=layer.waiting.rolled(shifts) if layer.waiting is not None else None,
        codes=layer.codes.rolled(shifts),
    )
    if turned.waiting is not None and turned.waiting.arrays is not None:
        turned.code_when_ready()
    return turned
