"""What a store has to make: an `ImageJob` for each image, and the `CodeSource` whose codes it takes over.

Plain data: `store` plans it, `image_maker` reads it.
"""

from __future__ import annotations

from typing import NamedTuple

from prefixcache.blocks.graph import NODE_BYTES
from prefixcache.blocks.node import Node
from prefixcache.image_format import ROWS, SNAPSHOT, Blueprint, Image, ImageKind
from prefixcache.keys import TOKEN_BYTES


class CodeSource(NamedTuple):
    """Rows that may be taken over as codes: the first `tokens` of a block whose images are these (a window's with its mask).

    Codes keep the levels that they were made with, so the image that takes them over has the same. `known`: the tokens whose
    rows stand there, taken over or not. `coded`: it is a whole block's.
    """

    tokens: int = 0
    rows: Image | None = None
    window: Image | None = None
    mask: tuple[int, ...] = ()
    known: int = 0
    coded: bool = False


NO_SOURCE = CodeSource()


class ImageJob(NamedTuple):
    """One image to make. `start` and `tokens` are its block's; `known` its node when the block stands already.

    `coded`: as a whole block's rows are, else as a tail's. Of a window image, for each window of the namespace: `mask` has
    its tokens, `encoded` those to encode; and `adds_rows` says that a stored window of the same block is added to, with its
    levels. `again`: all of its rows stand below RAM already, and it is made for the live cache.
    """

    kind: ImageKind
    parent: Node
    known: Node | None
    start: int
    tokens: bytes
    key: bytes
    blueprint: Blueprint
    source: CodeSource
    coded: bool = True
    mask: tuple[int, ...] = ()
    encoded: tuple[int, ...] = ()
    adds_rows: bool = False
    again: bool = False

    @property
    def length(self) -> int:
        """Count its tokens."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def end(self) -> int:
        """Return the token behind its last one."""
        return self.start + self.length

    def cost(self, slot_bytes: int) -> int:
        """Return the RAM that the job takes, its place in the tree included, where a slot takes `slot_bytes`."""
        node = NODE_BYTES + len(self.tokens) if self.kind == ROWS else 0  # a known one may have left by then
        return self.blueprint.nbytes + slot_bytes + node + (len(self.tokens) if self.kind == SNAPSHOT else 0)
