"""A layer whose keys and values are transformed: what a calibration finds and a basis says of it."""

from __future__ import annotations

from typing import NamedTuple

from prefixcache.codecs.transform.rotation import Rotation


class Layer(NamedTuple):
    """A layer that can be transformed. `index` counts the prompt cache's list, `dtype` is its rows' ("bfloat16")."""

    index: int  # type: ignore[assignment]  # not tuple's method
    heads: int
    key_width: int
    value_width: int
    dtype: str
    rotation: Rotation

    @property
    def channels(self) -> int:
        """Values of a token: its keys of all heads, and its values."""
        return self.heads * (self.key_width + self.value_width)
