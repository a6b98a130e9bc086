"""Rows as a fetch would give them, on their way back into the live cache that they were read from.

What is generated on is then what is stored: a hit, from whatever tier, gives the rows that the first answer was made on.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from prefixcache.blocks.window_masks import held_mask, row_pairs, runs_of
from prefixcache.codecs import RawRows
from prefixcache.codecs.interchange import on_cpu
from prefixcache.codecs.pieces import Piece, decode
from prefixcache.image_format import Image
from prefixcache.keys import BLOCK
from prefixcache.layers.adapters import Leaf
from prefixcache.layers.image_layout import Group, Joined, Member, Plan, Section, Tensors
from prefixcache.layers.transformed import CodedBlocks, DamagedBlock, Stretch, codes_of, decode_joined
from prefixcache.layers.transformed_windows import CodedWindow, coded_window


def decoded_rows(group: Group, member: Member, rows: slice, tensors: Tensors) -> mx.array:
    """Return these rows of an image's tensors as a fetch would give them, of one stream: (heads, tokens, width)."""
    planes = tuple(tensors[name][rows, member.in_group] for name in group.names)
    piece = Piece(group.codec, planes, 0, group.packed_levels(tensors, member.in_group))
    return decode([piece], member.heads, piece.tokens, group.codec.width, group.codec.dtype)


class WriteBack:
    """Collects decoded rows of whole blocks, from the block of token `since` on, for the live cache that has these leaves.
    `apply` puts them there.
    """

    def __init__(self, plan: Plan, leaves: Sequence[Leaf], since: int, limit: int):
        self._plan, self._leaves, self._limit = plan, leaves, limit
        self._held = [plan.held(leaves, window) for window in range(len(plan.windows))]
        self.since = since
        self.is_damaged = False  # some block's codes can't be decoded
        self._first = since - since % BLOCK
        self._rows: dict[tuple[int, str], list[tuple[int, mx.array]]] = {}

    def add(self, member: Member, first: int, rows: mx.array, exact: int = 0) -> None:
        """Add rows (heads, tokens, width) of the tokens from `first` on. The live cache's rows before token `exact` stay."""
        since = max(self._first, exact)
        if first + rows.shape[1] > since:
            skipped = max(since - first, 0)
            rows = rows[:, skipped:] if skipped else rows
            self._rows.setdefault((member.leaf, member.stream), []).append((first + skipped, rows))

    def decode_rows(
        self, group: Group, member: Member, first: int, rows: slice, tensors: Tensors, exact: int = 0
    ) -> None:
        """Add these rows of an image's tensors, which are of the tokens from `first` on."""
        if first + rows.stop - rows.start > max(self._first, exact):
            self.add(member, first, decoded_rows(group, member, rows, tensors), exact)

    def decode_section(self, section: Section, first: int, tensors: Tensors, rows: slice) -> None:
        """Add these rows of all streams of a section. Sinks have an exact copy beside their codes, which is taken instead."""
        for group in section.groups:
            exact = 0 if isinstance(group.codec, RawRows) else self._plan.sink_tokens
            for member in group.members:
                if self._leaves[member.leaf].codes is None:
                    self.decode_rows(group, member, first, rows, tensors, exact)

    def decode_window(self, start: int, tensors: Tensors, mask: tuple[int, ...]) -> None:
        """Add the rows of a block's window image whose tokens the live cache holds, except those of transformed layers."""
        plan, sunk = self._plan, self._plan.sunk(start)
        for w, section in enumerate(plan.windowed):
            present = mask[w] & held_mask(self._held[w], start, plan.windows[w].keep, self._limit)
            for (first, _), (_, rows) in zip(runs_of(present), row_pairs(present, present, mask[w]), strict=True):
                self.decode_section(section, start + first, tensors, rows)
            sinks = present & sunk
            for (first, _), (_, rows) in zip(runs_of(sinks), row_pairs(sinks, present, mask[w] & sunk), strict=True):
                self.decode_section(plan.window_sinks[w], start + first, tensors, rows)

    def decode_joined(self, images: Sequence[tuple[int, Tensors]]) -> None:
        """Add the rows of transformed layers in rows images of whole blocks, each given with its first token."""
        self._decode(
            [
                CodedBlocks(joined, [(start, codes_of(joined, tensors, slice(0, BLOCK))) for start, tensors in images])
                for joined in self._plan.rows.joined
            ]
        )

    def add_joined(self, joined: Joined, stretches: Sequence[Stretch]) -> None:
        """Add rows of a group that is transformed, as a fetch would give them."""
        for stretch in stretches:
            for number, (leaf, stream) in enumerate(joined.streams):
                if self._leaves[leaf].codes is None:
                    _, member = self._plan.tail_places[leaf][stream]
                    self.add(member, stretch.first, stretch.rows(number, joined.coder.dtype), self._plan.sink_tokens)

    def decode_joined_windows(self, images: Sequence[tuple[int, Tensors, tuple[int, ...]]]) -> None:
        """Add the rows of transformed layers in window images of whole blocks, each given with its block's first token and
        its masks, as far as the live cache holds their tokens.
        """
        for w, window in enumerate(self._plan.windows):
            blocks = []
            for start, tensors, mask in images:
                wanted = mask[w] & held_mask(self._held[w], start, window.keep, self._limit) & ~self._plan.sunk(start)
                blocks.append(CodedWindow(start, tensors, wanted, mask[w]))
            self._decode(coded_window(self._plan.windowed[w], blocks))

    def _decode(self, groups: Sequence[CodedBlocks]) -> None:
        """Add the rows of these blocks, except those before `since`, and those of live caches that have codes."""
        coded = [
            of._replace(
                blocks=[(token, codes) for token, codes in of.blocks if token - token % BLOCK + BLOCK > self.since]
            )
            for of in groups
            if any(self._leaves[leaf].codes is None for leaf, _ in of.joined.streams)
        ]
        if not coded or not coded[0].blocks:
            return
        try:
            decoded = [*decode_joined(coded)]
            for of_group in decoded:  # of all groups, before any is put back
                of_group.check()
            for (joined, _), of_group in zip(coded, decoded, strict=True):
                self.add_joined(joined, of_group.stretches)
        except DamagedBlock:  # the live cache keeps its own rows; a fetch deletes the image
            self.is_damaged = True

    def decode_blocks(self, blocks: Sequence[tuple[int, Image]]) -> None:
        """Add all that the rows images of whole blocks have."""
        images = [(start, image.tensors()) for start, image in blocks]
        for start, tensors in images:
            for section, count in self._plan.in_rows(start, BLOCK, coded=True):
                self.decode_section(section, start, tensors, slice(0, count))
        self.decode_joined(images)

    def apply(self) -> None:
        """Put the added rows into the live cache's buffers, in place of the rows that are there."""
        changed = []
        for (leaf, stream), pieces in self._rows.items():
            array, where = self._leaves[leaf].arrays[stream], self._leaves[leaf].where
            for first, rows in _adjacent_joined(sorted(pieces, key=lambda piece: piece[0])):
                at = where(first, first + rows.shape[1])
                array[:, :, at if isinstance(at, slice) else mx.array(at)] = rows
            changed.append(array)
        self._rows.clear()
        if on_cpu():
            mx.eval(changed)
        else:
            mx.async_eval(changed)  # nothing on this side waits for them


def _adjacent_joined(pieces: list[tuple[int, mx.array]]) -> list[tuple[int, mx.array]]:
    """Join pieces that follow each other into one: each update of a buffer costs time."""
    runs: list[tuple[int, list[mx.array]]] = []
    end = -1
    for first, rows in pieces:
        if first == end:
            runs[-1][1].append(rows)
        else:
            runs.append((first, [rows]))
        end = first + rows.shape[1]
    return [(first, rows[0] if len(rows) == 1 else mx.concatenate(rows, axis=1)) for first, rows in runs]
