"""In the place of the simulator, for tests of what runs it: a cell's outcome at once, never, or an error. Light to import, as
processes of their own do.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from prefixcache.planning.advice import Served
from prefixcache.planning.outcome import Cell, CellOutcome
from prefixcache.planning.sweep import Workload

NOTHING: Any = None
WORKLOAD = Workload(Path("nowhere"), NOTHING, NOTHING, requests=100)


def outcome(cell: Cell, **values: Any) -> CellOutcome:
    """Hits are as many as the cell has bytes."""
    counts = dict.fromkeys(CellOutcome._fields, 0)
    served = Served(0.0, np.array([100]), *[np.zeros(1, np.int64)] * 5)
    of = {"cell": cell, "served": served, "ram_tokens": cell.ram, "ssd_tokens": cell.ssd}
    return CellOutcome(**{**counts, **of, **values})


def at_once(workload: Workload, cell: Cell, tell: Callable[[int], None]) -> CellOutcome:
    tell(50)
    return outcome(cell, evicted=os.getpid())


def never(workload: Workload, cell: Cell, tell: Callable[[int], None]) -> CellOutcome:
    workload.trace.joinpath(str(os.getpid())).touch()
    while True:
        time.sleep(60)


def wrong(workload: Workload, cell: Cell, tell: Callable[[int], None]) -> CellOutcome:
    if cell.ram == 2:
        raise KeyError("lost")
    return at_once(workload, cell, tell)


def refusing(workload: Workload, cell: Cell, tell: Callable[[int], None]) -> CellOutcome:
    raise ValueError("the trace, line 3: not JSON")


def killed(workload: Workload, cell: Cell, tell: Callable[[int], None]) -> CellOutcome:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError
