"""`prefixcache plan`: how much RAM and SSD a server needs, before they are bought. What is asked is read and checked here;
the simulations are `prefixcache.planning`'s, and how the results look is `text`'s and `report`'s.

MLX and mlx-lm are imported when the command runs, so that asking for help stays quick.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_args

import typer

from prefixcache.cli import output
from prefixcache.cli.plan.shapes import SHAPES
from prefixcache.cli.plan.text import screen
from prefixcache.cli.progress import bar
from prefixcache.cli.text import Refused, complain, console, print_json, refusing
from prefixcache.settings import Settings, parse_size

if TYPE_CHECKING:
    from prefixcache.planning.model import ModelState
    from prefixcache.planning.sizes import Sizes

CODECS = ("raw", "affine:4", "turboquant:4", "turboquant:4:3", "turboquant:3")
USUAL = "turboquant:4"  # as `Settings` has it
LEAST, MOST = 1e-6, 1e12  # of a rate or a price
WORTH = 500_000  # ids to simulate, in all, from which processes of their own are worth their beginning
POLICIES, ADMISSIONS = (get_args(Settings.model_fields[name].annotation) for name in ("policy", "ssd_admission"))

Facts = dict[str, Any]
Texts = list[str] | None  # of an option that may be given again, or with commas


@dataclass(frozen=True)
class Assumed:
    """What the trace doesn't say. Rates in tokens or bytes a second, prices of a GB, `tbw` in bytes."""

    prefill_rate: float
    ssd_rates: list[int]
    decode_rate: int
    tbw: int
    ram_price: float
    ssd_price: float


class _Wanted(NamedTuple):
    """What is to be simulated; empty sizes: a ladder that the trace's own bytes give."""

    trace: Path
    block: int | None
    first: int | None
    rams: list[int]
    ssds: list[int]
    policies: list[str]
    admissions: list[str]


def plan(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="What serve takes, the model's folder or its name on Hugging Face if it was downloaded; or a config.json, "
            f"or one of {', '.join(sorted(SHAPES))}.",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Requests: Mooncake's JSONL or a server's recording, plain or gzip."),
    ] = None,
    codec: Annotated[
        Texts,
        typer.Option(metavar="SPEC", help=f"Such as turboquant:4:3; several. With a trace the first, else {USUAL}."),
    ] = None,
    ram: Annotated[
        Texts,
        typer.Option(metavar="SIZES", help="RAM, such as 8GB,16GB; 0: SSD only. Else from a 256th of all up to it."),
    ] = None,
    ssd: Annotated[
        Texts, typer.Option(metavar="SIZES", help="SSD, such as 0,100GB. Else none, a quarter of all, all.")
    ] = None,
    policy: Annotated[Texts, typer.Option(metavar="NAMES", help=f"Of eviction: {', '.join(POLICIES)}.")] = None,
    ssd_admission: Annotated[
        Texts, typer.Option(metavar="NAMES", help=f"What the SSD is given: {', '.join(ADMISSIONS)}.")
    ] = None,
    block: Annotated[int | None, typer.Option(min=1, help="Tokens that an id of the trace stands for.")] = None,
    first: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only the trace's first N requests.")] = None,
    prefill_rate: Annotated[float, typer.Option(metavar="TOKENS", help="Tokens that the model reads a second.")] = 1000,
    ssd_rate: Annotated[
        Texts, typer.Option(metavar="SIZES", help="That the SSD reads a second, such as 1GB,3GB. Else 3GB.")
    ] = None,
    decode_rate: Annotated[str, typer.Option(metavar="SIZE", help="Of images that are decoded a second.")] = "10GB",
    tbw: Annotated[str, typer.Option(metavar="SIZE", help="That the SSD may be written, by its maker.")] = "600TB",
    ram_price: Annotated[float, typer.Option(help="Of a GB of RAM. Only the ratio of the two prices matters.")] = 25.0,
    ssd_price: Annotated[float, typer.Option(help="Of a GB of SSD.")] = 0.4,
    as_json: Annotated[bool, typer.Option("--json", help="All numbers as one JSON object.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Draw it: OUT.png, OUT.svg, or both without a suffix.")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a report: one page, complete.")] = None,
) -> None:
    """Tell how much RAM and SSD a server needs, before they are bought.

    Of a model alone: what tokens and prompts take with each codec, and how many
    a Mac could keep. With a trace: what each size of RAM and SSD would hit, by
    the cache's own code on sizes in place of bytes; the prefill and the waiting
    that it saves, what it writes, and which size pays. Prices, rates and the
    SSD's rated writes are examples until you give your own.

    Files are written whole or not at all; one that is there is replaced only if
    this command wrote it. docs/planning.md says how to read the numbers.

    Exit code: 0 planned, 2 it could not be, 130 stopped by Ctrl-C.
    """
    try:
        with refusing((ValueError, RuntimeError)):
            pictures = output.pictures("--plot", plot) if plot is not None else []
            if html is not None:
                output.check("--html", html)
            if model is None:
                raise Refused(f"--model is missing: give a model's folder, its name on Hugging Face, or {_shapes()}")
            assumed = Assumed(
                _positive("--prefill-rate", prefill_rate),
                sorted({_rate("--ssd-rate", text) for text in _listed(ssd_rate) or ["3GB"]}),
                _rate("--decode-rate", decode_rate), _rate("--tbw", tbw, "no SSD could be written at all"),
                _positive("--ram-price", ram_price, or_zero=True), _positive("--ssd-price", ssd_price, or_zero=True),
            )  # fmt: skip
            wanted = None if trace is None else _Wanted(
                trace, block, first, _sizes("--ram", ram), _sizes("--ssd", ssd),
                _names("--policy", policy, POLICIES), _names("--ssd-admission", ssd_admission, ADMISSIONS),
            )  # fmt: skip
            if wanted and wanted.rams == wanted.ssds == [0]:
                raise Refused("--ram 0 with --ssd 0: nothing could be kept; give at least one of them a size")
            with _quiet_log():
                facts = _plan(model, _listed(codec), wanted, assumed)
    except KeyboardInterrupt:
        complain("plan: stopped by SIGINT")
        raise typer.Exit(130) from None
    if as_json:
        print_json(facts)
    else:
        out = console()
        for part in screen(facts):
            out.print(part)
    with refusing():  # after the numbers: they took minutes
        _write(facts, html, pictures)


# -- what was asked ---------------------------------------------------------------------------------------------------


def _shapes() -> str:
    return f"one of {', '.join(sorted(SHAPES))}"


def _listed(given: Texts) -> list[str]:
    """Options that are given again, or with commas, each once."""
    return list(dict.fromkeys(part.strip() for text in given or () for part in text.split(",")))


def _sizes(option: str, given: Texts) -> list[int]:
    return sorted({parse_size(text, option) for text in _listed(given)})


def _names(option: str, given: Texts, known: Sequence[str]) -> list[str]:
    for name in _listed(given):
        if name not in known:
            raise Refused(f"{option} {name!r}: none of those there are; write {', '.join(known)}")
    return _listed(given) or [known[0]]


def _rate(option: str, text: str, what: str = "nothing would ever arrive") -> int:
    nbytes = parse_size(text.removesuffix("/s"), option)
    if not nbytes:
        raise Refused(f"{option} {text}: {what}; give a size, such as 2GB")
    return nbytes


def _positive(option: str, value: float, *, or_zero: bool = False) -> float:
    if not (LEAST <= value <= MOST or (value == 0 and or_zero)):  # refuses a NaN too
        zero = "0, or " if or_zero else ""
        raise Refused(f"{option} {value:g}: not possible; give {zero}a number from {LEAST:g} to {MOST:g}")
    return value


def _model(name: str) -> ModelState:
    from prefixcache.planning.model import ModelState

    if name and Path(name).expanduser().exists():
        return ModelState.read(name)
    if name.lower() in SHAPES:
        return ModelState.of(SHAPES[name.lower()], name.lower())
    return ModelState.read(_in_the_hubs_cache(name))


def _in_the_hubs_cache(name: str) -> str:
    """The config.json of a Hugging Face name that was downloaded before; the network is not asked."""
    from huggingface_hub import constants, try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, "config.json", cache_dir=constants.HF_HUB_CACHE)
    except ValueError:  # none of their names
        found = None
    if not isinstance(found, str):
        raise Refused(
            f"--model {name!r}: no such file or folder, and the Hugging Face cache in {constants.HF_HUB_CACHE} has no such "
            f"model; give a config.json, a folder that has one, the name of a model that was downloaded, or {_shapes()}"
        )
    return found


# -- the work ---------------------------------------------------------------------------------------------------------


def _plan(model: str, names: list[str], wanted: _Wanted | None, assumed: Assumed) -> Facts:
    from prefixcache import __version__
    from prefixcache.cli.plan import facts as plan_facts
    from prefixcache.codecs.choice import as_codec
    from prefixcache.planning.sizes import Sizes

    codecs = {name: codec for name in names or CODECS if (codec := as_codec(name)) is not None}
    state = _model(model)
    sizes = {name: Sizes(state, codec) for name, codec in codecs.items()}
    facts: Facts = {
        "prefixcache": __version__, "model": plan_facts.of_model(state),
        "codecs": [plan_facts.of_codec(*named) for named in sizes.items()], "macs": plan_facts.of_macs(state, sizes),
        "trace": None, "codec": None, "assumed": asdict(assumed), "sizes": None,
    }  # fmt: skip
    if wanted is not None:
        facts["codec"] = names[0] if names else USUAL
        facts["trace"], facts["sizes"] = _simulate(state, sizes[facts["codec"]], wanted, assumed)
    return facts


def _simulate(state: ModelState, sizes: Sizes, wanted: _Wanted, assumed: Assumed) -> tuple[Facts, Facts]:
    """An endless cache first: its bytes are the ladder's top, and its hits are what is possible."""
    from prefixcache.cli.plan import facts as plan_facts
    from prefixcache.planning.bound import best_at
    from prefixcache.planning.sweep import ENDLESS, Cell, Workload, enough, sweep
    from prefixcache.trace.reading import Trace, summary

    requests = Trace(wanted.trace, wanted.block, limit=wanted.first)
    known = summary(requests)
    lines = known.requests + known.stores
    workload = Workload(wanted.trace, state, sizes.codec, requests.block, wanted.first, requests=lines)
    with bar("an endless cache") as show:
        (endless,) = sweep(workload, [Cell(ENDLESS)], processes=1, progress=show)
    most = enough(endless)
    rams = wanted.rams or plan_facts.ram_ladder(most)[:: 2 if wanted.ssds else 1]
    ssds = wanted.ssds or [0, *plan_facts.ssd_ladder(most)]
    cells = plan_facts.grid(rams, ssds, wanted.policies, wanted.admissions)
    processes = 1 if known.ids * len(cells) < WORTH else None
    with bar("sizes") as show:
        outcomes = sweep(workload, cells, known={Cell(ENDLESS): endless}, most=most, processes=processes, progress=show)
    bounds = best_at(requests, plan_facts.capacities(cells, sizes.bytes_per_token, requests.block))
    told = plan_facts.of_trace(requests, known, endless.asked, state.context)
    facts = plan_facts.of_outcomes(outcomes, bounds, endless, sizes.bytes_per_token, assumed)
    if (best := facts["recommendation"]) is not None:
        ram = plan_facts.ram_taken(facts["cells"][best["cell"]]["ram"])
        best["machine"] = plan_facts.of_machine(state, sizes, ram, known.longest)
    return told, facts


@contextmanager
def _quiet_log() -> Iterator[None]:
    """What the log says of simulated tiers is told in the notes, once."""
    log = logging.getLogger("prefixcache")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _write(facts: Facts, html: Path | None, pictures: list[Path]) -> None:
    from prefixcache.cli.plan.report import page, picture

    if html is not None:
        output.write("--html", html, page(facts).encode())
    output.write_pictures("--plot", pictures, partial(picture, facts))
