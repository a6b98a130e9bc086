"""What may come into a tier, where room must be made for it: `Claim` says how much a prompt takes from others, `Doorkeeper`
(`ssd_admission="second"`) which images came before. The storage's lock guards both. Decision 0010 says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prefixcache.blocks.node import Node, Slot

SHARE = 8  # an eighth of the tier: a prompt's part of the room of what was hit


class LongPrompts:
    """The latest prompts of which more was new than a `SHARE`th of a tier, and how many of them were asked for again.

    A prompt is named by one of its whole blocks: the block's number and its key. `asked_for` must hear of every request.
    """

    REMEMBERED = 64
    DECAY = 0.9  # a prompt: some ten of them decide
    ENOUGH = 1 / 3  # of them

    def __init__(self) -> None:
        self._asked_again: dict[tuple[int, bytes], bool] = {}
        self._long = self._returned = 0.0

    def __len__(self) -> int:
        return len(self._asked_again)

    @property
    def often_return(self) -> bool:
        """Tell whether enough of the latest were asked for again."""
        return self._returned > 0 and self._returned >= self.ENOUGH * self._long

    def add(self, keys: Sequence[bytes], number: int) -> None:
        """Note that a long prompt came whose whole blocks have these keys: block `number` names it. One that is known, by
        whichever of its blocks, is not counted again.
        """
        if number >= len(keys) or any(self._of(keys)):
            return
        self._long, self._returned = self._long * self.DECAY + 1, self._returned * self.DECAY
        self._asked_again[number, keys[number]] = False
        if len(self._asked_again) > self.REMEMBERED:
            del self._asked_again[next(iter(self._asked_again))]

    def asked_for(self, keys: Sequence[bytes]) -> None:
        """Note that a request asks for a prompt whose whole blocks have these keys."""
        for name in list(self._of(keys)):
            self._returned += not self._asked_again[name]
            self._asked_again[name] = True

    def was_asked_again(self, keys: Sequence[bytes]) -> bool:
        return any(self._asked_again[name] for name in self._of(keys))

    def _of(self, keys: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
        return (name for name in self._asked_again if name[0] < len(keys) and keys[name[0]] == name[1])


class Claim:
    """How much room one prompt may take from others in a tier of `limit` bytes.

    It may evict any image that was never hit. It may evict images that were hit while its own new images, which nobody has
    hit, are at most a `SHARE`th of the tier; without that limit if the prompt came before, or if long prompts often return.
    Until it `is_begun`, its first image takes the room that it needs.

    `path` are the prompt's blocks so far, and `keys` gives those of its whole blocks: asked for once it is long.
    """

    def __init__(
        self, long_prompts: LongPrompts, tier: int, limit: int, path: Sequence[Node], keys: Callable[[], list[bytes]]
    ):
        self._long_prompts, self._share = long_prompts, limit // SHARE
        self._path, self._keys = path, keys
        self._new = _new_bytes(path, tier, self._share)
        self._deserves_more: bool | None = None  # known once it is long

    @property
    def is_begun(self) -> bool:
        """Tell whether the tier has something new of the prompt."""
        return self._new > 0

    def spares(self, victim: Slot, nbytes: int) -> bool:
        """Tell whether `victim` must not be lost for `nbytes` more of this prompt."""
        return victim.hits > 0 and self._is_long(nbytes) and not self._deserves_more

    def add(self, nbytes: int) -> None:
        """Note that the prompt has so many new bytes more in the tier."""
        self._new += nbytes
        self._is_long(0)

    def _is_long(self, nbytes: int) -> bool:
        """Tell whether the prompt is long with so many bytes more."""
        if self._new + nbytes <= self._share:
            return False
        if self._deserves_more is None:
            keys = self._keys()
            self._deserves_more = self._long_prompts.often_return or self._long_prompts.was_asked_again(keys)
            self._long_prompts.add(keys, len(self._path))
        return True


def _new_bytes(path: Sequence[Node], tier: int, enough: int) -> int:
    """Count the bytes of a path's end that nobody has hit and that are in the tier or on the way there, up to `enough`."""
    new = 0
    for node in reversed(path):
        if new > enough or (node.rows is not None and node.rows.hits):
            break  # what is before it was hit with it
        new += sum(s.nbytes for s in node.slots if not s.hits and (s.tiers | s.pending) >> tier & 1)
    return new


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
