"""Rows of one image into the tensors of another, whose section keeps them otherwise: as they are, or coded. No live cache
has a part in it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prefixcache.codecs.base import Decoding, Encoding
from prefixcache.codecs.turboquant.levelling import measure_levels
from prefixcache.layers import levels
from prefixcache.layers.image_layout import Group, Section, Tensors

RowPairs = list[tuple[slice, slice]]  # rows to write, rows to read


def encode_stored(
    section: Section, tails: Section, rows: Tensors, tensors: Tensors, measured_rows: Sequence[slice]
) -> None:
    """All `rows` that tensors of `tails` have as they are -> `tensors` of a section of the same streams.

    Levels are measured here, from `measured_rows`.
    """
    places = _places(tails)
    for group in section.groups:
        parts = []
        for member in group.members:
            tail, heads = places[member.leaf, member.stream]
            parts.append(rows[tail.names[0]][:, heads])
        of_group, measured = np.concatenate(parts, axis=1), None
        if group.steps:
            parts = [of_group[some] for some in measured_rows]
            measured = measure_levels(np.concatenate(parts), group.codec.centred)
            levels.write(group, tensors, measured.packed())
        group.codec.encode_all([Encoding(of_group, tuple(tensors[name] for name in group.names), measured)])


def decode_stored(section: Section, tails: Section, source: Tensors, tensors: Tensors, pairs: RowPairs) -> None:
    """Codes that an image of `section` has -> `tensors` of `tails`."""
    places = _places(tails)
    for group in section.groups:
        for member in group.members:
            tail, heads = places[member.leaf, member.stream]
            of_member, batch = levels.read(group, source, member), []
            for into, out in pairs:
                planes = tuple(source[name][out, member.in_group] for name in group.names)
                batch.append(Decoding(planes, tensors[tail.names[0]][into, heads].swapaxes(0, 1), of_member))
            group.codec.decode_all(batch)


def copy_stored(section: Section, tensors: Tensors, other: Section, source: Tensors, pairs: RowPairs) -> None:
    """Rows that an image has as they are in `other` -> `tensors` of `section`: of the streams of both."""
    into, out = _places(section), _places(other)
    for where in into.keys() & out.keys():
        (group, heads), (other_group, other_heads) = into[where], out[where]
        for a, b in pairs:
            tensors[group.names[0]][a, heads] = source[other_group.names[0]][b, other_heads]


def _places(section: Section) -> dict[tuple[int, str], tuple[Group, slice]]:
    """Where the rows of each leaf and stream stand."""
    return {
        (member.leaf, member.stream): (group, member.in_group) for group in section.groups for member in group.members
    }
