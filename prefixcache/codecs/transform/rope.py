"""How RoPE turned a layer's keys, and how rows of keys are turned back to position 0 and forth again, in NumPy.

A key without its rotation says the same at every position, so its channels have one mean and one covariance. How a model's
rotation is found is `prefixcache.calibration.layers`' business.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from prefixcache.codecs.interchange import Array

CHUNK_VALUES = 1 << 17  # rows that are turned at once stay in a core's cache


class Rope(NamedTuple):
    """RoPE (arXiv 2104.09864) as a layer applies it to its keys.

    The first 2 * pairs values of a head turn in pairs: pair i by `frequencies[i]` radians a token (float64, (pairs,)), and
    is `scale` times as long afterwards (YaRN's mscale). A pair is values 2i and 2i + 1 where `interleaved`, mlx's
    traditional=True, else i and i + pairs. Without pairs nothing turns.
    """

    frequencies: Array
    interleaved: bool = False
    scale: float = 1.0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rope) and self._comparable() == other._comparable()

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._comparable())

    def _comparable(self) -> tuple[bytes, bool, float]:
        return np.asarray(self.frequencies, np.float64).tobytes(), self.interleaved, self.scale

    def redo(self, rows: Array, first: int, out: Array | None = None) -> Array:
        """Turn rows float32 (tokens, heads, width), of tokens `first`, `first` + 1, ..., as RoPE turns them.

        Written into `out`, of the same shape, which may be `rows`; a new array without it. ValueError for rows
        narrower than 2 * pairs.
        """
        return self._turn(rows, first, out, forth=True)

    def undo(self, rows: Array, first: int, out: Array | None = None) -> Array:
        """Return the inverse of `redo`, but for float32's rounding."""
        return self._turn(rows, first, out, forth=False)

    def _turn(self, rows: Array, first: int, out: Array | None, forth: bool) -> Array:
        pairs = len(self.frequencies)
        tokens, heads, width = rows.shape
        if width < 2 * pairs:
            raise ValueError(f"rows of {width} values: the rotation turns {2 * pairs}; give rows of the layer's keys")
        if out is None:
            out = np.array(rows, np.float32, order="C")
            rows = out
        elif out is not rows:
            np.copyto(out, rows)
            rows = out
        if not pairs or not rows.size:
            return out
        cos, sin = _phases(np.asarray(self.frequencies, np.float64).tobytes(), first, tokens)
        length = np.float32(self.scale if forth else 1 / self.scale)
        real, imaginary = slice(pairs), slice(pairs, 2 * pairs)
        if self.interleaved:
            real, imaginary = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
        step = max(1, CHUNK_VALUES // (heads * width))
        for start in range(0, tokens, step):
            part = slice(start, start + step)
            c, s = cos[part, None] * length, sin[part, None] * (length if forth else -length)
            a, b = rows[part, :, real], rows[part, :, imaginary]
            turned = a * s
            turned += b * c
            a *= c
            a -= b * s
            b[:] = turned
        return out


NO_ROPE = Rope(np.zeros(0))


@lru_cache(maxsize=8)  # the layers of a model share a rotation as a rule, and one call follows the other
def _phases(frequencies: bytes, first: int, tokens: int) -> tuple[Array, Array]:
    """Return cosines and sines, float32 (tokens, pairs), of phases in float64."""
    phases = np.arange(first, first + tokens, dtype=np.float64)[:, None] * np.frombuffer(frequencies, np.float64)
    cos, sin = np.cos(phases).astype(np.float32), np.sin(phases).astype(np.float32)
    cos.flags.writeable = sin.flags.writeable = False
    return cos, sin
