"""`prefixcache clear`: every image of a directory is deleted. The work is `prefixcache.ssd.clearing`'s."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from prefixcache.cli.directory.argument import Dir, errors_told
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
    """Delete every image in a directory, quarantined files and what interrupted writes left. The directory stays.

    Nobody else may have it open; a dry run looks at a live one too.

    Exit code: 0 done, 1 not all: you said no, or files that are not prefixcache's were left, 2 it could not be done.
    """
    with errors_told(directory, as_json=as_json):
        if not (dry_run or yes):
            _confirm(delete_all(directory, dry_run=True))
        with bar("deleting") as show:
            cleared = delete_all(directory, dry_run=dry_run, progress=show)
    if as_json:
        print_json(cleared.as_dict())
    else:
        _show(cleared)
    raise typer.Exit(1 if cleared.left else 0)


def _confirm(foreseen: Cleared) -> None:
    if not sys.stdin.isatty():
        complain(f"clear deletes all of {foreseen.directory}: add --yes where there is no terminal to ask")
        raise typer.Exit(2)
    if not typer.confirm(f"{safe(foreseen.directory)}: delete {_contents(foreseen)}?", err=True):
        complain("nothing was deleted")
        raise typer.Exit(1)


def _contents(cleared: Cleared) -> str:
    parts = [many(cleared.images, "image")]
    parts += [many(cleared.quarantine, "quarantined file")] if cleared.quarantine else []
    parts += [many(cleared.debris, "file") + " of interrupted writes"] if cleared.debris else []
    return f"{', '.join(parts)}, {size(cleared.freed)} on disk"


def _show(cleared: Cleared) -> None:
    out = console()
    did = "would delete" if cleared.dry_run else "deleted"
    out.print(foreign(f"{cleared.directory}: {did} {_contents(cleared)}"), soft_wrap=True)
    for name in cleared.left[:FEW]:
        out.print(foreign(f"left alone, no image has such a name: {name}", "yellow"), soft_wrap=True)
    if len(cleared.left) > FEW:
        out.print(f"... and {len(cleared.left) - FEW:,} more; prefixcache reconcile quarantines them", soft_wrap=True)
