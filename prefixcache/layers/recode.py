"""Moves of rows between the tensors of images, whose sections may keep them otherwise: as they are, or coded. No live
cache has a part in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from prefixcache.blocks.masks import RowPairs
from prefixcache.codecs.base import Decoding, Encoding
from prefixcache.codecs.turboquant.measure_levels import measure_levels
from prefixcache.layers.image_layout import Group, Section, Tensors
from prefixcache.layers.transformed import codes_of, decoded


class TakeCodes(NamedTuple):
    """Copy rows as they are coded, and their levels, between tensors of the same section."""

    section: Section
    tensors: Tensors
    source: Tensors
    pairs: RowPairs

    def run(self) -> None:
        for group in self.section.groups:
            for name in group.names:
                for into, out in self.pairs:
                    self.tensors[name][into] = self.source[name][out]
            for name in group.level_names:
                self.tensors[name][...] = self.source[name]


class CopyRows(NamedTuple):
    """Copy rows that `other` keeps as they are to a section that does so, too: of the streams that both have."""

    section: Section
    tensors: Tensors
    other: Section
    source: Tensors
    pairs: RowPairs

    def run(self) -> None:
        places, others = _places(self.section), _places(self.other)
        for stream in places.keys() & others.keys():
            (group, heads), (other_group, other_heads) = places[stream], others[stream]
            for into, out in self.pairs:
                self.tensors[group.names[0]][into, heads] = self.source[other_group.names[0]][out, other_heads]


class DecodeRows(NamedTuple):
    """Decode rows of `section` into tensors of `tails`, which keeps the same streams as they are. `tokens`: the first one of
    each pair's rows.
    """

    section: Section
    source: Tensors
    tails: Section
    tensors: Tensors
    pairs: RowPairs
    tokens: Sequence[int]

    def run(self) -> None:
        """Decode. DamagedBlock for joined rows' codes that no encoder wrote."""
        places = _places(self.tails)
        for joined in self.section.joined:
            for (into, out), token in zip(self.pairs, self.tokens, strict=True):
                rows = decoded(joined, token, codes_of(joined, self.source, out))
                for at, of_stream in zip(joined.streams, rows, strict=True):
                    tail, heads = places[at]
                    self.tensors[tail.names[0]][into, heads] = of_stream
        for group in self.section.groups:
            for member in group.members:
                tail, heads = places[member.leaf, member.stream]
                of_member, batch = group.levels(self.source, member), []
                for into, out in self.pairs:
                    planes = tuple(self.source[name][out, member.in_group] for name in group.names)
                    rows = self.tensors[tail.names[0]][into, heads].swapaxes(0, 1)
                    batch.append(Decoding(planes, rows, of_member))
                group.codec.decode_all(batch)


class EncodeRows(NamedTuple):
    """Encode all rows that tensors of `tails` have as they are into a section of the same streams, with levels that are
    measured from the `measured` ones.
    """

    section: Section
    tensors: Tensors
    tails: Section
    source: Tensors
    measured: Sequence[slice]

    def run(self) -> None:
        places = _places(self.tails)
        for group in self.section.groups:
            parts = []
            for member in group.members:
                tail, heads = places[member.leaf, member.stream]
                parts.append(self.source[tail.names[0]][:, heads])
            of_group, measured = np.concatenate(parts, axis=1), None
            if group.steps:
                parts = [of_group[rows] for rows in self.measured]
                measured = measure_levels(np.concatenate(parts), group.codec.centred)
                group.write_levels(self.tensors, measured.packed())
            planes = tuple(self.tensors[name] for name in group.names)
            group.codec.encode_all([Encoding(of_group, planes, measured)])


def _places(section: Section) -> dict[tuple[int, str], tuple[Group, slice]]:
    """Say where the rows of each leaf and stream stand."""
    return {
        (member.leaf, member.stream): (group, member.in_group) for group in section.groups for member in group.members
    }
