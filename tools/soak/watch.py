"""What the cache does to its directory, told to the judge as it happens: opened, acknowledged, leaving, set aside.

Wraps methods of the product's classes in the server's process; changes nothing of what they do. A deletion is told
before it is queued, a write when its row is committed. Of a write that a deletion overtook, nothing is told: that
deletion may come after it.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

from prefixcache.ssd import Entry, Ssd, open_directory, reader, writer
from prefixcache.ssd.entries import Address
from prefixcache.tiers.storage import Storage
from prefixcache.tiers.tier_in_graph import TierInGraph
from tools.faults.evidence import before_deletion

Tell = Callable[..., None]

FEW = 20  # images to a message, so that it is one write to the pipe: whole or not at all


class Watch:
    """`_lock` guards the order of writes and deletions, and of what is told of them."""

    def __init__(self, tell: Tell):
        self._tell = tell
        self._lock = threading.Lock()
        self._clock = 0
        self._written: dict[Address, deque[tuple[int, float]]] = defaultdict(deque)  # accepted, and not yet reported
        self._deleted: dict[Address, int] = {}
        self._standing: set[Address] = set()
        self._openings = 0

    def install(self) -> None:
        self._watch_opening()
        self._watch_writes()
        self._watch_deletions()
        self._watch_damage()

    def _watch_opening(self) -> None:
        opening: Any = open_directory
        made, opened, mend = Ssd.__init__, opening.OpenDirectory._open, opening.mend

        def init(ssd: Ssd, *rest: Any, **more: Any) -> None:
            made(ssd, *rest, **more)
            entries = [[e.kind, e.key.hex(), e.checksum] for e in ssd.entries()]
            for at in range(0, len(entries), FEW):
                self._tell("there", entries[at : at + FEW])
            self._tell("opened", len(entries))

        def open_(one: open_directory.OpenDirectory) -> None:
            opened(one)
            self._openings += 1
            if self._openings > 1:
                self._tell("reopened")

        def mend_(*rest: Any, **more: Any) -> Any:
            mended = mend(*rest, **more)
            self._tell("mended", mended.report.counts)
            return mended

        Ssd.__init__, opening.OpenDirectory._open, opening.mend = init, open_, mend_  # type: ignore[method-assign]

    def _watch_writes(self) -> None:
        write, written, standing = Ssd.write, Storage.written, writer.Writer._skip_durable

        def write_(ssd: Ssd, entry: Entry, *rest: Any, **more: Any) -> bool:
            with self._lock:
                self._clock += 1
                mine = (self._clock, time.monotonic())
                self._written[entry.address].append(mine)
            accepted = write(ssd, entry, *rest, **more)
            if not accepted:
                with self._lock:
                    self._written[entry.address].remove(mine)
            return accepted

        def written_(storage: Storage, tier: TierInGraph, entry: Entry, error: Exception | None) -> None:
            with self._lock:
                order, at = self._written[entry.address].popleft()
                overtaken = self._deleted.get(entry.address, 0) > order
                if not self._written[entry.address]:
                    del self._written[entry.address]
                    self._deleted.pop(entry.address, None)
                stood = entry.address in self._standing
                self._standing.discard(entry.address)
                if error is None and not overtaken:
                    self._tell("durable", entry.kind, entry.key.hex(), entry.checksum, at, stood)
            written(storage, tier, entry, error)

        def standing_(one: writer.Writer, *rest: Any) -> set[Address]:
            found = standing(one, *rest)
            with self._lock:
                self._standing |= found
            return found

        Ssd.write, Storage.written = write_, written_  # type: ignore[method-assign]
        writer.Writer._skip_durable = standing_  # type: ignore[method-assign]

    def _watch_deletions(self) -> None:
        def tell(entries: list[Entry], superseded: bool) -> None:
            with self._lock:
                for entry in entries:
                    self._clock += 1
                    if entry.address in self._written:
                        self._deleted[entry.address] = self._clock
                for at in range(0, len(entries), FEW):
                    self._tell("leaving", time.monotonic(), [[e.kind, e.key.hex()] for e in entries[at : at + FEW]])

        before_deletion(tell)

    def _watch_damage(self) -> None:
        quarantine = reader.Reader._quarantine

        def quarantine_(pool: reader.Reader, path: str, entry: Entry, damage: Any) -> None:
            self._tell("aside", time.monotonic(), entry.kind, entry.key.hex(), str(damage))
            quarantine(pool, path, entry, damage)

        reader.Reader._quarantine = quarantine_  # type: ignore[method-assign]
