"""What a store has to make: a `Job` for each image, and the `Source` whose codes it takes over.

Plain data: `store` plans it, `image_maker` reads it.
"""

from __future__ import annotations

from typing import NamedTuple

from prefixcache.blocks.graph import NODE_BYTES
from prefixcache.blocks.node import Node
from prefixcache.image_format import ROWS, SNAPSHOT, Blueprint, Image, Kind


class Source(NamedTuple):
    """Rows that may be taken over as codes: the first `tokens` of a block whose images are these (a window's with its mask).

    Codes keep the levels that they were made with, so the image that takes them over has the same.
    """

    tokens: int
    rows: Image | None
    window: Image | None
    mask: tuple[int, ...]
    known: int = 0  # tokens whose rows stand there, taken over or not
    coded: bool = False  # whether it is a whole block's


NOTHING = Source(0, None, None, ())


class Job(NamedTuple):
    """One image to make. `start` and `tokens` are its block's; `known` its node when the block stands already."""

    kind: Kind
    parent: Node
    known: Node | None
    start: int
    tokens: bytes
    key: bytes
    blueprint: Blueprint
    source: Source
    coded: bool = True  # as a whole block's rows are; else as a tail's
    mask: tuple[int, ...] = ()
    encoded: tuple[int, ...] = ()  # of a window: for each window of the namespace, the tokens to encode
    adds_rows: bool = False  # to a stored window of the same block, with its levels

    def cost(self, slot_bytes: int) -> int:
        """RAM that the job takes, its place in the tree included, where a slot takes `slot_bytes`."""
        node = NODE_BYTES + len(self.tokens) if self.kind == ROWS else 0  # a known one may have left by then
        return self.blueprint.nbytes + slot_bytes + node + (len(self.tokens) if self.kind == SNAPSHOT else 0)
