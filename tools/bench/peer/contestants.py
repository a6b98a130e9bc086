"""Who is compared, and how a task is put to one: in a process of its own, in its own environment.

A peer that can't be installed, or fails, gives the reason in place of numbers. Ours has to work.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tools.bench.peer import venv

LONGEST = 600  # seconds that one task may take


@dataclass(frozen=True)
class Contestant:
    """`side` is its module in this folder; `installed`: in this project's environment."""

    name: str
    side: str
    installed: bool


OURS = Contestant("prefixcache", "ours", True)
MLX_LM = Contestant(f"mlx-lm {version('mlx-lm')} LRUPromptCache", "mlx_lm", True)
VLLM_MLX = Contestant("vllm-mlx 0.6.0", "vllm_mlx", False)
VLLM_MLX_SCHEDULED = Contestant("vllm-mlx 0.6.0, as its scheduler stores", "vllm_mlx", False)
MLX_VLM = Contestant("mlx-vlm 0.7.10 APC", "mlx_vlm", False)
MLX_VLM_CODEC = Contestant("mlx-vlm 0.7.10 TurboQuant", "mlx_vlm_turboquant", False)


@dataclass(frozen=True)
class Answer:
    """What a contestant found, or why it found nothing."""

    found: dict[str, Any] | None
    why: str = ""


def ask(who: Contestant, task: str, module: str = "tasks", **plan: Any) -> Answer:
    """One task in a fresh process. Raises RuntimeError when it is ours that fails."""
    try:
        python = Path(sys.executable) if who.installed else venv.python()
    except venv.NotInstalled as missing:
        return Answer(None, str(missing))
    command = [str(python), "-m", f"tools.bench.peer.{module}", who.side, task, json.dumps(plan)]
    environment = {**os.environ, "PYTHONPATH": str(venv.ROOT), "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            command, cwd=venv.ROOT, env=environment, capture_output=True, text=True, timeout=LONGEST
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return _failed(who, f"not done after {LONGEST} s")
    if done.returncode == -9 and plan.get("kill"):
        return Answer({})
    if done.returncode:
        return _failed(who, f"failed: {(done.stderr.strip().splitlines() or ['it said nothing'])[-1]}", done.stderr)
    return Answer(json.loads(done.stdout.splitlines()[-1]))


def _failed(who: Contestant, why: str, said: str = "") -> Answer:
    if who is OURS:
        raise RuntimeError(f"{why}\n{said[-4000:]}")
    return Answer(None, why)
