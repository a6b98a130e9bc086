"""Many sizes, side by side: a grid of `Cell`s, each simulated by a process that streams the trace by itself.

The processes share nothing but their progress, so each core takes the memory of one simulated cache. They end with the
process that started them, however that ends.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from prefixcache.codecs import Codec
from prefixcache.planning.fleet import simulate_fleet
from prefixcache.planning.model import ModelState
from prefixcache.planning.outcome import Cell, CellOutcome, Fleet, FleetOutcome
from prefixcache.planning.simulator import simulate
from prefixcache.trace.reading import Request, Trace

POLL_INTERVAL = 0.1  # seconds between two reads of the processes' progress
ENDLESS = 1 << 50  # bytes of a RAM that never evicts
FEW = 4_000_000  # ids of a trace that is kept in memory: 150 MB a process


class Workload(NamedTuple):
    """What every cell is tried on. `limit`: only so many of the trace's requests. `requests`: how many there are, for the
    progress; 0 where that is not known. `ids`: how many ids they have; where these are few, a process reads the trace once
    for all of its cells.
    """

    trace: Path
    state: ModelState
    codec: Codec
    block: int | None = None
    limit: int | None = None
    requests: int = 0
    ids: int | None = None


class Known(NamedTuple):
    """What needs no run: outcomes that are there, and the bytes of a RAM that never evicts, None where not known."""

    outcomes: Mapping[Cell, CellOutcome] = {}
    most: int | None = None


NOTHING_KNOWN = Known()


class CellFailed(RuntimeError):
    """A cell could not be simulated. The text names it."""


CellProgress = Callable[[int], None]  # is told how many requests of a cell are done
Progress = Callable[[int, int], None]  # is told what is done of all runs, and of how much
Report = Callable[[Sequence[int], int], None]  # is told the requests done in each run, and the runs that ended
Run = Callable[[Workload, Any, CellProgress], Any]  # simulates a cell or a fleet


def simulated(workload: Workload, cell: Cell, progress: CellProgress) -> CellOutcome:
    """Simulate one cell, in this process. ValueError of a trace that can't be read or a codec that is none."""
    block, requests = _requests(workload)
    return simulate(requests, workload.state, workload.codec, cell, block=block, progress=progress)


def simulated_fleet(workload: Workload, fleet: Fleet, progress: CellProgress) -> FleetOutcome:
    """Simulate one fleet, in this process. Errors as `simulated` has."""
    block, requests = _requests(workload)
    return simulate_fleet(requests, workload.state, workload.codec, fleet, block=block, progress=progress)


class _TraceRequests(NamedTuple):
    """A trace's requests, and the tokens that an id of theirs stands for."""

    block: int
    requests: Iterable[Request]


def _requests(workload: Workload) -> _TraceRequests:
    trace = workload.trace, workload.block, workload.limit
    if workload.ids is not None and workload.ids <= FEW:
        return _read(*trace, _version(workload.trace))
    return _stream(*trace)


def _stream(path: Path, block: int | None, limit: int | None) -> _TraceRequests:
    trace = Trace(path, block, limit=limit)
    return _TraceRequests(trace.block, trace)


@lru_cache(maxsize=1)
def _read(path: Path, block: int | None, limit: int | None, _version: Any) -> _TraceRequests:
    block, requests = _stream(path, block, limit)
    return _TraceRequests(block, tuple(requests))


def _version(path: Path) -> tuple[int, int] | None:
    """Return what is another when the file has changed; None where it can't be looked at, which `Trace` tells."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def sufficient_ram(endless: CellOutcome) -> int:
    """Return bytes of a RAM that never evicts, by the run of an endless one: its peak and half as much, because what fills
    three quarters of a RAM begins to be written ahead.
    """
    return endless.ram_peak * 3 // 2


def equivalent_cell(cell: Cell, most: int | None) -> Cell:
    """Return the cell to run for this one: cells whose outcomes can't differ have it in common.

    More RAM than `most`, which never evicts, changes nothing and writes nothing, unless hot prompts have a share of it or
    leases write;
    without an SSD its admission changes nothing. (Only the peak of RAM differs, by what a policy or an admission remembers.)
    With None every cell is run.
    """
    if most is None:
        return cell
    if cell.ram >= most and not (cell.hot or cell.lease):
        return Cell(ENDLESS)
    return cell if cell.ssd else cell._replace(admission="always")


def sweep(
    workload: Workload,
    cells: Sequence[Cell],
    *,
    known: Known = NOTHING_KNOWN,
    processes: int | None = None,
    progress: Progress | None = None,
) -> list[CellOutcome]:
    """Return the outcomes of `cells`, in their order. Cells that are equal, or can't differ by what is `known`, run
    once; those whose outcomes are known don't run again.

    `processes`: one a core unless told; with 1 all is done in this process. `progress(done, total)` is called several times
    a second, in requests (of all runs), or in runs where the workload doesn't say how many requests there are.

    The processes are spawned: a script that calls this needs the usual `if __name__ == "__main__":`. ValueError as
    `simulated` says, CellFailed (with the cell's name) for everything else; either ends all processes, and so do Ctrl-C
    and the end of this process.
    """
    outcomes = dict(known.outcomes)
    runs = [cell for cell in dict.fromkeys(equivalent_cell(cell, known.most) for cell in cells) if cell not in outcomes]
    runs.sort(key=lambda cell: (cell.ssd == 0, -cell.ssd, cell.ram))  # the longest first
    results = run_all(workload, runs, processes, progress, simulated)
    outcomes.update(zip(runs, results, strict=True))
    return [outcomes[equivalent_cell(cell, known.most)]._replace(cell=cell) for cell in cells]


def sweep_fleets(
    workload: Workload, fleets: Sequence[Fleet], *, processes: int | None = None, progress: Progress | None = None
) -> list[FleetOutcome]:
    """Return the outcomes of `fleets`, in their order. Else as `sweep`."""
    return run_all(workload, list(fleets), processes, progress, simulated_fleet)


def run_all(
    workload: Workload, runs: list[Any], processes: int | None, progress: Progress | None, run: Run
) -> list[Any]:
    """Have a module's function `run` simulate each of the runs. Else as `sweep`."""

    def report(done_by_run: Sequence[int], ended: int) -> None:
        if progress is not None and workload.requests:
            total = workload.requests * len(runs)
            progress(min(sum(done_by_run), total), total)
        elif progress is not None:
            progress(ended, len(runs))

    count = min(processes or cores(), len(runs))
    return _run_here(workload, runs, report, run) if count <= 1 else _run_in_pool(workload, runs, count, report, run)


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _run_here(workload: Workload, runs: list[Any], report: Report, run: Run) -> list[Any]:
    done = [0] * len(runs)
    outcomes: list[Any] = []
    for i, cell in enumerate(runs):

        def progress(requests: int, i: int = i) -> None:
            done[i] = requests
            report(done, len(outcomes))

        outcomes.append(_run_cell(workload, cell, progress, run))
        progress(workload.requests)
    return outcomes


def _run_cell(workload: Workload, cell: Any, progress: CellProgress, run: Run) -> Any:
    """Run a cell. An error names it, except where the trace or the model is what is wrong."""
    try:
        return run(workload, cell, progress)
    except ValueError:
        raise
    except Exception as error:
        raise CellFailed(f"{_name(cell)}: {type(error).__name__}: {error}") from error


def _name(run: Cell | Fleet) -> str:
    if isinstance(run, Fleet):
        tier = f"routing={run.routing}, remote_admission={run.remote_admission}"
        return f"{run.machines} machines of {_name(run.cell)}, {tier}"
    return f"ram={run.ram}, ssd={run.ssd}, policy={run.policy}, ssd_admission={run.admission}, hot={run.hot}"


# -- processes --------------------------------------------------------------------------------------------------------


def _run_in_pool(workload: Workload, runs: list[Any], count: int, report: Report, run: Run) -> list[Any]:
    context = multiprocessing.get_context("spawn")
    done: Any = context.RawArray("Q", len(runs))  # requests, written by the processes
    theirs, ours = context.Pipe(duplex=False)  # they end when our end is closed, however that comes
    pool = ProcessPoolExecutor(count, context, initializer=_start_process, initargs=(theirs, done))
    try:
        futures = _submit(pool, [(i, workload, cell, run) for i, cell in enumerate(runs)])
        waiting: set[Future[Any]] = set(futures)
        while waiting:
            ended, waiting = wait(waiting, timeout=POLL_INTERVAL, return_when=FIRST_EXCEPTION)
            for future in ended:
                done[futures.index(future)] = workload.requests
                future.result()
            report(done, len(runs) - len(waiting))
        pool.shutdown()
        return [future.result() for future in futures]
    except BrokenProcessPool as error:
        raise CellFailed(
            f"a process was ended from outside, perhaps for want of memory: simulate with fewer than {count} at a time"
        ) from error
    finally:
        ours.close()
        pool.shutdown(cancel_futures=True)
        theirs.close()


def _submit(pool: ProcessPoolExecutor, jobs: list[tuple[int, Workload, Any, Run]]) -> list[Future[Any]]:
    """Submit jobs. Ctrl-C is for the first process alone: those spawned here never see it, not even while they start."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return [pool.submit(_run_in_process, *job) for job in jobs]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_done: Any = None  # in a process of the pool: the requests done in each run


def _start_process(end: Connection, done: Any) -> None:
    global _done
    _done = done
    logging.getLogger("prefixcache").setLevel(logging.ERROR)  # each would say the same, and outcomes count it
    threading.Thread(target=_end_with, args=(end,), daemon=True).start()


def _end_with(end: Connection) -> None:
    try:
        end.poll(None)  # there is something to read once the other side is closed
    finally:
        os._exit(1)


def _run_in_process(index: int, workload: Workload, cell: Any, run: Run) -> Any:
    def progress(requests: int) -> None:
        _done[index] = requests

    return _run_cell(workload, cell, progress, run)
