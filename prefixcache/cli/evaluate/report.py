"""How the results of `prefixcache evaluate` are written: tables and sentences.

All are made from the facts that `--json` prints; nothing is computed here but what text needs.
"""

from __future__ import annotations

import math
from typing import Any

from rich.table import Table
from rich.text import Text

from prefixcache.cli.tables import NONE, Grid, markdown, table
from prefixcache.cli.text import foreign, many, safe, size

LIVE = "live cache"

Facts = dict[str, Any]


def number(value: float | None, error: float | None = None) -> str:
    """Write three digits, or as many as the error bears: "0.0123", "1.2e-05 ± 3e-07", "0.012 ± 0.003"."""
    if value is None:
        return NONE
    if not error:
        return "0" if not value else f"{value:#.3g}".rstrip(".") if abs(value) < 1000 else f"{value:,.0f}"
    if max(abs(value), error) < 1e-3:
        return f"{value:.1e} ± {error:.0e}"
    digits = max(-math.floor(math.log10(error)), 0)
    return f"{round(value, digits) + 0.0:,.{digits}f} ± {error:,.{digits}f}"  # + 0.0: no "-0.0"


def signed(value: float | None, error: float | None) -> str:
    return f"{'+' if value is not None and value > 0 else ''}{number(value, error)}"


def main_grid(facts: Facts) -> Grid:
    """Return the live cache and every codec, one row each."""
    headings = ["codec", "bits\na value", "stored\na token", "perplexity", "change"]
    headings += ["KL,\nnats", "KL,\n99 %", "same top\ntoken"]
    first = facts["codecs"][0]
    live = 8 * first["live_bytes_per_token"] / first["values_per_token"] if first["values_per_token"] else None
    rows = [[LIVE, _bits(live), NONE, number(facts["reference"]["perplexity"]), NONE, NONE, NONE, NONE]]
    for c in facts["codecs"]:
        stored = c["stored_bytes_per_token"]
        rows.append(
            [
                c["codec"],
                _bits(c["bits_per_value"]),
                NONE if stored is None else size(round(stored)),
                number(c["perplexity"]),
                signed(c["perplexity_difference"], c["perplexity_difference_error"]),
                number(c["kl_mean"], c["kl_error"]),
                number(c["kl_p99"]),
                f"{100 * c['top1']:.1f} %",
            ]
        )
    if facts["depths"]:
        headings.append("numbers\ntold")
        for row, needles in zip(rows, _needles(facts).values(), strict=True):
            row.append(_share(needles))
    return Grid(headings, rows)


def _bits(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"


def _needles(facts: Facts) -> dict[str, Facts]:
    """Return how many of the hidden numbers were told, by the live cache and by each codec."""
    return {LIVE: facts["reference"]["needles"], **{c["codec"]: c["needles"] for c in facts["codecs"]}}


def _share(needles: Facts) -> str:
    return f"{needles['right']}/{needles['asked']}"


def depth_grid(facts: Facts) -> Grid:
    rows = [[name, *map(_share, needles["by_depth"])] for name, needles in _needles(facts).items()]
    return Grid(["numbers told, by depth", *(f"{depth:.0%}" for depth in facts["depths"])], rows)


def grids(facts: Facts) -> list[Grid]:
    return [main_grid(facts), depth_grid(facts)] if facts["depths"] else [main_grid(facts)]


def notes(facts: Facts) -> list[str]:
    """Return what a reader of the numbers must know, a sentence or two each."""
    job, versions, text = facts["job"], facts["versions"], facts["text"]
    source = ", ".join(map(safe, text["files"])) or f"pydoc_data.topics of Python {text['python']}"
    lines = [
        f"{many(job['windows'], 'text')}: {job['prefix']:,} tokens stored and restored, {job['tokens']:,} read after "
        f"them. Text: {source}; other text gives other numbers.",
        "±: standard error over the texts. Bits a value: codes and scales. Stored a token: all of it, with headers, "
        "token ids and recurrent state.",
    ]
    if facts["depths"]:
        lines.append(
            f"Numbers: {len(facts['depths'])} hidden in {many(job['needles'], 'text')} each, and each asked for by itself."
        )
    for codec in facts["codecs"]:
        if codec["codec"] == "raw" and codec["identical"]:
            lines.append("Control: with raw, every logit is the live cache's bit for bit.")
        elif codec["codec"] == "raw":
            lines.append(
                f"Control: with raw, logits differ from the live cache's (KL {number(codec['kl_mean'])} nats): on this "
                "device the same rows don't always give the same sums. Smaller differences than this mean nothing."
            )
        if raw := codec["raw_layers"]:
            layers = f"{many(len(raw), 'layer')} ({', '.join(map(str, raw[:8]))}{', ...' if len(raw) > 8 else ''})"
            if len(raw) == codec["layers"]:
                layers = "every layer"
            lines.append(f"{codec['codec']}: keys or values of {layers} are kept raw.")
    if facts.get("float32"):
        lines.append("The weights were cast to float32, and with them the live cache.")
    lines.append(
        f"prefixcache {versions['prefixcache']}, mlx {versions['mlx']} on {versions['device']}, "
        f"mlx-lm {versions['mlx-lm']}, seed {job['seed']}."
    )
    return lines


def screen(facts: Facts) -> list[Table | Text]:
    return [*map(table, grids(facts)), *(foreign(line, "dim") for line in notes(facts))]


def as_markdown(facts: Facts) -> str:
    """Return the same as Markdown, without a heading."""
    return "\n\n".join([*map(markdown, grids(facts)), "\n".join(f"- {line}" for line in notes(facts))])
