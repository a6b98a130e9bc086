"""Released programs of npm's registry, fetched on first use into the git-ignored folder `.peers/`."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.peers.wheels import PEERS

INSTALL = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--no-save"]


def installed(package: str, version: str) -> Path:
    """The folder of a package's programs, with all that it needs.

    Skips the test, and says why, where there is no npm, or it can't get the package.
    """
    if shutil.which("npm") is None:
        pytest.skip("there is no npm to install it with")
    folder = PEERS / f"{package.replace('/', '+')}-{version}-npm"
    if not folder.is_dir():
        PEERS.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=PEERS) as own:
            _install(f"{package}@{version}", Path(own) / "made")
            if not folder.is_dir():  # another test run may have been quicker
                os.rename(Path(own) / "made", folder)
    return folder / "node_modules" / ".bin"


def _install(package: str, folder: Path) -> None:
    folder.mkdir()
    done = subprocess.run([*INSTALL, "--prefix", str(folder), package], capture_output=True, text=True, timeout=250)
    if done.returncode:
        pytest.skip(f"npm can't get {package}: {(done.stderr or done.stdout).strip()[-200:]}")
