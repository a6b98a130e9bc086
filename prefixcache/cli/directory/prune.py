"""`prefixcache prune`: the images of a selection are deleted. The work is `prefixcache.ssd.pruning`'s."""

from __future__ import annotations

import re
import time
from typing import Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from prefixcache.byte_sizes import parse_size
from prefixcache.cli.directory.argument import Dir, errors_told
from prefixcache.cli.progress import bar
from prefixcache.cli.text import complain, console, foreign, many, print_json, size
from prefixcache.ssd import Pruned, Selection
from prefixcache.ssd import prune as delete

ROWS = 200  # namespaces in the table; --json has all
UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def prune(
    directory: Dir,
    older_than: Annotated[
        str | None,
        typer.Option(metavar="AGE", help="Last used at least so long ago, such as 7d; units: s, min, h, d, w."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of this model only; the name before @ will do.")
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option(
            metavar="ROOT", help="Of this namespace only: the beginning of its root key, as inspect shows it."
        ),
    ] = None,
    to_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="The least recently used, until DIR takes at most this, such as 100GB."),
    ] = None,
    quarantine: Annotated[
        bool,
        typer.Option("--quarantine", help="Quarantined files, too; with --older-than those quarantined so long ago."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The result as one JSON object.")] = False,
) -> None:
    """Delete the images that all options select. An image stays as long as one that depends on it does.

    Nobody else may have the directory open; a dry run looks at a live one too, and guesses the index's share.

    Exit code: 0 done, 1 DIR takes more than --to-size even so, 2 it could not be done.
    """
    try:
        selection = Selection(
            model, namespace, time.time() - _seconds(older_than) if older_than is not None else None,
            parse_size(to_size, "--to-size") if to_size is not None else None, quarantine,
        )  # fmt: skip
    except ValueError as error:
        complain(str(error))
        raise typer.Exit(2) from None
    if not (selection.of_images or quarantine):
        complain(
            "nothing is selected: give --older-than, --model, --namespace, --to-size or --quarantine; clear deletes all"
        )
        raise typer.Exit(2)
    with errors_told(directory, as_json=as_json), bar("deleting") as show:
        pruned = delete(directory, selection, dry_run=dry_run, progress=show)
    if as_json:
        print_json(pruned.as_dict())
    else:
        _show(pruned)
    if not pruned.reached:
        complain(f"{pruned.directory}: takes {size(pruned.after)} even so: nothing is left that may be deleted")
    raise typer.Exit(0 if pruned.reached else 1)


def _seconds(text: str) -> float:
    age = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?(s|min|h|d|w)", text)
    if not age:
        raise ValueError(f'--older-than {text!r}: not an age; write "7d", "12h", "30min": units are s, min, h, d and w')
    return float(age[1]) * UNITS[age[2]]


def _show(pruned: Pruned) -> None:
    out = console()
    did = "would delete" if pruned.dry_run else "deleted"
    parts = [f"{many(pruned.images, 'image')}, {size(pruned.disk)}"]
    if pruned.quarantine:
        parts.append(f"{many(pruned.quarantine, 'quarantined file')}, {size(pruned.quarantine_disk)}")
    out.print(foreign(f"{pruned.directory}: {did} {'; '.join(parts)}"), soft_wrap=True)
    if pruned.shares:
        out.print(_by_namespace(pruned))
    if pruned.held:
        out.print(f"{many(pruned.held, 'image')} stayed: images that stay depend on them", soft_wrap=True)
    about = "about " if pruned.dry_run else ""
    out.print(f"on disk: {size(pruned.before)} before, {about}{size(pruned.after)} after", soft_wrap=True)


def _by_namespace(pruned: Pruned) -> Table:
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("model, namespace", overflow="fold")
    for heading in ("images", "on disk"):
        table.add_column(heading, justify="right", no_wrap=True)
    for share in pruned.shares[:ROWS]:
        name = Text.assemble(foreign(share.model, "bold"), foreign(f", {share.root[:8]}", "dim"))
        table.add_row(name, f"{share.images:,}", size(share.disk))
    if len(pruned.shares) > ROWS:
        table.add_row(foreign(f"... {many(len(pruned.shares) - ROWS, 'namespace')} more: --json has all", "dim"))
    return table
