"""`prefixcache top`: a server or a directory, live in the terminal. This module looks again and again; what there is to see
is `top_server`'s and `top_directory`'s.
"""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from prefixcache.cli.text import complain, console, foreign
from prefixcache.cli.top.parts import Away, Facts, NotOurs, clock
from prefixcache.settings import parse_size


def top(
    target: Annotated[
        str, typer.Argument(metavar="DIR|URL", help="A cache's directory, or a server: http://127.0.0.1:8080.")
    ],
    interval: Annotated[float, typer.Option(min=0.1, max=3600, metavar="SECONDS", help="Between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="One picture, of one interval, and the end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line for each look.")] = False,
    limit: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Of DIR: what it may take (its server's --ssd), to show against.")
    ] = None,
) -> None:
    """Show a server or a directory at work, until Ctrl-C.

    Of a server: hit rate by tier, tokens a second, RAM and SSD against their limits, latencies, trouble; from its /metrics.
    Of a directory, live or dead: what it takes, how it grows, what was used last, by model. Changes nothing.

    Exit code: 0 shown (Ctrl-C is the way to end it), 2 nothing could be: no such directory or not one of prefixcache's, a
    page that is none of its servers', with --once nobody there; 130 stopped before anything was shown, 143 by SIGTERM.
    """
    shown = False
    try:
        with _ended_by_sigterm():
            source, out = _source(target, limit), console()
            if once:
                _print(source, _second_look(source, interval), as_json, out)
                return
            if as_json or not out.is_terminal or out.is_dumb_terminal:
                for facts in _looks(source, interval):
                    _print(source, facts, as_json, out)
                    shown = True
            else:
                for _ in _watch(source, interval, out):
                    shown = True
    except (Away, NotOurs, ValueError) as error:
        complain(f"{target}: {error}" if isinstance(error, Away) else str(error))
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(0 if shown else 128 + signal.SIGINT) from None


class Source(Protocol):
    """Something to look at. `look` raises Away when there is nothing to be seen for now, NotOurs when there never will be."""

    name: str

    def look(self) -> Facts: ...

    def picture(self, facts: Facts) -> RenderableType: ...


def _source(target: str, limit: str | None) -> Source:
    """Imported late: a directory needs no metrics, a server no index."""
    if "://" in target:
        if limit is not None:
            raise ValueError(f"--limit {limit}: a server says its limits; leave it out")
        from prefixcache.cli.top.server import Server

        return Server(target)
    from prefixcache.cli.top.directory import Watched

    return Watched(Path(target), parse_size(limit, "--limit") if limit is not None else None)


def _second_look(source: Source, interval: float) -> Facts:
    """What is seen after an interval: rates need two looks."""
    source.look()
    time.sleep(interval)
    return source.look()


def _looks(source: Source, interval: float) -> Iterator[Facts]:
    while True:
        try:
            yield source.look()
        except Away as away:
            yield {"source": source.name, "up": False, "error": str(away), "now": time.time()}
        time.sleep(interval)


def _print(source: Source, facts: Facts, as_json: bool, out: Console) -> None:
    if as_json:
        typer.echo(json.dumps(facts, allow_nan=False))
    elif facts["up"]:
        out.print(source.picture(facts))
    else:
        out.print(_away(facts))
    out.file.flush()


def _watch(source: Source, interval: float, out: Console) -> Iterator[None]:
    """In place, on a terminal. While nobody answers, the last picture stays."""
    last: RenderableType = ""
    with Live(console=out, auto_refresh=False, vertical_overflow="crop") as live:
        for facts in _looks(source, interval):
            if facts["up"]:
                last = source.picture(facts)
            live.update(last if facts["up"] else Group(_away(facts), last), refresh=True)
            yield


def _away(facts: Facts) -> Text:
    said = f"{facts['source']}: {facts['error']}; trying again  {clock(facts['now'])}"
    return foreign(said, "yellow")


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """An end that gives the terminal its cursor back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
