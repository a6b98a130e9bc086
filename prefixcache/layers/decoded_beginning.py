"""The rows of a prompt whose first blocks are decoded already, as a hot prompt has them: of those no image is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from prefixcache.codecs.pieces import Piece
from prefixcache.layers.image_layout import Plan
from prefixcache.layers.stored_rows import Block, StoredRows


class DecodedBeginning(NamedTuple):
    """The rows of a prompt's first `tokens` tokens, which are whole blocks, in layers that keep every token: a piece of each
    leaf and stream.
    """

    tokens: int
    pieces: dict[tuple[int, str], Piece]


class RowsBehind(StoredRows):
    """The rows of the first `tokens` tokens of a prompt: those of its `beginning`, then those in the images behind it."""

    def __init__(self, plan: Plan, tokens: int, blocks: Sequence[Block], beginning: DecodedBeginning):
        super().__init__(plan, tokens, [block for block in blocks if block.start >= beginning.tokens])
        self._beginning = beginning

    def pieces(self, leaf: int, stream: str) -> list[Piece]:
        return [self._beginning.pieces[leaf, stream], *super().pieces(leaf, stream)]
