"""`prefixcache plan`: how much RAM and SSD a server needs, before they are bought. This module checks the options and starts
the simulations of `prefixcache.planning`; `facts` makes the JSON object of their results, `text` and `report` show it.

MLX and mlx-lm are imported when the command runs, so that asking for help stays quick.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_args

import typer

from prefixcache.byte_sizes import parse_size
from prefixcache.cli import output
from prefixcache.cli.plan.shapes import SHAPES
from prefixcache.cli.plan.text import screen
from prefixcache.cli.progress import bar
from prefixcache.cli.text import Refused, complain, console, print_json, refusing
from prefixcache.settings import BASIS_DIR, Settings

if TYPE_CHECKING:
    from prefixcache.planning.model import ModelState
    from prefixcache.planning.outcome import Outcome
    from prefixcache.planning.sizes import Sizes
    from prefixcache.planning.sweep import Cell, Workload

CODECS = ("raw", "turboquant:4", "turboquant:4:3", "turboquant:3", "transform:4")
DEFAULT_CODEC = "turboquant:4"  # as `Settings` has it
SMALLEST, LARGEST = 1e-6, 1e12  # of a rate or a price
PARALLEL_IDS = 500_000  # ids to simulate, in all, from which processes of their own are worth their start
ROUTINGS = ("sticky", "random")
MOST_MACHINES = 1000
NEEDED = {  # of a fleet
    "--trace": "the requests",
    "--ram": "what each machine has",
    "--ssd": "what each machine has (0: none)",
}
REMOTE_ADMISSIONS = ("second", "always", "never")  # as `Settings` is to have them
POLICIES, ADMISSIONS = (get_args(Settings.model_fields[name].annotation) for name in ("policy", "ssd_admission"))
SHAPE_NAMES = ", ".join(sorted(SHAPES))

Facts = dict[str, Any]
Values = list[str] | None  # of an option that may be given again, or with commas


@dataclass(frozen=True)
class Assumed:
    """What the trace doesn't say. Rates in tokens or bytes a second, prices of a GB, `tbw` in bytes."""

    prefill_rate: float
    ssd_rates: list[int]
    decode_rate: int
    tbw: int
    ram_price: float
    ssd_price: float


class FleetOptions(NamedTuple):
    """How many machines share a remote tier, its limit in bytes (None: none), a round trip's seconds, and bytes a second."""

    machines: int
    routings: list[str]
    admissions: list[str]
    limit: int | None
    rtt: float
    rate: int


class Simulation(NamedTuple):
    """What is to be simulated; where no sizes are given, the trace's own bytes give some."""

    trace: Path
    block: int | None
    limit: int | None
    rams: list[int]
    ssds: list[int]
    policies: list[str]
    admissions: list[str]
    fleet: FleetOptions | None


def plan(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="The model's folder, its name on Hugging Face if it was downloaded, a config.json, or one of "
            f"{SHAPE_NAMES}.",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Requests: Mooncake's JSONL or a server's recording, plain or gzip."),
    ] = None,
    codec: Annotated[
        Values,
        typer.Option(
            metavar="SPEC", help=f"Such as turboquant:4:3. A trace is run with the first, else {DEFAULT_CODEC}."
        ),
    ] = None,
    ram: Annotated[
        Values,
        typer.Option(
            metavar="SIZES",
            help="Such as 8GB,16GB. Else from a 256th of all state up to all.",
        ),
    ] = None,
    ssd: Annotated[
        Values,
        typer.Option(metavar="SIZES", help="Such as 0,100GB. Else 0, a quarter of all state, and all."),
    ] = None,
    policy: Annotated[Values, typer.Option(metavar="NAMES", help=f"Eviction policies: {', '.join(POLICIES)}.")] = None,
    ssd_admission: Annotated[
        Values, typer.Option(metavar="NAMES", help=f"When an image is written to the SSD: {', '.join(ADMISSIONS)}.")
    ] = None,
    machines: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Machines, each with --ram and --ssd, that share a remote tier."),
    ] = None,
    routing: Annotated[
        Values, typer.Option(metavar="NAMES", help=f"Who serves a request of the fleet: {', '.join(ROUTINGS)}.")
    ] = None,
    remote: Annotated[
        str | None, typer.Option(metavar="SIZE", help="What the remote tier may hold. Else it has no limit.")
    ] = None,
    remote_rtt: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="A round trip to the remote tier. Else 0.002.")
    ] = None,
    remote_rate: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Bytes that come from there a second. Else 1GB.")
    ] = None,
    remote_admission: Annotated[
        Values, typer.Option(metavar="NAMES", help=f"When an image is sent there: {', '.join(REMOTE_ADMISSIONS)}.")
    ] = None,
    basis: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The model's basis, for codec transform; else it is looked for.")
    ] = None,
    basis_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", envvar="PREFIXCACHE_BASIS_DIR", help="Where it is looked for, by the weights."),
    ] = None,
    block: Annotated[int | None, typer.Option(min=1, help="Tokens that an id of the trace stands for.")] = None,
    first: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only the trace's first N requests.")] = None,
    prefill_rate: Annotated[float, typer.Option(metavar="TOKENS", help="Tokens that the model reads a second.")] = 1000,
    ssd_rate: Annotated[
        Values, typer.Option(metavar="SIZES", help="Bytes that the SSD reads a second, such as 1GB,3GB. Else 3GB.")
    ] = None,
    decode_rate: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Bytes of images that are decoded a second. Else 10GB, of codec transform 1GB.",
        ),
    ] = None,
    tbw: Annotated[str, typer.Option(metavar="SIZE", help="Bytes that the SSD is rated to be written.")] = "600TB",
    ram_price: Annotated[
        float, typer.Option(help="Price of a GB of RAM; only the ratio of the two prices matters.")
    ] = 25.0,
    ssd_price: Annotated[float, typer.Option(help="Price of a GB of SSD.")] = 0.4,
    as_json: Annotated[bool, typer.Option("--json", help="All numbers as one JSON object.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Draw it: OUT.png, OUT.svg, or both without a suffix.")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a report, one HTML page.")] = None,
) -> None:
    """Tell how much RAM and SSD a server needs, before they are bought.

    Of a model alone: what tokens and prompts take with each codec, and how many a
    Mac could keep. With a trace, the cache's own code runs on sizes in place of
    bytes: what each size of RAM and SSD would hit, save and write, and which pays.
    Prices, rates and the SSD's rated writes are examples until you give your own.

    A file that is there is replaced only if prefixcache wrote it.
    docs/planning.md says how to read the numbers.

    Exit code: 0 planned, 2 it could not be, 130 stopped by Ctrl-C.
    """
    try:
        with refusing((ValueError, RuntimeError)):
            pictures = output.pictures("--plot", plot)
            if html is not None:
                output.check("--html", html)
            if model is None:
                raise Refused(
                    f"--model is missing: give a model's folder, its name on Hugging Face, or one of {SHAPE_NAMES}"
                )
            codecs = _listed(codec)
            assumed = Assumed(
                _positive("--prefill-rate", prefill_rate),
                sorted({_rate("--ssd-rate", text) for text in _listed(ssd_rate) or ["3GB"]}),
                _rate("--decode-rate", _decoding(codecs) if decode_rate is None else decode_rate),
                _rate("--tbw", tbw, "no SSD could be written at all"),
                _positive("--ram-price", ram_price, or_zero=True),
                _positive("--ssd-price", ssd_price, or_zero=True),
            )
            given = {
                "--routing": routing,
                "--remote": remote,
                "--remote-rtt": remote_rtt,
                "--remote-rate": remote_rate,
                "--remote-admission": remote_admission,
            }
            needed = {"--trace": trace, "--ram": ram, "--ssd": ssd}
            fleet = _fleet_options(machines, given, [option for option, value in needed.items() if not value])
            simulation = (
                None
                if trace is None
                else Simulation(
                    trace,
                    block,
                    first,
                    _sizes("--ram", ram),
                    _sizes("--ssd", ssd),
                    _names("--policy", policy, POLICIES),
                    _names("--ssd-admission", ssd_admission, ADMISSIONS),
                    fleet,
                )
            )
            if simulation and 0 in simulation.rams:
                raise Refused("--ram 0: nothing could be kept; give it a size, such as 1GB")
            with _quiet_log():
                facts = _plan(model, codecs, simulation, assumed, basis, basis_dir or BASIS_DIR)
    except KeyboardInterrupt:
        complain("plan: stopped by SIGINT")
        raise typer.Exit(130) from None
    if as_json:
        print_json(facts)
    else:
        console().print(*screen(facts), sep="\n")
    with refusing():  # after the numbers: they took minutes
        _write(facts, html, pictures)


# -- the options ------------------------------------------------------------------------------------------------------


def _listed(values: Values) -> list[str]:
    """The values of an option that is given again, or with commas, each once."""
    return list(dict.fromkeys(part.strip() for text in values or () for part in text.split(",")))


def _sizes(option: str, values: Values) -> list[int]:
    return sorted({parse_size(text, option) for text in _listed(values)})


def _names(option: str, values: Values, known: Sequence[str]) -> list[str]:
    for name in _listed(values):
        if name not in known:
            raise Refused(f"{option} {name!r}: none of those there are; write {', '.join(known)}")
    return _listed(values) or [known[0]]


def _fleet_options(machines: int | None, given: Facts, missing: list[str]) -> FleetOptions | None:
    """`given`: the options of a fleet, as they were written. `missing`: of --trace, --ram and --ssd."""
    if machines is None:
        if alone := next((option for option, value in given.items() if value is not None), None):
            raise Refused(f"{alone}: this is for a fleet; add --machines, with how many there are")
        return None
    if machines > MOST_MACHINES:
        raise Refused(f"--machines {machines}: too many to simulate; give 1 to {MOST_MACHINES}")
    if missing:
        raise Refused(
            f"--machines {machines}: add {', '.join(f'{option} with {NEEDED[option]}' for option in missing)}"
        )
    limit, rtt, rate = given["--remote"], given["--remote-rtt"], given["--remote-rate"]
    return FleetOptions(
        machines,
        _names("--routing", given["--routing"], ROUTINGS),
        _names("--remote-admission", given["--remote-admission"], REMOTE_ADMISSIONS),
        None if limit is None else _rate("--remote", limit, "nothing could be sent there"),
        0.002 if rtt is None else _positive("--remote-rtt", rtt, or_zero=True),
        _rate("--remote-rate", rate or "1GB"),
    )


def _rate(option: str, text: str, problem: str = "nothing would ever arrive") -> int:
    nbytes = parse_size(text.removesuffix("/s"), option)
    if not nbytes:
        raise Refused(f"{option} {text}: {problem}; give a size, such as 2GB")
    return nbytes


def _decoding(codecs: Sequence[str]) -> str:
    """The rate of the codec that a trace is run with."""
    return "1GB" if (codecs or [DEFAULT_CODEC])[0].partition(":")[0] == "transform" else "10GB"


def _positive(option: str, value: float, *, or_zero: bool = False) -> float:
    if not (SMALLEST <= value <= LARGEST or (value == 0 and or_zero)):  # refuses a NaN too
        zero = "0, or " if or_zero else ""
        raise Refused(f"{option} {value:g}: not possible; give {zero}a number from {SMALLEST:g} to {LARGEST:g}")
    return value


def _model(name: str) -> ModelState:
    """The model of a path, of a known shape, or of a Hugging Face name that was downloaded; the network is not asked."""
    from huggingface_hub import constants, try_to_load_from_cache

    from prefixcache.planning.model import ModelState

    if name and Path(name).expanduser().exists():
        return ModelState.read(name)
    if name.lower() in SHAPES:
        return ModelState.of(SHAPES[name.lower()], name.lower())
    try:
        config = try_to_load_from_cache(name, "config.json", cache_dir=constants.HF_HUB_CACHE)
    except ValueError:  # no valid repository's name
        config = None
    if not isinstance(config, str):
        raise Refused(
            f"--model {name!r}: no such file or folder, and the Hugging Face cache in {constants.HF_HUB_CACHE} has no such "
            "model; give a config.json, a folder that has one, the name of a model that was downloaded, or one of "
            f"{SHAPE_NAMES}"
        )
    return ModelState.read(config)


# -- the work ---------------------------------------------------------------------------------------------------------


def _plan(
    model: str, specs: list[str], simulation: Simulation | None, assumed: Assumed, basis: Path | None, basis_dir: Path
) -> Facts:
    from prefixcache import __version__
    from prefixcache.cli.plan.bases import Where, sizes_of
    from prefixcache.cli.plan.facts import codec_facts, mac_facts, model_facts
    from prefixcache.codecs.choice import as_codec

    codecs = {spec: codec for spec in specs or CODECS if (codec := as_codec(spec)) is not None}
    state = _model(model)
    sizes = sizes_of(codecs, model, state, Where(basis, basis_dir))
    facts: Facts = {
        "prefixcache": __version__,
        "model": model_facts(state),
        "codecs": [codec_facts(spec, of) for spec, of in sizes.items()],
        "macs": mac_facts(state, sizes),
        "trace": None,
        "codec": None,
        "assumed": asdict(assumed),
        "sizes": None,
        "fleet": None,
    }
    if simulation is not None:
        spec = specs[0] if specs else DEFAULT_CODEC
        facts["codec"] = spec
        facts["trace"], facts["sizes"], facts["fleet"] = _simulate(state, sizes[spec], simulation, assumed)
    return facts


def _simulate(
    state: ModelState, sizes: Sizes, simulation: Simulation, assumed: Assumed
) -> tuple[Facts, Facts, Facts | None]:
    """Facts of the trace, of the sizes, and of the fleets, if any. An endless cache is simulated first: its bytes are the
    largest size that is worth a try, and its hits are what is possible.
    """
    from prefixcache.cli.plan.facts import capacities, grid, outcome_facts, ram_ladder, ssd_ladder, trace_facts
    from prefixcache.planning.bound import best_at
    from prefixcache.planning.sweep import ENDLESS, Cell, Workload, sufficient_ram, sweep
    from prefixcache.trace.reading import Trace, summary

    trace = Trace(simulation.trace, simulation.block, limit=simulation.limit)
    totals = summary(trace)
    lines = totals.requests + totals.stores
    workload = Workload(
        simulation.trace, state, sizes.codec, trace.block, simulation.limit, requests=lines, ids=totals.ids
    )
    with bar("an endless cache") as show:
        (endless,) = sweep(workload, [Cell(ENDLESS)], processes=1, progress=show)
    most = sufficient_ram(endless)
    rams = simulation.rams or ram_ladder(most)[:: 2 if simulation.ssds else 1]
    ssds = simulation.ssds or [0, *ssd_ladder(most)]
    cells = grid(rams, ssds, simulation.policies, simulation.admissions)
    processes = 1 if totals.ids * len(cells) < PARALLEL_IDS else None
    with bar("sizes") as show:
        outcomes = sweep(workload, cells, known={Cell(ENDLESS): endless}, most=most, processes=processes, progress=show)
    fleets = None
    if simulation.fleet is not None:
        fleets = _fleets(
            workload, cells, dict(zip(cells, outcomes, strict=True)), most, sizes, simulation.fleet, assumed
        )
    bounds = best_at(trace, capacities(cells, sizes.bytes_per_token, trace.block))
    return (
        trace_facts(trace, totals, endless.asked, state.context),
        outcome_facts(outcomes, bounds, endless, state, sizes, totals.longest, assumed),
        fleets,
    )


def _fleets(
    workload: Workload,
    cells: list[Cell],
    ones: dict[Cell, Outcome],
    most: int,
    sizes: Sizes,
    options: FleetOptions,
    assumed: Assumed,
) -> Facts:
    """Facts of fleets whose machines are of each size: with and without a remote tier, beside one machine of that size and
    one that has what they have together. `ones` are runs of one machine.
    """
    from prefixcache.cli.plan.facts import fleet_facts
    from prefixcache.planning.advice import Link
    from prefixcache.planning.routing import sessions
    from prefixcache.planning.sweep import Fleet, sweep, sweep_fleets
    from prefixcache.trace.reading import Trace

    link = Link(options.rtt, options.rate)
    with_all = [cell._replace(ram=cell.ram * options.machines, ssd=cell.ssd * options.machines) for cell in cells]
    fleets = [
        Fleet(*cell, options.machines, routing, admission, options.limit, link, assumed.prefill_rate)
        for cell in cells
        for routing in options.routings
        for admission in (None, *options.admissions)
    ]
    processes = 1 if (workload.ids or 0) * len(fleets) < PARALLEL_IDS else None
    with bar("one machine with all of it") as show:
        alone = sweep(workload, with_all, known=ones, most=most, processes=processes, progress=show)
    with bar("fleets") as show:
        outcomes = sweep_fleets(workload, fleets, processes=processes, progress=show)
    told = sessions(Trace(workload.trace, workload.block, limit=workload.limit))
    return fleet_facts(
        outcomes, [*zip([ones[cell] for cell in cells], alone, strict=True)], told, sizes, options, assumed
    )


@contextmanager
def _quiet_log() -> Iterator[None]:
    """What the log says of simulated tiers is told in the notes, once."""
    log = logging.getLogger("prefixcache")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _write(facts: Facts, html: Path | None, pictures: list[Path]) -> None:
    from prefixcache.cli.plan.report import page, picture

    if html is not None:
        output.write("--html", html, page(facts).encode())
    for file in pictures:
        output.write("--plot", file, picture(facts, file.suffix))
