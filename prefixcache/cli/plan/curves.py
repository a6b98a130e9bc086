"""The curves of `prefixcache plan`, as plain data: what `plan_plot` draws with matplotlib and `plan_html` as SVG of its own.

The colours are Okabe and Ito's, as in `evaluate_plot`, and every line has a marker of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from prefixcache.cli.evaluate.plot import OTHERS, STYLES
from prefixcache.cli.plan.text import short, sizes_of

LOOKS = (*STYLES.values(), *OTHERS)  # colour and marker

Facts = dict[str, Any]


class Curve(NamedTuple):
    """A line. `look` is its place in LOOKS; a `dashed` one has no markers."""

    label: str
    xs: list[float]
    ys: list[float]
    look: int
    dashed: bool = False


class Mark(NamedTuple):
    """A point with a name."""

    label: str
    x: float
    y: float


class Panel(NamedTuple):
    """One pair of axes. Their texts name the units; an axis is linear unless `log_x` or `log_y` says otherwise, and what is
    not above 0 has no place on a logarithmic one. `size_x`: x is in bytes.
    """

    title: str
    x_label: str
    y_label: str
    curves: list[Curve]
    marks: list[Mark]
    log_x: bool = False
    log_y: bool = False
    size_x: bool = False
    y_range: tuple[float, float] | None = None


def panels(facts: Facts) -> list[Panel]:
    """Of a trace hit rates, money and waiting; of a model alone what prompts take."""
    if not facts["trace"]:
        return [_of_prompts(facts)]
    return [panel for panel in (_of_hits(facts), _of_cost(facts), _of_waiting(facts)) if panel.curves]


def _of_prompts(facts: Facts) -> Panel:
    curves = [
        Curve(c["codec"], [p["tokens"] for p in c["prompts"]], [p["bytes"] / 1e9 for p in c["prompts"]], i)
        for i, c in enumerate(facts["codecs"])
    ]
    return Panel("What a prompt takes", "tokens", "GB", curves, [], log_x=True, log_y=True)


def _series(cells: Sequence[Facts]) -> dict[tuple[int, str, str], list[Facts]]:
    """By SSD, policy and admission, RAM rising."""
    found: dict[tuple[int, str, str], list[Facts]] = {}
    for cell in sorted(cells, key=lambda c: (c["policy"], c["ssd_admission"], c["ssd"], c["ram"])):
        found.setdefault((cell["ssd"], cell["policy"], cell["ssd_admission"]), []).append(cell)
    return found


def _named(facts: Facts, of: tuple[int, str, str]) -> str:
    ssd, policy, admission = of
    cells = facts["sizes"]["cells"]
    parts = [f"{short(ssd)} SSD" if ssd else "no SSD"]
    parts += [policy] if len({c["policy"] for c in cells}) > 1 else []
    parts += [admission] if ssd and len({c["ssd_admission"] for c in cells if c["ssd"]}) > 1 else []
    return ", ".join(parts)


def _chosen(facts: Facts) -> Facts | None:
    best = facts["sizes"]["recommendation"]
    return facts["sizes"]["cells"][best["cell"]] if best else None


def _of_hits(facts: Facts) -> Panel:
    sizes, cell = facts["sizes"], _chosen(facts)
    series = _series([c for c in sizes["cells"] if c["ram"]])
    curves = [
        Curve(_named(facts, of), [c["ram"] for c in cells], [100 * c["hit_rate"] for c in cells], i)
        for i, (of, cells) in enumerate(series.items())
    ]
    rams = [x for curve in curves for x in curve.xs]
    if rams:
        ceiling = 100 * sizes["possible"]["hit_rate"]
        curves.append(Curve("endless", [min(rams), max(rams)], [ceiling, ceiling], len(curves), True))
    marks = [Mark(sizes_of(cell), cell["ram"], 100 * cell["hit_rate"])] if cell and cell["ram"] else []
    return Panel(
        "Tokens that need no prefill", "RAM", "hit rate, % of tokens", curves, marks, log_x=True, size_x=True,
        y_range=(0, 100),
    )  # fmt: skip


def _of_cost(facts: Facts) -> Panel:
    sizes, cell = facts["sizes"], _chosen(facts)
    shown = [sizes["cells"][i] for i in sizes["front"]]
    curves = []
    if cell:
        xs, ys = ([0.0, *(c[name] for c in shown)] for name in ("cost", "of_possible"))
        curves = [Curve("the most for its cost", xs, [100 * y for y in ys], 0)]
    marks = [Mark(sizes_of(cell), cell["cost"], 100 * cell["of_possible"])] if cell else []
    return Panel("What money buys", "cost", "% of what is possible", curves, marks, y_range=(0, 100))


def _of_waiting(facts: Facts) -> Panel:
    sizes, cell = facts["sizes"], _chosen(facts)
    shown = [sizes["cells"][i] for i in sizes["front"]] if cell else []
    without = sizes["without"]["ttft"]
    names = (("p50", "median"), ("p90", "90th percentile"), ("p99", "99th percentile"))
    curves = [
        Curve(label, [0.0, *(c["cost"] for c in shown)], [without[p], *(c["ttft"][0][p] for c in shown)], i)
        for i, (p, label) in enumerate(names)
        if shown
    ]
    return Panel("Time to first token", "cost", "seconds", curves, [], log_y=True)


def placed(curve: Curve, panel: Panel) -> list[tuple[float, float]]:
    """The points that have a place on the panel's axes."""
    points = zip(curve.xs, curve.ys, strict=True)
    return [(x, y) for x, y in points if (x > 0 or not panel.log_x) and (y > 0 or not panel.log_y)]
