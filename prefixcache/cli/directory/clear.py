"""`prefixcache clear`: every image leaves a directory. The work is `prefixcache.ssd.removing`'s."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from prefixcache.cli.directory.argument import Dir
from prefixcache.cli.directory.changing import changing
from prefixcache.cli.progress import bar
from prefixcache.cli.text import complain, console, foreign, many, print_json, safe, size
from prefixcache.ssd import Cleared
from prefixcache.ssd import clear as delete_all

FEW = 10  # names that are shown


def clear(
    directory: Dir,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Don't ask.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The result as one JSON object.")] = False,
) -> None:
    """Delete every image in a directory, what is in quarantine and what interrupted writes left.

    The directory stays, with its audit.log. Nobody else may have it open; a dry run looks at a live one too.

    Exit code: 0 done, 1 not all: you said no, or files that are not prefixcache's were left, 2 it could not be done.
    """
    arguments = {"directory": str(directory), "yes": yes}
    with changing("clear", directory, arguments, dry_run=dry_run, as_json=as_json) as told:
        if not (dry_run or yes):
            _ask(delete_all(directory, dry_run=True))
        with bar("deleting") as show:
            found = delete_all(directory, dry_run=dry_run, progress=show)
        told.update(images=found.images, bytes=found.freed, quarantine=found.quarantine, left=len(found.left))
    if as_json:
        print_json(found.as_dict())
    else:
        _show(found)
    raise typer.Exit(1 if found.left else 0)


def _ask(found: Cleared) -> None:
    if not sys.stdin.isatty():
        complain(f"clear deletes all of {found.directory}: add --yes where there is no terminal to ask")
        raise typer.Exit(2)
    if not typer.confirm(f"{safe(found.directory)}: delete {_what(found)}?", err=True):
        complain("nothing was deleted")
        raise typer.Exit(1)


def _what(found: Cleared) -> str:
    parts = [many(found.images, "image")]
    parts += [many(found.quarantine, "item") + " in quarantine"] if found.quarantine else []
    parts += [many(found.debris, "file") + " of interrupted writes"] if found.debris else []
    return f"{', '.join(parts)}, {size(found.freed)} on disk"


def _show(found: Cleared) -> None:
    out = console()
    did = "would delete" if found.dry_run else "deleted"
    out.print(foreign(f"{found.directory}: {did} {_what(found)}"), soft_wrap=True)
    for name in found.left[:FEW]:
        out.print(foreign(f"left alone, no image has such a name: {name}", "yellow"), soft_wrap=True)
    if len(found.left) > FEW:
        out.print(f"... and {len(found.left) - FEW:,} more; prefixcache reconcile sets them aside", soft_wrap=True)
