"""`prefixcache clear`: every image of a directory is deleted, or of a running server. The work is
`prefixcache.ssd.clearing`'s, and the server's.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from prefixcache.cli.directory.argument import Target, errors_told
from prefixcache.cli.options import AsJson, DryRun, flags_of, with_options
from prefixcache.cli.progress import bar
from prefixcache.cli.running.admin_client import AdminClient
from prefixcache.cli.running.remove import show_deleted
from prefixcache.cli.running.tenant import TenantOptions
from prefixcache.cli.text import complain, console, foreign, many, print_json, refusing, safe, size
from prefixcache.ssd import Cleared
from prefixcache.ssd import clear as delete_all

FEW = 10  # names that are shown


@with_options
def clear(
    target: Target,
    tenant: TenantOptions,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --url: of this model only; the name before @ will do.")
    ] = None,
    dry_run: DryRun = False,
    yes: Annotated[bool, typer.Option("--yes", help="Don't ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete every image in a directory, quarantined files and what interrupted writes left. The directory stays.

    Nobody else may have it open; a dry run looks at a live one too. With --url a running server deletes all that it has
    in RAM and on its SSD, or what is of a model or a tenant, pinned or not, and gives the RAM back.

    Exit code: 0 done, 1 not all: you said no, or files that are not prefixcache's were left, 2 it could not be done.
    """
    with refusing():
        target.check({"--dry-run": dry_run}, {"--model": model, **flags_of(tenant)})
        if target.url is not None:
            client = AdminClient(target.url, target.admin_key_file)
            selection = {**({"model": model} if model is not None else {}), **tenant.fields()}
            if not yes:
                _ask(f"{client.name}: delete {'what is selected' if selection else 'everything'}, in RAM and on SSD?")
            show_deleted(client, client.ask("DELETE", "images", selection), as_json=as_json)
            return
    assert target.directory is not None
    with errors_told(target.directory, as_json=as_json):
        if not (dry_run or yes):
            _confirm(delete_all(target.directory, dry_run=True))
        with bar("deleting") as show:
            cleared = delete_all(target.directory, dry_run=dry_run, progress=show)
    if as_json:
        print_json(cleared.as_dict())
    else:
        _show(cleared)
    raise typer.Exit(1 if cleared.left else 0)


def _confirm(foreseen: Cleared) -> None:
    _ask(f"{safe(foreseen.directory)}: delete {_contents(foreseen)}?")


def _ask(question: str) -> None:
    if not sys.stdin.isatty():
        complain(f"add --yes where there is no terminal to ask: {question}")
        raise typer.Exit(2)
    if not typer.confirm(question, err=True):
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
