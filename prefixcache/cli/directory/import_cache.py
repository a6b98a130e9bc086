"""`prefixcache import`: images of an archive into a directory. The work is `prefixcache.ssd.importing`'s."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from prefixcache.cli.directory.changing import changing
from prefixcache.cli.progress import bar
from prefixcache.cli.text import complain, console, foreign, many, print_json, safe, size
from prefixcache.memory import available_memory
from prefixcache.settings import parse_size
from prefixcache.ssd import ArchiveError, Imported, import_archive

FEW = 10  # of everything that is named


def import_cache(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", readable=False, help="The cache's directory (ssd_dir); made when missing.")
    ],
    file: Annotated[str, typer.Argument(metavar="FILE.tar|-", help="The archive; - is standard input.")],
    limit: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="What DIR may take. Default: what it takes now and 90 % of what is free."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be taken in.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The result as one JSON object.")] = False,
) -> None:
    """Take in the images of an archive that `prefixcache export` wrote. What is there already is not written again, so one
    that was interrupted is run again and goes on.

    Everything is checked, and what is damaged or out of place is refused, image by image. But whoever made the archive chose
    what it holds: import archives of those you trust. Nobody else may have DIR open; a dry run looks at a live one too.

    Exit code: 0 all is in, 1 something was refused or the archive is torn (the rest is in), 2 it could not be done.
    """
    try:
        room = parse_size(limit, "--limit") if limit is not None else None
        if room == 0:
            raise ValueError(f"--limit {limit}: nothing could be taken in; give a size, such as 100GB")
    except ValueError as error:
        complain(str(error))
        raise typer.Exit(2) from None
    arguments = {"directory": str(directory), "file": file, "limit": limit}
    with changing("import", directory, arguments, dry_run=dry_run, as_json=as_json) as told:
        with _source(file) as stream, bar("importing") as show:
            most = max(available_memory() // 4, 1 << 20)
            found = import_archive(directory, stream, most=most, limit=room, dry_run=dry_run, progress=show)
        told.update(
            images=found.images,
            bytes=found.nbytes,
            present=found.present,
            refused=found.counts,
            models=found.models[:FEW],
        )
        told["result"] = f"torn: {found.torn}" if found.torn else "done"
    if as_json:
        print_json(found.as_dict())
    else:
        _show(found)
    raise typer.Exit(1 if found.torn or found.counts else 0)


@contextmanager
def _source(file: str) -> Iterator[BinaryIO]:
    if file == "-":
        if sys.stdin.isatty():
            raise ArchiveError("-: standard input is a terminal; pipe an archive into it, or name a file")
        yield sys.stdin.buffer
        return
    path = Path(file).expanduser()
    try:
        opened = path.open("rb")
    except OSError as error:
        raise ArchiveError(f"{file!r}: {error.strerror}; name an archive of prefixcache export") from None
    with opened as stream:
        yield stream


def _show(found: Imported) -> None:
    out = console()
    did = "would take in" if found.dry_run else "took in"
    there = f"; {many(found.present, 'image')} were there already" if found.present else ""
    out.print(
        foreign(f"{found.directory}: {did} {many(found.images, 'image')}, {size(found.nbytes)}{there}"), soft_wrap=True
    )
    for model in found.models[:FEW]:
        out.print(foreign(f"of model {model}"), soft_wrap=True)
    if len(found.models) > FEW:
        out.print(f"... and {many(len(found.models) - FEW, 'model')} more", soft_wrap=True)
    if found.unverified:
        out.print(
            f"{many(len(found.unverified), 'namespace')} can't be checked against their root key, because they have a salt",
            soft_wrap=True,
        )
    for refusal in found.refused[:FEW]:
        out.print(foreign(f"refused, {refusal.kind}: {refusal.name}: {refusal.reason}", "yellow"), soft_wrap=True)
    total = sum(found.counts.values())
    if total > FEW:
        parts = ", ".join(f"{number:,} x {kind}" for kind, number in sorted(found.counts.items()))
        out.print(f"refused in all: {parts}", soft_wrap=True)
    if found.torn:
        complain(safe(f"the archive is torn: {found.torn}"))
