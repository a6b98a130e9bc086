"""Released programs of npm's registry, fetched on first use into the git-ignored folder `.peers/`."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TextIO

import pytest

from tests.peers.wheels import PEERS

INSTALL = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--no-save"]
CLAUDE_CODE = ("@anthropic-ai/claude-code", "2.1.197")
CODEX = ("@openai/codex", "0.169.0")
SECONDS = 250  # pytest ends a test after 300
PATIENCE = 60  # seconds for another process that is fetching it


def installed(package: str, version: str, seconds: float = SECONDS) -> Path:
    """The folder of a package's programs, with all that it needs.

    Skips the test, and says why, where there is no npm, or it can't get the package.
    """
    if shutil.which("npm") is None:
        pytest.skip("there is no npm to install it with")
    folder = PEERS / f"{package.replace('/', '+')}-{version}-npm"
    PEERS.mkdir(exist_ok=True)
    with (PEERS / f"{folder.name}.lock").open("w") as lock:
        _wait_for(lock, package)  # another test run may be fetching it
        if not folder.is_dir():
            with tempfile.TemporaryDirectory(dir=PEERS) as own:
                _install(f"{package}@{version}", Path(own) / "made", seconds)
                os.rename(Path(own) / "made", folder)
    return folder / "node_modules" / ".bin"


def _wait_for(lock: TextIO, package: str) -> None:
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                pytest.skip(f"another process is still fetching {package}")
            time.sleep(0.2)


def _install(package: str, folder: Path, seconds: float) -> None:
    folder.mkdir()
    command = [*INSTALL, "--prefix", str(folder), package]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm has not got {package} in {seconds:g} s")
    if done.returncode:
        pytest.skip(f"npm can't get {package}: {(done.stderr or done.stdout).strip()[-200:]}")


if __name__ == "__main__":  # ahead of the tests
    for which in (CODEX, CLAUDE_CODE):
        print(installed(*which, seconds=1200))
