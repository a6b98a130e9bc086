"""What a place for images below RAM must be able to do: the protocol that the SSD and the planner's simulated one have.
`OpenCache._open_tiers` plugs them in. Decision 0007 says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from prefixcache.blocks.node import Slot, Walk
from prefixcache.image_format import Image
from prefixcache.ssd.entries import Entry, NamespaceRow, Use


class PendingRead(Protocol):
    """A read on its way, as a Future is."""

    def done(self) -> bool: ...

    def result(self, timeout: float | None = None) -> Image: ...


class Tier(Protocol):
    """An executor with exact accounting: what is written and deleted there is decided by `TierInGraph`.

    No call but `flush` and `close` waits. Whoever makes a tier gives it `written(entry, error)`, which it calls once for
    each accepted write, with no lock of its own held: with None when the image is durable there, else with the error.
    """

    name: str
    """As users know it: "ssd"."""

    @property
    def limit(self) -> int:
        """Return the bytes that it may take."""

    @property
    def used(self) -> int:
        """Return the bytes that it takes, with what is queued."""

    @property
    def stored(self) -> int:
        """Return those of `used` without room that is kept for something to grow: what users are told."""

    def entries(self) -> Iterator[Entry]:
        """Yield what it holds at its opening, parents before children."""

    def max_tick(self) -> int:
        """Return the newest recency tick that it knows."""

    def has_room(self, nbytes: int) -> bool:
        """Tell whether its queue would take a write of so many bytes now."""

    def footprint(self, nbytes: int) -> int:
        """Return the bytes of its limit that an image of `nbytes` takes."""

    def write(self, entry: Entry, namespace: NamespaceRow, image: Image) -> bool:
        """Queue a write. False, and no callback, when it takes none now, which it counts as a refusal."""

    def read(self, entry: Entry) -> PendingRead:
        """Begin to read an image, which is checked. Its `result` raises `ssd.Corrupt` for one that is lost, else what kept it
        from being read.
        """

    def delete(self, entries: Iterable[Entry]) -> None:
        """Queue deletions. A write that still waits is cancelled."""

    def touch(self, uses: Iterable[Use]) -> None:
        """Hear how images were used since the last call."""

    def resize(self, limit: int) -> None:
        """Set a new limit. What must be deleted for it is for the caller to say."""

    @property
    def failed(self) -> int:
        """Return how many writes failed so far."""

    def flush(self, timeout: float | None = None, since: int | None = None) -> bool:
        """Wait until all queued before is durable. False when not in time, or when a write failed since `failed` was
        `since`.
        """


class SharedTier(Protocol):
    """A tier that machines share. The storage tells it of stores and hits, and doesn't know which images it holds: no slot
    counts as being there. Called under the storage's lock.
    """

    def offer_stored(self, slot: Slot) -> None:
        """Hear that an image was stored here."""

    def offer_used(self, walk: Walk, depth: int, required: Sequence[Slot]) -> None:
        """Hear that a hit at `depth` used the `required` images, tail first."""

    def offer_written(self, slot: Slot) -> None:
        """Hear that an image is durable in the tier below RAM."""

    def refuse(self, slot: Slot) -> None:
        """Hear that an image can't be decoded: it is not read again for a while."""
