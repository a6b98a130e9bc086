"""The picture of docs/comparison.md: `python -m tools.bench.chart results.json docs/bench` makes bench.svg and bench.png.

It shows what `make bench` measured beside the peers, from the file that its `--json` wrote, and measures nothing itself.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

# Okabe and Ito's colours, which people who see colours differently can tell apart: one a project.
COLOURS = {"prefixcache": "#0072B2", "mlx-lm": "#E69F00", "vllm-mlx": "#009E73", "mlx-vlm": "#CC79A7"}
COLUMNS = 2
INK, FAINT, GROUND = "#1a1a1a", "#5c5c5c", "#ffffff"


class Panel(NamedTuple):
    """A figure whose name begins and ends so; its title, its unit with what a value is multiplied by, and its axis."""

    begins: str
    ends: str
    title: str
    unit: str
    scale: float = 1.0
    log: bool = False


PANELS = (
    Panel(
        "lookup of a prompt",
        "to 8,192 tokens",
        "Lookup of a diverging prompt\n100 long entries",
        "ms",
        1e3,
        True,
    ),
    Panel(
        "lookup of a prompt",
        "to 1,024 tokens",
        "Lookup of a diverging prompt\n10,000 short entries",
        "ms",
        1e3,
        True,
    ),
    Panel("", "bytes held over unique", "RAM held by 20 conversations\nover their unique bytes", "x"),
    Panel("", "bytes written to the SSD over unique", "Written to the SSD, RAM a quarter\nover unique bytes", "x"),
    Panel("from the SSD to", "over a plain cold read", "From the SSD to a usable cache\nover a plain cold read", "x"),
    Panel(
        "TurboQuant, 4 bits: KL",
        "constant offsets",
        "TurboQuant at 4 bits: KL of attention\non keys with constant offsets",
        "nats",
    ),
)


class Found(NamedTuple):
    """What each contestant has at a panel's task, whether more is better, and what must be said beside a number."""

    values: dict[str, float]
    more_is_better: bool
    notes: dict[str, str]


def values_of(results: dict[str, Any], panel: Panel) -> Found:
    """Raises ValueError where it was not measured."""
    for figure in results["figures"]:
        name, raw = figure["name"], figure["raw"]
        if "values" in raw and name.startswith(panel.begins) and name.endswith(panel.ends):
            values = {who: value * panel.scale for who, value in raw["values"].items()}
            return Found(values, raw["more_is_better"], _fewer(raw))
    raise ValueError(
        f"no figure {panel.begins!r} ... {panel.ends!r}: run python -m tools.bench --only peers --json FILE"
    )


def _fewer(raw: dict[str, Any]) -> dict[str, str]:
    """Who was measured with fewer entries than ours, because storing them took too long."""
    asked = raw["ours"].get("entries", 0)
    found = {who: one["entries"] for who, one in raw["theirs"].items() if who in raw["values"] and "entries" in one}
    return {who: f", {entries:,} entries" for who, entries in found.items() if entries < asked}


def draw(axes: Axes, panel: Panel, found: Found, most: int) -> None:
    """Bars from the top down, ours first, each with its number; there is room for `most`."""
    values = found.values
    names = list(values)
    places = range(len(names))
    scheduled = ["as its scheduler" in name for name in names]
    for place, name, hatched in zip(places, names, scheduled, strict=True):
        colour = COLOURS[name.split()[0]]
        axes.barh(
            place,
            values[name],
            color=GROUND if hatched else colour,
            edgecolor=colour,
            height=0.72,
            hatch="////" if hatched else None,
            linewidth=1,
        )
        told = f"{_number(values[name])} {panel.unit}{found.notes.get(name, '')}"
        axes.annotate(
            told,
            (values[name], place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=INK,
            fontweight="bold" if place == 0 else "normal",
        )
    axes.set_yticks(places, [_label(name) for name in names], fontsize=9, color=INK)
    axes.set_ylim(most - 0.5, -0.5)  # bars are as thick in every panel
    if panel.log:
        axes.set_xscale("log")
        axes.set_xlim(min(values.values()) / 3, max(values.values()) * 20)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        axes.set_xlim(0, max(values.values()) * 1.28)
    axes.set_title(panel.title, fontsize=10, color=INK, loc="left", fontweight="bold", linespacing=1.3)
    better = "more is better" if found.more_is_better else "less is better"
    axes.set_xlabel(f"{better}{', log scale' if panel.log else ''}", fontsize=8, color=FAINT, loc="left")
    axes.tick_params(axis="x", labelsize=7.5, colors=FAINT, length=2)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#c8c8c8")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 1 else f"{value:.2g}"


def _label(name: str) -> str:
    project, _, rest = name.partition(" ")
    if "as its scheduler" in rest:
        return f"{project},\nas scheduled"
    return project


def picture(results: dict[str, Any], target: Path) -> list[Path]:
    """Write target.svg and target.png."""
    matplotlib.rcParams |= {"svg.hashsalt": "prefixcache", "font.family": "DejaVu Sans", "hatch.linewidth": 0.8}
    found = [values_of(results, panel) for panel in PANELS]
    lines = [max(len(one.values) for one in found[i : i + COLUMNS]) for i in range(0, len(found), COLUMNS)]
    figure, grid = pyplot.subplots(
        len(lines),
        COLUMNS,
        figsize=(9.2, 3 + 0.36 * sum(lines)),
        height_ratios=lines,
        layout="constrained",
        facecolor=GROUND,
    )
    for i, (axes, panel) in enumerate(zip(grid.flat, PANELS, strict=True)):
        axes.set_facecolor(GROUND)
        draw(axes, panel, found[i], lines[i // COLUMNS])
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12, wspace=0.02, hspace=0.03)
    figure.supxlabel(_said(results), fontsize=8, color=FAINT)
    written = [target.with_suffix(suffix) for suffix in (".svg", ".png")]
    figure.savefig(written[0], facecolor=GROUND, metadata={"Date": None})
    figure.savefig(written[1], facecolor=GROUND, dpi=150, metadata={"Software": None})
    pyplot.close(figure)
    return written


def _said(results: dict[str, Any]) -> str:
    names = {
        name for figure in results["figures"] for name in figure["raw"].get("values", ()) if "scheduler" not in name
    }
    peers = ", ".join(sorted(name for name in names if name != "prefixcache"))
    how = f"python -m tools.bench --only peers: same tasks, one after the other, {results['machine']['cpus']} CPUs"
    return f"{how}\n{peers}"


def main(arguments: list[str]) -> int:
    if len(arguments) != 2:
        print("python -m tools.bench.chart results.json docs/bench", file=sys.stderr)
        return 2
    for path in picture(json.loads(Path(arguments[0]).read_text()), Path(arguments[1])):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
