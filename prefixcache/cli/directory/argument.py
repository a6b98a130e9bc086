"""What the commands of operators share: DIR, their argument, and the line that says why it can't be used."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from prefixcache.cli.text import complain, print_json
from prefixcache.ssd import IndexBroken, SsdError
from prefixcache.ssd.directory import refusal

# readable=False: the commands say themselves that it can't be read, in the words of every other refusal.
Dir = Annotated[Path, typer.Argument(metavar="DIR", readable=False, help="The cache's directory (ssd_dir).")]


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
