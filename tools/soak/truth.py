"""What must be on the disk: the judge's own account, from what the server told and from what was done to the files.

An image is *durable* from the moment on that the cache said so until it says that it leaves, or until the soak lays hands
on it (*damaged*). A durable image that is missing or another is lost. All times are of the monotonic clock, which both
processes share.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

from prefixcache.ssd.directory import Directory
from prefixcache.ssd.entries import Address
from tools.faults.evidence import image_fault


class Truth:
    """`lost`: sentences, with the bytes; `met`: bad files that the cache found, by how it did; `injected`: by kind."""

    def __init__(self, directory: Directory):
        self.directory = directory
        self.durable: dict[Address, str] = {}
        self.damaged: dict[Address, float] = {}
        self.lost: list[str] = []
        self.met: Counter[str] = Counter()
        self.vanished = False  # the directory was moved away, and the cache has not begun a new one yet
        self.acknowledged = self.checked = 0
        self._there: dict[Address, str] = {}

    def mark(self, address: Address) -> None:
        """The soak is about to lay hands on the file of this image."""
        self.damaged[address] = time.monotonic()
        self.durable.pop(address, None)

    def vanish(self) -> None:
        """The whole directory is about to be moved away."""
        for address in list(self.durable):
            self.mark(address)
        self.vanished = True

    # -- what the server tells ----------------------------------------------------------------------------------------

    def there(self, entries: list[list[str]]) -> None:
        """Some of the images that an opening found."""
        self._there.update({_address(kind, key): checksum for kind, key, checksum in entries})

    def opened(self) -> None:
        for address, checksum in self.durable.items():
            if self._there.get(address) != checksum:
                self._lose(
                    address, "not in the index" if address not in self._there else "another checksum in the index"
                )
        fresh = {a: c for a, c in self._there.items() if a not in self.damaged}
        self.durable, self._there = fresh, {}
        self.vanished = False

    def reopened(self) -> None:
        self.durable.clear()
        self.vanished = False

    def wrote(self, kind: str, key: str, checksum: str, queued: float, stood: bool) -> None:
        """An image is durable. `stood`: its row and file were there already, so that the file was not written anew."""
        address = _address(kind, key)
        if self.vanished:
            self.mark(address)
        elif address not in self.damaged or (queued > self.damaged[address] and not stood):
            self.damaged.pop(address, None)
            self.durable[address] = checksum
            self.acknowledged += 1

    def leaving(self, when: float, images: list[list[str]]) -> None:
        """Damaged ones stay so: a kill may come before their files are deleted, and the next opening finds them again."""
        for kind, key in images:
            self.durable.pop(_address(kind, key), None)

    def aside(self, when: float, kind: str, key: str, reason: str) -> None:
        """A reader found the file of an image bad."""
        address = _address(kind, key)
        if address in self.durable:
            self._lose(address, f"set aside, and nobody had touched it: {reason}")
            del self.durable[address]
        elif address not in self.damaged:
            self.met["left meanwhile"] += 1
        else:
            self.met["on reading"] += 1
            if when > self.damaged[address]:
                del self.damaged[address]

    # -- what the files say -------------------------------------------------------------------------------------------

    def check_files(self) -> None:
        """While no server runs: every durable image is there, bit for bit."""
        if self.vanished:
            self.reopened()
        for address, checksum in list(self.durable.items()):
            if fault := image_fault(self.directory, address, checksum):
                self._lose(address, fault)
                del self.durable[address]
        self.checked += len(self.durable)

    def mended(self) -> None:
        """Every file has been read and judged: what was bad is gone."""
        self.damaged.clear()

    def _lose(self, address: Address, why: str) -> None:
        self.lost.append(f"{address[0]} {address[1].hex()}: {why}")


def _address(kind: str, key: str) -> Address:
    return kind, bytes.fromhex(key)


def as_calls(truth: Truth) -> dict[str, Any]:
    """By the word with which the server tells it."""
    return {
        "there": truth.there,
        "opened": lambda count: truth.opened(),
        "reopened": truth.reopened,
        "durable": truth.wrote,
        "leaving": truth.leaving,
        "aside": truth.aside,
    }
