"""`prefixcache serve` on several ranks of this machine, as `mlx.launch` starts it."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import requests

from prefixcache.cli import app
from tests.models.families import FAMILIES
from tests.servers.forked import begin
from tests.servers.serving import SECONDS, TROUBLE, VOCABULARY, Endpoint, save_model, wait_for
from tools.ranks.launch import gpus, nccl_variables, ring_variables

COMMAND = f"import sys; sys.path[:] = {sys.path!r}; from prefixcache.cli import app; app(prog_name='prefixcache')"
EXACT = {"MLX_ENABLE_TF32": "0"}  # a GPU's rows of a hit and of a cold run would differ
EXPECTED = re.compile(r"not recommended for production|Future(Warning)?")


def save_sharded(folder: Path, family: str, **fields: Any) -> Path:
    """A model that several ranks can load, in a pipeline, too."""
    build = FAMILIES[family].build
    if isinstance(build, partial) and (text := build.args[1].get("text_config")):
        fields["text_config"] = {**text, "vocab_size": VOCABULARY}
    save_model(folder, family, **fields)
    names = mx.load(str(folder / "model.safetensors"))
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def run_command(arguments: list[str]) -> None:
    """Run the first argument, which is Python, and then the command that the others are."""
    sys.argv[1:] = arguments[1:]
    exec(arguments[0], {})
    app(prog_name="prefixcache")


class RankServer(Endpoint):
    """Ranks that serve one model, and what each one logs."""

    def __init__(self, logs: Path, size: int, *flags: Any, before: str = ""):
        self.logs = [logs.with_name(f"{logs.name}-{rank}") for rank in range(size)]
        for log in self.logs:
            log.touch()
        words = [before, "serve", "--port", "0", *flags]
        on_gpus = gpus() >= size and "--pipeline" not in flags
        self.ranks = [
            begin(run_command, words, log, log, **EXACT, **variables)
            for log, variables in zip(self.logs, nccl_variables(size) if on_gpus else ring_variables(size), strict=True)
        ]

    def said(self, rank: int = 0) -> str:
        return self.logs[rank].read_text(errors="replace")

    def ready(self) -> RankServer:
        self.url = wait_for(self._address, "ranks that take requests", self.logs[0])
        return self

    def _address(self) -> str:
        ended = [rank for rank, process in enumerate(self.ranks) if process.poll() is not None]
        assert not ended, f"ranks {ended} ended:\n" + "\n".join(map(self.said, ended))
        address = re.search(r"serving at (http://\S+)", self.said())
        return address[1] if address else ""

    def troubles(self) -> list[str]:
        lines = [line for rank in range(len(self.ranks)) for line in self.said(rank).splitlines()]
        return [line for line in lines if TROUBLE.search(line) and not EXPECTED.search(line)]

    def send(self, rank: int, signum: int) -> None:
        self.ranks[rank].send_signal(signum)

    def wait(self, seconds: float = SECONDS) -> list[int]:
        """The exit codes, once all have ended."""
        until = time.monotonic() + seconds
        return [process.wait(max(until - time.monotonic(), 0.1)) for process in self.ranks]

    def metrics_text(self) -> str:
        return requests.get(f"{self.url}/metrics", timeout=SECONDS).text


@contextmanager
def rank_serving(logs: Path, size: int, *flags: Any, before: str = "") -> Iterator[RankServer]:
    """Ranks that serve; those that still run at the end of the block must end in order. `before`: what each runs first."""
    server = RankServer(logs, size, "--codec", "raw", "--ram", "100MB", "--no-canonical", *flags, before=before)
    try:
        yield server.ready()
        if all(process.poll() is None for process in server.ranks):
            server.send(0, signal.SIGTERM)
            assert server.wait() == [0] * size, server.said()
            assert server.troubles() == []
    finally:
        for process in server.ranks:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGCONT)
                process.kill()
                process.wait()
