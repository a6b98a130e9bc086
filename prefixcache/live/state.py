"""A coded layer as arrays alone, as mlx-lm saves and loads a cache's state, and such a layer back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from prefixcache.codecs.interchange import borrow, copy_out, element
from prefixcache.codecs.levels import Levels
from prefixcache.codecs.packing import words_of
from prefixcache.codecs.turboquant.coding import Choice, LayerLevels, LayerRows, Run
from prefixcache.live.buffers import Alignment, CodeBuffer, FirstRows, RecentRows, RowBuffer
from prefixcache.live.layer import CodedLayer

VERSION = 1


def to_arrays(layer: CodedLayer, right: Sequence[int] | None = None) -> list[mx.array]:
    """Return all of a layer as a list of arrays; the first is JSON (uint8), so that it can be saved like any other state.
    `right`: each sequence's padding on the right.
    """
    in_use, alignment = layer.levels_in_use(), layer.alignment
    numbers = {id(levels): i for i, levels in enumerate(in_use)}
    uncoded = layer.waiting.arrays if layer.waiting is not None else layer.sinks.arrays
    buffers = [layer.codes.arrays, uncoded, layer.recent.arrays]
    header = {
        "version": VERSION,
        "choice": layer.choice,
        "kind": layer.kind,
        "rows": alignment.rows,
        "pads": alignment.pads,
        "floors": layer.recent.floors,
        "ends": alignment.ends,
        "waiting": layer.waiting is not None,
        "runs": [[[run.first, numbers[id(run.levels)]] for run in runs] for runs in layer.runs],
        "levels": [[part is not None for part in levels] for levels in in_use],
        "held": [arrays is not None for arrays in buffers],
        "right": right,
    }
    text = mx.array(np.frombuffer(json.dumps(header).encode(), np.uint8))
    rows = [array for arrays in buffers for array in arrays or ()]
    parts = [part for levels in in_use for part in levels if part is not None]
    return [text, *rows, *(mx.array(array) for part in parts for array in (part.mean, part.divisor))]


class SavedLayer(NamedTuple):
    """A layer that was saved; of a batch, too, each sequence's padding on the right, None where there is none."""

    layer: CodedLayer
    right: list[int] | None


def from_arrays(state: Sequence[mx.array]) -> SavedLayer:
    """Return what `to_arrays` was given. ValueError for arrays that it can't have made."""
    try:
        arrays = iter(state)
        header: dict[str, Any] = json.loads(borrow(next(arrays)).tobytes())
        if header["version"] != VERSION:
            raise ValueError(f"its version is {header['version']}, this release reads {VERSION}")
        layer = CodedLayer.empty(Choice(*header["choice"]))
        layer.kind = LayerRows(*header["kind"]) if header["kind"] is not None else None
        ends = tuple(header["ends"]) if header["ends"] is not None else None
        layer.alignment = Alignment(header["rows"], tuple(header["pads"]), ends)
        codes, uncoded, recent = ((next(arrays), next(arrays)) if is_there else None for is_there in header["held"])
        layer.codes = CodeBuffer(codes)
        layer.waiting = RowBuffer(uncoded) if header["waiting"] else None
        layer.sinks = FirstRows(layer.choice.sink_tokens, None if header["waiting"] else uncoded)
        layer.recent = RecentRows(layer.choice.recent_tokens, tuple(header["floors"]), recent)
        levels = [
            LayerLevels(*(Levels(copy_out(next(arrays)), copy_out(next(arrays))) if there else None for there in parts))
            for parts in header["levels"]
        ]
        layer.runs = tuple(tuple(Run(first, levels[i]) for first, i in runs) for runs in header["runs"])
        _check(layer)
    except (StopIteration, RuntimeError, KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise ValueError(f"no state of a live TurboQuant cache: {error or type(error).__name__}") from None
    return SavedLayer(layer, header.get("right"))


def _check(layer: CodedLayer) -> None:
    """Raise ValueError where arrays and what the header says of them don't go together."""
    layer.choice.check()
    runs = 0 if layer.waiting is not None else layer.batch
    fits = len(layer.recent.floors) == layer.batch and len(layer.runs) == runs and layer.rows >= 0
    if not (fits and (layer.kind is None or _arrays_fit(layer, layer.kind))):
        raise ValueError("its arrays are not those that it names")


def _arrays_fit(layer: CodedLayer, kind: LayerRows) -> bool:
    dtype = element(kind.dtype).mlx
    words = sum(words_of(form.width, form.codebook.bits) for form in layer.choice.forms(kind))
    waiting = layer.waiting.arrays if layer.waiting is not None else None
    wanted = [
        (layer.codes.arrays, (words, 2), (mx.uint32, mx.uint16), layer.rows),
        (waiting, kind.widths, (dtype, dtype), layer.rows),
        (layer.sinks.arrays, kind.widths, (dtype, dtype), layer.sinks.size),
        (layer.recent.arrays, kind.widths, (dtype, dtype), layer.recent.size),
    ]
    for arrays, widths, dtypes, least in wanted:
        for array, width, of_array in zip(arrays or (), widths, dtypes, strict=False):
            rows = max(array.shape[2], least)
            if array.shape != (layer.batch, kind.heads, rows, width) or array.dtype != of_array:
                return False
    for levels in layer.levels_in_use():
        for part, width in zip(levels, kind.widths, strict=True):
            if part is not None and not part.mean.shape == part.divisor.shape == (kind.heads, width):
                return False
    return layer.rows == 0 or any(arrays for arrays, *_ in wanted)
