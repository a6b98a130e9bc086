"""The options of `prefixcache plan`, as they are written and checked: which model, which trace and sizes, which fleet, what
is assumed, and where the numbers go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, NamedTuple, get_args

import typer

from prefixcache.byte_sizes import parse_size
from prefixcache.cli.plan.known_models import KNOWN_MODELS
from prefixcache.cli.text import Refused
from prefixcache.settings import BASIS_DIR, Settings

DEFAULT_CODEC = "turboquant:4"  # as `Settings` has it
SMALLEST, LARGEST = 1e-6, 1e12  # of a rate or a price
ROUTINGS = ("sticky", "random")
MOST_MACHINES = 1000
REMOTE_ADMISSIONS = ("second", "always", "never")  # as `Settings` is to have them
POLICIES, ADMISSIONS = (get_args(Settings.model_fields[name].annotation) for name in ("policy", "ssd_admission"))
KNOWN_NAMES = ", ".join(sorted(KNOWN_MODELS))

Values = list[str] | None  # of an option that may be given again, or with commas


@dataclass(frozen=True)
class ModelOptions:
    """The model, the codecs, and the basis of codec transform."""

    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="The model's folder, its name on Hugging Face if it was downloaded, a config.json, or one of "
            f"{KNOWN_NAMES}.",
        ),
    ] = None
    codec: Annotated[
        Values,
        typer.Option(
            metavar="SPEC", help=f"Such as turboquant:4:3. A trace is run with the first, else {DEFAULT_CODEC}."
        ),
    ] = None
    basis: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The model's basis, for codec transform; else it is looked for.")
    ] = None
    basis_dir: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            envvar="PREFIXCACHE_BASIS_DIR",
            help="Where it is looked for, by the weights.",
            show_default=False,
        ),
    ] = BASIS_DIR

    def name(self) -> str:
        """Return the model as it was given. Raises Refused without one."""
        if self.model is None:
            raise Refused(
                f"--model is missing: give a model's folder, its name on Hugging Face, or one of {KNOWN_NAMES}"
            )
        return self.model

    def codecs(self) -> list[str]:
        return _listed(self.codec)


class Assumed(NamedTuple):
    """What the trace doesn't say. Rates in tokens or bytes a second, prices of a GB, `tbw` in bytes."""

    prefill_rate: float
    ssd_rates: list[int]
    decode_rate: int
    tbw: int
    ram_price: float
    ssd_price: float


@dataclass(frozen=True)
class AssumedOptions:
    """The rates, prices and wear that a trace doesn't tell, as the user wrote them."""

    prefill_rate: Annotated[float, typer.Option(metavar="TOKENS", help="Tokens that the model reads a second.")] = 1000
    ssd_rate: Annotated[
        Values, typer.Option(metavar="SIZES", help="Bytes that the SSD reads a second, such as 1GB,3GB. Else 3GB.")
    ] = None
    decode_rate: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Bytes of images that are decoded a second. Else 10GB, of codec transform 1GB."
        ),
    ] = None
    tbw: Annotated[str, typer.Option(metavar="SIZE", help="Bytes that the SSD is rated to be written.")] = "600TB"
    ram_price: Annotated[
        float, typer.Option(help="Price of a GB of RAM; only the ratio of the two prices matters.")
    ] = 25.0
    ssd_price: Annotated[float, typer.Option(help="Price of a GB of SSD.")] = 0.4

    def checked(self, codecs: Sequence[str]) -> Assumed:
        """Return the numbers, the decoder's rate by the codec that runs a trace. Raises Refused for an impossible one."""
        transform = (codecs or [DEFAULT_CODEC])[0].partition(":")[0] == "transform"
        return Assumed(
            _positive("--prefill-rate", self.prefill_rate),
            sorted({_rate("--ssd-rate", text) for text in _listed(self.ssd_rate) or ["3GB"]}),
            _rate("--decode-rate", self.decode_rate or ("1GB" if transform else "10GB")),
            _rate("--tbw", self.tbw, "no SSD could be written at all"),
            _positive("--ram-price", self.ram_price, or_zero=True),
            _positive("--ssd-price", self.ssd_price, or_zero=True),
        )


class FleetPlan(NamedTuple):
    """How many machines share a remote tier, its limit in bytes (None: none), a round trip's seconds, and bytes a second."""

    machines: int
    routings: list[str]
    admissions: list[str]
    limit: int | None
    rtt: float
    rate: int


@dataclass(frozen=True)
class FleetOptions:
    """Machines that share a remote tier, as they are written."""

    machines: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Machines, each with --ram and --ssd, that share a remote tier."),
    ] = None
    routing: Annotated[
        Values, typer.Option(metavar="NAMES", help=f"Who serves a request of the fleet: {', '.join(ROUTINGS)}.")
    ] = None
    remote: Annotated[
        str | None, typer.Option(metavar="SIZE", help="What the remote tier may hold. Else it has no limit.")
    ] = None
    remote_rtt: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="A round trip to the remote tier. Else 0.002.")
    ] = None
    remote_rate: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Bytes that come from there a second. Else 1GB.")
    ] = None
    remote_admission: Annotated[
        Values, typer.Option(metavar="NAMES", help=f"When an image is sent there: {', '.join(REMOTE_ADMISSIONS)}.")
    ] = None

    def checked(self, sizes: TraceOptions) -> FleetPlan | None:
        """Return the fleet, None where none is asked for. Raises Refused for what contradicts itself or the `sizes`."""
        if self.machines is None:
            if option := _given(self):
                raise Refused(f"{option}: this is for a fleet; add --machines, with how many there are")
            return None
        if self.machines > MOST_MACHINES:
            raise Refused(f"--machines {self.machines}: too many to simulate; give 1 to {MOST_MACHINES}")
        if missing := sizes.missing_for_a_fleet():
            raise Refused(f"--machines {self.machines}: add {', '.join(missing)}")
        return FleetPlan(
            self.machines,
            _names("--routing", self.routing, ROUTINGS),
            _names("--remote-admission", self.remote_admission, REMOTE_ADMISSIONS),
            None if self.remote is None else _rate("--remote", self.remote, "nothing could be sent there"),
            0.002 if self.remote_rtt is None else _positive("--remote-rtt", self.remote_rtt, or_zero=True),
            _rate("--remote-rate", self.remote_rate or "1GB"),
        )


class TracePlan(NamedTuple):
    """What is simulated; where no sizes are given, the trace's own bytes give some."""

    trace: Path
    block: int | None
    limit: int | None
    rams: list[int]
    ssds: list[int]
    policies: list[str]
    admissions: list[str]
    hots: list[int | str]
    lease: float
    lease_tokens: int
    fleet: FleetPlan | None


@dataclass(frozen=True)
class TraceOptions:
    """The trace and the sizes to try, as they are written."""

    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Requests: Mooncake's JSONL or a server's recording, plain or gzip."),
    ] = None
    block: Annotated[int | None, typer.Option(min=1, help="Tokens that an id of the trace stands for.")] = None
    first: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only the trace's first N requests.")] = None
    ram: Annotated[
        Values, typer.Option(metavar="SIZES", help="Such as 8GB,16GB. Else from a 256th of all state up to all.")
    ] = None
    ssd: Annotated[
        Values, typer.Option(metavar="SIZES", help="Such as 0,100GB. Else 0, a quarter of all state, and all.")
    ] = None
    policy: Annotated[Values, typer.Option(metavar="NAMES", help=f"Eviction policies: {', '.join(POLICIES)}.")] = None
    ssd_admission: Annotated[
        Values, typer.Option(metavar="NAMES", help=f"When an image is written to the SSD: {', '.join(ADMISSIONS)}.")
    ] = None
    hot: Annotated[
        Values,
        typer.Option(metavar="SIZES", help="Of the RAM, for the state of hot prompts, such as 0,auto,4GB. Else auto."),
    ] = None

    lease: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="Tell what it costs if each request leases its prompt so long."),
    ] = 0.0
    lease_tokens: Annotated[
        int, typer.Option(min=0, metavar="N", help="Of each prompt only the first N tokens are leased; 0: all.")
    ] = 0

    def missing_for_a_fleet(self) -> list[str]:
        needed = {
            "--trace with the requests": self.trace,
            "--ram with what each machine has": self.ram,
            "--ssd with what each machine has (0: none)": self.ssd,
        }
        return [option for option, value in needed.items() if not value]

    def checked(self, fleet: FleetPlan | None) -> TracePlan | None:
        """Return what is to be simulated, None without a trace. Raises Refused for a size or a name that can't be."""
        if self.trace is None:
            if option := _given(self):
                raise Refused(f"{option} without --trace: nothing is simulated; add --trace FILE, or leave it out")
            return None
        rams = _sizes("--ram", self.ram)
        if 0 in rams:
            raise Refused("--ram 0: nothing could be kept; give it a size, such as 1GB")
        policies = _names("--policy", self.policy, POLICIES)
        admissions = _names("--ssd-admission", self.ssd_admission, ADMISSIONS)
        hots: list[int | str] = [text if text == "auto" else parse_size(text, "--hot") for text in _listed(self.hot)]
        return TracePlan(
            self.trace,
            self.block,
            self.first,
            rams,
            _sizes("--ssd", self.ssd),
            policies,
            admissions,
            hots or ["auto"],
            _positive("--lease", self.lease, or_zero=True),
            self.lease_tokens,
            fleet,
        )


def _given(options: FleetOptions | TraceOptions) -> str | None:
    """Return the first of these options that was given; None where none was."""
    given = (each.name for each in fields(options) if getattr(options, each.name) != each.default)
    return next((f"--{name.replace('_', '-')}" for name in given), None)


def _listed(values: Values) -> list[str]:
    """Return the values of an option that is given again, or with commas, each once."""
    return list(dict.fromkeys(part.strip() for text in values or () for part in text.split(",")))


def _sizes(option: str, values: Values) -> list[int]:
    return sorted({parse_size(text, option) for text in _listed(values)})


def _names(option: str, values: Values, known: Sequence[str]) -> list[str]:
    for name in _listed(values):
        if name not in known:
            raise Refused(f"{option} {name!r}: none of those there are; write {', '.join(known)}")
    return _listed(values) or [known[0]]


def _rate(option: str, text: str, problem: str = "nothing would ever arrive") -> int:
    nbytes = parse_size(text.removesuffix("/s"), option)
    if not nbytes:
        raise Refused(f"{option} {text}: {problem}; give a size, such as 2GB")
    return nbytes


def _positive(option: str, value: float, *, or_zero: bool = False) -> float:
    if not (SMALLEST <= value <= LARGEST or (value == 0 and or_zero)):  # refuses a NaN too
        zero = "0, or " if or_zero else ""
        raise Refused(f"{option} {value:g}: not possible; give {zero}a number from {SMALLEST:g} to {LARGEST:g}")
    return value
