"""Who is let onto the tier below RAM: with admission "second", what was asked for again."""

from __future__ import annotations


class Doorkeeper:
    """Remembers keys that came once, in a fixed number of bytes: two generations of a Bloom filter (Bloom, CACM 1970) with
    four bits a key. When the younger is full, the older is forgotten. A key that never came is taken for one that did in 2 %
    of cases at most.
    """

    BITS = 12  # of a generation, a key

    def __init__(self, nbytes: int):
        self._young, self._old = bytearray(max(nbytes // 2, 8)), bytearray(max(nbytes // 2, 8))
        self._room = self._full = len(self._young) * 8 // self.BITS  # keys

    def __contains__(self, key: bytes) -> bool:
        return any(all(bits[at >> 3] >> (at & 7) & 1 for at in self._places(key)) for bits in (self._young, self._old))

    def add(self, key: bytes) -> None:
        if not self._room:
            self._young, self._old = bytearray(len(self._young)), self._young
            self._room = self._full
        self._room -= 1
        for at in self._places(key):
            self._young[at >> 3] |= 1 << (at & 7)

    def _places(self, key: bytes) -> list[int]:
        bits = len(self._young) * 8
        return [int.from_bytes(key[i : i + 4], "little") % bits for i in range(0, 16, 4)]
