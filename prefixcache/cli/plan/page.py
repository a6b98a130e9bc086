"""The report of `prefixcache plan` as one HTML page: advice, pictures, tables. It needs nothing from outside and no
script, and is light or dark as its reader's system is. Its pictures are matplotlib's, as SVG; without it there are none.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

from prefixcache.cli.output import INSTALL, MARK, can_draw
from prefixcache.cli.plan.picture import picture
from prefixcache.cli.plan.text import (
    CHOSEN,
    advice_lines,
    codec_grid,
    mac_grid,
    model_line,
    model_notes,
    trace_grids,
    trace_line,
    trace_notes,
)
from prefixcache.cli.tables import Grid
from prefixcache.cli.text import safe

STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1b1f24; --quiet: #59636e; --line: #d5dae0; --card: #f5f7f9; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171a; --ink: #e6e9ec; --quiet: #9aa4ae; --line: #343a41; --card: #1d2226; }
}
body { margin: 0 auto; max-width: 76rem; padding: 1.5rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.2rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
.advice { background: var(--card); border-left: 4px solid #0072B2; padding: .8rem 1.1rem; border-radius: 4px; }
.advice p { margin: .3rem 0; } .advice p:first-child { font-size: 1.35rem; font-weight: 600; }
.wide { overflow-x: auto; } .quiet, footer, li { color: var(--quiet); } svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .4rem 0 1rem; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { vertical-align: bottom; font-weight: 600; } th:first-child, td:first-child { text-align: left; padding-left: 0; }
tr.chosen td { font-weight: 600; background: var(--card); }
""".strip()

Facts = dict[str, Any]


def page(facts: Facts) -> str:
    """The whole document. Everything that came from outside is escaped."""
    title = _text(
        f"prefixcache plan: {facts['model']['name']}" + (f", {facts['trace']['file']}" if facts["trace"] else "")
    )
    parts = [f"<h1>{title}</h1>"]
    if facts["trace"]:
        parts += [
            f'<div class="advice">{_each("p", advice_lines(facts))}</div>',
            f'<p class="quiet">{_text(trace_line(facts))}</p>', _picture(facts),
        ]  # fmt: skip
        for heading, grids in trace_grids(facts).items():
            parts += [f"<h2>{heading}</h2>", *map(_table, grids)]
        parts += ["<h2>What this assumes</h2>", f"<ul>{_each('li', trace_notes(facts))}</ul>"]
    else:
        parts.append(_picture(facts))
    parts += [
        "<h2>What the model's state takes</h2>", f"<p>{_text(model_line(facts))}</p>", _table(codec_grid(facts)),
        "<h2>What a Mac could keep</h2>", _table(mac_grid(facts)), f"<ul>{_each('li', model_notes(facts))}</ul>",
        f"<footer>prefixcache {_text(facts['prefixcache'])}; the same numbers, and all of them, with --json</footer>",
    ]  # fmt: skip
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="generator" content="{MARK}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{STYLE}\n</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _picture(facts: Facts) -> str:
    if not can_draw():
        return f'<p class="quiet">There are pictures, too, where matplotlib is: {INSTALL}</p>'
    svg = picture(facts, [".svg"])[0].decode()
    return svg[svg.index("<svg") :]  # without the head of a file of its own


def _text(text: str) -> str:
    return escape(safe(text))


def _each(tag: str, lines: Iterable[str]) -> str:
    return "".join(f"<{tag}>{_text(line)}</{tag}>" for line in lines)


def _table(grid: Grid) -> str:
    head = "".join(f"<th>{'<br>'.join(map(_text, heading.splitlines()))}</th>" for heading in grid.headings)
    rows = [
        f"<tr{' class=chosen' if row[0].endswith(f' {CHOSEN}') else ''}>{_each('td', row)}</tr>" for row in grid.rows
    ]
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
