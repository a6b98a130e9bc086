"""`prefixcache prune`: images that were chosen leave a directory. The work is `prefixcache.ssd.removing`'s."""

from __future__ import annotations

import re
import time
from typing import Annotated

import typer

from prefixcache.cli.directory.argument import Dir
from prefixcache.cli.directory.changing import changing
from prefixcache.cli.progress import bar
from prefixcache.cli.text import by_namespace, complain, console, foreign, many, print_json, size
from prefixcache.settings import parse_size
from prefixcache.ssd import Pruned, Selection
from prefixcache.ssd import prune as delete

ROWS = 200  # namespaces in the table; --json has all
UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def prune(
    directory: Dir,
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="Not used for so long, such as 7d; units: s, min, h, d, w.")
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
        str | None, typer.Option(metavar="SIZE", help="The coldest, until DIR takes at most so much, such as 100GB.")
    ] = None,
    quarantine: Annotated[
        bool, typer.Option("--quarantine", help="What was set aside, too; with --older-than only if so long ago.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The result as one JSON object.")] = False,
) -> None:
    """Delete the images that all of the options mean. One that others hang on stays as long as they do.

    Nobody else may have the directory open; a dry run looks at a live one too, and guesses the index's share.

    Exit code: 0 done, 1 DIR takes more than --to-size even so, 2 it could not be done.
    """
    arguments = {
        "directory": str(directory), "older_than": older_than, "model": model, "namespace": namespace, "to_size": to_size,
        "quarantine": quarantine,
    }  # fmt: skip
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
            "nothing is chosen: give --older-than, --model, --namespace, --to-size or --quarantine; clear deletes all"
        )
        raise typer.Exit(2)
    with changing("prune", directory, arguments, dry_run=dry_run, as_json=as_json) as told:
        with bar("deleting") as show:
            found = delete(directory, selection, dry_run=dry_run, progress=show)
        told.update(
            images=found.images, bytes=found.disk, quarantine=found.quarantine, before=found.before, after=found.after
        )
        if not found.reached:
            told["result"] = "done, and it takes more than --to-size"
    if as_json:
        print_json(found.as_dict())
    else:
        _show(found)
    if not found.reached:
        complain(f"{found.directory}: takes {size(found.after)} even so: nothing that may leave is left")
    raise typer.Exit(0 if found.reached else 1)


def _seconds(text: str) -> float:
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?(s|min|h|d|w)", text)
    if not found:
        raise ValueError(f'--older-than {text!r}: not an age; write "7d", "12h", "30min": units are s, min, h, d and w')
    return float(found[1]) * UNITS[found[2]]


def _show(found: Pruned) -> None:
    out = console()
    did = "would delete" if found.dry_run else "deleted"
    said = [many(found.images, "image") + f", {size(found.disk)}"]
    if found.quarantine:
        said.append(many(found.quarantine, "item") + f" set aside, {size(found.quarantine_disk)}")
    out.print(foreign(f"{found.directory}: {did} {'; '.join(said)}"), soft_wrap=True)
    if found.shares:
        out.print(by_namespace("on disk", [(s.model, s.root, s.images, s.disk) for s in found.shares], ROWS))
    if found.held:
        out.print(f"{many(found.held, 'image')} stayed, because others that stay hang on them", soft_wrap=True)
    would = "about " if found.dry_run else ""
    out.print(f"on disk: {size(found.before)} before, {would}{size(found.after)} after", soft_wrap=True)
