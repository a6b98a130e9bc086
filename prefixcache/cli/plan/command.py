"""`prefixcache plan`: how much RAM and SSD a server needs, before they are bought. This module is the screen; what it tells
is `plan_facts`', and the simulations are `prefixcache.planning`'s.

MLX and mlx-lm are imported when the command runs, so that asking for help stays quick.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_args

import typer

from prefixcache.cli.evaluate.texts import NotMeasured
from prefixcache.cli.plan import files as plan_files
from prefixcache.cli.plan import plot as plan_plot
from prefixcache.cli.plan.shapes import SHAPES
from prefixcache.cli.progress import bar
from prefixcache.cli.text import complain, console, print_json
from prefixcache.settings import Settings, parse_size

if TYPE_CHECKING:
    from prefixcache.cli.plan.facts import Assumed
    from prefixcache.planning.model import ModelState
    from prefixcache.planning.sizes import Sizes
    from prefixcache.planning.sweep import Cell

CODECS = ("raw", "affine:4", "turboquant:4", "turboquant:4:3", "turboquant:3")
USUAL = "turboquant:4"  # as `Settings` has it
LEAST, MOST = 1e-6, 1e12  # of a rate or a price
WORTH = 500_000  # ids to simulate, in all, from which processes of their own are worth their beginning
POLICIES, ADMISSIONS = (get_args(Settings.model_fields[name].annotation) for name in ("policy", "ssd_admission"))

Facts = dict[str, Any]


class NotPlanned(ValueError):
    """It can't be planned as asked. The text names the option, the value and the remedy."""


class _Wanted(NamedTuple):
    """What is to be simulated; empty sizes: a ladder that the trace's own bytes give."""

    trace: Path
    block: int | None
    first: int | None
    rams: list[int]
    ssds: list[int]
    policies: list[str]
    admissions: list[str]
    processes: int | None


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
        list[str] | None,
        typer.Option(
            metavar="SPEC", help=f"Such as turboquant:4:3; several, or again. With a trace the first, else {USUAL}."
        ),
    ] = None,
    ram: Annotated[
        list[str] | None,
        typer.Option(metavar="SIZES", help="Of RAM, such as 8GB,16GB; 0: SSD only. Else from a 256th of all up to it."),
    ] = None,
    ssd: Annotated[
        list[str] | None,
        typer.Option(metavar="SIZES", help="Of SSD, such as 0,100GB. Else none, a quarter of all, all."),
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(metavar="NAMES", help=f"Who leaves first: {', '.join(POLICIES)}.")
    ] = None,
    ssd_admission: Annotated[
        list[str] | None, typer.Option(metavar="NAMES", help=f"What the SSD is given: {', '.join(ADMISSIONS)}.")
    ] = None,
    block: Annotated[int | None, typer.Option(min=1, help="Tokens that an id of the trace stands for.")] = None,
    first: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only the trace's first N requests.")] = None,
    prefill_rate: Annotated[float, typer.Option(metavar="TOKENS", help="Tokens that the model reads a second.")] = 1000,
    ssd_rate: Annotated[
        list[str] | None, typer.Option(metavar="SIZES", help="That the SSD reads a second, such as 1GB,3GB. Else 3GB.")
    ] = None,
    decode_rate: Annotated[str, typer.Option(metavar="SIZE", help="Of images that are decoded a second.")] = "10GB",
    tbw: Annotated[str, typer.Option(metavar="SIZE", help="That the SSD may be written, by its maker.")] = "600TB",
    ram_price: Annotated[float, typer.Option(help="Of a GB of RAM. Only the ratio of the two prices matters.")] = 25.0,
    ssd_price: Annotated[float, typer.Option(help="Of a GB of SSD.")] = 0.4,
    processes: Annotated[int | None, typer.Option(min=1, help="That simulate side by side. Else one a core.")] = None,
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
        files = plan_plot.targets(plot) if plot is not None else []
        if html is not None:
            plan_files.check("--html", html)
        if model is None:
            raise NotPlanned(f"--model is missing: give a model's folder, its name on Hugging Face, or {_shapes()}")
        assumed = _assumed(prefill_rate, ssd_rate, decode_rate, tbw, ram_price, ssd_price)
        wanted = None
        if trace is not None:
            wanted = _Wanted(
                trace, block, first, _sizes("--ram", ram), _sizes("--ssd", ssd),
                _names("--policy", policy, POLICIES), _names("--ssd-admission", ssd_admission, ADMISSIONS), processes,
            )  # fmt: skip
            if wanted.rams == wanted.ssds == [0]:
                raise NotPlanned("--ram 0 with --ssd 0: nothing could be kept; give at least one of them a size")
        with _quiet_log():
            facts = _plan(model, _listed(codec), wanted, assumed)
    except (ValueError, OSError, RuntimeError, NotMeasured, plan_files.NotWritable) as error:
        complain(str(error))
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        complain("plan: stopped by SIGINT")
        raise typer.Exit(130) from None
    _show(facts, as_json)
    _write(facts, plot, files, html)


# -- what was asked ---------------------------------------------------------------------------------------------------


def _shapes() -> str:
    return f"one of {', '.join(sorted(SHAPES))}"


def _listed(given: list[str] | None) -> list[str]:
    """Options that are given again, or with commas, each once."""
    return list(dict.fromkeys(part.strip() for text in given or () for part in text.split(",")))


def _sizes(option: str, given: list[str] | None) -> list[int]:
    return sorted({parse_size(text, option) for text in _listed(given)})


def _names(option: str, given: list[str] | None, known: Sequence[str]) -> list[str]:
    for name in _listed(given):
        if name not in known:
            raise NotPlanned(f"{option} {name!r}: none of those there are; write {', '.join(known)}")
    return _listed(given) or [known[0]]


def _more_than_nothing(option: str, text: str, what: str) -> int:
    found = parse_size(text.removesuffix("/s"), option)
    if not found:
        raise NotPlanned(f"{option} {text}: {what}; give a size, such as 2GB")
    return found


def _positive(option: str, value: float, *, or_zero: bool = False) -> float:
    if not (LEAST <= value <= MOST or (value == 0 and or_zero)):  # refuses a NaN too
        zero = "0, or " if or_zero else ""
        raise NotPlanned(f"{option} {value:g}: not possible; give {zero}a number from {LEAST:g} to {MOST:g}")
    return value


def _assumed(
    prefill: float, ssd: list[str] | None, decode: str, tbw: str, ram_price: float, ssd_price: float
) -> Assumed:
    from prefixcache.cli.plan.facts import Assumed
    from prefixcache.planning.advice import Prices

    slow = "nothing would ever arrive"
    ssds = tuple(sorted({_more_than_nothing("--ssd-rate", text, slow) for text in _listed(ssd) or ["3GB"]}))
    prices = Prices(*(_positive(f"--{n}-price", p, or_zero=True) for n, p in (("ram", ram_price), ("ssd", ssd_price))))
    return Assumed(
        _positive("--prefill-rate", prefill), ssds, _more_than_nothing("--decode-rate", decode, slow),
        _more_than_nothing("--tbw", tbw, "no SSD could be written at all"), prices,
    )  # fmt: skip


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
        raise NotPlanned(
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

    chosen = names[0] if names else USUAL
    codecs = [(name, codec) for name in names or CODECS if (codec := as_codec(name)) is not None]
    state = _model(model)
    sized = [(name, Sizes(state, codec)) for name, codec in codecs]
    facts: Facts = {
        "prefixcache": __version__, "model": plan_facts.of_model(state),
        "codecs": [plan_facts.of_codec(name, sizes) for name, sizes in sized],
        "macs": plan_facts.of_macs(state, sized), "trace": None, "codec": None, "assumed": assumed.as_dict(), "sizes": None,
    }  # fmt: skip
    if wanted is not None:
        facts["codec"] = chosen
        facts["trace"], facts["sizes"] = _simulate(state, dict(sized)[chosen], wanted, assumed)
    return facts


def _simulate(state: ModelState, sizes: Sizes, wanted: _Wanted, assumed: Assumed) -> tuple[Facts, Facts]:
    """An endless cache first: its bytes are the ladder's top, and its hits are what is possible."""
    from prefixcache.cli.plan import facts as plan_facts
    from prefixcache.planning.bound import best_at
    from prefixcache.planning.sweep import ENDLESS, Cell, Workload, enough, sweep
    from prefixcache.trace.reading import Trace, summary

    requests = Trace(wanted.trace, wanted.block, limit=wanted.first)
    found = summary(requests)
    lines = found.requests + found.stores
    workload = Workload(wanted.trace, state, sizes.codec, requests.block, wanted.first, requests=lines)
    with bar("an endless cache") as show:
        (endless,) = sweep(workload, [Cell(ENDLESS)], processes=1, progress=show)
    most = enough(endless)
    cells = _cells(wanted, most)
    processes = 1 if found.ids * len(cells) < WORTH else wanted.processes
    with bar("sizes") as show:
        outcomes = sweep(workload, cells, known={Cell(ENDLESS): endless}, most=most, processes=processes, progress=show)
    bounds = best_at(requests, plan_facts.capacities(cells, sizes.bytes_per_token, requests.block))
    told = plan_facts.of_trace(requests, found, endless.asked, state.context)
    facts = plan_facts.of_outcomes(outcomes, bounds, endless, sizes.bytes_per_token, assumed)
    if (best := facts["recommendation"]) is not None:
        ram = plan_facts.ram_taken(facts["cells"][best["cell"]]["ram"])
        best["machine"] = plan_facts.of_machine(state, sizes, ram, found.longest)
    return told, facts


def _cells(wanted: _Wanted, most: int) -> list[Cell]:
    """All sizes of RAM with all of SSD: those that were given, or ladders that the trace's own bytes give."""
    from prefixcache.cli.plan.facts import grid, ram_ladder, ssd_ladder

    rams = wanted.rams or ram_ladder(most)[:: 2 if wanted.ssds else 1]
    return grid(rams, wanted.ssds or [0, *ssd_ladder(most)], wanted.policies, wanted.admissions)


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


# -- the results ------------------------------------------------------------------------------------------------------


def _show(facts: Facts, as_json: bool) -> None:
    from prefixcache.cli.plan.text import screen

    if as_json:
        print_json(facts)
        return
    out = console()
    for part in screen(facts):
        out.print(part)


def _write(facts: Facts, plot: Path | None, files: Sequence[Path], html: Path | None) -> None:
    """After the numbers: they took minutes."""
    from prefixcache.cli.plan.html import page

    option = f"--html {html}"
    try:
        if html is not None:
            text = page(facts)
            plan_files.write(html, lambda half: half.write_bytes(text.encode()))
        option = f"--plot {plot}"
        if files:
            plan_plot.draw(facts, list(files))
    except OSError as error:
        complain(f"{option}: {error.strerror}")
        raise typer.Exit(2) from error
