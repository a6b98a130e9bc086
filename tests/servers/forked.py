"""Commands in processes of their own that need not import MLX, mlx-lm and transformers again: they are forked from a
process that has done so, and nothing else. Importing them takes two seconds, more than most of what these processes do.

Where MLX uses a GPU, which survives no fork, and on other systems than Linux each is an interpreter of its own.
"""

from __future__ import annotations

import atexit
import multiprocessing.forkserver
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import mlx.core as mx

ROOT = Path(__file__).parents[2]
FORKS = sys.platform == "linux" and mx.default_device() == mx.cpu
IMPORTED = ["prefixcache.cli.serve.warm", "prefixcache.servers.mlx_lm.http_server", "tests.servers.serving"]
OPENBLAS = Path("/usr/lib").glob("*/openblas-pthread/libopenblas.so.0")
HUB = "/nowhere/hub"  # Hugging Face's library reads its variables when it is imported
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": HUB}  # no network, no models of the user's

# Where OpenBLAS is installed: it multiplies float32 many times faster than what MLX's wheel brings (docs/servers.md).
BLAS = {"LD_PRELOAD": str(file), "OPENBLAS_NUM_THREADS": "1"} if (file := next(OPENBLAS, None)) else {}


@cache
def preloaded() -> dict[str, str]:
    """`BLAS`, and waiting_recv.c where it can be built: it saves more than half of the processor time of ranks."""
    if sys.platform != "linux" or shutil.which("cc") is None:
        return BLAS
    folder = tempfile.mkdtemp(prefix="waiting-recv-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    library, source = f"{folder}/waiting_recv.so", ROOT / "tests/ranks/waiting_recv.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, source, "-ldl"], check=True)
    return {**BLAS, "LD_PRELOAD": ":".join(filter(None, [BLAS.get("LD_PRELOAD"), library]))}


Main = Callable[[list[str]], None]


class Forked:
    """A process with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, main: Main, arguments: list[str], out: Path, err: Path, environment: dict[str, str]):
        job = (main.__module__, main.__qualname__, arguments, str(out), str(err), environment)
        self._process = _server().Process(target=_run, args=job, daemon=True)
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(str(self._process), timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None and self.pid:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self._process.kill()


def begin(main: Main, arguments: Sequence[Any], out: Path, err: Path, *, anew: bool = False, **variables: str) -> Any:
    """`main(arguments)` in a process at the repository's root that has this environment, with `variables`, and writes into
    these files.

    `anew`: in an interpreter of its own in any case.
    """
    words, environment = [*map(str, arguments)], {**os.environ, **OFFLINE, **preloaded(), **variables}
    if FORKS and not anew:
        return Forked(main, words, out, err, environment)
    imported = f"import sys; sys.path[:] = {sys.path!r}; from {main.__module__} import {main.__qualname__} as main"
    with out.open("ab") as to, err.open("ab") as errors:
        return subprocess.Popen(
            [sys.executable, "-c", f"{imported}; main(sys.argv[1:])", *words],
            stdin=subprocess.DEVNULL,
            stdout=to,
            stderr=errors,
            cwd=ROOT,
            env=environment,
        )


def run(main: Main, *arguments: Any, timeout: float = 200.0) -> subprocess.CompletedProcess[str]:
    """What `main(arguments)` wrote, in a process of its own, and how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        process = begin(main, arguments, out, err)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        return subprocess.CompletedProcess([*arguments], code, out.read_text(), err.read_text())


def _server() -> ForkServerContext:
    """Of the process that forks, which begins with the first process that is wanted of it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    before: Mapping[str, str] = dict(os.environ)
    os.environ.update(OFFLINE | preloaded())
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def _run(module: str, name: str, arguments: list[str], out: str, err: str, environment: dict[str, str]) -> None:
    for path, stream in ((out, 1), (err, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, stream)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    sys.argv = ["prefixcache", *arguments]
    getattr(import_module(module), name)(arguments)
