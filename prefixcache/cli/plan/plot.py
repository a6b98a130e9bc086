"""The picture of `prefixcache plan`: hit rates, money and waiting as PNG and SVG.

matplotlib comes with the extra "plan", is imported when something is drawn, and draws without a display.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefixcache.cli.evaluate.plot import targets as kinds
from prefixcache.cli.plan.curves import LOOKS, Panel, panels, placed
from prefixcache.cli.plan.files import MARK, check, write
from prefixcache.cli.plan.text import short

Facts = dict[str, Any]


def targets(out: Path) -> list[Path]:
    """The files to write: `out`, or both kinds where it has no suffix. NotMeasured or NotWritable when they can't be made."""
    files = kinds(out)
    for file in files:
        check("--plot", file)
    return files


def draw(facts: Facts, files: list[Path]) -> None:
    """Draw once, write each file. OSError when one can't be written."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = panels(facts)
    with matplotlib.rc_context({"svg.hashsalt": "prefixcache", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(5.0 * max(len(shown), 1), 4.2), layout="constrained")
        FigureCanvasAgg(figure)
        for axes, panel in zip(figure.subplots(1, max(len(shown), 1), squeeze=False)[0], shown, strict=True):
            _draw_panel(axes, panel)
        title = facts["model"]["name"] + (f" and {Path(facts['trace']['file']).name}" if facts["trace"] else "")
        figure.suptitle(title, parse_math=False)
        for file in files:
            write(file, lambda half: figure.savefig(half, **_extra(half)))


def _extra(file: Path) -> dict[str, Any]:
    if file.suffix == ".svg":
        return {"metadata": {"Date": None, "Creator": MARK}}  # no date: the same facts give the same file
    return {"dpi": 110, "metadata": {"Software": MARK}}


def _draw_panel(axes: Any, panel: Panel) -> None:
    for curve in panel.curves:
        points = placed(curve, panel)
        colour, marker = LOOKS[curve.look % len(LOOKS)]
        look = {"linestyle": "--"} if curve.dashed else {"marker": marker, "markersize": 5}
        axes.plot([x for x, _ in points], [y for _, y in points], color=colour, label=curve.label, **look)
    if panel.log_y:
        axes.set_yscale("log")
    if panel.log_x:
        axes.set_xscale("log", base=2)
        xs = sorted({x for curve in panel.curves for x in curve.xs if x > 0})
        axes.set_xticks(xs, [short(int(x)) if panel.size_x else f"{x:,.0f}" for x in xs], rotation=45, fontsize=7)
        axes.minorticks_off()
    if panel.y_range:
        axes.set_ylim(panel.y_range[0], panel.y_range[1] * 1.02)
    for mark in panel.marks:
        axes.plot([mark.x], [mark.y], marker="*", markersize=16, color="#D55E00", linestyle="none", zorder=5)
        place = axes.transAxes.inverted().transform(axes.transData.transform((mark.x, mark.y)))[0]
        inwards = {"xytext": (8, -16), "ha": "left"} if place < 0.5 else {"xytext": (-8, -16), "ha": "right"}
        axes.annotate(mark.label, (mark.x, mark.y), textcoords="offset points", fontsize=8, parse_math=False, **inwards)
    axes.grid(True, which="major", alpha=0.3)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.set_title(panel.title, fontsize=9)
    if len(panel.curves) > 1:
        axes.legend(fontsize=7)
