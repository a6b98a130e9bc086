"""How a figure looks, how it is timed against its reference, and the command line that every bench shares.

A bench module has a table `FIGURES`: name -> function of a scale ("full", "quick" or "tiny") that yields `Figure`s. All
that is compared is measured in one run, in turns, because the machine is never quiet.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
SCALES = ("full", "quick", "tiny")

RATIO = "ratio: how many times better prefixcache is; under 1 the other is ahead"
WIDTH = 200  # columns of the table, where it doesn't go to a terminal

scratch_parent = tempfile.gettempdir()  # `--dir`: files are written below it


class Beside(NamedTuple):
    """What a peer has at the same task, or why there is nothing; how many times better ours is, where it is a number."""

    who: str
    said: str
    ratio: str = ""


@dataclass(frozen=True)
class Figure:
    """One line of the report. `met` is None where there is no bar; `raw` has the numbers behind the text, for `--json`.

    What it is compared with stands in `reference`, or, where that is other projects, one a line in `beside`.
    """

    name: str
    measured: str
    bar: str
    reference: str
    met: bool | None
    raw: dict[str, Any] = field(default_factory=dict)
    beside: tuple[Beside, ...] = ()


def without_bar(figure: Figure) -> Figure:
    """The same, for the reader alone: nobody is held to it."""
    return replace(figure, bar="", met=None)


def has_a_gpu() -> bool:
    """Does MLX work on one by default?"""
    import mlx.core as mx

    return mx.default_device().type == mx.DeviceType.gpu


def needs_a_gpu(name: str, said: str = "") -> Figure:
    """The row of a figure that this machine can't give."""
    return Figure(name, f"needs a GPU{': ' if said else ''}{said}", "", "", None)


Bench = Callable[[str], Iterable[Figure]]


# -- measuring ---------------------------------------------------------------------------------------------------------


def seconds(work: Callable[[], Any]) -> float:
    """How long one call takes; the garbage collector waits, so that one figure does not pay for another's."""
    gc.collect()
    gc.disable()
    try:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin
    finally:
        gc.enable()


def in_turns(rounds: int, *works: Callable[[int], float]) -> list[list[float]]:
    """Call each with the number of the round, `rounds` times, every other round in reverse; what each gave, by work."""
    found: list[list[float]] = [[] for _ in works]
    for number in range(rounds):
        order = list(enumerate(works))
        for i, work in order if number % 2 == 0 else reversed(order):
            found[i].append(work(number))
    return found


def median_ratio(over: list[float], under: list[float]) -> float:
    """The median of the ratios of each round: what slows a whole round down cancels."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def rss() -> int:
    """Bytes of this process that are in memory now."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return int(subprocess.check_output(["ps", "-o", "rss=", "-p", str(os.getpid())])) * 1024


def trim_heap() -> bool:
    """Ask the C library to give free memory back to the system. False where it has no such call."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        return False
    return True


def in_child(module: str, function: str, *args: Any) -> Any:
    """The JSON that `function` of a module of this package returns, called in a fresh process."""
    code = (
        f"import json, sys; from tools.bench import {module}; "
        f"print(json.dumps({module}.{function}(*json.loads(sys.argv[1]))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(args)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{module}.{function} failed in its process:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder of one's own, gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="prefixcache-bench-", dir=scratch_parent) as folder:
        yield Path(folder)


def forget_pages(paths: Iterable[Path | str]) -> None:
    """Take files out of the page cache, where the system can (nothing happens on macOS)."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


# -- showing -----------------------------------------------------------------------------------------------------------


def table_of(figures: Iterable[Figure]) -> Table:
    """One row a figure; a peer has a line of its own."""
    table = Table(
        "figure",
        "prefixcache",
        "beside it, same run",
        "ratio",
        "bar",
        "met",
        title="prefixcache, measured",
        caption=RATIO,
    )
    verdicts = {True: "[green]yes[/]", False: "[bold red]no[/]", None: ""}
    for figure in figures:
        first, *others = figure.beside or (Beside("", figure.reference),)
        table.add_row(
            escape(figure.name),
            escape(figure.measured),
            _told(first),
            first.ratio,
            figure.bar,
            verdicts[figure.met],
            end_section=not others,
        )
        for i, other in enumerate(others):
            table.add_row("", "", _told(other), other.ratio, "", "", end_section=i == len(others) - 1)
    return table


def _told(beside: Beside) -> str:
    return escape(f"{beside.who}: {beside.said}" if beside.who else beside.said)


def as_json(figures: list[Figure], scale: str) -> dict[str, Any]:
    packages = {name: version(name) for name in ("prefixcache", "mlx", "mlx-lm", "numpy")}
    machine = {
        "system": platform.platform(),
        "processor": processor(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
    }
    return {
        "date": time.strftime("%Y-%m-%d"),
        "scale": scale,
        "machine": machine,
        "packages": packages,
        "figures": [asdict(f) for f in figures],
    }


def processor() -> str:
    """What the CPU calls itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def load(groups: Mapping[str, Sequence[str]], only: Collection[str] = ()) -> dict[str, dict[str, Bench]]:
    """Import the modules of the groups that `only` names, or of all where it names none or a figure. Return the figures."""
    named = only and set(only) <= groups.keys()
    return {
        group: {name: b for module in modules for name, b in import_module(f"tools.bench.{module}").FIGURES.items()}
        for group, modules in groups.items()
        if group in only or not named
    }


def chosen(benches: Mapping[str, Mapping[str, Bench]], only: list[str]) -> dict[str, Bench]:
    """The benches of these names: a figure's ("match") or a group's ("lookup"); all where none is named."""
    every = {name: bench for group in benches.values() for name, bench in group.items()}
    unknown = [name for name in only if name not in every and name not in benches]
    if unknown:
        raise SystemExit(f"--only {unknown[0]}: no such figure or group; choose from {', '.join([*benches, *every])}")
    wanted = {figure for name in only for figure in benches.get(name, [name])}
    return {name: bench for name, bench in every.items() if not only or name in wanted}


def main(groups: Mapping[str, Sequence[str]], arguments: list[str] | None = None) -> int:
    """The command line. The exit code is 0 whatever was measured, unless a bench failed."""
    global scratch_parent
    parser = argparse.ArgumentParser(description="Measure prefixcache, each figure beside its reference.")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME", help=f"a figure or a group: {', '.join(groups)}"
    )
    parser.add_argument("--quick", action="store_const", const="quick", dest="scale", help="smaller, noisier")
    parser.add_argument("--scale", choices=SCALES, help=argparse.SUPPRESS)
    parser.set_defaults(scale="full")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the numbers there")
    parser.add_argument(
        "--dir", metavar="DIR", default=scratch_parent, help="where files are written: a folder on the SSD"
    )
    options = parser.parse_args(arguments)
    scratch_parent = options.dir
    figures: list[Figure] = []
    notes = Console(stderr=True)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for name, bench in chosen(load(groups, options.only), options.only).items():
        begin = time.perf_counter()
        with notes.status(f"{name} ..."):
            figures += bench(options.scale)
        notes.print(f"[dim]{name}: {time.perf_counter() - begin:.1f} s[/]")
    console.print(table_of(figures))
    missed = [figure.name for figure in figures if figure.met is False]
    console.print(f"missed: {', '.join(missed)}" if missed else "every bar met")
    if options.json:
        options.json.write_text(json.dumps(as_json(figures, options.scale), indent=2) + "\n")
    return 0
