"""`prefixcache plan`: how much RAM and SSD a server needs, before they are bought. `planner` does what `options` ask for and
returns it as a JSON object, which `text` shows.

MLX and mlx-lm are imported when the command runs, so that asking for help stays quick.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from prefixcache.cli.options import AsJson, with_options
from prefixcache.cli.plan.options import AssumedOptions, FleetOptions, ModelOptions, TraceOptions
from prefixcache.cli.plan.text import screen
from prefixcache.cli.text import complain, console, print_json, refusing


@with_options
def plan(
    model: ModelOptions, trace: TraceOptions, fleet: FleetOptions, assumed: AssumedOptions, as_json: AsJson = False
) -> None:
    """Tell how much RAM and SSD a server needs, before they are bought.

    Of a model alone: what tokens and prompts take with each codec, and how many a
    Mac could keep. With a trace, the cache's own code runs on sizes in place of
    bytes: what each size of RAM and SSD would hit, save and write, and which pays.
    Prices, rates and the SSD's rated writes are examples until you give your own.

    docs/planning.md says how to read the numbers.

    Exit code: 0 planned, 2 it could not be, 130 stopped by Ctrl-C.
    """
    from prefixcache.cli.plan.planner import planned_facts

    try:
        with refusing((ValueError, RuntimeError)):
            name, known = model.name(), assumed.checked(model.codecs())
            simulation = trace.checked(fleet.checked(trace))
            with _quiet_log():
                facts = planned_facts(name, model, simulation, known)
    except KeyboardInterrupt:
        complain("plan: stopped by SIGINT")
        raise typer.Exit(130) from None
    if as_json:
        print_json(facts)
    else:
        console().print(*screen(facts), sep="\n")


@contextmanager
def _quiet_log() -> Iterator[None]:
    """Silence the log: what it says of simulated tiers is told in the notes, once."""
    log = logging.getLogger("prefixcache")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
