"""The bar that long work shows on a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from prefixcache.cli.text import console


class Show(Protocol):
    """Moves a bar. What is None stays as it is."""

    def __call__(self, done: int | None, total: int | None = None, what: str | None = None) -> None: ...


@contextmanager
def bar(what: str, total: int | None = None, unit: str = "") -> Iterator[Show]:
    """Show a bar on stderr; nothing is shown where that is no terminal."""
    err = console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task(what, total=total)

        def show(done: int | None, total: int | None = None, what: str | None = None) -> None:
            progress.update(task, completed=done, total=total, description=what)

        yield show
