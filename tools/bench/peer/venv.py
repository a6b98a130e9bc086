"""The peers that are no dependency of this project, in a virtual environment of their own: the git-ignored `.peers/venv`.

It is made on first use and kept. vllm-mlx and mlx-vlm come without their dependencies, of which what is measured imports few:
MLX, NumPy, psutil, mlx-lm of the release that vllm-mlx asks for, and what vllm-mlx's server imports.
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
SERVER = [
    "fastapi",
    "uvicorn",
    "jsonschema",
    "prometheus-client",
    "requests",
    "pytz",
    "pyyaml",
    "tabulate",
    "pillow",
    "tqdm",
    "python-multipart",
]
WITH_DEPENDENCIES = [MLX, "mlx-lm==0.31.3", "numpy", "psutil", "rich>=13.7", *SERVER]
ALONE = ["vllm-mlx==0.6.0", "mlx-vlm==0.7.10"]
LMCACHE_FOLDER = ROOT / ".peers" / "lmcache"
LMCACHE = "lmcache==0.5.6"
# What its connectors to Redis import. The rest is for GPUs and clouds.
LMCACHE_IMPORTS = [
    "torch==2.13.0",
    "redis",
    "msgspec",
    "pyyaml",
    "psutil",
    "sortedcontainers",
    "numpy<=2.2.6",
    "prometheus_client",
    "cachetools",
    "aiofiles",
    "requests",
    "blake3",
    "nvtx",
    "numba",
    "cufile-python",
    "safetensors",
    "pyzmq",
    "py-cpuinfo",
    "httpx",
    "aiohttp",
    "aiofile",
    "fastapi",
    "httptools",
    "uvicorn",
    "cryptography",
    "opentelemetry-api",
    "opentelemetry-sdk",
    "opentelemetry-exporter-prometheus",
    "opentelemetry-exporter-otlp",
    "protobuf<7",
    "setuptools<81",
    "transformers",
]
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
    return _made(FOLDER, WITH_DEPENDENCIES, ALONE)


@cache
def lmcache() -> Path:
    """The interpreter of LMCache's environment, made if need be. Raises `NotInstalled`."""
    return _made(LMCACHE_FOLDER, LMCACHE_IMPORTS, [LMCACHE])


def _made(folder: Path, with_dependencies: list[str], alone: list[str]) -> Path:
    stamp, wanted = folder / "installed", "\n".join([sys.version, *with_dependencies, *alone])
    here = folder / "bin" / "python"
    if stamp.is_file() and stamp.read_text() == wanted:
        return here
    shutil.rmtree(folder, ignore_errors=True)
    _run(*CREATE, str(folder))
    _run(str(here), *PIP, *with_dependencies)
    _run(str(here), *PIP, "--no-deps", *alone)
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
