"""What may come into a tier, where room must be made for it: `Claim` says how much a prompt takes from others, `Doorkeeper`
(`ssd_admission="second"`) which images came before. The storage's lock guards both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prefixcache.blocks.node import Node, Slot

SHARE = 8  # a prompt takes room of what was hit until it has an eighth of the tier


class LongPrompts:
    """The latest prompts that wanted more of a tier than their share, and how many of them were asked for again.

    A prompt is named by one of its whole blocks: by the block's number and its key. `asked_for` must hear of every request.
    """

    REMEMBERED = 64
    DECAY = 0.9  # a prompt: some ten of them decide

    def __init__(self) -> None:
        self._asked_again: dict[tuple[int, bytes], bool] = {}
        self._came = self._returned = 0.0

    def __len__(self) -> int:
        return len(self._asked_again)

    @property
    def return_mostly(self) -> bool:
        """Whether at least half of the latest were asked for again."""
        return 0 < self._came <= 2 * self._returned

    def came(self, keys: Sequence[bytes], number: int) -> None:
        """A prompt whose whole blocks have these keys wants more than its share: it is named by block `number`. One that is
        known, by whichever of its blocks, is not counted again.
        """
        if number >= len(keys) or any(self._of(keys)):
            return
        self._came, self._returned = self._came * self.DECAY + 1, self._returned * self.DECAY
        self._asked_again[number, keys[number]] = False
        if len(self._asked_again) > self.REMEMBERED:
            del self._asked_again[next(iter(self._asked_again))]

    def asked_for(self, keys: Sequence[bytes]) -> None:
        """A request asks for a prompt whose whole blocks have these keys."""
        for name in list(self._of(keys)):
            self._returned += not self._asked_again[name]
            self._asked_again[name] = True

    def was_asked_again(self, keys: Sequence[bytes]) -> bool:
        return any(self._asked_again[name] for name in self._of(keys))

    def _of(self, keys: Sequence[bytes]) -> Iterator[tuple[int, bytes]]:
        return (name for name in self._asked_again if name[0] < len(keys) and keys[name[0]] == name[1])


class Claim:
    """What one prompt may take from others in a tier of `limit` bytes.

    It takes any room of what was never hit. It takes room of what was hit only while its own images that nobody has hit are
    less than a `SHARE`th of the tier, unless it came before and is asked for again, or most prompts of such a length are.

    `path` are the prompt's blocks so far, and `keys` gives those of its whole blocks; neither is looked at until it matters.
    """

    def __init__(
        self, long_prompts: LongPrompts, tier: int, limit: int, path: Sequence[Node], keys: Callable[[], list[bytes]]
    ):
        self._long_prompts, self._tier, self._limit = long_prompts, tier, limit
        self._path, self._keys = path, keys
        self._added = 0
        self._unhit: int | None = None  # of the path
        self._is_free: bool | None = None  # of the share

    def spares(self, victim: Slot, nbytes: int) -> bool:
        """Whether `victim` must not be lost for `nbytes` more of this prompt."""
        if not victim.hits or self._is_free:
            return False
        if self._unhit is None:
            slots = (slot for node in self._path for slot in node.slots)
            self._unhit = sum(s.nbytes for s in slots if not s.hits and (s.tiers | s.pending) >> self._tier & 1)
        if self._unhit + self._added + nbytes <= self._limit // SHARE:
            return False
        if self._is_free is None:
            self._is_free = self._deserves_more()
        return not self._is_free

    def add(self, nbytes: int) -> None:
        """The prompt has so many bytes more in the tier."""
        self._added += nbytes

    def _deserves_more(self) -> bool:
        keys, long_prompts = self._keys(), self._long_prompts
        deserves = long_prompts.return_mostly or long_prompts.was_asked_again(keys)
        long_prompts.came(keys, len(self._path))
        return deserves



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
