"""What is written because nobody asks (setting `spill_idle`): traces through the simulator, with and without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from prefixcache import TurboQuant
from prefixcache.cli.plan.known_models import KNOWN_MODELS
from prefixcache.planning.model import ModelState
from prefixcache.planning.outcome import Cell
from prefixcache.planning.simulator import simulate
from prefixcache.trace.reading import Trace
from tools.bench.report import Figure

TRACES = Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "traces"
MODEL, GB = "qwen3-8b", 10**9
# trace -> its requests at each scale (None: all), and the sizes of RAM and SSD
RUNS: dict[str, tuple[dict[str, int | None], list[tuple[int, int]]]] = {
    "coding_agents": ({"full": None, "quick": 1000, "tiny": 20}, [(8 * GB, 120 * GB), (200 * GB, 120 * GB)]),
    "chat": ({"full": 4000, "quick": 500, "tiny": 20}, [(16 * GB, 200 * GB)]),
}


def idle_writes(scale: str) -> Iterator[Figure]:
    """Bytes written and hits, with `spill_idle="auto"` over 0: every gap of more than 3 seconds is used."""
    state = ModelState.of(KNOWN_MODELS[MODEL], MODEL)
    for name, (limits, sizes) in RUNS.items():
        for ram, ssd in sizes:
            trace = Trace(TRACES / f"{name}.jsonl.gz", limit=limits[scale])
            runs = [
                simulate(trace, state, TurboQuant(), Cell(ram, ssd, idle=idle), block=trace.block)
                for idle in (0, "auto")
            ]
            off, on = runs
            rates = [int(outcome.served.hit.sum()) / max(outcome.served.asked_tokens, 1) for outcome in runs]
            hours = off.served.seconds / 3600
            yield Figure(
                f"written with idle writes: {name}, {off.served.requests} requests, {hours:.1f} h, RAM {ram // GB} GB, "
                f"SSD {ssd // GB} GB",
                f"{on.written_bytes / GB:.2f} GB, {rates[1]:.2%} hit",
                "",
                f"without: {off.written_bytes / GB:.2f} GB, {rates[0]:.2%} hit",
                None,
                {"on": on.written_bytes, "off": off.written_bytes, "stored": off.stored_bytes, "hours": hours},
            )


FIGURES = {"idle-writes": idle_writes}
