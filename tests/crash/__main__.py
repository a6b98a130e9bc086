"""The whole crash matrix: `python -m tests.crash --rounds 500 --power`. Ends with a table, and 1 where a promise did not
hold.
"""

from __future__ import annotations

import argparse
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Iterable

from tests.crash import matrix
from tests.crash.matrix import MODES, Lab, Outcome, Tally
from tools.faults import shim
from tools.faults.power import VARIANTS

Run = Callable[[Lab], Iterable[Outcome]]


def plan(lab: Lab, chosen: argparse.Namespace) -> list[Run]:
    """Every run that was asked for. Some of them are counted first, by a run that nothing befalls."""
    runs: list[Run] = []
    every, first = chosen.every, 1 + chosen.first % chosen.every
    for name, mode in MODES.items():
        if _wanted(chosen, name):
            total = lab.calls(mode.kinds)
            runs += [lambda lab, name=name, at=at: [matrix.met(lab, name, at)] for at in range(first, total + 1, every)]
    if _wanted(chosen, matrix.KILLED_TWICE):
        for at in range(first, lab.calls() + 1, every * 97):
            again = range(1 + at % 5, 220, 5 * every)
            runs += [lambda lab, at=at, then=then: [matrix.killed_twice(lab, at, then)] for then in again]
    if _wanted(chosen, matrix.STALLED):
        runs += [lambda lab, at=at: [matrix.stands_still(lab, at)] for at in range(first, 200, every)]
    if _wanted(chosen, matrix.KILLED_ANY_TIME):
        seeds = range(chosen.first, chosen.first + chosen.rounds // matrix.CHAIN)
        runs += [lambda lab, seed=seed: matrix.killed_any_time(lab, seed, chosen.seconds) for seed in seeds]
    if chosen.power and _wanted(chosen, matrix.POWER):
        cuts = matrix.PowerCuts(matrix.recorded(lab)[0])
        for moment in range(first, cuts.journal.length + 1, every):
            runs += [lambda lab, at=moment, how=how: [cuts.cut(lab, at, how, chosen.first)] for how in VARIANTS]
    if chosen.power and _wanted(chosen, matrix.SYNC_FAILED):
        total = lab.calls(shim.SYNC)
        runs += [lambda lab, at=at: matrix.sync_failed(lab, at) for at in range(first, total + 1, every)]
    if chosen.power and _wanted(chosen, matrix.KILLED_CUT):
        total = lab.calls()
        runs += [lambda lab, at=at: [matrix.killed_then_cut(lab, at)] for at in range(first, total + 1, every)]
    return runs


def _wanted(chosen: argparse.Namespace, name: str) -> bool:
    return not chosen.only or name in chosen.only


def work(runs: list[Run], labs: list[Lab], report: Callable[[Outcome, int], None], end: float | None) -> None:
    """Do them all, one at a time in each lab; none is begun after `end`."""
    waiting: queue.SimpleQueue[Run] = queue.SimpleQueue()
    for run in runs:
        waiting.put(run)
    done: queue.SimpleQueue[Outcome | BaseException | None] = queue.SimpleQueue()

    def labour(lab: Lab) -> None:
        try:
            while end is None or time.monotonic() < end:
                for outcome in waiting.get_nowait()(lab):
                    done.put(outcome)
        except queue.Empty:
            pass
        except BaseException as error:
            done.put(error)
        done.put(None)

    for lab in labs:
        threading.Thread(target=labour, args=(lab,), daemon=True).start()
    idle = 0
    while idle < len(labs):
        outcome = done.get()
        if isinstance(outcome, BaseException):
            raise outcome
        if outcome is None:
            idle += 1
        else:
            report(outcome, waiting.qsize())


def main(arguments: list[str] | None = None) -> int:
    names = [*MODES, *matrix.OTHERS]
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="of the calls, one in so many (1)")
    parser.add_argument(
        "--first", type=int, default=0, help="where to begin, and the seed of all that is by chance (0)"
    )
    parser.add_argument("--rounds", type=int, default=100, help="kills at any time (100)")
    parser.add_argument("--seconds", type=float, default=0.7, help="the latest of these kills (0.7)")
    parser.add_argument("--minutes", type=float, help="as many of the runs as fit into this time, picked by chance")
    parser.add_argument("--power", action="store_true", help="power cuts, too")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once (1)")
    parser.add_argument("--codec", default="", help='of the session with coded rows, as "transform:6" (turboquant:8)')
    parser.add_argument("--only", action="append", choices=names, metavar="MODE", help="this mode; may be repeated")
    chosen = parser.parse_args(arguments)
    if reason := shim.unavailable():
        print(f"not here: {reason}")
        return 2
    tallies = {name: Tally(name) for name in names}
    began = time.monotonic()
    labs = [Lab(chosen.codec) for _ in range(max(1, chosen.jobs))]
    try:
        runs = plan(labs[0], chosen)
        end = None
        if chosen.minutes is not None:
            random.Random(chosen.first).shuffle(runs)
            end = began + 60 * chosen.minutes

        def report(outcome: Outcome, left: int) -> None:
            tally = tallies[outcome.mode]
            tally.add(outcome)
            if outcome.failure and len(tally.failures) <= 20:
                print(f"\r{outcome.mode}, {outcome.title}: {outcome.failure}", flush=True)
            bad = sum(len(tally.failures) for tally in tallies.values())
            if sys.stderr.isatty() or not left % 100:
                print(f"\r{left:6} runs left, {bad} bad, {time.monotonic() - began:6.0f} s ", end="", file=sys.stderr)

        work(runs, labs, report, end)
    finally:
        for lab in labs:
            lab.__exit__()
    print(f"\n{matrix.HEADER}")
    for tally in tallies.values():
        if tally.runs:
            print(tally)
    print(f"{time.monotonic() - began:.0f} s")
    return int(any(tally.failures for tally in tallies.values()))


if __name__ == "__main__":
    sys.exit(main())
