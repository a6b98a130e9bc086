"""What a remote tier gives four machines on the trace of coding agents, by the planner's simulation: how much they hit beside
one machine, and beside one that has all their RAM and SSD; and what they send for each token that is used again.
"""

from __future__ import annotations

from collections.abc import Iterator

from prefixcache.cli.plan.known_models import KNOWN_MODELS
from prefixcache.codecs import TurboQuant
from prefixcache.planning.advice import Link
from prefixcache.planning.model import ModelState
from prefixcache.planning.outcome import Cell, Fleet
from prefixcache.planning.sweep import Workload, sweep, sweep_fleets
from tools.bench import report
from tools.bench.report import Figure

MODEL, CODEC = "llama-3.1-8b", "turboquant:4"
MACHINES = 4
SIZE = Cell(ram=16 * 10**9, ssd=64 * 10**9)
LINK, PREFILL = Link(0.002, 1e9), 1000.0  # seconds of a round trip, bytes a second; tokens computed a second
LIMITS = {"full": None, "quick": 400, "tiny": 40}  # requests of the trace
TRACE = report.ROOT / "tests" / "fixtures" / "traces" / "coding_agents.jsonl.gz"


def fleet(scale: str) -> Iterator[Figure]:
    """With each routing: without a remote tier, and with one that is sent what is hit, or all that is stored."""
    workload = Workload(TRACE, ModelState.of(KNOWN_MODELS[MODEL], MODEL), TurboQuant(4), limit=LIMITS[scale])
    processes = 1 if scale == "tiny" else None
    whole = SIZE._replace(ram=MACHINES * SIZE.ram, ssd=MACHINES * SIZE.ssd)
    one, alone = sweep(workload, [SIZE, whole], processes=processes)
    fleets = [
        Fleet(SIZE, MACHINES, routing, admission, link=LINK, prefill=PREFILL)
        for routing in ("sticky", "random")
        for admission in (None, "second", "always")
    ]
    before = 0.0
    for run in sweep_fleets(workload, fleets, processes=processes):
        admission = run.fleet.remote_admission
        if admission is None:
            before = run.hit_rate
            continue
        sent = run.sent_per_reused_token
        per_token = "" if sent is None else f"{sent / 1e3:,.1f} kB" if sent < 1e6 else f"{sent / 1e6:,.0f} MB"
        told = f"{per_token} sent for each token used again" if per_token else "nothing used again"
        yield Figure(
            f"fleet of {MACHINES}, agents' trace, requests to {_ROUTED[run.fleet.routing]}, `{admission}` sent: "
            "hit rate over one machine's and over one's with all the RAM and SSD",
            f"{run.hit_rate / one.hit_rate:.3f} and {run.hit_rate / alone.hit_rate:.3f} ({run.hit_rate:.1%}); {told}",
            "",
            f"without a remote tier: {before / one.hit_rate:.3f} and {before / alone.hit_rate:.3f}; "
            f"one machine {one.hit_rate:.1%}",
            None,
            {
                "hit_rate": run.hit_rate,
                "one": one.hit_rate,
                "whole": alone.hit_rate,
                "without": before,
                "sent": run.sent_bytes,
                "read": run.remote_read_bytes,
                "reused_tokens": run.reused_tokens,
            },
        )


_ROUTED = {"sticky": "their session's machine", "random": "any machine"}

FIGURES = {"remote-fleet": fleet}
