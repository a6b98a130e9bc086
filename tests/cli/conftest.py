"""A directory of each test's own, live or dead, and the command to call on it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from directories import LIVE, fill
from typer.testing import CliRunner

from prefixcache import PrefixCache
from prefixcache.cli import app


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("original") / "cache")


@pytest.fixture
def filled(original: Path, tmp_path: Path) -> Path:
    """A directory of its own with three models, two tenants and four namespaces; nobody has it open."""
    return Path(shutil.copytree(original, tmp_path / "cache"))


@pytest.fixture
def live(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """A directory that another process has open until its standard input ends (a crash) or has a line (a close)."""
    path = tmp_path / "live"
    script = LIVE.format(here=str(Path(__file__).parent), path=str(path))
    with subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield path, process
        if process.poll() is None:
            process.communicate("\n", timeout=60)


@pytest.fixture
def opened(filled: Path) -> Iterator[Path]:
    """A directory that this process has open."""
    with PrefixCache(ram="20MB", ssd_dir=filled, ssd="100MB"):
        yield filled


@pytest.fixture
def call() -> Callable[..., Any]:
    """Runs the command within this process, 100 columns wide."""
    return lambda *args: CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "100"})
