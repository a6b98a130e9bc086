"""The records that the SSD tier and the graph of blocks exchange: plain data, no I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import NamedTuple, TypeVar

from prefixcache import keys
from prefixcache.image_format import ROWS, SIZE_BOUND, SNAPSHOT, START_BOUND, WINDOW, ImageKind

FOLDERS = {ROWS: "rows", WINDOW: "windows", SNAPSHOT: "snapshots"}  # kind -> folder

Item = TypeVar("Item")
Progress = Callable[[int, int], None]  # told how much is done, of how much
Address = tuple[ImageKind, bytes]  # kind and key: what names one image

# Numbers of an entry are at least 0 and below these: so sums of them fit in 64 bits.
BOUNDS = {"start": START_BOUND, "nbytes": SIZE_BOUND, "disk": SIZE_BOUND, "used": 1 << 60, "hits": 1 << 40}


def batched(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    """Yield the items in lists of `size`, the last one shorter: what one transaction takes at a time."""
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


class Use(NamedTuple):
    """That an image was used at a recency tick, and how many of the uses since it was last told were hits."""

    kind: ImageKind
    key: bytes
    tick: int
    hits: int


class Touch(NamedTuple):
    """Uses of one image that the index has not heard of: the newest tick, how many were hits, the Unix time."""

    tick: int
    hits: int
    at: float

    def joined(self, other: Touch | None) -> Touch:
        if other is None:
            return self
        return Touch(max(self.tick, other.tick), self.hits + other.hits, max(self.at, other.at))


class NamespaceRow(NamedTuple):
    """What a root key stands for. `codec` and `layout` are JSON; `created` is Unix time."""

    root: bytes
    model: str
    codec: str
    layout: str
    created: float

    @property
    def stated(self) -> tuple[str, str, str]:
        """Return what its root key follows from, but for the salt."""
        return self.model, self.codec, self.layout


class Entry(NamedTuple):
    """One image on the SSD.

    `tokens` are raw little-endian int64: a rows image's block, a snapshot's suffix after its parent block, b"" of a
    window. `nbytes` is the file's length, `disk` the bytes that it really takes; `used` is a recency tick, larger is
    newer; `created` and `used_at` are Unix times, 0.0 for now.
    """

    kind: ImageKind
    key: bytes
    namespace: bytes
    parent: bytes
    start: int
    tokens: bytes
    nbytes: int
    checksum: str
    disk: int = 0
    used: int = 0
    created: float = 0.0
    hits: int = 0
    extra: str = "{}"
    used_at: float = 0.0

    def __repr__(self) -> str:  # the tuple's own would show the prompt's tokens in a traceback
        length = len(self.tokens) // keys.TOKEN_BYTES
        return f"Entry({self.kind} {self.key.hex()}, start {self.start}, {length} tokens, {self.nbytes} bytes)"

    @property
    def address(self) -> Address:
        return self.kind, self.key
