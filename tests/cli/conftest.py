"""A directory of each test's own, live or dead, and the command to call on it."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import directories
import pytest
from directories import fill
from typer.testing import CliRunner

from prefixcache import PrefixCache
from prefixcache.cli import app
from tests.servers import forked
from tests.servers.serving import SECONDS, wait_for


@pytest.fixture(scope="session")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("original") / "cache")


@pytest.fixture
def filled(original: Path, tmp_path: Path) -> Path:
    """A directory of its own with three models, two tenants and four namespaces; nobody has it open."""
    return Path(shutil.copytree(original, tmp_path / "cache"))


@pytest.fixture
def live(tmp_path: Path) -> Iterator[tuple[Path, Any]]:
    """A directory that another process has open until it is killed (a crash), or the test ends."""
    path, out, err = tmp_path / "live", tmp_path / "live.out", tmp_path / "live.err"
    process = forked.begin(directories.live, [path], out, err)
    try:
        wait_for(lambda: out.exists() and out.read_text() == "ready\n", "open directory", err)
        yield path, process
        if process.poll() is None:
            process.send_signal(signal.SIGUSR1)
            assert process.wait(SECONDS) == 0, err.read_text()
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def live_directory(filled: Path) -> Iterator[Path]:
    with PrefixCache(ram="20MB", ssd_dir=filled, ssd="100MB"):
        yield filled


@pytest.fixture
def call() -> Callable[..., Any]:
    """Runs the command within this process, 100 columns wide."""
    return lambda *args, columns=100: CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": str(columns)})
