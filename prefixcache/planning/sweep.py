"""Many sizes, side by side: a grid of `Cell`s, each simulated by a process that streams the trace by itself.

Nothing is shared between the processes but how far they are, so a grid takes as long as its cells on the cores there are, and
the memory of as many simulated caches. They end with the process that began them, however that ends.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from prefixcache.planning.outcome import Outcome
from prefixcache.trace.reading import Trace

if TYPE_CHECKING:
    from prefixcache.codecs import Codec
    from prefixcache.planning.model import ModelState

LOOK = 0.1  # seconds between two looks at how far the processes are
ENDLESS = 1 << 50  # bytes of a RAM that nothing ever leaves


class Cell(NamedTuple):
    """One size to try: bytes of RAM and SSD (0: none), who leaves first, what the SSD is given; as in `Settings`."""

    ram: int
    ssd: int = 0
    policy: str = "lru"
    admission: str = "always"


class Workload(NamedTuple):
    """What every cell is tried on. `limit`: only so many of the trace's requests; `requests`: how many there are, for the
    progress; 0: not known.
    """

    trace: Path
    state: ModelState
    codec: Codec
    block: int | None = None
    limit: int | None = None
    leave: int = 1
    requests: int = 0


class CellFailed(RuntimeError):
    """A cell could not be simulated. The text names it."""


Telling = Callable[[int], None]  # how many requests of a cell are done
Run = Callable[[Workload, Cell, Telling], Outcome]


def simulated(workload: Workload, cell: Cell, tell: Telling) -> Outcome:
    """One cell, in this process. ValueError of a trace that can't be read or a codec that is none."""
    from prefixcache.planning.simulator import simulate  # the cache with all that it stands on

    requests = Trace(workload.trace, workload.block, limit=workload.limit)
    return simulate(
        requests, workload.state, workload.codec, ram=cell.ram, ssd=cell.ssd, policy=cell.policy,
        admission=cell.admission, leave=workload.leave, block=requests.block, progress=tell,
    )  # fmt: skip


def enough(endless: Outcome) -> int:
    """Bytes of a RAM that nothing leaves, by the run of an endless one: its peak and half as much, because what fills three
    quarters of a RAM begins to be written ahead.
    """
    return endless.ram_peak * 3 // 2


def stands_for(cell: Cell, most: int) -> Cell:
    """The cell that has the same outcome, where nothing leaves a RAM of `most` bytes: with more than that nothing changes and
    nothing is written, and what an SSD is given makes no difference without one. (Only the peak of RAM differs, by what a
    policy or an admission remembers.) Cells that have one in common need one run.
    """
    if cell.ram >= most:
        return Cell(ENDLESS)
    return cell if cell.ssd else cell._replace(admission="always")


def sweep(
    workload: Workload, cells: Sequence[Cell], *, most: int | None = None, known: Mapping[Cell, Outcome] | None = None,
    processes: int | None = None, progress: Callable[[int, int], None] | None = None, run: Run = simulated,
) -> list[Outcome]:  # fmt: skip
    """The outcomes of `cells`, in their order. Cells that are equal, or can't differ where nothing leaves a RAM of `most`
    bytes, run once; those in `known` don't run again.

    `processes`: one a core unless told; with 1 all is done in this process. `progress(done, total)` is called several times
    a second, in requests (of all runs), or in runs where the workload doesn't say how many requests there are. `run` is for
    whoever has a simulator of their own; it must be a module's function.

    The processes are spawned: a script that calls this needs the usual `if __name__ == "__main__":`. ValueError as
    `simulated` says, CellFailed (with the cell's name) for everything else; either ends all processes, and so do Ctrl-C
    and the end of this process.
    """
    found = dict(known or {})
    runs = [cell for cell in dict.fromkeys(_run_of(cell, most) for cell in cells) if cell not in found]
    runs.sort(key=lambda cell: (cell.ssd == 0, -cell.ssd, cell.ram))  # the longest first
    tell = _progress(workload.requests, len(runs), progress)
    count = min(processes or cores(), len(runs))
    outcomes = _here(workload, runs, tell, run) if count <= 1 else _in_processes(workload, runs, count, tell, run)
    found.update(zip(runs, outcomes, strict=True))
    return [found[_run_of(cell, most)]._replace(**cell._asdict()) for cell in cells]


def cores() -> int:
    """That this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _run_of(cell: Cell, most: int | None) -> Cell:
    return cell if most is None else stands_for(cell, most)


def _progress(
    requests: int, runs: int, progress: Callable[[int, int], None] | None
) -> Callable[[Sequence[int], int], None]:
    """Tells of the requests done in each run and of the runs that ended, in one pair of numbers."""

    def tell(within: Sequence[int], ended: int) -> None:
        if progress is not None:
            done = min(sum(within), requests * runs) if requests else ended
            progress(done, requests * runs if requests else runs)

    return tell


def _here(workload: Workload, runs: list[Cell], tell: Callable[[Sequence[int], int], None], run: Run) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for cell in runs:
        before = len(outcomes) * workload.requests

        def within(done: int, before: int = before) -> None:
            tell([before + done], len(outcomes))

        outcomes.append(_named(workload, cell, within, run))
        tell([len(outcomes) * workload.requests], len(outcomes))
    return outcomes


def _named(workload: Workload, cell: Cell, tell: Telling, run: Run) -> Outcome:
    """Runs a cell; what goes wrong in it names it, except where the trace or the model is what is wrong."""
    try:
        return run(workload, cell, tell)
    except ValueError:
        raise
    except Exception as error:
        raise CellFailed(f"{_name(cell)}: {type(error).__name__}: {error}") from error


def _name(cell: Cell) -> str:
    return f"ram={cell.ram}, ssd={cell.ssd}, policy={cell.policy}, ssd_admission={cell.admission}"


# -- processes --------------------------------------------------------------------------------------------------------


def _in_processes(
    workload: Workload, runs: list[Cell], count: int, tell: Callable[[Sequence[int], int], None], run: Run
) -> list[Outcome]:
    context = multiprocessing.get_context("spawn")
    within: Any = context.RawArray("Q", len(runs))
    theirs, ours = context.Pipe(duplex=False)  # at the end of which, however it comes, they end
    pool = ProcessPoolExecutor(count, context, initializer=_begin, initargs=(theirs, within))
    try:
        futures = _submitted(pool, [(i, workload, cell, run) for i, cell in enumerate(runs)])
        waiting: set[Future[Outcome]] = set(futures)
        while waiting:
            ended, waiting = wait(waiting, timeout=LOOK, return_when=FIRST_EXCEPTION)
            for future in ended:
                within[futures.index(future)] = workload.requests
                future.result()
            tell(within, len(runs) - len(waiting))
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


def _submitted(pool: ProcessPoolExecutor, jobs: list[tuple[int, Workload, Cell, Run]]) -> list[Future[Outcome]]:
    """Ctrl-C is for the first process alone: those that are spawned here never see it, not even while they begin."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return [pool.submit(_work, *job) for job in jobs]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_within: Any = None  # in a process of the pool: how far each run is


def _begin(end: Connection, within: Any) -> None:
    global _within
    _within = within
    logging.getLogger("prefixcache").setLevel(logging.ERROR)  # each would say the same, and outcomes count it
    threading.Thread(target=_end_with, args=(end,), daemon=True).start()


def _end_with(end: Connection) -> None:
    try:
        end.poll(None)  # there is something to read once the other side is closed
    finally:
        os._exit(1)


def _work(index: int, workload: Workload, cell: Cell, run: Run) -> Outcome:
    def tell(done: int) -> None:
        _within[index] = done

    return _named(workload, cell, tell, run)
