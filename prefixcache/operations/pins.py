"""What callers keep with `PrefixCache.pin` until `unpin`. A pin is of the tokens that it was given for."""

from __future__ import annotations

from prefixcache.blocks.lookup import required_images
from prefixcache.blocks.node import Slot
from prefixcache.tiers.prompt import Prompt
from prefixcache.tiers.storage import Storage


class Pins:
    """The callers' pins, by root key and tokens. The storage's lock guards them, and each call takes it."""

    def __init__(self, storage: Storage):
        self._storage = storage
        self._pinned: dict[tuple[bytes, bytes], list[list[Slot]]] = {}

    def add(self, prompt: Prompt) -> int:
        """Pin what any tier has of a prompt: how many tokens that is."""
        storage = self._storage
        with storage.lock:
            deepest = prompt.deepest(storage.graph.last)
            if deepest is None or deepest.depth == 0:
                return 0
            pinned = storage.graph.pin(required_images(deepest.walk, deepest.depth, storage.graph.last))
            self._pinned.setdefault((deepest.namespace.row.root, prompt.token_bytes), []).append(pinned)
            return deepest.depth

    def remove(self, prompt: Prompt) -> bool:
        """End one pin of a prompt. False when there is none."""
        with self._storage.lock:
            for namespace in prompt.namespaces():
                if pins := self._pinned.get((namespace.row.root, prompt.token_bytes)):
                    self._storage.unpin(pins.pop())
                    if not pins:
                        del self._pinned[namespace.row.root, prompt.token_bytes]
                    return True
        return False

    def clear(self) -> None:
        """End all."""
        with self._storage.lock:
            for pins in self._pinned.values():
                for pinned in pins:
                    self._storage.unpin(pinned)
            self._pinned.clear()
