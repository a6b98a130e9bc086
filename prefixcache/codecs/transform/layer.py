"""The layers whose keys and values are transformed, as a calibration finds them, and which of them are joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from prefixcache.codecs.transform.rope import Rope

CHANNELS = 2048  # of a group, at most: layers are joined while they have fewer
MOST_CHANNELS = 8192  # of a layer that is a group by itself


class Layer(NamedTuple):
    """A layer that can be transformed. `index` counts the prompt cache's list, `dtype` is its rows' ("bfloat16"). The layer
    attends to the last `window` tokens, 0: to all.
    """

    index: int  # type: ignore[assignment]  # not tuple's method
    heads: int
    key_width: int
    value_width: int
    dtype: str
    rotation: Rope
    window: int = 0

    @property
    def channels(self) -> int:
        """Count the numbers that a token has here: its keys of all heads, and its values."""
        return self.heads * (self.key_width + self.value_width)


class GroupedLayers(NamedTuple):
    """Groups of neighbours, and why a layer, by its number, is in none."""

    groups: list[list[Layer]]
    refused: dict[int, str]


def grouped(layers: Sequence[Layer], channels: int = CHANNELS) -> GroupedLayers:
    """Join layers of the same dtype and window, in their order, into groups of at most so many channels."""
    groups: list[list[Layer]] = []
    growing: dict[tuple[str, int], list[Layer]] = {}
    refused = {}
    for layer in layers:
        if layer.channels > MOST_CHANNELS:
            refused[layer.index] = f"{layer.channels} channels, more than {MOST_CHANNELS}"
            continue
        last = growing.get((layer.dtype, layer.window))
        if last is not None and sum(other.channels for other in last) + layer.channels <= channels:
            last.append(layer)
        else:
            growing[layer.dtype, layer.window] = [layer]
            groups.append(growing[layer.dtype, layer.window])
    return GroupedLayers(groups, refused)
