"""What callers keep with `PrefixCache.pin` until `unpin`. A pin is of the tokens that it was given for."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import NamedTuple

from prefixcache.blocks.lookup import required_images
from prefixcache.blocks.node import Slot
from prefixcache.keys import TOKEN_BYTES
from prefixcache.tiers.prompt import Prompt
from prefixcache.tiers.storage import Storage


class Pinned(NamedTuple):
    """A prompt that is pinned: a name to end the pin by, whose it is, its tokens, the bytes of its images, and how many pins
    it has.
    """

    name: str
    model: str
    namespace: str
    tokens: int
    nbytes: int
    pins: int


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

    def listed(self) -> list[Pinned]:
        with self._storage.lock:
            return [
                Pinned(
                    _name(root, tokens),
                    self._storage.namespaces[root].row.model,
                    root.hex(),
                    len(tokens) // TOKEN_BYTES,
                    sum(slot.nbytes for slot in pins[-1]),
                    len(pins),
                )
                for (root, tokens), pins in self._pinned.items()
                if root in self._storage.namespaces  # else all of it was deleted
            ]

    def end(self, name: str) -> int:
        """End all pins of the prompt that `listed` calls so. Returns how many there were."""
        with self._storage.lock:
            return self._end([key for key in self._pinned if _name(*key) == name])

    def end_beginning_with(self, prompt: Prompt) -> None:
        """End the pins of all prompts that begin with this one."""
        with self._storage.lock:
            roots = {namespace.row.root for namespace in prompt.namespaces()}
            self._end([key for key in self._pinned if key[0] in roots and key[1].startswith(prompt.token_bytes)])

    def clear(self, roots: Collection[bytes] | None = None) -> None:
        """End all, or those of the namespaces with these root keys."""
        with self._storage.lock:
            self._end([key for key in self._pinned if roots is None or key[0] in roots])

    def _end(self, keys: list[tuple[bytes, bytes]]) -> int:
        ended = [pinned for key in keys for pinned in self._pinned.pop(key)]
        for pinned in ended:
            self._storage.unpin(pinned)
        return len(ended)


def _name(root: bytes, tokens: bytes) -> str:
    return hashlib.blake2b(root + tokens, digest_size=8).hexdigest()
