"""One directory for all tests here, made once by a real cache; each test damages a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from . import directories


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return directories.fill(tmp_path_factory.mktemp("corruption") / "ssd")


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return directories.copy(made, tmp_path / "ssd")


@pytest.fixture
def copies(made: Path, tmp_path: Path) -> Callable[[], Iterator[Path]]:
    """Copies without end, each gone when the next one comes."""

    def endless() -> Iterator[Path]:
        while True:
            yield directories.copy(made, tmp_path / "copy")
            directories.remove(tmp_path / "copy")

    return endless
