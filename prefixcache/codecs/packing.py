"""Codes of b bits to and from uint32 words, in NumPy.

A row is a little-endian bit stream: value i occupies bits [i*b, (i+1)*b), so 32 values of 3 bits fill 3 words, and the
last word of a row is padded with zeros. b is 1, 2, 3, 4 or 8. MLX runs on little-endian machines only, so a row's words
and its bytes are the same stream.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from prefixcache.codecs.interchange import Array


def words_of(width: int, bits: int) -> int:
    """Return how many uint32 words a row of `width` codes takes."""
    return -(-width * bits // 32)


def pack_columns(codes: Array, bits: int) -> Array:
    """Pack codes uint8 (width, n), one row in each *column* -> bytes uint8 (4 * words, n)."""
    width, n = codes.shape
    n_bytes = 4 * words_of(width, bits)
    groups = -(-width // 8)
    packed = np.zeros((max(groups * bits, n_bytes), n), np.uint8)
    # 8 values fill `bits` bytes: value i of every group goes to the same place of its group, all groups at once.
    grouped = packed[: groups * bits].reshape(groups, bits, n)
    for i in range(min(8, width)):
        byte, offset = divmod(i * bits, 8)
        lane = codes[i::8]
        grouped[: len(lane), byte] |= lane << np.uint8(offset)
        if offset + bits > 8:
            grouped[: len(lane), byte + 1] |= lane >> np.uint8(8 - offset)
    return packed[:n_bytes]


@lru_cache(maxsize=32)
def _spread(centroids: bytes, bits: int) -> Array:
    """Return what each byte (at 3 bits: each run of 12 bits) decodes to: its int8 centroids, side by side in one integer."""
    run = 12 if bits == 3 else 8
    count = run // bits
    index = np.arange(1 << run)[:, None] >> (np.arange(count) * bits) & ((1 << bits) - 1)
    table = np.frombuffer(centroids, np.int8)[index]
    return np.ascontiguousarray(table).view(f"u{count}").reshape(-1)


def unpack_centroids(words: Array, width: int, bits: int, centroids: Array) -> Array:
    """Unpack words uint32 (n, words) -> what each code stands for: int8 (n, width), from `centroids` int8 (2**bits,)."""
    n = len(words)
    octets = np.ascontiguousarray(words).view(np.uint8).reshape(n, -1)
    runs = octets if bits != 3 else _runs_of_12(octets, -(-width // 4))
    spread = np.take(_spread(centroids.tobytes(), bits), runs)
    return spread.view(np.int8).reshape(n, -1)[:, :width]


def _runs_of_12(octets: Array, count: int) -> Array:
    """Return the first `count` runs of 12 bits of each row: uint16 (n, count), count rounded up to even."""
    pairs = -(-count // 2)
    if octets.shape[1] < 3 * pairs:
        octets = np.pad(octets, ((0, 0), (0, 3 * pairs - octets.shape[1])))
    runs = np.empty((len(octets), pairs, 2), np.uint16)
    first, second, third = (octets[:, i : 3 * pairs : 3].astype(np.uint16) for i in range(3))
    runs[:, :, 0] = first | (second & 15) << 8
    runs[:, :, 1] = second >> 4 | third << 4
    return runs.reshape(len(octets), -1)
