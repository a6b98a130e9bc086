"""The report of `prefixcache plan` as one HTML page: advice, curves, tables, inputs. It needs nothing from outside and no
script, and is light or dark as its reader's system is.

The curves are SVG written here, so that their colours follow the page and no plotting library is needed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from prefixcache.cli.evaluate.report import Grid
from prefixcache.cli.plan.curves import LOOKS, Curve, Panel, panels, placed
from prefixcache.cli.plan.files import MARK
from prefixcache.cli.plan.text import (
    advice_lines,
    all_grid,
    codec_grid,
    front_grid,
    hit_grids,
    mac_grid,
    model_line,
    model_notes,
    short,
    target_grid,
    trace_line,
    trace_notes,
    waiting_grid,
)
from prefixcache.cli.text import safe

WIDTH, HEIGHT = 460, 340
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 30, 62  # of the axes within that

STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1b1f24; --quiet: #59636e; --line: #d5dae0; --card: #f5f7f9; }
@media (prefers-color-scheme: dark) {
  :root { --page: #14171a; --ink: #e6e9ec; --quiet: #9aa4ae; --line: #343a41; --card: #1d2226; }
}
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.2rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
.advice { background: var(--card); border-left: 4px solid #0072B2; padding: .8rem 1.1rem; border-radius: 4px; }
.advice p { margin: .3rem 0; } .advice p:first-child { font-size: 1.35rem; font-weight: 600; }
.wide { overflow-x: auto; } .quiet, footer, li { color: var(--quiet); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .4rem 0 1rem; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { vertical-align: bottom; font-weight: 600; } th:first-child, td:first-child { text-align: left; padding-left: 0; }
tr.chosen td { font-weight: 600; background: var(--card); }
.curves { display: flex; flex-wrap: wrap; gap: 1rem; } svg { max-width: 100%; height: auto; }
svg text { fill: var(--ink); font: 11px system-ui, sans-serif; } svg .title { font-weight: 600; font-size: 12px; }
svg .grid { stroke: var(--line); } svg .quiet { fill: var(--quiet); }
""".strip()

Facts = dict[str, Any]


def page(facts: Facts) -> str:
    """The whole document. Everything that came from outside is escaped."""
    about = facts["model"]["name"] + (f", {facts['trace']['file']}" if facts["trace"] else "")
    title = _text(f"prefixcache plan: {about}")
    parts = [f"<h1>{title}</h1>"]
    if facts["trace"]:
        parts += _of_trace(facts)
    else:
        parts += [_curves(facts)]
    parts += [
        "<h2>What the model's state takes</h2>", f"<p>{_text(model_line(facts))}</p>", _table(codec_grid(facts)),
        "<h2>What a Mac could keep</h2>", _table(mac_grid(facts)), _list(model_notes(facts)),
        "<h2>Inputs</h2>", _table(_inputs(facts)),
        f"<footer>prefixcache {_text(facts['prefixcache'])}; the same numbers, and all of them, with --json</footer>",
    ]  # fmt: skip
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<meta name="generator" content="{MARK}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{STYLE}\n</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _of_trace(facts: Facts) -> list[str]:
    said = "".join(f"<p>{_text(line)}</p>" for line in advice_lines(facts))
    parts = [f'<div class="advice">{said}</div>', f'<p class="quiet">{_text(trace_line(facts))}</p>', _curves(facts)]
    parts += ["<h2>Hit rate by size</h2>", *(_table(grid) for _, grid in hit_grids(facts))]
    if facts["sizes"]["recommendation"]:
        parts += [
            "<h2>What money buys</h2>", _table(front_grid(facts)), _table(target_grid(facts)),
            "<h2>Waiting and wear</h2>", _table(waiting_grid(facts, every=True)),
        ]  # fmt: skip
    parts += ["<h2>Every size that was tried</h2>", _table(all_grid(facts))]
    return [*parts, "<h2>What this assumes</h2>", _list(trace_notes(facts))]


def _inputs(facts: Facts) -> Grid:
    rows = [["model", facts["model"]["name"]], ["codecs", ", ".join(c["codec"] for c in facts["codecs"])]]
    if facts["trace"]:
        assumed, cells = facts["assumed"], facts["sizes"]["cells"]
        rows += [
            ["trace", facts["trace"]["file"]], ["codec of the trace's state", facts["codec"]],
            ["tokens an id", f"{facts['trace']['block']:,}"],
            ["RAM", ", ".join(short(ram) for ram in sorted({c["ram"] for c in cells}))],
            ["SSD", ", ".join(short(ssd) for ssd in sorted({c["ssd"] for c in cells}))],
            ["policies", ", ".join(dict.fromkeys(c["policy"] for c in cells))],
            ["what the SSD is given", ", ".join(dict.fromkeys(c["ssd_admission"] for c in cells))],
            ["prefill", f"{assumed['prefill_rate']:,g} tokens/s"],
            ["SSD reads", ", ".join(f"{short(int(rate))}/s" for rate in assumed["ssd_rates"])],
            ["decoding", f"{short(int(assumed['decode_rate']))}/s"], ["SSD's rated writes", short(assumed["tbw"])],
            ["price of a GB of RAM, of SSD", f"{assumed['ram_price']:g}, {assumed['ssd_price']:g}"],
        ]  # fmt: skip
    return Grid(["input", "value"], rows)


def _text(text: str) -> str:
    return escape(safe(text))


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{_text(line)}</li>' for line in lines)}</ul>"


def _table(grid: Grid) -> str:
    head = "".join(f"<th>{'<br>'.join(map(_text, heading.split(chr(10))))}</th>" for heading in grid.headings)
    rows = []
    for row in grid.rows:
        chosen = ' class="chosen"' if row[0].endswith(" *") else ""
        rows.append(f"<tr{chosen}>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>")
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


# -- curves -----------------------------------------------------------------------------------------------------------


class _Axis:
    """Values to places on a line from `start` to `end`."""

    def __init__(self, values: Sequence[float], start: float, end: float, log: bool, whole: tuple[float, float] | None):
        self._log, self._start, self._end = log, start, end
        low, high = whole or (min(values), max(values))
        if log:
            self.low, self.high = math.log10(low), math.log10(high)
        else:
            self.low, self.high = min(low, 0.0), high
        if self.high <= self.low:
            self.high = self.low + 1

    def at(self, value: float) -> float:
        part = ((math.log10(value) if self._log else value) - self.low) / (self.high - self.low)
        return self._start + part * (self._end - self._start)

    def ticks(self) -> list[float]:
        if self._log:
            decades = range(math.floor(self.low), math.ceil(self.high) + 1)
            steps = (1, 2, 5) if len(decades) <= 4 else (1,)
            found = [step * 10.0**decade for decade in decades for step in steps]
            return [tick for tick in found if self.low - 1e-9 <= math.log10(tick) <= self.high + 1e-9]
        raw = (self.high - self.low) / 5
        size = 10 ** math.floor(math.log10(raw))
        step = next(step * size for step in (1, 2, 2.5, 5, 10) if step * size >= raw)
        return [i * step for i in range(int(self.high / step + 1e-9) + 1)]


def _curves(facts: Facts) -> str:
    return f'<div class="curves">{"".join(map(_svg, panels(facts)))}</div>'


def _svg(panel: Panel) -> str:
    points = [point for curve in panel.curves for point in placed(curve, panel)]
    if not points:
        return ""
    legend = [curve for curve in panel.curves if len(panel.curves) > 1]
    lines = math.ceil(len(legend) / 2)
    height = HEIGHT + 16 * lines
    x = _Axis([p[0] for p in points], LEFT, WIDTH - RIGHT, panel.log_x, None)
    y = _Axis([p[1] for p in points], HEIGHT - BOTTOM, TOP, panel.log_y, panel.y_range)
    own = sorted({point[0] for point in points})
    ticks = own if panel.log_x and len(own) <= 10 else x.ticks()
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
        f'aria-label="{_text(panel.title)}">',
        f'<text class="title" x="{LEFT}" y="16">{_text(panel.title)}</text>',
    ]
    for tick in y.ticks():
        at = y.at(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{tick:,.6g}</text>')
    for tick in ticks:
        label, at = short(int(tick)) if panel.size_x else f"{tick:,.6g}", x.at(tick)
        turned = f'transform="rotate(-35 {at:.1f} {HEIGHT - BOTTOM + 16})" text-anchor="end"'
        parts.append(f'<text x="{at:.1f}" y="{HEIGHT - BOTTOM + 16}" {turned}>{_text(label)}</text>')
    parts.append(
        f'<text class="quiet" x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{_text(panel.x_label)}</text>'
    )
    parts.append(f'<text class="quiet" x="{WIDTH - RIGHT}" y="16" text-anchor="end">{_text(panel.y_label)}</text>')
    parts += [_line(curve, panel, x, y) for curve in panel.curves]
    for mark in panel.marks:
        at_x, at_y = x.at(mark.x), y.at(mark.y)
        anchor = "end" if at_x > WIDTH / 2 else "start"
        parts.append(f'<circle cx="{at_x:.1f}" cy="{at_y:.1f}" r="8" fill="none" stroke="#D55E00" stroke-width="2.5"/>')
        parts.append(f'<text x="{at_x:.1f}" y="{at_y + 24:.1f}" text-anchor="{anchor}">{_text(mark.label)}</text>')
    for i, curve in enumerate(legend):
        at_x, at_y = LEFT + (i % 2) * (WIDTH - LEFT) // 2, HEIGHT + 16 * (i // 2) + 8
        parts.append(_marker(curve, at_x, at_y - 4))
        parts.append(f'<text x="{at_x + 10}" y="{at_y}">{_text(curve.label)}</text>')
    return "".join([*parts, "</svg>"])


def _line(curve: Curve, panel: Panel, x: _Axis, y: _Axis) -> str:
    places = [(x.at(px), y.at(py)) for px, py in placed(curve, panel)]
    path = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
    dash = ' stroke-dasharray="5 4"' if curve.dashed else ""
    line = f'<polyline points="{path}" fill="none" stroke="{_colour(curve)}" stroke-width="1.8"{dash}/>'
    return line + ("" if curve.dashed else "".join(_marker(curve, px, py) for px, py in places))


def _colour(curve: Curve) -> str:
    colour = LOOKS[curve.look % len(LOOKS)][0]
    return "currentColor" if colour == "#000000" else colour  # black is for light pages


def _marker(curve: Curve, x: float, y: float) -> str:
    fill = f'fill="{_colour(curve)}"'
    if curve.dashed:
        return f'<rect x="{x - 5:.1f}" y="{y - 1:.1f}" width="10" height="2" {fill}/>'
    r = 4.0
    shapes = {
        "s": [(-r, -r), (r, -r), (r, r), (-r, r)], "D": [(0, -r - 1), (r + 1, 0), (0, r + 1), (-r - 1, 0)],
        "^": [(0, -r - 1), (r + 1, r), (-r - 1, r)], "v": [(0, r + 1), (r + 1, -r), (-r - 1, -r)],
        "P": [(-2, -r), (2, -r), (2, -2), (r, -2), (r, 2), (2, 2), (2, r), (-2, r), (-2, 2), (-r, 2), (-r, -2), (-2, -2)],
        "X": [(-r, -r), (0, -1.5), (r, -r), (1.5, 0), (r, r), (0, 1.5), (-r, r), (-1.5, 0)],
    }  # fmt: skip
    corners = shapes.get(LOOKS[curve.look % len(LOOKS)][1])
    if corners is None:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r}" {fill}/>'
    return f'<polygon points="{" ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)}" {fill}/>'
