"""Processes that are the ranks of one ring on this machine."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import IO, Any


def free_ports(count: int) -> list[int]:
    """Return ports below 32768 that nobody has: no system gives one of these to a connection before a server takes it."""
    free: list[int] = []
    for port in random.SystemRandom().sample(range(15_000, 32_000), 100 * count):  # Hypothesis seeds the usual one
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            free.append(port)
        if len(free) == count:
            return free
    raise OSError("no free port")


def ring(
    command: Sequence[str], size: int, outputs: Sequence[IO[Any] | int], **options: Any
) -> list[subprocess.Popen[Any]]:
    """Start `size` ranks of a command, as `mlx.launch --backend ring` does, but none is killed when another ends. Where
    there are GPUs, they take turns with them.

    `outputs`: where each one writes to. `options`: of `subprocess.Popen`; `env` is added to this environment.
    """
    return _start(command, outputs, ring_variables(size), options)


def nccl(
    command: Sequence[str], size: int, outputs: Sequence[IO[Any] | int], **options: Any
) -> list[subprocess.Popen[Any]]:
    """The same with NCCL, which needs a GPU for each rank. It has no pipelines: MLX can't send and receive there."""
    return _start(command, outputs, nccl_variables(size), options)


def ring_variables(size: int) -> list[dict[str, str]]:
    """Return the variables that make each of `size` processes a rank of one ring."""
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as hosts:
        json.dump([[f"127.0.0.1:{port}"] for port in free_ports(size)], hosts)
    return [_of_rank(rank, {"MLX_HOSTFILE": hosts.name}) for rank in range(size)]


def nccl_variables(size: int) -> list[dict[str, str]]:
    """The same for NCCL."""
    port = str(free_ports(1)[0])
    group = {"NCCL_HOST_IP": "127.0.0.1", "NCCL_PORT": port, "MLX_WORLD_SIZE": str(size)}
    return [_of_rank(rank, group) for rank in range(size)]


def _of_rank(rank: int, group: dict[str, str]) -> dict[str, str]:
    return {**group, **_gpu(rank), **OF_RANK.get(rank, {}), "MLX_RANK": str(rank)}


def _gpu(rank: int) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": str(rank % count)} if (count := gpus()) else {}


@cache
def gpus() -> int:
    """How many NVIDIA GPUs this machine has."""
    try:
        return len(subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout.splitlines())
    except (OSError, subprocess.CalledProcessError):
        return 0


OF_RANK: dict[int, dict[str, str]] = {}  # variables of single ranks


def _start(
    command: Sequence[str], outputs: Sequence[IO[Any] | int], ranks: Sequence[dict[str, str]], options: dict[str, Any]
) -> list[subprocess.Popen[Any]]:
    environment = {**os.environ, **options.pop("env", {})}
    return [
        subprocess.Popen(
            command,
            env={**environment, **variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            **options,
        )
        for output, variables in zip(outputs, ranks, strict=True)
    ]
