"""sglang-router 0.3.2 as a process in front of servers, from an environment of its own."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import requests

from tests.peers.wheels import installed
from tests.servers.serving import SECONDS, Endpoint, Server, wait_for
from tools.ranks.launch import free_ports

RELEASE = "sglang-router==0.3.2"


class Router(Endpoint):
    def __init__(self, url: str):
        self.url = url


@contextmanager
def routing(workers: list[Server], log: Path, *flags: str) -> Iterator[Router]:
    """A router in front of these servers, all of which it has found healthy; at the end of the block it is killed."""
    port, metrics = free_ports(2)
    command = [
        str(installed(RELEASE)),
        "-m",
        "sglang_router.launch_router",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--prometheus-host",
        "127.0.0.1",
        "--prometheus-port",
        str(metrics),
        "--worker-urls",
        *(worker.url for worker in workers),
        *flags,
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with log.open("wb") as said:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: process.poll() is not None or healthy(url) == len(workers), "router that is ready", log)
        assert process.poll() is None, log.read_text(errors="replace")
        yield Router(url)
    finally:
        process.kill()
        process.wait()


def healthy(url: str) -> int:
    """How many servers a router sends requests to."""
    try:
        return requests.get(f"{url}/readiness", timeout=SECONDS).json().get("healthy_workers", 0)
    except (requests.ConnectionError, ValueError):
        return 0
