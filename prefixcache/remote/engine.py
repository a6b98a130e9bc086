"""What an engine must be able to do to keep a fleet's images: the protocol that object stores and Valkey have.

An engine keeps bytes under names. It evicts by its own rules, so any name may be gone at any time. No bytes count as none:
an empty value is as a missing one. Nothing here knows what the bytes are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol


class EngineError(Exception):
    """The engine could not be asked, or did not answer in time; the text says why, and has no name, URL or credential."""


class EngineFull(EngineError):
    """The engine takes no more bytes now; it still answers."""


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
        """The bytes under each name, None where there are none. What is there becomes the most recently used, where the
        engine evicts by use.
        """

    def get(self, name: str, size: int | None, room: Callable[[int], bool]) -> bytes | memoryview | None:
        """The bytes under a name; None when there are none, or `room` refuses them.

        `size`: what `sizes` said, None where it is not known. `room` is called once with the number of bytes before any
        of them are read, and no more are.
        """

    def put(self, name: str, data: bytes | memoryview, listed: bool = False) -> None:
        """Put bytes under a name, all of them or none. EngineFull when there is no room. `listed`: `names_under` gives it."""

    def keep_listed(self, names: Sequence[str]) -> None:
        """These names, which are there, are to be given by `names_under`: an engine may have evicted the list alone."""

    def names_under(self, folder: str) -> list[str]:
        """The names that were put `listed` and are `folder`, a `/` and one part more. 1000 of them at most."""

    def about(self) -> dict[str, str]:
        """What an operator should know, by the engine's own terms: its kind and version, and how it evicts, if it tells."""

    def close(self) -> None:
        """Let go of connections. Calls under way end with EngineError."""
