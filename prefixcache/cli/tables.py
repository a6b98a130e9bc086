"""Tables of text, on a terminal and in Markdown: what `evaluate`, `plan` and `demo` write their numbers in; and `listing`,
which the commands of operators fill.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rich import box
from rich.table import Table

from prefixcache.cli.text import foreign

NONE = "-"


class Grid(NamedTuple):
    """A table of text: the first column is to the left, the others to the right. Headings may have several lines."""

    headings: list[str]
    rows: list[list[str]]


def listing(texts: Sequence[str], numbers: Sequence[str] = (), **more: Any) -> Table:
    """Return an empty table: columns of texts, which fold where they are long, then columns of numbers."""
    columns = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False, **more)
    for heading in texts:
        columns.add_column(heading, overflow="fold")
    for heading in numbers:
        columns.add_column(heading, justify="right", no_wrap=True)
    return columns


def named_rows() -> Table:
    """Return an empty table of two columns: names, and what they name."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column(overflow="fold")
    return rows


def table(grid: Grid) -> Table:
    columns = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for i, heading in enumerate(grid.headings):
        columns.add_column(heading, justify="right" if i else "left", no_wrap=not i)
    for row in grid.rows:
        columns.add_row(*(foreign(cell) for cell in row))
    return columns


def markdown(grid: Grid) -> str:
    rule = ["---", *("---:" for _ in grid.headings[1:])]
    rows = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in (grid.headings, *grid.rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:]))
