"""What both pictures of `prefixcache top` are made of, and how its two sources say that they have nothing to show."""

from __future__ import annotations

import time
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from prefixcache.cli.text import size

BAR = 24  # columns of a meter

Facts = dict[str, Any]


class Away(Exception):
    """Nothing to be seen there for now. The text says why."""


class NotOurs(Exception):
    """What is there is none of prefixcache's. The text names it and says what to do."""


def clock(when: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(when))


def pairs() -> Table:
    """Names on the left, what there is to say on the right."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def part_of(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def meter(used: float, limit: float | None) -> Text:
    """How much of a limit is used, as a bar and in numbers; without a limit the number alone."""
    if not limit:
        return Text(size(int(used)))
    share = min(max(used / limit, 0.0), 1.0)
    full = round(share * BAR)
    return Text.assemble(
        "[",
        ("#" * full, "green"),
        "." * (BAR - full),
        f"] {used / limit:4.0%}  {size(int(used))} of {size(int(limit))}",
    )
