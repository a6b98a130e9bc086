"""The work of `prefixcache plan`: it reads the model, starts the simulations of `prefixcache.planning` that the options ask
for, and returns all they tell as one JSON object.
"""

from __future__ import annotations

from typing import Any

from huggingface_hub import constants, try_to_load_from_cache

from prefixcache import __version__
from prefixcache.cli.plan.bases import sizes_of
from prefixcache.cli.plan.facts import (
    capacities,
    codec_facts,
    fleet_facts,
    grid,
    hot_cells,
    hot_facts,
    lease_facts,
    mac_facts,
    model_facts,
    outcome_facts,
    ram_ladder,
    ssd_ladder,
    trace_facts,
)
from prefixcache.cli.plan.known_models import KNOWN_MODELS
from prefixcache.cli.plan.options import DEFAULT_CODEC, KNOWN_NAMES, Assumed, FleetPlan, ModelOptions, TracePlan
from prefixcache.cli.progress import bar
from prefixcache.cli.text import Refused, expanded
from prefixcache.codecs.choice import as_codec
from prefixcache.planning.advice import Link
from prefixcache.planning.bound import best_at
from prefixcache.planning.model import ModelState
from prefixcache.planning.outcome import Cell, Fleet
from prefixcache.planning.routing import sessions
from prefixcache.planning.sizes import StateSizes
from prefixcache.planning.sweep import ENDLESS, Known, Workload, sufficient_ram, sweep, sweep_fleets
from prefixcache.trace.reading import Trace, summary

CODECS = ("raw", "turboquant:4", "turboquant:4:3", "turboquant:3", "transform:4")
PARALLEL_IDS = 500_000  # ids to simulate, in all, from which processes of their own are worth their start

Facts = dict[str, Any]


def planned_facts(name: str, options: ModelOptions, simulation: TracePlan | None, assumed: Assumed) -> Facts:
    """Return the JSON object that `plan` prints; `simulation` is None if no trace was given."""
    specs = options.codecs()
    codecs = {spec: codec for spec in specs or CODECS if (codec := as_codec(spec)) is not None}
    state = _model(name)
    sizes = sizes_of(codecs, name, state, options.basis, options.basis_dir)
    facts: Facts = {
        "prefixcache": __version__,
        "model": model_facts(state),
        "codecs": [codec_facts(spec, of) for spec, of in sizes.items()],
        "macs": mac_facts(state, sizes),
        "trace": None,
        "codec": None,
        "assumed": assumed._asdict(),
        "sizes": None,
        "fleet": None,
    }
    if simulation is not None:
        spec = specs[0] if specs else DEFAULT_CODEC
        facts |= {"codec": spec, **_simulate(sizes[spec], simulation, assumed)}
    return facts


def _simulate(sizes: StateSizes, simulation: TracePlan, assumed: Assumed) -> Facts:
    """Return {"trace", "sizes", "fleet"}; "fleet" is None if none was asked for. An endless cache is simulated first: its
    bytes are the largest size that is worth a try, and its hits are what is possible.
    """
    trace = Trace(simulation.trace, simulation.block, limit=simulation.limit)
    totals = summary(trace)
    lines = totals.requests + totals.stores
    workload = Workload(
        simulation.trace, sizes.state, sizes.codec, trace.block, simulation.limit, requests=lines, ids=totals.ids
    )
    with bar("an endless cache") as show:
        (endless,) = sweep(workload, [Cell(ENDLESS)], processes=1, progress=show)
    most = sufficient_ram(endless)
    known = Known({Cell(ENDLESS): endless}, most)
    rams = simulation.rams or ram_ladder(most)[:: 2 if simulation.ssds else 1]
    ssds = simulation.ssds or [0, *ssd_ladder(most)]
    cells = grid(rams, ssds, simulation.policies, simulation.admissions, simulation.hots)
    processes = 1 if totals.ids * len(cells) < PARALLEL_IDS else None
    with bar("sizes") as show:
        outcomes = sweep(workload, cells, known=known, processes=processes, progress=show)
    known, fleet = Known({**known.outcomes, **dict(zip(cells, outcomes, strict=True))}, most), None
    if simulation.fleet is not None:
        fleet = _simulate_fleets(workload, cells, known, sizes, simulation.fleet, assumed)
    bounds = best_at(trace, capacities(cells, sizes.bytes_per_token, trace.block))
    facts = outcome_facts(outcomes, bounds, endless, sizes, totals.longest, assumed)
    if (best := facts["recommendation"]) is not None:
        tried = hot_cells(cells[best["cell"]], simulation.hots)
        with bar("hot prompts") as show:
            hot_outcomes = sweep(workload, tried, known=known, processes=processes, progress=show)
        facts["hot"] = hot_facts(hot_outcomes, endless.hit_tokens, sizes, assumed)
        if simulation.lease:
            advised = cells[best["cell"]]
            leased = advised._replace(lease=simulation.lease, lease_tokens=simulation.lease_tokens)
            with bar("leases") as show:
                with_and_without = sweep(workload, [leased, advised], known=known, processes=1, progress=show)
            facts["leases"] = lease_facts(*with_and_without)
    return {
        "trace": trace_facts(trace, totals, endless.served.asked, sizes.state.context),
        "sizes": facts,
        "fleet": fleet,
    }


def _simulate_fleets(
    workload: Workload,
    cells: list[Cell],
    known: Known,
    sizes: StateSizes,
    options: FleetPlan,
    assumed: Assumed,
) -> Facts:
    """Return facts of fleets whose machines are of each size: with and without a remote tier, beside one machine of that
    size and one that has what they have together. `known` has the runs of one machine.
    """
    link = Link(options.rtt, options.rate)
    combined_cells = [cell._replace(ram=cell.ram * options.machines, ssd=cell.ssd * options.machines) for cell in cells]
    fleets = [
        Fleet(cell, options.machines, routing, admission, options.limit, link, assumed.prefill_rate)
        for cell in cells
        for routing in options.routings
        for admission in (None, *options.admissions)
    ]
    processes = 1 if (workload.ids or 0) * len(fleets) < PARALLEL_IDS else None
    with bar("one machine with all of it") as show:
        alone = sweep(workload, combined_cells, known=known, processes=processes, progress=show)
    with bar("fleets") as show:
        outcomes = sweep_fleets(workload, fleets, processes=processes, progress=show)
    session_ids = sessions(Trace(workload.trace, workload.block, limit=workload.limit))
    pairs = [*zip([known.outcomes[cell] for cell in cells], alone, strict=True)]
    return fleet_facts(outcomes, pairs, session_ids, sizes, options, assumed)


def _model(name: str) -> ModelState:
    """Return the model of a path, of a known model, or of a Hugging Face name that was downloaded; the network is not
    asked.
    """
    if name and expanded(name, "--model").exists():
        return ModelState.read(name)
    if name.lower() in KNOWN_MODELS:
        return ModelState.of(KNOWN_MODELS[name.lower()], name.lower())
    try:
        config = try_to_load_from_cache(name, "config.json", cache_dir=constants.HF_HUB_CACHE)
    except ValueError:  # no valid repository's name
        config = None
    if not isinstance(config, str):
        raise Refused(
            f"--model {name!r}: no such file or folder, and the Hugging Face cache in {constants.HF_HUB_CACHE} has no such "
            "model; give a config.json, a folder that has one, the name of a model that was downloaded, or one of "
            f"{KNOWN_NAMES}"
        )
    return ModelState.read(config)
