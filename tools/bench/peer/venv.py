"""The peers that are no dependency of this project, in a virtual environment of their own: the git-ignored `.peers/venv`.

It is made on first use and kept. vllm-mlx and mlx-vlm come without their dependencies, of which the modules that are measured
import few: MLX, NumPy, psutil, and mlx-lm of the release that vllm-mlx asks for.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / ".peers" / "venv"
MLX = "mlx==0.32.4" if sys.platform == "darwin" else "mlx[cpu]==0.32.4"
WITH_DEPENDENCIES = [MLX, "mlx-lm==0.31.3", "numpy", "psutil", "rich>=13.7"]
ALONE = ["vllm-mlx==0.6.0", "mlx-vlm==0.7.10"]
PIP = [
    "-m",
    "pip",
    "install",
    "--quiet",
    "--disable-pip-version-check",
    "--no-input",
    "--retries",
    "1",
    "--timeout",
    "20",
]
CREATE = [sys.executable, "-m", "venv"]
MINUTES = 10


class NotInstalled(Exception):
    """Why there is no such environment, in one line."""


@cache
def python() -> Path:
    """The interpreter of the peers' environment, made if need be. Raises `NotInstalled`."""
    stamp, wanted = FOLDER / "installed", "\n".join([sys.version, *WITH_DEPENDENCIES, *ALONE])
    here = FOLDER / "bin" / "python"
    if stamp.is_file() and stamp.read_text() == wanted:
        return here
    shutil.rmtree(FOLDER, ignore_errors=True)
    _run(*CREATE, str(FOLDER))
    _run(str(here), *PIP, *WITH_DEPENDENCIES)
    _run(str(here), *PIP, "--no-deps", *ALONE)
    stamp.write_text(wanted)
    return here


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MINUTES * 60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstalled(f"not installed: {type(error).__name__} in {' '.join(command[1:4])}") from error
    if done.returncode:
        lines = done.stderr.splitlines()
        said = [line for line in lines if line.startswith("ERROR")] or lines or ["it said nothing"]
        raise NotInstalled(f"not installed: {said[-1]}")
