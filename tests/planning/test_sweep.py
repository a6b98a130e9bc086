"""A grid of sizes in processes of their own: in order, once each, and none of them outlives whoever began it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from prefixcache.codecs.choice import as_codec
from prefixcache.planning import sweep as module
from prefixcache.planning.model import ModelState
from prefixcache.planning.outcome import Cell, CellOutcome, Fleet
from prefixcache.planning.sweep import (
    ENDLESS,
    CellFailed,
    Known,
    Workload,
    equivalent_cell,
    run_all,
    sufficient_ram,
    sweep,
    sweep_fleets,
)
from prefixcache.trace.reading import Trace, TraceError
from tests.planning.stand_ins import WORKLOAD, at_once, killed, outcome, refusing, wrong
from tests.waiting import until

TESTS = Path(__file__).parent.parent
TINY = TESTS / "fixtures" / "tiny-llama"


def chats(path: Path, chats: int = 6, turns: int = 5) -> Path:
    """A trace of chats side by side, each turn two blocks longer than the one before."""
    ids: dict[int, list[int]] = {chat: [0] for chat in range(chats)}
    lines = []
    for turn in range(turns):
        for chat, own in ids.items():
            own += [1000 * (chat + 1) + 2 * turn, 1000 * (chat + 1) + 2 * turn + 1]
            at = 1000 * (turn * chats + chat)
            lines.append({"timestamp": at, "input_length": 256 * len(own), "output_length": 9, "hash_ids": list(own)})
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    path = chats(tmp_path_factory.mktemp("trace") / "chats.jsonl")
    return Workload(path, ModelState.read(TINY), as_codec("turboquant:4"), 256, requests=30)


def numbers(outcome: CellOutcome) -> dict[str, object]:
    """All that a run gives but its sizes, and what policies remember of them."""
    own = outcome._asdict() | outcome.served._asdict()
    for name in ("cell", "ram_peak", "served"):
        del own[name]
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in own.items()}


# -- which cells run --------------------------------------------------------------------------------------------------


def test_equal_cells_run_once(monkeypatch):
    ran = []

    def run(workload, cell, tell):
        ran.append(cell)
        return outcome(cell)

    cells = [Cell(1), Cell(2), Cell(1), Cell(1, 0, "adaptive"), Cell(1)]
    monkeypatch.setattr(module, "simulated", run)
    found = sweep(WORKLOAD, cells, processes=1)
    assert [(o.cell.ram, o.cell.policy) for o in found] == [(cell.ram, cell.policy) for cell in cells]
    assert sorted(ran) == sorted(set(cells))


def test_cells_that_can_not_differ_run_once_and_keep_their_names(monkeypatch):
    ran = []

    def run(workload, cell, tell):
        ran.append(cell)
        return outcome(cell)

    cells = [Cell(10), Cell(20, 5, "adaptive"), Cell(3, 10), Cell(3, 0, "lru", "second"), Cell(3), Cell(20, hot=5)]
    monkeypatch.setattr(module, "simulated", run)
    found = sweep(WORKLOAD, cells, known=Known(most=10), processes=1)
    assert sorted(ran) == [Cell(3), Cell(3, 10), Cell(20, hot=5), Cell(ENDLESS)]
    assert [o.cell for o in found] == cells
    assert [o.ram_tokens for o in found] == [ENDLESS, ENDLESS, 3, 3, 3, 20]


def test_what_is_known_does_not_run_again(monkeypatch):
    monkeypatch.setattr(module, "simulated", refusing)
    known = {Cell(ENDLESS): outcome(Cell(ENDLESS), evicted=7)}
    found = sweep(WORKLOAD, [Cell(50)], known=Known(known, 10))
    assert [(o.cell.ram, o.evicted) for o in found] == [(50, 7)]
    assert sweep(WORKLOAD, []) == []


def test_more_than_enough_changes_nothing(workload):
    (endless,) = sweep(workload, [Cell(ENDLESS)], processes=1)
    assert endless.hit_rate > 0.5
    assert endless.ram_peak < 100 << 20
    most = sufficient_ram(endless)
    for cell in (Cell(most), Cell(most, 10 << 20), Cell(2 * most, most, "lru", "second")):
        (found,) = sweep(workload, [cell], processes=1)
        assert equivalent_cell(cell, most) == Cell(ENDLESS)
        assert numbers(found) == numbers(endless)


# -- processes --------------------------------------------------------------------------------------------------------


def test_processes_simulate_what_one_does_in_the_order_of_the_cells(workload):
    told: list[tuple[int, int]] = []
    cells = [Cell(1 << 20), Cell(1 << 20, 4 << 20), Cell(1 << 20)]
    alone = sweep(workload, cells, processes=1)
    apart = sweep(workload, cells, processes=2, progress=lambda *done: told.append(done))
    assert [numbers(o) for o in alone] == [numbers(o) for o in apart]
    assert [o.cell.ssd for o in apart] == [0, 4 << 20, 0]
    assert alone[0].hit_rate < alone[1].hit_rate
    assert told == sorted(told)
    assert told[-1] == (60, 60)


def test_a_short_trace_is_read_once_for_all_cells_and_again_when_it_has_changed(tmp_path, workload, monkeypatch):
    trace = chats(tmp_path / "chats.jsonl")
    passes = []
    read = Trace.__iter__
    monkeypatch.setattr(Trace, "__iter__", lambda trace: passes.append(trace) or read(trace))
    cells = [Cell(1_000_000), Cell(2_000_000), Cell(4_000_000)]
    streamed = sweep(workload._replace(trace=trace), cells, processes=1)
    assert len(passes) == 3
    kept = workload._replace(trace=trace, ids=90)
    assert [*map(numbers, sweep(kept, cells, processes=1))] == [*map(numbers, streamed)]
    assert len(passes) == 4
    trace.write_text("\n".join(trace.read_text().splitlines()[:20]))
    assert sweep(kept, cells, processes=1)[0].served.requests == 20
    assert len(passes) == 5
    trace.unlink()
    with pytest.raises(TraceError, match="No such file"):
        sweep(kept, cells[:1], processes=1)


def test_progress_is_in_requests_or_in_runs():
    told: list[tuple[int, int]] = []
    run_all(WORKLOAD, [Cell(1), Cell(2)], 1, lambda *done: told.append(done), at_once)
    assert told == [(50, 200), (100, 200), (150, 200), (200, 200)]
    told.clear()
    unknown = WORKLOAD._replace(requests=0)
    run_all(unknown, [Cell(1), Cell(2)], 1, lambda *done: told.append(done), at_once)
    assert (told[0], told[-1]) == ((0, 2), (2, 2))


def test_a_cell_that_fails_is_named():
    named = r"ram=2, ssd=5, policy=lru, ssd_admission=always, hot=0: KeyError: 'lost'"
    with pytest.raises(CellFailed, match=named):
        run_all(WORKLOAD, [Cell(1), Cell(2, 5)], 2, None, wrong)


def test_a_fleet_that_fails_is_named(monkeypatch):
    monkeypatch.setattr(module, "simulate_fleet", lambda *of, **others: {}["lost"])
    monkeypatch.setattr(module, "_requests", lambda workload: (256, ()))
    named = r"3 machines of ram=2, .*, hot=0, routing=sticky, remote_admission=second: KeyError: 'lost'"
    with pytest.raises(CellFailed, match=named):
        sweep_fleets(WORKLOAD, [Fleet(Cell(2), 3, remote_admission="second")], processes=1)


def test_what_is_wrong_with_the_trace_is_told_as_it_is():
    with pytest.raises(ValueError, match=r"^the trace, line 3: not JSON$"):
        run_all(WORKLOAD, [Cell(1)], 1, None, refusing)


def test_a_process_that_is_killed_is_told_of_with_a_remedy():
    with pytest.raises(CellFailed, match="fewer than 2 at a time"):
        run_all(WORKLOAD, [Cell(1), Cell(2)], 2, None, killed)


SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.planning.stand_ins import WORKLOAD, never
from prefixcache.planning.outcome import Cell
from prefixcache.planning.sweep import run_all
if __name__ == "__main__":
    run_all(WORKLOAD._replace(trace=Path({folder!r})), [Cell(1), Cell(2), Cell(3)], 2, None, never)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_processes_end_with_the_one_that_began_them(tmp_path, number):
    folder = tmp_path / "running"
    folder.mkdir()
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(root=str(TESTS.parent), folder=str(folder)))
    with subprocess.Popen(
        [sys.executable, script], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        until(lambda: len(list(folder.iterdir())) == 2)
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.kill()
        _, err = process.communicate(timeout=60)
    assert process.returncode == -number
    assert err.count("Traceback") == (number == signal.SIGINT)
    until(lambda: not any(runs(int(file.name)) for file in folder.iterdir()))


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # whose new parent takes its time
    except psutil.NoSuchProcess:
        return False
