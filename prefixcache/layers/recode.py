"""Moves of rows between the tensors of images, whose sections may keep them otherwise: as they are, or coded. No live
cache has a part in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from prefixcache.blocks.window_masks import RowPairs
from prefixcache.codecs.base import Decoding, Encoding
from prefixcache.codecs.interchange import Array
from prefixcache.codecs.turboquant.measure_levels import measure_levels
from prefixcache.layers.image_layout import Section, Tensors
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
        if not self.pairs:  # then an image need not have the section's tensors
            return
        rows, others = _rows_as_they_are(self.section, self.tensors), _rows_as_they_are(self.other, self.source)
        for stream in rows.keys() & others.keys():
            for into, out in self.pairs:
                rows[stream][into] = others[stream][out]


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
        rows = _rows_as_they_are(self.tails, self.tensors)
        for joined in self.section.joined:
            for (into, out), token in zip(self.pairs, self.tokens, strict=True):
                of_streams = decoded(joined, token, codes_of(joined, self.source, out))
                for stream, of_stream in zip(joined.streams, of_streams, strict=True):
                    rows[stream][into] = of_stream
        for group in self.section.groups:
            for member in group.members:
                of_member, batch = group.levels(self.source, member), []
                for into, out in self.pairs:
                    planes = tuple(self.source[name][out, member.in_group] for name in group.names)
                    batch.append(Decoding(planes, rows[member.leaf, member.stream][into].swapaxes(0, 1), of_member))
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
        rows = _rows_as_they_are(self.tails, self.source)
        for group in self.section.groups:
            of_group = np.concatenate([rows[member.leaf, member.stream] for member in group.members], axis=1)
            measured = None
            if group.steps:
                sample = np.concatenate([of_group[part] for part in self.measured])
                measured = measure_levels(sample, group.codec.centred)
                group.write_levels(self.tensors, measured.packed())
            planes = tuple(self.tensors[name] for name in group.names)
            group.codec.encode_all([Encoding(of_group, planes, measured)])


def _rows_as_they_are(section: Section, tensors: Tensors) -> dict[tuple[int, str], Array]:
    """Return the rows of each leaf and stream, (rows, heads, width), of a section that keeps them as they are: views."""
    return {
        (member.leaf, member.stream): tensors[group.names[0]][:, member.in_group]
        for group in section.groups
        for member in group.members
    }
