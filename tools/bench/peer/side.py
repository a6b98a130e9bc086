"""What a prefix cache is asked to do here, and the place that it is given: each contestant's own module has a class `Side`.

A side does for one prompt what its server does, by calls of its release alone, in a process of its own. Nothing is imported
here but the standard library: every environment reads this.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol


@dataclass(frozen=True)
class Place:
    """`ram` bytes; a folder on the SSD, or none; the model's folder; about how many unique tokens will come.

    `restarts`: what is in RAM when the server stops is to be there when it starts again. `options`: of the side's own.
    """

    ram: int
    folder: str | None = None
    model: str = "bench"
    tokens: int = 1 << 18
    restarts: bool = False
    options: tuple[str, ...] = ()


class Side(Protocol):
    """Opened with a `Place` and one empty prompt cache, which says what layers the model has."""

    classes: ModuleType
    """Where the layer caches come from that its server uses."""

    def fetch(self, tokens: list[int]) -> tuple[list[Any] | None, int]:
        """The prompt cache of the longest known prefix, from RAM or SSD, the caller's to go on with; how many tokens."""

    def store(self, tokens: list[int], prompt_cache: list[Any]) -> None:
        """Keep the state of `tokens` after a request."""

    def held(self) -> int:
        """Bytes in RAM, by its own account."""

    def written(self) -> int:
        """Bytes written to the SSD since it was opened."""

    def settle(self) -> None:
        """Wait until what it writes in the background is on the disk."""

    def close(self) -> None:
        """Stop as its server stops."""
