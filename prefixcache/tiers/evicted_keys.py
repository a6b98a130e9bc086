"""`EvictedKeys`: which blocks have left all tiers lately, so that a miss can be told from a prompt that never came."""

from __future__ import annotations

from array import array

PLACES = 1 << 13  # of 8 bytes each: the whole blocks of some 2 million tokens


class EvictedKeys:
    """The first 8 bytes of the keys that were added last, each in a place that they choose, where the next one replaces them.
    Takes 64 KiB, whatever is added. Called under the tiers' lock.
    """

    def __init__(self) -> None:
        self._places = array("Q", bytes(8 * PLACES))

    def add(self, key: bytes) -> None:
        beginning = int.from_bytes(key[:8], "little")
        self._places[beginning % PLACES] = beginning

    def __contains__(self, key: bytes) -> bool:
        beginning = int.from_bytes(key[:8], "little")
        return self._places[beginning % PLACES] == beginning
