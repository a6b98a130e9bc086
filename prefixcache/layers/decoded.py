"""Rows as a fetch would give them, on their way back into the live cache that they were read from.

What is generated on is then what is stored: a hit, from whatever tier, gives the rows that the first answer was made on.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from prefixcache.codecs.interchange import on_cpu
from prefixcache.codecs.pieces import Piece, decode
from prefixcache.keys import BLOCK
from prefixcache.layers import levels
from prefixcache.layers.adapters import Leaf
from prefixcache.layers.image_layout import Group, Member, Tensors


def decoded_rows(group: Group, member: Member, rows: slice, tensors: Tensors) -> mx.array:
    """These rows of an image's tensors as a fetch would give them, of one stream: (heads, tokens, width)."""
    planes = tuple(tensors[name][rows, member.in_group] for name in group.names)
    piece = Piece(group.codec, planes, 0, levels.packed(group, tensors, member))
    return decode([piece], member.heads, piece.tokens, group.codec.width, group.codec.dtype)


class Decoded:
    """Decoded rows of whole blocks, by stream of a prompt cache; none of blocks before that of token `since`."""

    def __init__(self, since: int):
        self.since = since
        self._first = since - since % BLOCK
        self._rows: dict[tuple[int, str], list[tuple[int, mx.array]]] = {}

    def add(self, member: Member, first: int, rows: mx.array, exact: int = 0) -> None:
        """Rows (heads, tokens, width) of the tokens from `first` on; those before token `exact` are kept as they are."""
        since = max(self._first, exact)
        if first + rows.shape[1] > since:
            skipped = max(since - first, 0)
            rows = rows[:, skipped:] if skipped else rows
            self._rows.setdefault((member.leaf, member.stream), []).append((first + skipped, rows))

    def decode_rows(
        self, group: Group, member: Member, first: int, rows: slice, tensors: Tensors, exact: int = 0
    ) -> None:
        """These rows of an image's tensors, which are of the tokens from `first` on."""
        if first + rows.stop - rows.start <= max(self._first, exact):
            return
        self.add(member, first, decoded_rows(group, member, rows, tensors), exact)

    def apply(self, leaves: Sequence[Leaf]) -> None:
        """Put them into the live cache's buffers, in place of the rows that are there."""
        changed = []
        for (leaf, stream), pieces in self._rows.items():
            array, where = leaves[leaf].arrays[stream], leaves[leaf].where
            for first, rows in _adjacent_joined(sorted(pieces, key=lambda piece: piece[0])):
                at = where(first, first + rows.shape[1])
                array[:, :, at if isinstance(at, slice) else mx.array(at)] = rows[None]
            changed.append(array)
        self._rows.clear()
        if on_cpu():
            mx.eval(changed)
        else:
            mx.async_eval(changed)  # nothing on this side waits for them


def _adjacent_joined(pieces: list[tuple[int, mx.array]]) -> list[tuple[int, mx.array]]:
    """Each run of pieces that follow each other as one piece: each update of a buffer costs."""
    runs: list[tuple[int, list[mx.array]]] = []
    end = -1
    for first, rows in pieces:
        if first == end:
            runs[-1][1].append(rows)
        else:
            runs.append((first, [rows]))
        end = first + rows.shape[1]
    return [(first, rows[0] if len(rows) == 1 else mx.concatenate(rows, axis=1)) for first, rows in runs]
