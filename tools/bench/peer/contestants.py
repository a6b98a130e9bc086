"""Who is compared, and how tasks are put to one: in a process of its own, in its own environment.

A peer that can't be installed, or fails, gives the reason in place of numbers. Ours has to work.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from tools.bench.peer import venv

LONGEST = 600  # seconds that one task may take


@dataclass(frozen=True)
class Contestant:
    """`side` is its module in this folder; `installed`: in this project's environment; `options`: of the side's own."""

    name: str
    side: str
    installed: bool
    options: tuple[str, ...] = ()


OURS = Contestant("prefixcache", "ours", True)
MLX_LM = Contestant(f"mlx-lm {version('mlx-lm')} LRUPromptCache", "mlx_lm", True)
VLLM_MLX = Contestant("vllm-mlx 0.6.0", "vllm_mlx", False)
VLLM_MLX_SCHEDULED = Contestant("vllm-mlx 0.6.0, as its scheduler stores", "vllm_mlx", False, ("as-scheduled",))
MLX_VLM = Contestant("mlx-vlm 0.7.10 APC", "mlx_vlm", False)
MLX_VLM_CODEC = Contestant("mlx-vlm 0.7.10 TurboQuant", "mlx_vlm_turboquant", False)


@dataclass(frozen=True)
class Answer:
    """What a contestant found, or why it found nothing."""

    found: dict[str, Any] | None
    why: str = ""


class Task(NamedTuple):
    """A task of `tools/bench/peer/tasks.py`, or of another module there, and its arguments."""

    name: str
    plan: dict[str, Any]


def ask(who: Contestant, *tasks: Task, module: str = "tasks") -> list[Answer]:
    """These tasks, one after the other, in one fresh process. Raises RuntimeError when it is ours that fails."""
    try:
        python = Path(sys.executable) if who.installed else venv.python()
    except venv.NotInstalled as missing:
        return [Answer(None, str(missing))] * len(tasks)
    side = ":".join([who.side, *who.options])
    command = [str(python), "-m", f"tools.bench.peer.{module}", side, json.dumps(tasks)]
    environment = {**os.environ, "PYTHONPATH": str(venv.ROOT), "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(command, cwd=venv.ROOT, env=environment, capture_output=True, text=True, timeout=LONGEST)
    except subprocess.TimeoutExpired:
        return [_failed(who, f"not done after {LONGEST} s")] * len(tasks)
    if done.returncode == -signal.SIGKILL and any(task.plan.get("kill") for task in tasks):
        return [Answer({})] * len(tasks)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return [_failed(who, f"failed: {said}", done.stderr)] * len(tasks)
    return [Answer(found) for found in json.loads(done.stdout.splitlines()[-1])]


def _failed(who: Contestant, why: str, said: str = "") -> Answer:
    if who is OURS:
        raise RuntimeError(f"{why}\n{said[-4000:]}")
    return Answer(None, why)
