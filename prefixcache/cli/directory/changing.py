"""What the commands share that change a directory or take data out of it: how they end, and the line in DIR/audit.log."""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from prefixcache.cli.directory.argument import refused
from prefixcache.cli.text import complain, print_json
from prefixcache.ssd import ArchiveError, DirectoryError, IndexBroken, NoSuchNamespace, SsdError, audit
from prefixcache.ssd.directory import Directory, refusal

_NOTHING_DONE = (DirectoryError, NoSuchNamespace, IndexBroken, ArchiveError)


class _Stopped(BaseException):
    """A signal, `args[0]`, asked for the end."""


@contextmanager
def changing(
    command: str, directory: Path, arguments: dict[str, Any], *, dry_run: bool, as_json: bool
) -> Iterator[dict[str, Any]]:
    """Do the work in the block and put what was done into the dictionary; "result" there is "done" unless the block says
    otherwise. Afterwards the audit log has a line, unless it was a dry run or nothing was begun.

    What went wrong is said in a line on stderr (and as an object, with `as_json`); the exit code is 2, or 128 + the signal.
    """
    told: dict[str, Any] = {}

    def end(result: str) -> None:
        if not dry_run:
            note(directory, command, arguments, result, told)

    try:
        with _signals():
            yield told
    except _Stopped as stopped:
        number = signal.Signals(stopped.args[0])
        end(f"stopped by {number.name}")
        complain(f"{command}: stopped by {number.name}")
        raise typer.Exit(128 + number) from None
    except (SsdError, OSError, sqlite3.Error) as failed:
        error: Exception = refusal(directory, failed) if isinstance(failed, sqlite3.Error) else failed
        if isinstance(failed, IndexBroken):
            error = IndexBroken(
                f"{str(directory)!r}: the index can't be read: {failed}; run prefixcache reconcile on it"
            )
        if not isinstance(failed, _NOTHING_DONE):
            end(f"failed: {refused(directory, error)}")
        complain(refused(directory, error))
        if as_json:
            print_json({"directory": str(directory), "error": refused(directory, error)})
        raise typer.Exit(2) from None
    end(told.pop("result", "done"))


def note(directory: Path, command: str, arguments: dict[str, Any], result: str, did: dict[str, Any]) -> None:
    """Add a line to the audit log. A disk that does not take it is told of and stops nothing."""
    from prefixcache import __version__

    if not _is_ours(Directory(directory)):  # nothing of somebody else's is touched
        return
    given = {name: value for name, value in arguments.items() if value not in (None, False)}
    record = {"release": __version__, "command": command, "arguments": given, "did": did, "result": result}
    try:
        audit.append(Directory(directory), record)
    except OSError as error:
        complain(f"{audit.NAME}: {os.strerror(error.errno or 0)}: this {command} is not noted there")


def _is_ours(directory: Directory) -> bool:
    try:
        return directory.ours
    except OSError:
        return False


@contextmanager
def _signals() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise _Stopped in the block, so that what is half done is put in order."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        for one, handler in before.items():  # the next one ends the process
            signal.signal(one, handler)
        raise _Stopped(number)

    before = {one: signal.signal(one, stop) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
