"""The report of `prefixcache plan` as one HTML page, and its picture: of a trace hit rates, money and waiting, of a model
alone what prompts take. The page needs nothing from outside and no script, and is light or dark as its reader's system is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from html import escape
from itertools import cycle, groupby
from pathlib import Path
from typing import Any

from prefixcache.cli.output import INSTALL, LOOKS, MARK, can_draw, draw
from prefixcache.cli.plan.text import (
    CHOSEN,
    advice_lines,
    chosen,
    codec_grid,
    mac_grid,
    model_line,
    model_notes,
    short,
    sizes_of,
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


# -- the picture ------------------------------------------------------------------------------------------------------


def picture(facts: Facts, kinds: Sequence[str]) -> list[bytes]:
    """One picture, as the bytes of each kind."""
    panels: list[Callable[..., None]] = [_hits, _money, _waiting] if facts["trace"] else [_prompts]
    title = facts["model"]["name"] + (f" and {Path(facts['trace']['file']).name}" if facts["trace"] else "")
    return draw(title, [partial(panel, facts=facts) for panel in panels], kinds)


def _plot(axes: Any, curves: dict[str, tuple[list[float], list[float]]]) -> None:
    for (label, (xs, ys)), (colour, marker) in zip(curves.items(), cycle(LOOKS), strict=False):
        axes.plot(xs, ys, color=colour, marker=marker, markersize=5, label=label)


def _star(axes: Any, cell: Facts, x: float, y: float) -> None:
    """The size that is recommended."""
    axes.plot([x], [y], marker="*", markersize=14, color="#D55E00", linestyle="none", zorder=5, label=sizes_of(cell))


def _prompts(axes: Any, facts: Facts) -> None:
    tokens = [p["tokens"] for p in facts["codecs"][0]["prompts"]]
    _plot(axes, {c["codec"]: (tokens, [p["bytes"] / 1e9 for p in c["prompts"]]) for c in facts["codecs"]})
    axes.set(title="What a prompt takes", xlabel="tokens", ylabel="GB", xscale="log", yscale="log")
    axes.set_xticks(tokens, [f"{n:,}" for n in tokens])


def _hits(axes: Any, facts: Facts) -> None:
    def kind(c: Facts) -> tuple[str, str, int]:
        return c["policy"], c["ssd_admission"], c["ssd"]

    cells = sorted((c for c in facts["sizes"]["cells"] if c["ram"]), key=lambda c: (*kind(c), c["ram"]))
    curves = {}
    for (policy, admission, ssd), group in groupby(cells, kind):
        name = f"{short(ssd)} SSD" if ssd else "no SSD"
        name += f", {policy}" if policy != "lru" else ""
        name += f", {admission}" if admission != "always" else ""
        line = list(group)
        curves[name] = [c["ram"] for c in line], [100 * c["hit_rate"] for c in line]
    _plot(axes, curves)
    axes.axhline(100 * facts["sizes"]["possible"]["hit_rate"], color="#000000", linestyle="--", label="endless")
    axes.set(title="Tokens that need no prefill", xlabel="RAM", ylabel="hit rate, % of tokens", ylim=(0, 102))
    if cells:
        rams = sorted({c["ram"] for c in cells})
        axes.set_xscale("log", base=2)
        axes.set_xticks(rams, [short(ram) for ram in rams], rotation=45, fontsize=7)
        axes.minorticks_off()
    if (cell := chosen(facts)) and cell["ram"]:
        _star(axes, cell, cell["ram"], 100 * cell["hit_rate"])


def _money(axes: Any, facts: Facts) -> None:
    front = [facts["sizes"]["cells"][i] for i in facts["sizes"]["front"]]
    values = [0, *(c["cost"] for c in front)], [0, *(100 * c["of_possible"] for c in front)]
    _plot(axes, {"the most for its cost": values})
    axes.set(title="What money buys", xlabel="cost", ylabel="% of what is possible", ylim=(0, 102))
    if cell := chosen(facts):
        _star(axes, cell, cell["cost"], 100 * cell["of_possible"])


def _waiting(axes: Any, facts: Facts) -> None:
    front = [facts["sizes"]["cells"][i] for i in facts["sizes"]["front"]]
    ttfts = [facts["sizes"]["without"]["ttft"], *(c["ttft"][0] for c in front)]
    costs = [0, *(c["cost"] for c in front)]
    names = {"p50": "median", "p90": "90th percentile", "p99": "99th percentile"}
    _plot(axes, {label: (costs, [ttft[p] for ttft in ttfts]) for p, label in names.items()})
    axes.set(title="Time to first token", xlabel="cost", ylabel="seconds", yscale="log")
