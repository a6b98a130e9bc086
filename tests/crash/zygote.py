"""A process that has everything imported and forks a child for each run: tenths of a second each, where an interpreter
that begins anew takes seconds.

Started with the shim loaded. Reads one JSON object a line, a job; answers with one, what became of the child. MLX runs
in the children only: its threads would not survive a fork.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import logging
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy

from prefixcache import PrefixCache
from prefixcache.ssd import queue, reconcile
from tests.crash.checks import check
from tests.crash.prompts import LEVELLED
from tests.crash.scenario import Scenario
from tests.crash.stalled import stalled
from tools.faults.shim import CHANGES, COUNT, Shim

LIMIT = 60.0  # seconds after which a child hangs


def run_scenario(job: dict[str, Any], shim: Shim) -> dict[str, Any]:
    scenario = Scenario(job["root"], shim)
    scenario.run()
    return {"calls": shim.count, "fired": shim.fired, "faults": scenario.faults}


def run_check(job: dict[str, Any], shim: Shim) -> dict[str, Any]:
    found = check(job["root"], job["promises"], shim.say, strict=job.get("strict", True))
    return {"calls": shim.count, **found}


def run_stalled(job: dict[str, Any], shim: Shim) -> dict[str, Any]:
    stalled(job["root"], shim, job["stall_at"])
    return {"calls": shim.count, "fired": shim.fired}


JOBS: dict[str, Callable[[dict[str, Any], Shim], dict[str, Any]]] = {
    "scenario": run_scenario,
    "check": run_check,
    "stalled": run_stalled,
}


def child(job: dict[str, Any], report: int) -> None:
    """One run; its last line says how it ended, if it comes that far."""
    shim = Shim()
    journal = -1
    if job.get("journal"):
        journal = os.open(job["journal"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    parent = os.path.dirname(job["root"])
    shim.arm(
        parent, job.get("mode", COUNT), job.get("at", 0), job.get("mask", CHANGES), job.get("errno", 0), report, journal
    )
    try:
        ended = {"ok": True, **JOBS[job["do"]](job, shim)}
    except BaseException as error:
        ended = {"ok": False, "error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    shim.lift()
    shim.say(json.dumps(["end", ended]))


def serve_one(job: dict[str, Any]) -> dict[str, Any]:
    out, into = os.pipe()
    began = time.monotonic()
    pid = os.fork()
    if not pid:
        try:
            os.close(out)
            child(job, into)
        finally:
            os._exit(0)
    os.close(into)
    fcntl.fcntl(out, fcntl.F_SETPIPE_SZ, 1 << 20)  # no word waits for its reader
    told, hung, give_up = bytearray(), False, began + LIMIT
    kill_at = began + job["kill_after"] if job.get("kill_after") is not None else give_up + LIMIT
    while True:
        if (now := time.monotonic()) >= min(give_up, kill_at):
            hung = now >= give_up
            give_up = kill_at = now + LIMIT
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        elif select.select([out], [], [], min(give_up, kill_at) - now)[0]:
            if not (some := os.read(out, 1 << 20)):
                break
            told += some
    os.close(out)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    lines = told.decode().splitlines()
    whole = [line for line in lines if line.startswith("[") and line.endswith("]")]
    words = [json.loads(line) for line in whole]
    ended = next((what for word, what in words if word == "end"), None)
    return {
        "died": status == -signal.SIGKILL and not hung,
        "hung": hung,
        "status": status,
        "fired": next((line[1:] for line in lines if line.startswith("!")), ""),
        "words": [word for word in words if word[0] != "end"],
        "end": ended,
        "seconds": time.monotonic() - began,
    }


def warm() -> None:
    """Do once what every child would do again: late imports, patterns, plans. Nothing of MLX, and its threads end."""
    with tempfile.TemporaryDirectory() as folder:
        PrefixCache(ram=1 << 20, ssd_dir=folder, ssd=1 << 20, codec=LEVELLED).close()
        reconcile(folder, deep=True)
    numpy.unique(numpy.arange(3))  # imports numpy.ma


def serve() -> None:
    queue.FIRST_DELAY, queue.LONGEST_DELAY = 0.02, 0.1
    logging.disable(logging.CRITICAL)
    warm()
    gc.freeze()
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(serve_one(job)), flush=True)


if __name__ == "__main__":
    serve()
