"""Fuzzing guided by coverage: `python -m tests.fuzz.atheris_run [--seconds 60] [TARGET ...]`, which `make fuzz` runs.

Each target runs in a process of its own, from seeds that are made here. Ends with the runs, the coverage and the crashes of
each; the exit status is 1 when there was one, whose input is then named and kept. Needs the package atheris (Linux).
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

NAMES = ("image", "header", "index", "note", "lock", "words", "ranges", "media")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(NAMES))
    parser.add_argument("--seconds", type=int, default=60, help="for each target (60)")
    parser.add_argument("--keep", type=Path, help="a folder for the corpus and the crashes (a temporary one)")
    given = parser.parse_args()
    if unknown := set(given.targets) - set(NAMES):
        parser.error(f"{min(unknown)!r}: no such target; there are {', '.join(NAMES)}")
    try:
        import atheris  # noqa: F401
    except ImportError:
        print("atheris is not installed: pip install atheris (Linux, Python 3.11 to 3.13)", file=sys.stderr)
        return 2
    folder = given.keep or Path(tempfile.mkdtemp(prefix="prefixcache-fuzz-"))
    crashed = 0
    for name in given.targets or NAMES:
        runs, coverage, crashes = fuzz(name, given.seconds, folder)
        print(f"{name:8} {runs:>10} runs   {coverage:>5} branches   {len(crashes)} crashes", flush=True)
        for crash in crashes:
            print(f"         {crash}: python -m tests.fuzz.atheris_child {name} {crash}")
        crashed += len(crashes)
    return 1 if crashed else 0


def fuzz(name: str, seconds: int, folder: Path) -> tuple[int, int, list[Path]]:
    """Runs, branches reached, and the inputs that broke a promise."""
    corpus, crashes = folder / name / "corpus", folder / name / "crashes"
    for each in (corpus, crashes):
        each.mkdir(parents=True, exist_ok=True)
    options = [
        f"-max_total_time={seconds}",
        "-print_final_stats=1",
        "-rss_limit_mb=4096",
        "-timeout=20",
        "-max_len=20000",
        f"-artifact_prefix={crashes}/",
        "-verbosity=1",
    ]
    command = [sys.executable, "-m", "tests.fuzz.atheris_child", name, *options, str(corpus)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=seconds + 120)
    found = sorted(crashes.iterdir())
    if done.returncode and not found:
        print(done.stdout[-2000:] + done.stderr[-4000:], file=sys.stderr)
        raise SystemExit(f"{name}: the fuzzer itself failed")
    if found:
        print(done.stdout[-3000:], file=sys.stderr)
    runs = re.findall(r"stat::number_of_executed_units:\s*(\d+)", done.stderr)
    coverage = re.findall(r"cov: (\d+)", done.stderr)
    return int(runs[-1]) if runs else 0, int(coverage[-1]) if coverage else 0, found


if __name__ == "__main__":
    sys.exit(main())
