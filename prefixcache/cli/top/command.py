"""`prefixcache top`: a server, live in the terminal. This module repeats; `server` reads the metrics, `picture` draws, `keys`
notices the one that ends it.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live

from prefixcache.cli.text import complain, console, foreign
from prefixcache.cli.top.keys import end_keys
from prefixcache.cli.top.metrics_page import Away, Facts, NotOurs, WatchedServer
from prefixcache.cli.top.picture import clock, picture


def top(
    url: Annotated[str, typer.Argument(metavar="URL", help="A server: http://127.0.0.1:8080.")],
    interval: Annotated[float, typer.Option(min=0.1, max=3600, metavar="SECONDS", help="Between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="One picture, of one interval, and the end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line for each look.")] = False,
) -> None:
    """Show a server at work, until q or Ctrl-C: hit rate by tier, tokens a second, RAM and SSD against their limits,
    latencies, trouble; from its /metrics. For a directory: prefixcache inspect.

    Exit code: 0 shown (q and Ctrl-C are the ways to end it), 2 nothing could be: no address, a page that is none of
    prefixcache's servers', with --once nobody there; 130 stopped before anything was shown, 143 by SIGTERM.
    """
    shown = False
    try:
        with _ended_by_sigterm():
            server, out = WatchedServer(url), console()
            if once:
                server.look()
                time.sleep(interval)  # rates need two looks
                _print(server.look(), as_json, out)
            elif as_json or not out.is_terminal or out.is_dumb_terminal:
                for facts in _looks(server):
                    _print(facts, as_json, out)
                    shown = True
                    time.sleep(interval)
            else:
                for _ in _watch(server, interval, out):
                    shown = True
    except (Away, NotOurs, ValueError) as error:
        complain(f"{url}: {error}; is the server up, and this its address?" if isinstance(error, Away) else str(error))
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(0 if shown else 128 + signal.SIGINT) from None


def _looks(server: WatchedServer) -> Iterator[Facts]:
    """Yield what each look shows, for ever; of a server that doesn't answer, that it is not up."""
    while True:
        try:
            yield server.look()
        except Away as away:
            yield {"source": server.name, "up": False, "error": str(away), "now": time.time()}


def _print(facts: Facts, as_json: bool, out: Console) -> None:
    if as_json:
        typer.echo(json.dumps(facts, allow_nan=False))
    else:
        out.print(_picture(facts))
    out.file.flush()


def _watch(server: WatchedServer, interval: float, out: Console) -> Iterator[None]:
    """Draw in place, on a terminal, until a key asks for the end; yield after each drawing. While nobody answers, the last
    picture stays.
    """
    last: RenderableType = ""
    with end_keys() as ended_within, Live(console=out, auto_refresh=False, vertical_overflow="crop") as live:
        for facts in _looks(server):
            if facts["up"]:
                last = _picture(facts)
            live.update(last if facts["up"] else Group(_picture(facts), last), refresh=True)
            yield
            if ended_within(interval):
                return


def _picture(facts: Facts) -> RenderableType:
    if facts["up"]:
        return picture(facts)
    return foreign(f"{facts['source']}: {facts['error']}; trying again  {clock(facts['now'])}", "yellow")


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """End on SIGTERM so that the terminal has its cursor back."""

    def end(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
