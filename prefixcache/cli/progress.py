"""The bar that long work shows on a terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from prefixcache.cli.text import console

PATIENCE = 0.5  # seconds of work before a bar appears


class _Bar:
    """Shows itself when the work turns out to be long."""

    def __init__(self, out: Console, what: str):
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            console=out, transient=True,
        )  # fmt: skip
        self._task = self._progress.add_task(what, total=None)
        self._shown = False
        self._since = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        self._progress.update(self._task, completed=done, total=total)
        if not self._shown and time.monotonic() - self._since > PATIENCE:
            self._progress.start()
            self._shown = True

    def stop(self) -> None:
        if self._shown:
            self._progress.stop()


@contextmanager
def bar(what: str) -> Iterator[_Bar | None]:
    """On stderr; none where that is no terminal."""
    out = console(stderr=True)
    if not out.is_terminal:
        yield None
        return
    shown = _Bar(out, what)
    try:
        yield shown
    finally:
        shown.stop()
