"""How the results of `prefixcache evaluate` are written: a table for a screen, and Markdown tables for a document.

Both are made of the same cells, from the facts that `--json` prints; nothing is computed here but what text needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.table import Table
from rich.text import Text

from prefixcache.cli.text import foreign, many, safe, size

LIVE = "live cache"
NONE = "-"

Facts = dict[str, Any]
Column = tuple[str, Callable[[Facts], str], Callable[[Facts], str]]  # heading, of a codec, of the reference


class Grid(NamedTuple):
    """A table of text: the first column is to the left, the others to the right. Headings may have two lines."""

    headings: list[str]
    rows: list[list[str]]


# -- cells ------------------------------------------------------------------------------------------------------------


def number(value: float | None, error: float | None = None) -> str:
    """Three digits, or as many as the error bears: "0.0123", "1.2e-05 ± 3e-07", "0.012 ± 0.003"."""
    if value is None:
        return NONE
    if not error:
        return "0" if not value else f"{value:#.3g}".rstrip(".") if abs(value) < 1000 else f"{value:,.0f}"
    if max(abs(value), error) < 1e-3:
        return f"{value:.1e} ± {error:.0e}"
    digits = max(-math.floor(math.log10(error)), 0)
    return f"{round(value, digits) + 0.0:,.{digits}f} ± {error:,.{digits}f}"  # + 0.0: no "-0.0"


def signed(value: float | None, error: float | None = None) -> str:
    text = number(value, error)
    return f"+{text}" if value is not None and value > 0 else text


def share(value: float | None) -> str:
    return NONE if value is None else f"{100 * value:.1f} %"


def told(facts: Facts) -> str:
    return f"{facts['needles']['right']}/{facts['needles']['asked']}"


def _bits(facts: Facts) -> str:
    return NONE if facts["bits_per_value"] is None else f"{facts['bits_per_value']:.2f}"


def _live(facts: Facts) -> str:
    """The live cache's bits a value; facts are the whole's here."""
    first = facts["codecs"][0]
    values = first["values_per_token"]
    return f"{8 * first['live_bytes_per_token'] / values:.2f}" if values else NONE


def _columns(facts: Facts) -> list[Column]:
    columns: list[Column] = [
        ("codec", lambda c: c["codec"], lambda _: LIVE),
        ("bits\na value", _bits, _live),
        (
            "stored\na token",
            lambda c: NONE if c["stored_bytes_per_token"] is None else size(round(c["stored_bytes_per_token"])),
            lambda _: NONE,
        ),
        ("perplexity", lambda c: number(c["perplexity"]), lambda f: number(f["reference"]["perplexity"])),
        (
            "change",
            lambda c: signed(c["perplexity_difference"], c["perplexity_difference_error"]),
            lambda _: NONE,
        ),
        ("KL,\nnats", lambda c: number(c["kl_mean"], c["kl_error"]), lambda _: NONE),
        ("KL,\n99 %", lambda c: number(c["kl_p99"]), lambda _: NONE),
        ("same top\ntoken", lambda c: share(c["top1"]), lambda _: NONE),
    ]
    if facts["depths"]:
        columns.append(("numbers\ntold", told, lambda f: told(f["reference"])))
    return columns


def main_grid(facts: Facts) -> Grid:
    """The live cache and every codec, one row each."""
    columns = _columns(facts)
    rows = [[of_reference(facts) for _, _, of_reference in columns]]
    rows += [[of_codec(codec) for _, of_codec, _ in columns] for codec in facts["codecs"]]
    return Grid([heading for heading, _, _ in columns], rows)


def depth_grid(facts: Facts) -> Grid:
    """How many of the hidden numbers were told, by depth."""
    rows = [
        [name, *(f"{at['right']}/{at['asked']}" for at in of["needles"]["by_depth"])]
        for name, of in ((LIVE, facts["reference"]), *((c["codec"], c) for c in facts["codecs"]))
    ]
    return Grid(["numbers told, by depth", *(f"{depth:.0%}" for depth in facts["depths"])], rows)


# -- sentences --------------------------------------------------------------------------------------------------------


def notes(facts: Facts) -> list[str]:
    """What a reader of the numbers must know, a sentence or two each."""
    job, versions = facts["job"], facts["versions"]
    lines = [
        f"{many(job['windows'], 'text')}: {job['prefix']:,} tokens stored and restored, {job['tokens']:,} read after "
        f"them. Text: {_source(facts['text'])}; other text gives other numbers.",
        "±: standard error over the texts. Bits a value: codes and scales. Stored a token: all of it, with headers, "
        "token ids and recurrent state.",
    ]
    if facts["depths"]:
        lines.append(
            f"Numbers: {len(facts['depths'])} hidden in {many(job['needles'], 'text')} each, and each asked for by itself."
        )
    lines += [_control(codec) for codec in facts["codecs"] if codec["codec"] == "raw"]
    lines += [_left_raw(codec) for codec in facts["codecs"] if codec["raw_layers"]]
    if facts.get("float32"):
        lines.append("The weights were cast to float32, and with them the live cache.")
    lines.append(
        f"prefixcache {versions['prefixcache']}, mlx {versions['mlx']} on {versions['device']}, "
        f"mlx-lm {versions['mlx-lm']}, seed {job['seed']}."
    )
    return lines


def _source(text: Facts) -> str:
    if not text["files"]:
        return f"pydoc_data.topics of Python {text['python']}"
    return ", ".join(safe(name) for name in text["files"])


def _control(raw: Facts) -> str:
    if raw["identical"]:
        return "Control: with raw, every logit is the live cache's bit for bit."
    return (
        f"Control: with raw, logits differ from the live cache's (KL {number(raw['kl_mean'])} nats): on this device the "
        "same rows don't always give the same sums. Smaller differences than this mean nothing."
    )


def _left_raw(codec: Facts) -> str:
    layers = codec["raw_layers"]
    which = "every layer" if len(layers) == codec["layers"] else f"{many(len(layers), 'layer')} ({_listed(layers)})"
    return f"{codec['codec']}: keys or values of {which} are kept raw."


def _listed(layers: Sequence[int]) -> str:
    few = ", ".join(map(str, layers[:8]))
    return few if len(layers) <= 8 else f"{few}, ..."


# -- on a screen, and in a document -----------------------------------------------------------------------------------


def table(grid: Grid) -> Table:
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for i, heading in enumerate(grid.headings):
        made.add_column(heading, justify="right" if i else "left", no_wrap=not i)
    for row in grid.rows:
        made.add_row(*(foreign(cell) for cell in row))
    return made


def screen(facts: Facts) -> list[Table | Text]:
    """What is printed, from top to bottom."""
    shown: list[Table | Text] = [table(main_grid(facts))]
    if facts["depths"]:
        shown.append(table(depth_grid(facts)))
    return [*shown, *(foreign(line, "dim") for line in notes(facts))]


def markdown(facts: Facts) -> str:
    """The same as Markdown, without a heading."""
    parts = [_markdown(main_grid(facts))]
    if facts["depths"]:
        parts.append(_markdown(depth_grid(facts)))
    parts.append("\n".join(f"- {line}" for line in notes(facts)))
    return "\n\n".join(parts)


def _markdown(grid: Grid) -> str:
    rule = ["---", *("---:" for _ in grid.headings[1:])]
    rows = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in (grid.headings, *grid.rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (rows[0], rule, *rows[1:]))
