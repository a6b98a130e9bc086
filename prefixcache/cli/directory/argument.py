"""What the commands of operators share: DIR, their argument, and the line that says why it can't be used."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from prefixcache.cli.text import Refused, complain, print_json
from prefixcache.ssd import IndexBroken, SsdError
from prefixcache.ssd.directory import refusal

# readable=False: the commands say themselves that it can't be read, in the words of every other refusal.
Dir = Annotated[Path, typer.Argument(metavar="DIR", readable=False, help="The cache's directory (ssd_dir).")]

DirOrUrl = Annotated[
    Path | None,
    typer.Argument(metavar="DIR", readable=False, help="The cache's directory (ssd_dir), unless --url is given."),
]


def only_one(directory: Path | None, url: str | None, of_directory: dict[str, Any], of_url: dict[str, Any]) -> None:
    """Raise Refused unless either a directory or a server's URL is given, and no option that goes with the other. Options are
    given by their names.
    """
    if (directory is None) == (url is None):
        both = "DIR with --url" if directory is not None else "neither DIR nor --url"
        raise Refused(f"{both}: name the directory of a cache that is closed, or the server that has one open")
    wrong = [option for option, given in (of_url if url is None else of_directory).items() if given]
    if wrong:
        remedy = "add --url in the place of DIR" if url is None else "it is for a DIR"
        raise Refused(f"{wrong[0]} {'without' if url is None else 'with'} --url: {remedy}, or leave it out")


@contextmanager
def errors_told(directory: Path, *, as_json: bool) -> Iterator[None]:
    """An error within becomes one line on stderr (with `as_json` also an object on stdout) and the exit code 2."""
    try:
        yield
    except (SsdError, OSError, sqlite3.Error) as error:
        reason = reason_of(directory, error)
        complain(reason)
        if as_json:
            print_json({"directory": str(directory), "error": reason})
        raise typer.Exit(2) from None


def reason_of(directory: Path, error: Exception) -> str:
    if isinstance(error, IndexBroken):
        return f"{str(directory)!r}: the index can't be read: {error}; run prefixcache reconcile on it"
    if isinstance(error, sqlite3.Error):
        return str(refusal(directory, error))
    if isinstance(error, PermissionError):
        return str(refusal(Path(error.filename or directory), error))
    return str(error)
