"""The picture of `prefixcache evaluate`: KL divergence against bits a value, and the numbers told by depth.

matplotlib comes with the extra "plan"; it is imported here and nowhere else, and draws without a display. The colours
are Okabe and Ito's, which the colour-blind can tell apart, and every line has a marker of its own.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from prefixcache.cli.evaluate.texts import NotMeasured

FORMATS = (".png", ".svg")
STYLES = {
    "affine": ("#E69F00", "s"),
    "turboquant": ("#0072B2", "o"),
    "turboquant, keys and values apart": ("#56B4E9", "D"),
    "turboquant, plain": ("#D55E00", "^"),
}
OTHERS = (("#009E73", "v"), ("#CC79A7", "P"), ("#000000", "X"))

Facts = dict[str, Any]


def targets(out: Path) -> list[Path]:
    """The files to write: `out`, or both kinds where it has no suffix. NotMeasured when they can't be made."""
    if not find_spec("matplotlib"):
        raise NotMeasured(f"--plot {out}: matplotlib is not installed; run pip install 'prefixcache[plan]'")
    if out.suffix and out.suffix not in FORMATS:
        raise NotMeasured(
            f"--plot {out}: can't draw {out.suffix}; give a name that ends in .png or .svg, or in neither"
        )
    if not out.parent.is_dir():
        raise NotMeasured(f"--plot {out}: no such folder; make {out.parent} first")
    if not os.access(out.parent, os.W_OK):
        raise NotMeasured(f"--plot {out}: nothing can be written to {out.parent}; give another folder")
    return [out] if out.suffix else [out.with_name(out.name + ending) for ending in FORMATS]


def family(spec: Facts) -> str:
    """Codecs that one line joins."""
    name = str(spec["name"])
    if name == "turboquant" and spec.get("levelling") is False:
        return "turboquant, plain"
    if name == "turboquant" and spec["key_bits"] != spec["value_bits"]:
        return "turboquant, keys and values apart"
    return name


def draw(facts: Facts, files: list[Path]) -> None:
    """Draw once, write each file. OSError when one can't be written."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "prefixcache", "svg.fonttype": "none", "font.size": 9}):
        panels = 2 if facts["depths"] else 1
        figure = Figure(figsize=(5.5 * panels, 4.2), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(1, panels, squeeze=False)[0]
        _draw_divergence(axes[0], facts)
        if facts["depths"]:
            _draw_recall(axes[1], facts)
        figure.suptitle(Path(facts["model"]).name)
        for file in files:
            # No date: the same facts give the same file.
            extra = {"metadata": {"Date": None}} if file.suffix == ".svg" else {"dpi": 110}
            figure.savefig(file, **extra)


def _draw_divergence(axes: Any, facts: Facts) -> None:
    shown = [c for c in facts["codecs"] if c["kl_mean"] and c["bits_per_value"]]  # 0 has no place on a log axis
    others = iter(OTHERS * len(shown))
    for name in dict.fromkeys(family(codec["spec"]) for codec in shown):
        own = sorted((c for c in shown if family(c["spec"]) == name), key=lambda c: c["bits_per_value"])
        colour, marker = STYLES.get(name) or next(others)
        axes.errorbar(
            [c["bits_per_value"] for c in own], [c["kl_mean"] for c in own], yerr=[c["kl_error"] or 0 for c in own],
            color=colour, marker=marker, linestyle="none" if name.endswith("apart") else "-", label=name, capsize=2,
        )  # fmt: skip
        if name.endswith("apart"):
            for c in own:
                label = f"k{c['spec']['key_bits']} v{c['spec']['value_bits']}"
                axes.annotate(
                    label, (c["bits_per_value"], c["kl_mean"]), xytext=(5, 4), textcoords="offset points", fontsize=7
                )
    if shown:
        axes.set_yscale("log")
        axes.legend(fontsize=8)
    axes.grid(True, which="major", alpha=0.3)
    axes.set_xlabel("bits a value, scales included")
    axes.set_ylabel("KL(live cache || codec), nats a token")
    axes.set_title("What a codec does to the next token", fontsize=9)


def _draw_recall(axes: Any, facts: Facts) -> None:
    """A field for each codec and depth: lines would lie on one another."""
    rows = [("live cache", facts["reference"]), *((c["codec"], c) for c in facts["codecs"])]
    shares = [[at["right"] / at["asked"] for at in of["needles"]["by_depth"]] for _, of in rows]
    axes.imshow(shares, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    for y, row in enumerate(shares):
        for x, value in enumerate(row):
            ink = "black" if value > 0.5 else "white"
            axes.text(x, y, f"{value:.0%}", ha="center", va="center", color=ink, fontsize=7)
    axes.set_xticks(range(len(facts["depths"])), [f"{depth:.0%}" for depth in facts["depths"]])
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
    axes.set_xlabel("depth of the number in the text")
    asked = facts["reference"]["needles"]["by_depth"][0]["asked"]
    axes.set_title(f"Hidden numbers that were told, of {asked} at each depth", fontsize=9)
