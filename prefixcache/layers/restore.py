"""From images to live layer caches: the inverse of `encode`. Runs on the caller's thread and stream."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx

from prefixcache.codecs.levels import same_levels
from prefixcache.codecs.pieces import Piece, decode
from prefixcache.codecs.turboquant.coding import Choice, LayerLevels, Run
from prefixcache.image_format import Image
from prefixcache.layers import live_codes
from prefixcache.layers.adapters import PARTS, Layout, adapter_of, blank
from prefixcache.layers.allowed_classes import find_class
from prefixcache.layers.stacks import RowRun
from prefixcache.layers.stored_rows import StoredRows, pieces_of

MOST_LEVELS = 4  # runs of levels in a live cache: attention runs once for each

Streams = dict[tuple[int, str], mx.array]  # buffers by leaf and stream


class Restorer:
    """Makes the layer caches of one stored prompt, with room for `spare_tokens` more. For one call, on its thread.

    With `live`, KVCache layers that TurboQuant coded come as `TurboQuantKVCache`. `decoded`: the buffers of all streams, if
    these are decoded already.
    """

    def __init__(
        self,
        rows: StoredRows,
        snapshot: Image | None,
        spare_tokens: int,
        *,
        live: bool = False,
        decoded: Streams | None = None,
    ):
        self._rows, self._plan, self._spare_tokens = rows, rows.plan, spare_tokens
        self._state = self._plan.stored_state(snapshot) if snapshot is not None else None
        self._live, self._decoded = live, decoded

    def layers(self, numbers: Sequence[int]) -> list[Any]:
        """Make these layers. DamagedBlock where a block's codes can't be decoded."""
        restored = []
        for number in numbers:
            first = bisect_left(self._plan.layer_of, number)  # a list may have no leaf
            restored.append(self._layer(self._plan.layers[number], iter(range(first, len(self._plan.leaves)))))
        self._rows.check()
        return restored

    def _layer(self, layer: Layout, leaves: Iterator[int]) -> Any:
        if layer["kind"] == "list":
            children = [self._layer(child, leaves) for child in layer["children"]]
            return blank(find_class(layer["class"]), {"caches": tuple(children) if layer["tuple"] else children})
        leaf = next(leaves)
        if layer["kind"] == "snapshot":
            assert self._state is not None
            return blank(find_class(layer["class"]), self._state.leaf(self._plan.snapshots.index(leaf)))
        choice = live_codes.choice_of(self._plan, leaf) if self._live else None
        return self._of_stored_class(leaf) if choice is None else self._compressed(leaf, choice)

    def _of_stored_class(self, leaf: int) -> Any:
        """Make a layer cache of the class that was stored."""
        layer = self._plan.leaves[leaf]
        cls, streams = find_class(layer["class"]), {}
        if layer["streams"]:
            capacity = self._capacity(leaf)
            for stream in self._plan.tail_places[leaf]:
                if self._decoded is not None:
                    streams[stream] = self._decoded[leaf, stream]
                else:
                    pieces = self._rows.pieces(leaf, stream)
                    capacity = max(capacity, max((piece.end for piece in pieces), default=0))
                    streams[stream] = self._buffer(leaf, stream, pieces, capacity)
        return adapter_of(cls).make(cls, layer, self._rows.tokens, streams)

    def _compressed(self, leaf: int, choice: Choice) -> Any:
        """Make a live cache that has a KVCache's codes; uncoded, to be coded later, if the rows have more than `MOST_LEVELS`
        runs of levels or are transformed.
        """
        runs = self._rows.leading(0, self._rows.tokens)
        coded = next((run.at for run in runs if not run.coded), self._rows.tokens)
        transformed = live_codes.is_transformed(self._plan, leaf)
        levelled = self._levelled(leaf, runs) if coded and not transformed else []
        if not 0 < len(levelled) <= MOST_LEVELS:
            return live_codes.waiting(self._of_stored_class(leaf), choice)
        plan, pieces, sinks, tail = self._plan, [], [], []
        for part in PARTS:
            pieces.append(pieces_of(plan.rows, plan.places[leaf][part], self._rows.leading(0, coded)))
            if choice.sink_tokens:
                sunk = self._rows.leading(0, min(choice.sink_tokens, coded))
                exact = pieces_of(plan.sinks, plan.sink_places[leaf][part], sunk)
                sinks.append(self._buffer(leaf, part, exact, choice.sink_tokens))
            if coded < self._rows.tokens:
                uncoded = [run._replace(at=run.at - coded) for run in runs[-1:]]
                exact = pieces_of(plan.tails, plan.tail_places[leaf][part], uncoded)
                tail.append(self._buffer(leaf, part, exact, self._rows.tokens - coded))
        mx.eval(sinks, tail)
        codes = live_codes.CodedLeaf(pieces, levelled, sinks)
        live = live_codes.live(plan, leaf, choice, codes, coded, self._capacity(leaf))
        if tail:
            live.update_and_fetch(*tail)
        return live

    def _levelled(self, leaf: int, runs: list[RowRun]) -> list[Run]:
        """Return the runs of levels that these rows are coded with."""
        levelled: list[Run] = []
        for run in runs:
            if run.coded:
                places = (self._plan.places[leaf][part] for part in PARTS)
                both = LayerLevels(*(self._plan.rows.groups[g].levels(run.tensors, of) for g, of in places))
                if not levelled or not all(map(same_levels, levelled[-1].levels, both)):
                    levelled.append(Run(run.at, both))
        return levelled

    def _capacity(self, leaf: int) -> int:
        layer = self._plan.leaves[leaf]
        return adapter_of(find_class(layer["class"])).capacity(layer, self._rows.tokens, self._spare_tokens)

    def _buffer(self, leaf: int, stream: str, pieces: list[Piece], capacity: int) -> mx.array:
        window, (t, member) = self._plan.window_of(leaf), self._plan.tail_places[leaf][stream]
        section = self._plan.tails if window is None else self._plan.window_tails[window]
        codec = section.groups[t].codec
        return decode(pieces, member.heads, capacity, codec.width, codec.dtype)[None]
