"""Processes that are the ranks of one ring on this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def ring(command: Sequence[str], size: int, outputs: Sequence[IO[Any] | int], **options: Any) -> list[subprocess.Popen[Any]]:
    """Start `size` ranks of a command, as `mlx.launch --backend ring` does, but none is killed when another ends.

    `outputs`: where each one writes to.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as hosts:
        json.dump([[f"127.0.0.1:{port}"] for port in free_ports(size)], hosts)
    environment = {**os.environ, **options.pop("env", {}), "MLX_HOSTFILE": str(Path(hosts.name))}
    return [
        subprocess.Popen(
            command, env={**environment, "MLX_RANK": str(rank)}, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, **options,
        )
        for rank, output in enumerate(outputs)
    ]  # fmt: skip
