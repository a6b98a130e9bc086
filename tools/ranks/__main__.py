"""`python -m tools.ranks`: random requests on real ranks, with faults on single ones, beside cold runs of the same ranks.

Prints a line for each case (how it is sharded, what kind of model, how many ranks), and the sum. Exit code 1 where an answer
deviated, a run hung or failed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tools.ranks.launch import nccl, ring
from tools.ranks.models import CASES, TENSOR, Case

STUCK = 120.0  # seconds without a word, after which a run hangs


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.ranks", description=__doc__)
    parser.add_argument("--requests", type=int, default=640, help="in each case")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 3])
    parser.add_argument("--only", nargs="*", default=[], metavar="HOW-KIND", help="such as tp-dense or pp-hybrid")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=1, help="cases that run at the same time")
    parser.add_argument("--alone", action="store_true", help="ranks that don't agree: shows what agreement is for")
    parser.add_argument("--gpu", action="store_true", help="a GPU for each rank; tensor-parallel through NCCL")
    given = parser.parse_args()
    cases = [case for case in CASES if not given.only or "-".join(case) in given.only]
    runs = [(case, size) for size in given.ranks for case in cases]
    total: dict[str, int] = {}
    with ThreadPoolExecutor(given.at_once) as pool:
        for (case, size), told in zip(runs, pool.map(lambda run: one(run[0], run[1], given), runs), strict=True):
            print(f"{case.how} {case.family:8} {size} ranks: {told['line']}", flush=True)
            for name, count in told["counts"].items():
                total[name] = total.get(name, 0) + count
    print("in all: " + ", ".join(f"{count:,} {name}" for name, count in sorted(total.items())))
    sys.exit(any(total.get(name) for name in ("deviation", "hang", "failure")) or not total)


def one(case: Case, size: int, given: Any) -> dict[str, Any]:
    """Run a case; what it counted, and a line of it."""
    folder, began = Path(tempfile.mkdtemp(prefix="ranks-")), time.monotonic()
    run = {
        "requests": given.requests,
        "seed": given.seed + size,
        "folder": str(folder / "ssd"),
        "agree": not given.alone,
        "gpu": given.gpu,
    }
    command = [sys.executable, "-m", "tools.ranks.worker", json.dumps({**case._asdict(), **run})]
    logs = [folder / f"rank-{rank}.log" for rank in range(size)]
    outputs = [log.open("wb") for log in logs]
    # On a GPU the rows of a hit and of a cold run would differ by what TF32 leaves out.
    processes = (nccl if given.gpu and case.how == TENSOR else ring)(
        command, size, outputs, env={"MLX_ENABLE_TF32": "0"}
    )
    quiet, seen, hung = time.monotonic(), -1, False
    while any(process.poll() is None for process in processes):
        time.sleep(0.2)
        said = sum(log.stat().st_size for log in logs)
        if said != seen:
            seen, quiet = said, time.monotonic()
        if time.monotonic() - quiet > STUCK or any(process.poll() for process in processes):
            hung = time.monotonic() - quiet > STUCK
            for process in processes:
                process.kill()
    for output in outputs:
        output.close()
    counts = {"hang" if hung else "failure": 1}
    ended = [line for line in logs[0].read_text(errors="replace").splitlines() if '"done"' in line]
    deviations = sum(log.read_text(errors="replace").count("another answer") for log in logs)
    if ended and not hung and not any(process.returncode for process in processes):
        counts = {name: count for name, count in json.loads(ended[-1]).items() if name != "rank"}
        counts["requests"] = counts.pop("done")
    else:
        for log in logs:
            print(f"--- {log}\n" + log.read_text(errors="replace")[-3000:], file=sys.stderr)
    counts["deviation"] = deviations
    line = ", ".join(f"{count:,} {name}" for name, count in counts.items()) + f"; {time.monotonic() - began:.0f} s"
    shutil.rmtree(folder, ignore_errors=True)
    return {"counts": counts, "line": line}


if __name__ == "__main__":
    main()
