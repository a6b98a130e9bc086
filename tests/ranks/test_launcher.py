"""Ranks that a real `mlx.launch` started end when it does; ranks that something else started go on without it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.ranks.rank_serving import COMMAND, EXACT, save_sharded
from tests.servers.forked import OFFLINE, ROOT, preloaded
from tests.servers.serving import SECONDS, Endpoint, ask, text, wait_for
from tools.ranks.launch import free_ports

LAUNCH = Path(sys.executable).with_name("mlx.launch")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sharded(tmp_path_factory.mktemp("sharded") / "llama", "llama")


class Launched(Endpoint):
    """A launcher with two ranks, and what they say by way of it."""

    def __init__(self, log: Path, command: list[str], *, wrapped: bool = False):
        self.log = log
        rank = ["sh", "-c", '"$@"; exit', "sh", *command] if wrapped else command
        port = str(free_ports(1)[0])
        launch = [str(LAUNCH), "-n", "2", "--backend", "ring", "--starting-port", port, "--", *rank]
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                launch,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                cwd=ROOT,
                env={**os.environ, **OFFLINE, **preloaded(), **EXACT},
            )

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def ready(self) -> Launched:
        address = wait_for(
            lambda: re.search(r"serving at (http://\S+)", self.said()), "ranks that take requests", self.log
        )
        self.url = address[1]
        return self

    def ranks(self) -> list[psutil.Process]:
        """The processes of the two ranks, shells left out."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if "python" in child.name()]


@contextmanager
def launched(log: Path, *command: Any, before: str = "", wrapped: bool = False) -> Iterator[Launched]:
    launcher = Launched(log, [sys.executable, "-c", before + COMMAND, *map(str, command)], wrapped=wrapped)
    try:
        yield launcher
    finally:
        for process in (
            [*psutil.Process(launcher.process.pid).children(recursive=True)] if launcher.process.poll() is None else []
        ):
            process.kill()
        launcher.process.kill()
        launcher.process.wait()


def all_end(processes: list[psutil.Process]) -> None:
    """Wait until these have ended, zombies included; those that don't are killed."""
    _, left = psutil.wait_procs(processes, SECONDS)
    for process in left:
        process.kill()
    assert not left, f"{len(left)} ranks go on without their launcher"


@pytest.mark.parametrize(("signum", "wrapped"), [(signal.SIGTERM, False), (signal.SIGKILL, True)])
def test_ranks_end_in_order_when_their_launcher_does(model, tmp_path, signum, wrapped):
    serve = "serve", "--port", 0, "--codec", "raw", "--ram", "100MB", "--model", model, "--ssd-dir", tmp_path / "ssd"
    with launched(tmp_path / "log", *serve, wrapped=wrapped) as launcher:
        ask(launcher.ready(), [{"role": "user", "content": text(560)}])
        ranks = launcher.ranks()
        assert len(ranks) == 2
        launcher.process.send_signal(signum)  # and nobody waits for it: it stays as a zombie
        all_end(ranks)
    for rank in range(2):  # what RAM had was written
        assert list((tmp_path / "ssd" / f"rank-{rank}" / "rows").rglob("*.safetensors"))


LOADS_LONG = """
import time
import mlx_lm.server
load = mlx_lm.server.ModelProvider.load_default
def slowly(self):
    print("loading", flush=True)
    time.sleep(300)
mlx_lm.server.ModelProvider.load_default = slowly
"""


def test_ranks_that_load_a_model_end_with_their_launcher(model, tmp_path):
    serve = "serve", "--port", 0, "--codec", "raw", "--ram", "100MB", "--model", model
    with launched(tmp_path / "log", *serve, before=LOADS_LONG) as launcher:
        wait_for(lambda: launcher.said().count("loading") == 2, "ranks that load", launcher.log)
        ranks = launcher.ranks()
        assert len(ranks) == 2
        launcher.process.send_signal(signal.SIGTERM)
        all_end(ranks)


LEAVES = """
import os, sys
from pathlib import Path
from tools.ranks.launch import ring
outputs = [open(f"{sys.argv[1]}-{rank}", "wb") for rank in range(2)]
print(*(process.pid for process in ring(sys.argv[2:], 2, outputs)), flush=True)
os._exit(0)
"""


def test_ranks_that_something_else_started_go_on_without_it(model, tmp_path):
    serve = "serve", "--port", 0, "--codec", "raw", "--ram", "100MB", "--model", model
    command = [sys.executable, "-c", LEAVES, tmp_path / "log", sys.executable, "-c", COMMAND, *serve]
    environment = {**os.environ, **OFFLINE, **preloaded(), **EXACT, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*map(str, command)], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    ranks = [psutil.Process(int(pid)) for pid in done.stdout.split()]
    try:
        log, server = tmp_path / "log-0", Endpoint()
        address = wait_for(
            lambda: re.search(r"serving at (http://\S+)", log.read_text()), "ranks that take requests", log
        )
        server.url = address[1]
        assert all(rank.is_running() for rank in ranks)
        assert ask(server, [{"role": "user", "content": text(30)}]).generated > 0
        ranks[0].send_signal(signal.SIGTERM)
        all_end(ranks)
    finally:
        for rank in ranks:
            if rank.is_running():
                rank.kill()
