"""What the commands of operators share: DIR or a server in its place, and the line that says why it can't be used."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from prefixcache.cli.running.admin_client import KeyFile
from prefixcache.cli.text import Refused, complain, print_json
from prefixcache.ssd import IndexBroken, SsdError
from prefixcache.ssd.directory import refusal
from prefixcache.store_fetch_remove.selection import NoSuchNamespace


def parse_directory(text: str) -> Path:
    """Return the path of an argument. BadParameter for an empty one, which pathlib takes for the current directory."""
    if not text:
        raise typer.BadParameter("it is empty; write the directory's path")
    if text.startswith(("http://", "https://")):
        raise typer.BadParameter(f"{text} is a server's address; write --url {text}")
    return Path(text)


Dir = Annotated[Path, typer.Argument(metavar="DIR", parser=parse_directory, help="The cache's directory (ssd_dir).")]


@dataclass(frozen=True)
class Target:
    """The directory of a cache that is closed, or a running server."""

    directory: Annotated[
        Path | None,
        typer.Argument(
            metavar="DIR", parser=parse_directory, help="The cache's directory (ssd_dir), unless --url is given."
        ),
    ] = None
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="A running server in the place of DIR: http://127.0.0.1:8080.")
    ] = None
    admin_key_file: KeyFile = None

    def check(self, of_directory: dict[str, Any], of_url: dict[str, Any]) -> None:
        """Raise Refused unless there is one of the two, and no option that goes with the other alone: `of_directory` and
        `of_url` have their values by name.
        """
        if (self.directory is None) == (self.url is None):
            both = "DIR with --url" if self.directory is not None else "neither DIR nor --url"
            raise Refused(f"{both}: name the directory of a cache that is closed, or the server that has one open")
        others = of_directory if self.url is not None else {**of_url, "--admin-key-file": self.admin_key_file}
        if wrong := [option for option, value in others.items() if value not in (None, False)]:
            remedy = "add --url in the place of DIR" if self.url is None else "it is for a DIR"
            raise Refused(f"{wrong[0]} {'without' if self.url is None else 'with'} --url: {remedy}, or leave it out")


@contextmanager
def errors_told(directory: Path, *, as_json: bool) -> Iterator[None]:
    """Turn an error within into one line on stderr (with `as_json` also an object on stdout) and the exit code 2."""
    try:
        yield
    except (SsdError, OSError, sqlite3.Error) as error:
        reason = reason_of(directory, error)
        complain(reason)
        if as_json:
            print_json({"directory": str(directory), "error": reason})
        raise typer.Exit(2) from None


def reason_of(directory: Path, error: Exception) -> str:
    """Return why a directory can't be used, and what to do."""
    if isinstance(error, NoSuchNamespace):
        return f"--{error}"  # it begins with the name of an option
    if isinstance(error, IndexBroken):
        return f"{str(directory)!r}: the index can't be read: {error}; run prefixcache reconcile on it"
    if isinstance(error, sqlite3.Error):
        return str(refusal(directory, error))
    if isinstance(error, PermissionError):
        return str(refusal(Path(error.filename or directory), error))
    return str(error)
