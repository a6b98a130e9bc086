"""Tables of text, on a terminal and in Markdown: what `evaluate` and `plan` write their numbers in."""

from __future__ import annotations

from typing import NamedTuple

from rich import box
from rich.table import Table

from prefixcache.cli.text import foreign

NONE = "-"


class Grid(NamedTuple):
    """A table of text: the first column is to the left, the others to the right. Headings may have two lines."""

    headings: list[str]
    rows: list[list[str]]


def table(grid: Grid) -> Table:
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for i, heading in enumerate(grid.headings):
        made.add_column(heading, justify="right" if i else "left", no_wrap=not i)
    for row in grid.rows:
        made.add_row(*(foreign(cell) for cell in row))
    return made


def markdown(grid: Grid) -> str:
    rule = ["---", *("---:" for _ in grid.headings[1:])]
    rows = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in (grid.headings, *grid.rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:]))
