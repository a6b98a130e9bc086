"""Rows decoded while the rest of a prompt is still being read, straight into the memory that the model goes on with.

On the CPU only, where decoding and MLX's memory cost as much as the SSD, and for layers that keep every token: a GPU decodes
faster than any SSD reads, and which rows of a window are needed is known at the end. Decision 0029 says why.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from prefixcache.codecs.base import Decoding, RowCodec
from prefixcache.codecs.interchange import element, on_cpu, writable
from prefixcache.image_format import Image
from prefixcache.layers.adapters import adapter_of
from prefixcache.layers.allowed_classes import find_class
from prefixcache.layers.image_layout import Plan
from prefixcache.layers.stored_rows import Block, DecodedBeginning, StoredRows


class ReadAhead:
    """The buffers of a prompt cache of `tokens` tokens with room for `room` more, filled block by block.

    Of the thread that made it: its arrays are MLX's. An image's rows stay where they were put, so that `StoredRows` of the
    very same images need none of them decoded again. `beginning`: rows that are decoded already; they are copied.
    """

    def __init__(self, plan: Plan, tokens: int, room: int, beginning: DecodedBeginning | None = None):
        self.beginning = beginning
        self._plan, self._tokens = plan, tokens
        self._blocks: dict[int, Image] = {}
        self._arrays: dict[tuple[int, str], mx.array] = {}
        self._rows: dict[tuple[int, str], np.ndarray] = {}
        for leaf, layer in enumerate(plan.leaves):
            capacity = adapter_of(find_class(layer["class"])).capacity(layer, tokens, room) if layer["streams"] else 0
            for stream, (t, member) in plan.tail_places[leaf].items():
                codec = plan.tails.groups[t].codec
                array, rows = writable((1, member.heads, max(capacity, tokens), codec.width), codec.dtype)
                self._arrays[leaf, stream], self._rows[leaf, stream] = array, rows[0]
        if beginning is not None:
            self._fill(StoredRows(plan, tokens, (), beginning=beginning))

    @staticmethod
    def serves(plan: Plan) -> bool:
        return on_cpu() and not plan.windows and not plan.snapshots

    def add(self, start: int, image: Image) -> None:
        """Decode the rows of the block that begins at this token."""
        self._fill(StoredRows(self._plan, self._tokens, [Block(start, image)]))
        self._blocks[start] = image

    def is_of(self, plan: Plan, tokens: int) -> bool:
        """Tell whether these are the layers and as many tokens as was thought."""
        return plan is self._plan and tokens == self._tokens

    def take(self, stored: StoredRows) -> dict[tuple[int, str], mx.array]:
        """Give the caller the buffers of each leaf and stream, (1, heads, capacity, width), with all of these rows, which
        this `is_of`, with its `beginning`. This is of no more use then.
        """
        for block in stored.blocks:
            if self._blocks.get(block.start) is not block.rows:
                self.add(block.start, block.rows)
        self._rows.clear()
        plan = self._plan
        return {
            (leaf, stream): array.view(element(plan.tails.groups[plan.tail_places[leaf][stream][0]].codec.dtype).mlx)
            for (leaf, stream), array in self._arrays.items()
        }

    def _fill(self, stored: StoredRows) -> None:
        batches: dict[RowCodec, list[Decoding]] = {}
        for (leaf, stream), rows in self._rows.items():
            for piece in stored.pieces(leaf, stream):
                into = rows[:, piece.at : piece.end]
                batches.setdefault(piece.codec, []).append(piece.decoding(into))
        for codec, batch in batches.items():
            codec.decode_all(batch)
