"""`prefixcache reconcile`: index against files, of a directory that nobody has open; or only a look, also at a live one. The
comparison and the repair are in `repair`.
"""

from __future__ import annotations

import os
import sqlite3

from prefixcache.ssd.directory import Directory, refusal
from prefixcache.ssd.entries import Address, Progress
from prefixcache.ssd.errors import DirectoryError, IndexBroken
from prefixcache.ssd.index import check_pages, reading
from prefixcache.ssd.lock import Lock, holder, refuse_newer
from prefixcache.ssd.quarantine import Quarantine
from prefixcache.ssd.repair import Claims, Pass, Report, compare, mend, open_index, require_true
from prefixcache.ssd.tables import read_addresses, read_entries, read_namespaces

__all__ = ["Report", "reconcile"]


def reconcile(
    directory: str | os.PathLike[str], *, dry_run: bool = False, deep: bool = False, progress: Progress | None = None
) -> Report:
    """Compare index and files of a directory and repair; with `dry_run` only say what would be done, also of a live
    one.

    Raises nothing for a directory that is held, missing, unreadable or newer: `Report.error` says so, `exit_code` is 2.
    """
    there = Directory(directory)
    try:
        there.require()
        if dry_run:
            return _look(there, deep, progress)
        lock = Lock(there)
        try:
            return _repair(there, lock, deep, progress)
        finally:
            lock.release()
    except DirectoryError as error:
        return Report(str(there.root), dry_run, deep, error=str(error))
    except (OSError, sqlite3.Error) as error:
        return Report(str(there.root), dry_run, deep, error=str(refusal(there.root, error)))


def _repair(directory: Directory, lock: Lock, deep: bool, progress: Progress | None) -> Report:
    refuse_newer(directory)
    lock.sign()
    directory.furnish()
    quarantine = Quarantine(directory)
    opened = open_index(directory, quarantine)
    index = opened.index
    try:
        mended = mend(directory, opened, quarantine, deep=deep, progress=progress)
        index = mended.index
        index.mark(clean=True)
        index.checkpoint()
        return mended.report
    finally:
        index.close()


def _addresses(directory: Directory) -> set[Address]:
    """Return what the index of a live directory has now."""
    with reading(directory.index, live=True) as connection:
        return read_addresses(connection)


def _look(directory: Directory, deep: bool, progress: Progress | None) -> Report:
    live = holder(directory) is not None
    try:
        with reading(directory.index, live=live) as connection:
            check_pages(connection)
            entries, spaces = read_entries(connection), read_namespaces(connection)
        require_true(directory, spaces, entries)
        run = Pass(directory, entries, None, None, deep, progress)
        run.claims = Claims(spaces)
        if live:
            run.addresses_now = lambda: _addresses(directory)
        return compare(run, "")
    except IndexBroken as error:
        run = Pass(directory, [], None, None, deep, progress)
        if live:
            run.addresses_now = set
        return compare(run, str(error))
