"""The facts of `prefixcache plan`, the object that `--json` prints: of a model, of a trace, of each size tried, the advice.

Numbers only: sizes in bytes, times in seconds, shares from 0 to 1. How they look, `text` says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from prefixcache.cli.plan.options import Assumed, FleetPlan
from prefixcache.cli.plan.text import settings_of
from prefixcache.codecs.choice import as_codec
from prefixcache.codecs.transform.codec import Calibrated, Transform
from prefixcache.planning import advice
from prefixcache.planning.advice import NO_WAIT, Link, Prices, Rates, Served
from prefixcache.planning.bound import Bound
from prefixcache.planning.model import ModelState
from prefixcache.planning.outcome import Cell, CellOutcome, Fleet, FleetOutcome
from prefixcache.planning.sizes import StateSizes
from prefixcache.planning.typical_basis import TypicalBasis
from prefixcache.settings import Settings, ram_auto
from prefixcache.trace.reading import Trace, TraceSummary

PROMPTS = (8_192, 32_768, 131_072)  # tokens
MEMORIES = tuple(gib << 30 for gib in (16, 24, 32, 48, 64, 96, 128, 192, 256, 512))
MACS = {
    memory: memory * 3 // 4 if memory >= 36 << 30 else memory * 2 // 3 for memory in MEMORIES
}  # what the GPU may have
WEIGHT_BITS = 4.5  # of a weight quantised to 4 bits in groups of 64, scale and bias included
TARGETS = (0.5, 0.75, 0.9, 0.95, 0.99)  # shares of what is possible for which the cheapest size is told
RAM_SHARES = (256, 128, 64, 32, 16, 4, 1)  # parts of what is sufficient; small ones tell more, and cost less
SSD_SHARES = (4, 1)
HOT_SHARES = (8, 2)  # parts of the RAM that hot prompts are tried with, beside none and "auto"
REMOTE_COUNTS = (
    "sent_images",
    "sent_bytes",
    "remote_read_images",
    "remote_read_bytes",
    "reused_tokens",
    "remote_evicted",
    "remote_peak",
)

Facts = dict[str, Any]


# -- the model --------------------------------------------------------------------------------------------------------


def model_facts(state: ModelState) -> Facts:
    return {
        "name": state.name,
        "model_type": state.model_type,
        "dtype": state.dtype,
        "parameters": state.parameters,
        "weights_at_4_bits": _weights(state),
        "context": state.context,
        "layers": [{**layer._asdict(), "window": layer.window and layer.window.size} for layer in state.layers],
    }


def codec_facts(name: str, sizes: StateSizes) -> Facts:
    """Return what a model's state takes with a codec. `windows` and `snapshot` are a boundary's, beside the tokens' own
    bytes.

    `transform`: None of another codec; else how many layers are transformed, and by which basis, which takes so many bytes of
    RAM; without one all of it is an estimate.
    """
    return {
        "codec": name,
        "spec": sizes.codec.spec() | ({"basis": None} if _is_estimate(sizes) else {}),
        "transform": _transform_facts(name, sizes),
        "live_bytes_per_token": sizes.raw_bytes_per_token,
        "bytes_per_token": sizes.bytes_per_token,
        "ratio": sizes.ratio,
        "ram_bytes_per_token": sizes.ram_bytes_per_token,
        "tokens_per_gb": int(1e9 / sizes.ram_bytes_per_token),
        "windows_bytes": sizes.most_windows_bytes,
        "snapshot_bytes": sizes.snapshot_bytes(PROMPTS[0] - 256, 256),
        "prompts": [{"tokens": tokens, "bytes": sizes.prompt_bytes(tokens)} for tokens in PROMPTS],
        "raw_layers": list(sizes.plan.raw),
    }


def _transform_facts(name: str, sizes: StateSizes) -> Facts | None:
    if not isinstance(as_codec(name), Transform):
        return None
    layers = sum(len(joined.coder.group.layers) for joined in sizes.plan.joined)
    basis = sizes.codec.basis if isinstance(sizes.codec, Calibrated) else None
    digest = basis.hash if basis and not _is_estimate(sizes) else None
    return {
        "layers": layers,
        "estimate": _is_estimate(sizes),
        "basis": digest,
        "basis_bytes": basis.nbytes if basis else 0,
    }


def _is_estimate(sizes: StateSizes) -> bool:
    return isinstance(sizes.codec, Calibrated) and isinstance(sizes.codec.basis, TypicalBasis)


def mac_facts(state: ModelState, codecs: dict[str, StateSizes]) -> list[Facts]:
    """Return what Macs could keep beside the model's weights at 4 bits. `auto` is what the setting `ram="auto"` takes, 0
    where the weights leave no room for that.
    """
    macs, weights = [], _weights(state)
    for memory, gpu in MACS.items():
        room, auto = max(gpu - weights, 0), ram_auto(gpu, weights)
        tokens = [{"codec": name, "tokens": int(room / of.ram_bytes_per_token)} for name, of in codecs.items()]
        macs.append({"memory": memory, "gpu": gpu, "room": room, "auto": auto if auto <= room else 0, "tokens": tokens})
    return macs


def _machine_facts(sizes: StateSizes, ram: int, longest: int) -> Facts:
    """Return the smallest Mac whose GPU has room for the model's weights at 4 bits, a cache of `ram` bytes and one live
    prompt: of the `longest` tokens, or of the model's context where that is less. `memory` and `gpu` are None where no Mac
    has.
    """
    tokens = min(longest, sizes.state.context or longest)
    weights, live = _weights(sizes.state), sizes.live_bytes(tokens)
    memory, gpu = next((mac for mac in MACS.items() if mac[1] >= weights + live + ram), (None, None))
    return {"memory": memory, "gpu": gpu, "weights": weights, "live_tokens": tokens, "live": live, "ram": ram}


def _weights(state: ModelState) -> int:
    return int(state.parameters * WEIGHT_BITS / 8)


# -- the trace and the sizes to try -----------------------------------------------------------------------------------


def trace_facts(trace: Trace, totals: TraceSummary, prompts: np.ndarray, context: int | None) -> Facts:
    """Return a trace's facts after a pass; `prompts` are the tokens of each, which may exceed the model's `context`."""
    return {
        "file": str(trace.path),
        "block": trace.block,
        "limit": trace.limit,
        **{name: getattr(totals, name) for name in ("requests", "stores", "tokens", "mean_tokens", "longest")},
        "beyond_context": int((prompts > context).sum()) if context is not None else 0,
        **{name: getattr(totals, name) for name in ("ids", "blocks", "seconds")},
        "blocks_exact": totals.exact,
        "torn": trace.torn,
        "backwards": trace.backwards,
    }


def step_up(nbytes: float) -> int:
    """Return the next size that things are sold in: 1 or 1.5 times a power of two of GB, MB or kB."""
    unit = next((unit for unit in (10**9, 10**6) if nbytes >= unit), 10**3)
    power = 1
    while power * unit * 1.5 < nbytes:
        power *= 2
    return int(power * unit if power * unit >= nbytes else power * unit * 1.5)


def ram_ladder(most: int) -> list[int]:
    """Return sizes from a 256th of `most` bytes, rounded up, to all of them."""
    return [max(step_up(most) // share, 1) for share in RAM_SHARES]


def ssd_ladder(most: int) -> list[int]:
    return [step_up(most) // share for share in SSD_SHARES]


def grid(
    rams: Sequence[int],
    ssds: Sequence[int],
    policies: Sequence[str],
    admissions: Sequence[str],
    hots: Sequence[int | str],
) -> list[Cell]:
    """Return the cells of each with each. Without an SSD all admissions are one."""
    combinations = product(rams, ssds, policies, admissions, hots)
    cells = [Cell(ram, ssd, policy, admission, hot=hot) for ram, ssd, policy, admission, hot in combinations]
    return list(dict.fromkeys(c if c.ssd else c._replace(admission=admissions[0]) for c in cells))


def hot_cells(cell: Cell, hots: Sequence[int | str]) -> list[Cell]:
    """Return a size with each share of its RAM for hot prompts; with shares of our own where only one is given."""
    shares = hots if len(hots) > 1 else (0, "auto", *(cell.ram // share for share in HOT_SHARES))
    return sorted((cell._replace(hot=hot) for hot in dict.fromkeys((*shares, cell.hot))), key=_hot_bytes)


def _hot_bytes(cell: Cell) -> int:
    return Settings.model_construct(hot=cell.hot).hot_bytes(cell.ram)


def capacities(cells: Sequence[Cell], bytes_per_token: float, block: int) -> list[int]:
    """Return how many of a trace's blocks RAM and SSD of each size have room for."""
    return [int((cell.ram + cell.ssd) / (bytes_per_token * block)) for cell in cells]


# -- the outcomes -----------------------------------------------------------------------------------------------------


def outcome_facts(
    outcomes: Sequence[CellOutcome],
    bounds: Sequence[Bound],
    endless: CellOutcome,
    sizes: StateSizes,
    longest: int,
    assumed: Assumed,
) -> Facts:
    """Return the facts of all sizes. `bounds` are Belady's at the outcomes' sizes; `endless` is the run of a RAM that
    never evicts: what is possible with this model. `longest` is the longest prompt's tokens.
    """
    per_token, prefill = sizes.bytes_per_token, assumed.prefill_rate
    rates = [Rates(prefill, ssd, assumed.decode_rate) for ssd in assumed.ssd_rates]
    prices = Prices(assumed.ram_price, assumed.ssd_price)
    costs = [advice.cost(o.cell.ram, o.cell.ssd, prices) for o in outcomes]
    hits, possible = [o.hit_tokens for o in outcomes], endless.hit_tokens
    front = advice.front(costs, hits)
    cells = [
        {"cost": cost, "on_front": i in front, "bound": bound.hit_rate, **_cell(o, possible, per_token, assumed, rates)}
        for i, (o, bound, cost) in enumerate(zip(outcomes, bounds, costs, strict=True))
    ]
    recommendation = _recommendation(cells, costs, hits, sizes, longest)
    targets = [{"of_possible": share, "cell": advice.cheapest(costs, hits, share * possible)} for share in TARGETS]
    asked, nothing = endless.served.asked_tokens, np.zeros_like(endless.served.asked)
    read_by_nobody = endless.served._replace(hot=nothing, read=nothing)
    return {
        "working_set": endless.ram_peak,
        "possible": {
            "hit_rate": endless.hit_rate,
            "hit_tokens": possible,
            "asked_tokens": asked,
            "prefill_seconds": asked / prefill,
            "prefill_seconds_saved": possible / prefill,
            "ttft": _ttft(read_by_nobody, per_token, rates[0]),
        },
        "without": {"ttft": _ttft(read_by_nobody._replace(hit=nothing), per_token, rates[0])},
        "reading_pays": [advice.reading_pays(per_token, of) for of in rates],
        "cells": cells,
        "front": front,
        "cheapest": targets if possible else [],
        "recommendation": recommendation,
        "hot": None,
        "leases": None,
    }


def lease_facts(leased: CellOutcome, without: CellOutcome) -> Facts:
    """Return how many tokens a size prefills where each request leases its prompt, and where none does."""
    prefilled = [outcome.served.asked_tokens - outcome.hit_tokens for outcome in (leased, without)]
    return {
        "seconds": leased.cell.lease,
        "tokens": leased.cell.lease_tokens,
        "prefilled_tokens": prefilled[0],
        "prefilled_tokens_without": prefilled[1],
    }


def hot_facts(outcomes: Sequence[CellOutcome], possible: int, sizes: StateSizes, assumed: Assumed) -> Facts:
    """Return the facts of one size with several shares of its RAM for hot prompts, and which of them waits least on the
    average, of those whose SSD lasts; of equals the smallest.
    """
    rates = [Rates(assumed.prefill_rate, ssd, assumed.decode_rate) for ssd in assumed.ssd_rates]
    cells = [_cell(outcome, possible, sizes.bytes_per_token, assumed, rates) for outcome in outcomes]
    lasting = [i for i, of in enumerate(cells) if of["tbw_years"] is None or of["tbw_years"] >= advice.LEAST_YEARS]
    best = min(lasting or range(len(cells)), key=lambda i: cells[i]["ttft"][0]["mean"])
    return {"cells": cells, "best": best}


def _recommendation(
    cells: Sequence[Facts],
    costs: Sequence[float],
    hits: Sequence[int],
    sizes: StateSizes,
    longest: int,
) -> Facts | None:
    """Return what is advised. `obstacles` say why it can't be lived with, where no size can. `beyond` is the size that would
    be advised if there were no obstacles, where that is another.
    """
    obstacles = [_obstacles(cell, sizes, longest) for cell in cells]
    chosen = advice.advised(costs, hits, [not of for of in obstacles])
    beyond = advice.knee(costs, hits)
    if chosen is None or beyond is None:
        return None
    better = {} if beyond == chosen or hits[beyond] <= hits[chosen] else _advised(cells, beyond, obstacles)
    return {
        **_advised(cells, chosen, obstacles),
        "beyond": better or None,
        "machine": _machine_facts(sizes, cells[chosen]["ram"], longest),
        "longest_bytes": _longest_bytes(sizes, longest),
    }


def _advised(cells: Sequence[Facts], index: int, obstacles: Sequence[list[str]]) -> Facts:
    cell = cells[index]
    says = f"{settings_of(cell)}: {100 * cell['of_possible']:.0f} % of what is possible"
    return {"cell": index, "says": says, "obstacles": obstacles[index]}


def _obstacles(cell: Facts, sizes: StateSizes, longest: int) -> list[str]:
    """Return why a size can't be lived with: "wear" (the SSD lasts less than a year), "prompt" (the longest doesn't fit into
    RAM), "memory" (no Mac has room for it).
    """
    ram, lasts = cell["ram"], cell["tbw_years"]
    obstacles = {
        "wear": lasts is not None and lasts < advice.LEAST_YEARS,
        "prompt": _longest_bytes(sizes, longest) > ram,
        "memory": _machine_facts(sizes, ram, longest)["memory"] is None,
    }
    return [name for name, stands in obstacles.items() if stands]


def _longest_bytes(sizes: StateSizes, longest: int) -> int:
    """Return the bytes of RAM that the longest prompt takes, up to the model's context."""
    return sizes.prompt_bytes(min(longest, sizes.state.context or longest))


def _cell(o: CellOutcome, possible: int, per_token: float, assumed: Assumed, rates: list[Rates]) -> Facts:
    counts = o._asdict()
    del counts["cell"], counts["served"]  # told by another name, or too long
    worn = advice.wear(o.written_bytes, o.served.seconds, assumed.tbw)
    return {
        **_hit_facts(o.cell, o),
        "of_possible": min(o.hit_tokens / possible, 1.0) if possible else None,
        "prefill_seconds_saved": o.hit_tokens / assumed.prefill_rate,
        "ttft": [_ttft(o.served, per_token, of) for of in rates],
        "decode_seconds_saved": o.hot_tokens * per_token / assumed.decode_rate,
        "hot_hits": o.hot_hits,
        "written_bytes_per_day": worn.bytes_per_day,
        "tbw_years": worn.years,
        **{name: getattr(o.served, name) for name in ("requests", "seconds", "asked_tokens")},
        **counts,
    }


def _hit_facts(cell: Cell, o: CellOutcome | FleetOutcome) -> Facts:
    asked = max(o.served.asked_tokens, 1)
    return {
        "ram": cell.ram,
        "ssd": cell.ssd,
        "policy": cell.policy,
        "ssd_admission": cell.admission,
        "hot": cell.hot,
        "hot_bytes": _hot_bytes(cell),
        "hit_rate": o.hit_rate,
        "ram_hit_rate": o.ram_tokens / asked,
        "hot_hit_rate": o.hot_tokens / asked,
        "ssd_hit_rate": o.ssd_tokens / asked,
        "hit_tokens": o.hit_tokens,
    }


# -- fleets -----------------------------------------------------------------------------------------------------------


def fleet_facts(
    outcomes: Sequence[FleetOutcome],
    ones: Sequence[tuple[CellOutcome, CellOutcome]],
    sessions: Sequence[int],
    sizes: StateSizes,
    options: FleetPlan,
    assumed: Assumed,
) -> Facts:
    """Return the facts of fleets. `ones`: for each size the outcome of one machine, and of one that has all of the fleet's
    RAM and SSD. `sessions`: each request's. The row of one machine has no routing; without a remote tier it has no admission.
    """
    rates = [Rates(assumed.prefill_rate, ssd, assumed.decode_rate) for ssd in assumed.ssd_rates]
    link, per_size = Link(options.rtt, options.rate), len(outcomes) // len(ones)
    rows = []
    for i, pair in enumerate(ones):
        of_size = [*map(_of_one, pair), *outcomes[i * per_size : (i + 1) * per_size]]
        rows.append([_fleet_row(outcome, sizes.bytes_per_token, link, rates) for outcome in of_size])
    counts = Counter(sessions)
    return {
        "machines": options.machines,
        "remote": options.limit,
        "rtt": link.rtt,
        "rate": link.rate,
        "reading_pays": link.rate / sizes.bytes_per_token > assumed.prefill_rate,
        "sessions": len(counts),
        "largest_session": max(counts.values()) / len(sessions),
        "sizes": rows,
    }


def _of_one(o: CellOutcome) -> FleetOutcome:
    remote = dict.fromkeys(("remote_tokens", *REMOTE_COUNTS), 0)
    tokens = o.ram_tokens, o.hot_tokens, o.ssd_tokens
    return FleetOutcome(Fleet(o.cell, 1, ""), o.served, [o.served.requests], *tokens, **remote)


def _fleet_row(o: FleetOutcome, per_token: float, link: Link, rates: list[Rates]) -> Facts:
    fleet = o.fleet
    return {
        "machines": fleet.machines,
        **_hit_facts(fleet.cell, o),
        "routing": fleet.routing or None,
        "remote_admission": fleet.remote_admission,
        "remote_hit_rate": o.remote_tokens / max(o.served.asked_tokens, 1),
        "requests": o.requests,
        "ttft": [_ttft(o.served, per_token, of, link) for of in rates],
        "sent_per_reused_token": o.sent_per_reused_token,
        "trips": int(o.served.trips.sum()),
        **{name: getattr(o, name) for name in REMOTE_COUNTS},
    }


def _ttft(served: Served, per_token: float, rates: Rates, link: Link = NO_WAIT) -> Facts:
    """Return the times to first token."""
    seconds = advice.times_to_first_token(served, per_token, rates, link)
    latency = advice.percentiles(seconds)
    percentiles = latency._asdict() if latency is not None else dict.fromkeys(advice.Latency._fields)
    return {"ssd_rate": rates.ssd, **percentiles, "mean": float(seconds.mean()) if seconds.size else None}
