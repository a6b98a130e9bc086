"""Notices when the `mlx.launch` that started this process ends: it forwards no signal, and its ranks would go on without
anybody who reads what they say.

Only an ancestor that is `mlx.launch` is watched. Ranks that ssh, nohup or another program started outlive their parent; of
those on other machines, ssh's end or rank 0 ends them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import psutil

LOOK = 1.0  # seconds between two looks
NAMES = "mlx.launch", "mlx._distributed_utils.launch"  # the script; the module, after `python -m`


def when_launcher_ends(call: Callable[[int], None]) -> bool:
    """Have `call(pid)` called once, on a thread of its own, when the `mlx.launch` above this process has ended. False where
    there is none above it.
    """
    launcher = _launcher()
    if launcher is None:
        return False

    def watch() -> None:
        while _is_alive(launcher):
            time.sleep(LOOK)
        call(launcher.pid)

    threading.Thread(target=watch, name="prefixcache-launcher", daemon=True).start()
    return True


def _launcher() -> psutil.Process | None:
    """Return the nearest ancestor that is `mlx.launch`, whatever shells are in between."""
    try:
        ancestors = psutil.Process().parents()
    except psutil.Error:
        return None
    return next((process for process in ancestors if _is_launcher(process)), None)


def _is_launcher(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()
    except psutil.Error:  # another user's, or gone
        return False
    return any(os.path.basename(word) in NAMES for word in words[:4])  # interpreter, its options, script


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:  # it can't be told: as if it were
        return True
