"""The report of `prefixcache plan` as one HTML page, and its picture: of a trace hit rates, money and waiting, of a model
alone what prompts take. The page needs nothing from outside and no script, and is light or dark as its reader's system is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import cycle, groupby
from pathlib import Path
from typing import Any

from prefixcache.cli.output import INSTALL, LOOKS, MARK, can_draw, draw
from prefixcache.cli.plan.text import (
    advice_lines,
    chosen,
    front,
    policies_of,
    sections,
    short,
    sizes_of,
    trace_line,
)
from prefixcache.cli.tables import elements, html_table, html_text

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
.wide { overflow-x: auto; } .quiet, footer, li { color: var(--quiet); } p, h1, li { overflow-wrap: anywhere; }
svg { width: 100%; max-width: 36rem; height: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .4rem 0 1rem; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { vertical-align: bottom; font-weight: 600; } th:first-child, td:first-child { text-align: left; padding-left: 0; }
@media (max-width: 40rem) {
  body { padding: 1rem; } ul { padding-left: 1.1rem; } th, td { padding: .25rem .4rem; }
  .advice { padding: .6rem .8rem; } .advice p:first-child { font-size: 1.15rem; }
}
""".strip()

Facts = dict[str, Any]


def page(facts: Facts) -> str:
    """Return the whole document. Everything that came from outside is escaped."""
    trace = f", {facts['trace']['file']}" if facts["trace"] else ""
    title = html_text(f"prefixcache plan: {facts['model']['name']}{trace}")
    parts = [f"<h1>{title}</h1>"]
    if facts["trace"]:
        parts.append(f'<div class="advice">{elements("p", advice_lines(facts))}</div>')
        parts.append(f'<p class="quiet">{html_text(trace_line(facts))}</p>')
    parts.append(_inline_picture(facts))
    for section in sections(facts):
        parts += [f"<h2>{section.heading}</h2>", elements("p", section.lines), *map(html_table, section.grids)]
        parts += [f"<ul>{elements('li', section.notes)}</ul>"] if section.notes else []
    version = html_text(facts["prefixcache"])
    parts.append(f"<footer>prefixcache {version}; the same numbers, and all of them, with --json</footer>")
    body = "\n".join(filter(None, parts))
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="generator" content="{MARK}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{STYLE}\n</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _inline_picture(facts: Facts) -> str:
    """Draw the picture with its panels one below the other, so that a phone is wide enough for them."""
    if not can_draw():
        return f'<p class="quiet">There are pictures, too, where matplotlib is: {INSTALL}</p>'
    svg = draw("", _panels(facts), ".svg", stacked=True).decode()
    return svg[svg.index("<svg") :]  # without the head of a file of its own


# -- the picture ------------------------------------------------------------------------------------------------------


def picture(facts: Facts, kind: str) -> bytes:
    """Return the bytes of a file with this suffix."""
    title = facts["model"]["name"] + (f" and {Path(facts['trace']['file']).name}" if facts["trace"] else "")
    return draw(title, _panels(facts), kind)


def _panels(facts: Facts) -> list[Callable[[Any], None]]:
    panels: list[Callable[..., None]] = [_hits, _money, _waiting] if facts["trace"] else [_prompts]
    return [partial(panel, facts=facts) for panel in panels]


def _plot(axes: Any, curves: dict[str, list[tuple[float, float]]]) -> None:
    """Draw each curve's points, by its label."""
    for (label, points), (colour, marker) in zip(curves.items(), cycle(LOOKS), strict=False):
        axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=5, label=label)


def _star(axes: Any, cell: Facts, x: float, y: float) -> None:
    """Mark the size that is recommended."""
    axes.plot([x], [y], marker="*", markersize=14, color="#D55E00", linestyle="none", zorder=5, label=sizes_of(cell))


def _prompts(axes: Any, facts: Facts) -> None:
    _plot(axes, {c["codec"]: [(p["tokens"], p["bytes"] / 1e9) for p in c["prompts"]] for c in facts["codecs"]})
    axes.set(title="What a prompt takes", xlabel="tokens", ylabel="GB", xscale="log", yscale="log")
    tokens = [prompt["tokens"] for prompt in facts["codecs"][0]["prompts"]]
    axes.set_xticks(tokens, [f"{n:,}" for n in tokens])


def _hits(axes: Any, facts: Facts) -> None:
    def curve(cell: Facts) -> tuple[list[str], int]:
        return policies_of(cell), cell["ssd"]

    cells = sorted((c for c in facts["sizes"]["cells"] if c["ram"]), key=lambda c: (*curve(c), c["ram"]))
    curves = {}
    for (policies, ssd), group in groupby(cells, curve):
        points = [(c["ram"], 100 * c["hit_rate"]) for c in group]
        curves[", ".join([f"{short(ssd)} SSD" if ssd else "no SSD", *policies])] = points
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
    points = [(cell["cost"], 100 * cell["of_possible"]) for cell in front(facts)]
    _plot(axes, {"the most for its cost": [(0.0, 0.0), *points]})
    axes.set(title="What money buys", xlabel="cost", ylabel="% of what is possible", ylim=(0, 102))
    if cell := chosen(facts):
        _star(axes, cell, cell["cost"], 100 * cell["of_possible"])


def _waiting(axes: Any, facts: Facts) -> None:
    ttfts = [(0.0, facts["sizes"]["without"]["ttft"]), *((cell["cost"], cell["ttft"][0]) for cell in front(facts))]
    names = {"p50": "median", "p90": "90th percentile", "p99": "99th percentile"}
    _plot(axes, {label: [(cost, ttft[p]) for cost, ttft in ttfts] for p, label in names.items()})
    axes.set(title="Time to first token", xlabel="cost", ylabel="seconds", yscale="log")
