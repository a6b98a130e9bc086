"""Released packages of peers, fetched with pip on first use into the git-ignored folder `.peers/`: what tests compare this
package with, or run beside it. `fetch` unpacks a release without its dependencies; `installed` gives a program with them an
environment of its own. Nothing is installed beside this package.
"""

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest

PEERS = Path(__file__).parents[2] / ".peers"
OPTIONS = ["-q", "--disable-pip-version-check", "--no-input", "--retries", "1", "--timeout", "20"]
FETCH = [sys.executable, "-m", "pip", "download", *OPTIONS, "--no-deps"]
WHEELS = "--only-binary=:all:"


def fetch(requirement: str, sdist: bool = False) -> Path:
    """The folder of an unpacked release, such as "vllm-mlx==0.6.0"; `sdist`: of its source, which may hold its tests.

    Skips the test, and says why, where pip can't get it.
    """
    folder = _folder(requirement, "-sdist" if sdist else "")
    if not folder.is_dir():
        PEERS.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=PEERS) as own:
            _download(requirement, sdist, Path(own))
            (file,) = Path(own).iterdir()
            _unpack(file, Path(own) / "unpacked")
            if not folder.is_dir():  # another test run may have been quicker
                os.rename(Path(own) / "unpacked", folder)
    if sdist:  # everything is in one folder of the archive
        (folder,) = (path for path in folder.iterdir() if path.is_dir())
    return folder


def installed(requirement: str) -> Path:
    """The interpreter of an environment that has a release, from wheels, and all that it needs.

    Skips the test, and says why, where pip can't get it.
    """
    folder = _folder(requirement, "-venv")
    if not folder.is_dir():
        PEERS.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=PEERS) as own:
            made = Path(own) / "venv"
            subprocess.run([sys.executable, "-m", "venv", str(made)], check=True, capture_output=True, timeout=100)
            _pip([str(made / "bin" / "python"), "-m", "pip", "install", *OPTIONS, WHEELS], requirement)
            if not folder.is_dir():
                os.rename(made, folder)  # its interpreter finds itself; scripts in bin/ would not
    return folder / "bin" / "python"


def _folder(requirement: str, kind: str) -> Path:
    if "==" not in requirement:
        raise ValueError(f"{requirement!r}: name one release, such as vllm-mlx==0.6.0")
    return PEERS / (re.sub(r"[^A-Za-z0-9.]+", "-", requirement) + kind)


def _download(requirement: str, sdist: bool, target: Path) -> None:
    kind = f"--no-binary={requirement.partition('==')[0]}" if sdist else WHEELS
    _pip([*FETCH, kind, "-d", str(target)], requirement)


def _pip(command: list[str], requirement: str) -> None:
    try:
        done = subprocess.run([*command, requirement], capture_output=True, text=True, timeout=200)
    except subprocess.TimeoutExpired:
        pytest.skip(f"pip took more than 200 s for {requirement}")
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        pytest.skip(f"pip can't get {requirement}: {said[-1] if said else 'it said nothing'}")


def _unpack(file: Path, target: Path) -> None:
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as archive:
            archive.extractall(target)
    else:
        with tarfile.open(file) as archive:
            archive.extractall(target, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
