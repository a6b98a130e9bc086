"""What callers keep with `PrefixCache.pin` until `unpin`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from typing import NamedTuple

from prefixcache.blocks.lookup import required_images
from prefixcache.blocks.node import Slot
from prefixcache.keys import TOKEN_BYTES
from prefixcache.tiers.prompt import Prompt
from prefixcache.tiers.storage import Storage


class Pinned(NamedTuple):
    """A prompt that is pinned: a name to end its pins by, its model and namespace, its tokens, the bytes of its images, and
    how many pins it has.
    """

    name: str
    model: str
    namespace: str
    tokens: int
    nbytes: int
    pins: int


class PinnedTokens(NamedTuple):
    """What a pin was given for: the tokens of a prompt, in the namespace of this root key."""

    root: bytes
    token_bytes: bytes

    @property
    def name(self) -> str:
        return hashlib.blake2b(self.root + self.token_bytes, digest_size=8).hexdigest()


class Pins:
    """The callers' pins: of each one the slots that it pins. The storage's lock guards them, and each call takes it."""

    def __init__(self, storage: Storage):
        self._storage = storage
        self._pins: dict[PinnedTokens, list[list[Slot]]] = {}

    def add(self, prompt: Prompt) -> int:
        """Pin what any tier has of a prompt, and return how many tokens that is."""
        storage = self._storage
        with storage.lock:
            deepest = prompt.deepest(storage.graph.last)
            if deepest is None or deepest.depth == 0:
                return 0
            slots = storage.graph.pin(required_images(deepest.walk, deepest.depth, storage.graph.last))
            pinned = PinnedTokens(deepest.namespace.row.root, prompt.token_bytes)
            self._pins.setdefault(pinned, []).append(slots)
            return deepest.depth

    def remove(self, prompt: Prompt) -> bool:
        """End one pin of a prompt. Return False when there is none."""
        with self._storage.lock:
            for namespace in prompt.namespaces():
                pinned = PinnedTokens(namespace.row.root, prompt.token_bytes)
                if pins := self._pins.get(pinned):
                    self._storage.unpin(pins.pop())
                    if not pins:
                        del self._pins[pinned]
                    return True
        return False

    def listed(self) -> list[Pinned]:
        """Return the prompts that are pinned, but for those all of whose images were deleted."""
        with self._storage.lock:
            is_attached = self._storage.graph.is_attached
            return [
                Pinned(
                    pinned.name,
                    self._storage.namespaces[pinned.root].row.model,
                    pinned.root.hex(),
                    len(pinned.token_bytes) // TOKEN_BYTES,
                    sum(slot.nbytes for slot in slots),
                    len(pins),
                )
                for pinned, pins in self._pins.items()
                if (slots := {slot for pin in pins for slot in pin if is_attached(slot)})
            ]

    def end(self, name: str) -> int:
        """End all pins of the prompt that `listed` gives this name, and return how many there were."""
        return self._end(lambda pinned: pinned.name == name)

    def end_beginning_with(self, prompt: Prompt) -> None:
        """End the pins of all prompts that begin with this one."""
        with self._storage.lock:
            roots = {namespace.row.root for namespace in prompt.namespaces()}
            self._end(lambda pinned: pinned.root in roots and pinned.token_bytes.startswith(prompt.token_bytes))

    def clear(self, roots: Collection[bytes] | None = None) -> None:
        """End all pins, or those in the namespaces with these root keys."""
        self._end(lambda pinned: roots is None or pinned.root in roots)

    def _end(self, is_meant: Callable[[PinnedTokens], bool]) -> int:
        with self._storage.lock:
            meant = [pinned for pinned in self._pins if is_meant(pinned)]
            pins = [slots for pinned in meant for slots in self._pins.pop(pinned)]
            for slots in pins:
                self._storage.unpin(slots)
            return len(pins)
