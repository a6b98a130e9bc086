"""The picture of `prefixcache plan`: of a trace hit rates, money and waiting, of a model alone what prompts take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, groupby
from pathlib import Path
from typing import Any

from prefixcache.cli.output import LOOKS, draw
from prefixcache.cli.plan.text import chosen, short, sizes_of

Facts = dict[str, Any]


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
    axes.plot([x], [y], marker="*", markersize=16, color="#D55E00", linestyle="none", zorder=5)
    axes.annotate(
        sizes_of(cell), (x, y), xytext=(0, -18), textcoords="offset points", ha="center", fontsize=8, parse_math=False
    )


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
