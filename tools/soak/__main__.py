"""`python -m tools.soak`: the command. The table comes at the end, also after Ctrl-C; exit code 1 tells of a violation."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from tools.soak.engines import KINDS, Unavailable, running
from tools.soak.fleet import Fleet
from tools.soak.judge import Judge
from tools.soak.prompts import TRACE
from tools.soak.report import Outcome


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--hours", type=float, default=0.0, help="in the place of minutes")
    parser.add_argument("--seed", type=int, help="the same seed, minutes and threads give the same schedule")
    parser.add_argument("--threads", type=int, default=4, help="clients at once")
    parser.add_argument("--tokens", type=int, default=24, help="tokens that a block of the trace becomes, 1 to 64")
    parser.add_argument("--directory", type=Path, help="where to work; kept afterwards. None: a temporary one")
    parser.add_argument("--json", type=Path, help="write the outcome there, too")
    parser.add_argument("--plant", choices=("answer", "file", "log"), default="", help="a fault that must be found")
    parser.add_argument(
        "--codec",
        choices=("raw", "transform:5"),
        default="raw",
        help="transform:5: rows are near, not exact",
    )
    parser.add_argument(
        "--remote",
        nargs="?",
        const="valkey",
        choices=KINDS,
        help="several machines that share a real engine: valkey (if no other is named), s3 (SeaweedFS) or file",
    )
    parser.add_argument("--machines", type=int, default=2, help="with --remote: how many")
    parser.add_argument("--stop", action="store_true", help="end at the first violation")
    options = parser.parse_args(words)
    if not TRACE.exists():
        parser.error(f"{TRACE} is missing: run this in a clone of the repository")
    if not 1 <= options.tokens <= 64:
        parser.error(f"--tokens {options.tokens}: give 1 to 64")
    if not 1 <= options.machines <= 16:
        parser.error(f"--machines {options.machines}: give 1 to 16")
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(1_000_000)
    seconds = options.hours * 3600 or options.minutes * 60
    where = options.directory or Path(tempfile.mkdtemp(prefix="prefixcache-soak-"))
    where.mkdir(parents=True, exist_ok=True)
    print(f"seed {seed}, {seconds:.0f} s, {options.threads} threads, in {where}", flush=True)
    how: dict[str, Any] = {
        "seed": seed,
        "seconds": seconds,
        "threads": options.threads,
        "where": where,
        "run": options.tokens,
        "plant": options.plant,
        "stop": options.stop,
        "codec": options.codec,
    }
    try:
        log, outcome = _run_fleet(options.remote, options.machines, how) if options.remote else _run(how)
    except Unavailable as error:
        print(f"skipped: --remote {options.remote}: {error}")
        return 0
    print(outcome.table())
    if options.json:
        options.json.write_text(json.dumps(outcome.as_dict(), indent=1) + "\n")
    again = (
        f"--seed {seed} --minutes {seconds / 60:g} --threads {options.threads} --tokens {options.tokens} "
        f"--codec {options.codec}"
        + (f" --remote {options.remote} --machines {options.machines}" if options.remote else "")
    )
    if outcome.exit_code:
        print(f"VIOLATIONS. To run it again: python -m tools.soak {again}; the log is {log}")
    elif options.directory is None:
        shutil.rmtree(where, ignore_errors=True)
    return outcome.exit_code


def _run(how: dict[str, Any]) -> tuple[Any, Outcome]:
    """Where the log is, and the outcome."""
    judge = Judge(**how)
    return judge.log, judge.run()


def _run_fleet(kind: str, machines: int, how: dict[str, Any]) -> tuple[Any, Outcome]:
    with running(kind, how["where"]) as engine:
        fleet = Fleet(engine, machines=machines, **how)
        return fleet.log, fleet.run()


if __name__ == "__main__":
    sys.exit(main())
