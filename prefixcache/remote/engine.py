"""What an engine must be able to do to keep a fleet's images: the protocol that object stores and Valkey have.

An engine keeps bytes under names. It evicts by its own rules, so any name may be gone at any time. No bytes count as none:
an empty value is as a missing one. Nothing here knows what the bytes are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

Sink = Callable[[memoryview], None]
"""Takes the bytes of a value, piece by piece, in order. The memory of a piece is the engine's again when the call ends."""

PIECE = 1 << 18  # bytes of a piece at most, about: the cache of a core still has them when the next hand takes them

UNTRUSTED = "its TLS certificate is not trusted"  # why an engine could not be asked, in an EngineError


class EngineError(Exception):
    """The engine could not be asked, or did not answer in time; the text says why, and has no name, URL or credential."""


class Engine(Protocol):
    """Bytes under names of lower-case letters, digits, `/` and `-`. Thread-safe.

    Every call waits, for no longer than the engine's timeout, and tries once. EngineError for an engine that can't be asked,
    or that fails; that a name is missing is no error.
    """

    label: str
    """For people: the URL without credentials and options."""

    names_at_once: int
    """How many names `sizes` asks for in one round trip; more take several."""

    def sizes(self, names: Sequence[str]) -> list[int | None]:
        """Return the bytes under each name, None where there are none. What is there becomes the most recently used, where
        the engine evicts by use.
        """

    def get(self, name: str, size: int | None, accept: Callable[[int], Sink | None]) -> bool:
        """Read the bytes under a name. False where there are none, or they are refused.

        `size`: what `sizes` said, None where it is not known. `accept` is called once with the number of bytes before any of
        them are read; it gives the sink that takes them, or None to refuse them. The sink has had all of them when this
        returns True, and is to be forgotten when it raises.
        """

    def put(self, name: str, data: bytes | memoryview, listed: bool = False) -> None:
        """Put bytes under a name, all of them or none. An engine that is full refuses. `listed`: `names_under` gives it."""

    def keep_listed(self, names: Sequence[str]) -> None:
        """Let `names_under` give these names, which are there: an engine may have evicted the list alone."""

    def names_under(self, folder: str) -> list[str]:
        """Return the names that were put `listed` and are `folder`, a `/` and one part more. 1000 of them at most."""

    def about(self) -> dict[str, str]:
        """Return what an operator should know, by the engine's own terms: its kind and version, and how it evicts, if it
        tells.
        """

    def close(self) -> None:
        """Let go of connections. Calls under way end with EngineError."""
