"""A small directory of today's format, with every kind of image: `python -m tests.cache.format_directory` writes it to
tests/fixtures/format-N, where it stays when there is another format, for that release to read.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from prefixcache import PrefixCache
from prefixcache.image_format import FORMAT
from tests.models import states

FIXTURES = Path(__file__).parents[1] / "fixtures"


class KeptPrompt(NamedTuple):
    """A prompt that the directory has, and how its prompt cache is made and checked."""

    model: str
    tokens: list[int]
    make: Callable[[list[int]], list[Any]]
    check: Callable[[list[Any], list[int]], None] = states.check
    codec: str = "raw"
    salt: bytes = b""

    @property
    def where(self) -> dict[str, Any]:
        return {"model": self.model, "salt": self.salt}


def prompt(seed: int, count: int) -> list[int]:
    return [(seed * 977 + i * 31) % 5000 + 10 for i in range(count)]


KEPT = (
    KeptPrompt("dense", prompt(1, 270), lambda tokens: states.sliceable(tokens, 1)),
    KeptPrompt("dense", prompt(2, 20), lambda tokens: states.sliceable(tokens, 1), salt=b"tenant"),
    KeptPrompt("windowed", prompt(3, 60), lambda tokens: states.windowed(tokens, 30)),
    KeptPrompt("hybrid", prompt(4, 30), states.hybrid),
    KeptPrompt(
        "levelled", prompt(5, 270), lambda tokens: states.uneven(tokens, 1), states.check_uneven, "turboquant:4"
    ),
)
CODECS = sorted({kept.codec for kept in KEPT})


def open_on(root: Path, codec: str = "raw") -> PrefixCache:
    return PrefixCache(ram="50MB", ssd_dir=root, ssd="50MB", codec=codec)


def fill(root: Path) -> None:
    for codec in CODECS:
        with open_on(root, codec) as cache:
            for kept in KEPT:
                if kept.codec == codec:
                    cache.store(kept.tokens, kept.make(kept.tokens), **kept.where)


def main() -> None:
    root = FIXTURES / f"format-{FORMAT}"
    shutil.rmtree(root, ignore_errors=True)
    fill(root)
    lock = root / "LOCK"
    lock.write_text(re.sub("host .*", "host localhost", lock.read_text()))
    print(f"wrote {root}: {sum(path.stat().st_size for path in root.rglob('*'))} bytes")


if __name__ == "__main__":
    main()
