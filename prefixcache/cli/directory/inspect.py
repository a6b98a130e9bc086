"""`prefixcache inspect`: what is in a directory, live or dead. Writes nothing into it; shows no tokens and no salts.

`facts.describe` makes one plain object of it; `--json` prints that object, and the tables here are drawn from it.
"""

from __future__ import annotations

import sqlite3
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from prefixcache.cli.directory.argument import errors_told, parse_directory, reason_of
from prefixcache.cli.directory.facts import KINDS, Facts, describe
from prefixcache.cli.directory.ranks import ranks_in, show_ranks
from prefixcache.cli.directory.remote import EngineOptions, describe_remote, show_remote
from prefixcache.cli.options import AsJson, with_options
from prefixcache.cli.tables import listing, named_rows
from prefixcache.cli.text import age, complain, console, foreign, many, print_json, refusing, size
from prefixcache.ssd import SsdError, Survey, survey
from prefixcache.store_fetch_remove.selection import model_meant

ROWS = 200  # of a table, without --all


@with_options
def inspect(
    engine: EngineOptions,
    directory: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIR", parser=parse_directory, help="The cache's directory (ssd_dir).", show_default=False
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this model; the name before @ will do.")
    ] = None,
    as_json: AsJson = False,
    everything: Annotated[bool, typer.Option("--all", help=f"Show all, not the first {ROWS} lines of each.")] = False,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Which code runs the codecs on this machine, in place of DIR.")
    ] = False,
) -> None:
    """Show what is in a directory, by model: tokens, sizes, age, last use, hits.

    Works on a directory that a server has open and on one that nobody has; changes nothing. Of a model that several processes
    serve, the ranks stand side by side.

    Exit code: 0 shown, 1 the index could not be read (what could be is shown), 2 nothing could be: no such
    directory, not one of prefixcache's, not readable, written by a newer release.
    """
    if engine.remote is not None and not kernels:
        with refusing():
            answers = describe_remote(engine, directory)
        if as_json:
            print_json(answers)
        else:
            show_remote(console(), answers)
        return
    if (directory is None) != kernels or engine.remote is not None:
        complain("give DIR, the cache's directory (ssd_dir), --kernels, or --remote URL")
        raise typer.Exit(2)
    if directory is None:
        _show_kernels(as_json)
        return
    with errors_told(directory, as_json=as_json):
        if ranks := ranks_in(directory):
            _inspect_ranks(directory, ranks, model, as_json)
            return
        facts = describe(_of_model(survey(directory), model), time.time())
    if as_json:
        print_json(facts)
    else:
        _show(console(), facts, None if everything else ROWS, of_model=model is not None)
    raise typer.Exit(1 if facts["problem"] else 0)


def _inspect_ranks(directory: Path, ranks: dict[int, Path], model: str | None, as_json: bool) -> None:
    facts: dict[int, Facts] = {}
    for rank, folder in ranks.items():
        try:
            facts[rank] = describe(_of_model(survey(folder), model), time.time())
        except (SsdError, OSError, sqlite3.Error) as error:
            facts[rank] = {"directory": str(folder), "error": reason_of(folder, error)}
            complain(facts[rank]["error"])
    if as_json:
        print_json({"directory": str(directory), "ranks": [{"rank": rank, **of} for rank, of in facts.items()]})
    else:
        show_ranks(console(), directory, {rank: of for rank, of in facts.items() if not of["error"]})
    raise typer.Exit(1 if any(of["error"] or of["problem"] for of in facts.values()) else 0)


def _of_model(whole: Survey, name: str | None) -> Survey:
    """Return the survey with this model's namespaces only."""
    if name is None:
        return whole
    model = model_meant(name, [space.model for space in whole.namespaces])
    return replace(whole, namespaces=tuple(space for space in whole.namespaces if space.model == model))


def _show_kernels(as_json: bool) -> None:
    # They need MLX, which the rest does not.
    from prefixcache.codecs.transform.backends import describe as entropy_coder
    from prefixcache.codecs.transform.gpu_coding import describe as gpu_transform
    from prefixcache.codecs.turboquant.backends import describe as code_paths

    if as_json:
        print_json({"kernels": code_paths(), "entropy_coder": entropy_coder(), "transform_gpu": gpu_transform()})
        return
    for device, code in code_paths().items():
        console().print(f"TurboQuant, {device}: {code}")
    console().print(f"transform, entropy coder, cpu: {entropy_coder()}")
    console().print(f"transform, gpu: {gpu_transform()}")


def _show(out: Console, facts: Facts, limit: int | None, *, of_model: bool) -> None:
    out.print(_summary(facts, of_model=of_model))
    if facts["namespaces"]:
        out.print(_namespaces(facts, limit))
        out.print(
            "In the order of last use. used: age of the last use. raw: size in a live cache. hits: of images.",
            style="dim",
        )
    if facts["quarantine"]:
        out.print(_quarantine(facts, limit))
    if facts["tmp"]:
        out.print(_tmp(facts, limit))


def _summary(facts: Facts, *, of_model: bool) -> Table:
    totals = facts["totals"]
    table = named_rows()
    table.add_row("directory", foreign(facts["directory"]))
    table.add_row("state", _state(facts))
    if facts["problem"]:
        cure = "; it is rebuilt from the files when a cache opens the directory, or by prefixcache reconcile"
        table.add_row("index", foreign(f"can't be read: {facts['problem']}{cure}", "red"))
    parts = [
        f"images {size(totals['disk'])}" if not facts["problem"] else "",
        f"index {size(facts['index_bytes'])}",
        f"quarantine {size(totals['quarantine']['disk'])}" if facts["quarantine"] else "",
    ]
    rest = "images, " if facts["problem"] else "other models, " if of_model else ""
    table.add_row(
        "on disk", f"{size(facts['disk'])}: {', '.join(filter(None, parts))}, the rest {rest}folders and the lock"
    )
    if not facts["problem"]:
        images = sum(totals[kind]["images"] for kind in KINDS)
        content = (
            f"{many(totals['tokens'], 'token')} in {many(totals['blocks']['images'], 'block')}, "
            f"{many(images, 'image')} in {many(totals['namespaces'], 'namespace')}"
        )
        table.add_row("content", content if images else "nothing yet")
    return table


def _state(facts: Facts) -> Text:
    if facts["live"]:
        return foreign(f"open: {facts['holder']}", "green")
    if facts["clean"]:
        return Text("closed")
    return Text("nobody has it open, and it was not closed cleanly: the next opening looks it over", style="yellow")


def _namespaces(facts: Facts, limit: int | None) -> Table:
    """Return a table with two lines a namespace, so that all fits in 80 columns. In the order of use."""
    now, totals, spaces = facts["now"], facts["totals"], facts["namespaces"]
    several = len(spaces) > 1
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False, show_footer=several)
    table.add_column("model\ncodec, namespace", overflow="fold", footer=Text("total"))
    for heading, top, bottom in (
        ("tokens\nblocks", f"{totals['tokens']:,}", f"{totals['blocks']['images']:,}"),
        ("windows\nsnapshots", f"{totals['windows']['images']:,}", f"{totals['snapshots']['images']:,}"),
        ("bytes\non disk", size(totals["nbytes"]), size(totals["disk"])),
        ("raw\nratio", *_raw_and_ratio(totals)),
        ("newest\noldest", age(totals["newest"], now), age(totals["oldest"], now)),
        ("used\nhits", age(totals["last_used"], now), f"{totals['hits']:,}"),
    ):
        table.add_column(heading, justify="right", no_wrap=True, footer=Text(f"{top}\n{bottom}"))
    for space in spaces[:limit]:
        raw_size, ratio = _raw_and_ratio(space)
        table.add_row(
            Text.assemble(
                foreign(space["model"], "bold"), "\n", foreign(f"{space['codec_name']}, {space['root'][:8]}", "dim")
            ),
            f"{space['tokens']:,}\n{space['blocks']['images']:,}",
            f"{space['windows']['images']:,}\n{space['snapshots']['images']:,}",
            f"{size(space['nbytes'])}\n{size(space['disk'])}",
            f"{raw_size}\n{ratio}",
            f"{age(space['newest'], now)}\n{age(space['oldest'], now)}",
            f"{age(space['last_used'], now)}\n{space['hits']:,}",
        )
    if limit is not None and len(spaces) > limit:
        table.add_row(foreign(f"... {many(len(spaces) - limit, 'namespace')} more, used longer ago: --all", "dim"))
    return table


def _raw_and_ratio(space: Facts) -> tuple[str, str]:
    nbytes, ratio = space["raw_nbytes"], space["ratio"]
    return (size(nbytes) if nbytes is not None else "?"), (f"{ratio:.2f}x" if ratio else "-")


def _quarantine(facts: Facts, limit: int | None) -> Table:
    items = facts["quarantine"]
    table = listing(["quarantine: files that failed a check, and why"], ["age", "on disk"])
    for item in items[-limit:] if limit is not None else items:
        where = item["origin"] or f"quarantine/{item['name']}"
        entry = Text.assemble(foreign(where), "\n", foreign(item["reason"] or "no reason was noted", "dim"))
        table.add_row(entry, age(item["when"], facts["now"]), size(item["disk"]))
    if limit is not None and len(items) > limit:
        table.add_row(foreign(f"... {len(items) - limit:,} more, older: --all", "dim"))
    return table


def _tmp(facts: Facts, limit: int | None) -> Table:
    names = facts["tmp"]
    meaning = "being written now" if facts["live"] else "left by interrupted writes; the next opening deletes them"
    table = listing([f"tmp: {meaning}"])
    for name in names[:limit]:
        table.add_row(foreign(name))
    if limit is not None and len(names) > limit:
        table.add_row(foreign(f"... {many(len(names) - limit, 'file')} more: --all", "dim"))
    return table
