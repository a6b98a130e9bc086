"""What `prefixcache inspect` shows of a directory with one subdirectory for each rank of a model: a column for each rank."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from prefixcache.cli.directory.facts import Facts
from prefixcache.cli.text import age, foreign, many, size
from prefixcache.ssd.directory import Directory, rank_folders

_PART = re.compile(r"\|((?:tp|pp) [0-9:/]+)$")  # of a model's name: the rank's


def ranks_in(directory: Path) -> dict[int, Path]:
    """Return the ranks' directories, by rank; none where `directory` is a cache's own."""
    folders = rank_folders(directory)
    return {} if folders and Directory(directory).ours else folders


def show_ranks(out: Console, directory: Path, ranks: dict[int, Facts]) -> None:
    """Print side by side: state and sizes, then for each model what every rank has of it."""
    out.print(Text.assemble(("directory  ", "bold"), foreign(str(directory))))
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("", overflow="fold")
    for rank in ranks:
        table.add_column(f"rank {rank}", justify="right", overflow="fold")
    every = list(ranks.values())
    table.add_row("state", *map(_state, every))
    table.add_row("on disk", *(size(facts["disk"]) for facts in every))
    table.add_row("quarantine", *(many(len(facts["quarantine"]), "file") for facts in every))
    for model, codec in dict.fromkeys(_named(space) for facts in every for space in facts["namespaces"]):
        table.add_section()
        table.add_row(Text.assemble(foreign(model, "bold"), "\n", foreign(codec, "dim")))
        spaces = [[space for space in facts["namespaces"] if _named(space) == (model, codec)] for facts in every]
        table.add_row("part", *(foreign(", ".join(dict.fromkeys(map(_part, of)))) for of in spaces))
        table.add_row("tokens", *(f"{sum(space['tokens'] for space in of):,}" for of in spaces))
        for kind in ("blocks", "windows", "snapshots"):
            table.add_row(kind, *(f"{sum(space[kind]['images'] for space in of):,}" for of in spaces))
        table.add_row("bytes", *(size(sum(space["nbytes"] for space in of)) for of in spaces))
        table.add_row("used", *(age(max(map(_used, of), default=0.0) or None, every[0]["now"]) for of in spaces))
    out.print(table)


def _state(facts: Facts) -> Text:
    if facts["problem"]:
        return foreign(f"the index can't be read: {facts['problem']}", "red")
    if facts["live"]:
        return Text("open", style="green")
    return Text("closed") if facts["clean"] else Text("not closed cleanly", style="yellow")


def _named(space: dict[str, Any]) -> tuple[str, str]:
    return _PART.sub("", space["model"]), space["codec_name"]


def _part(space: dict[str, Any]) -> str:
    part = _PART.search(space["model"])
    return part[1] if part else "the whole model"


def _used(space: dict[str, Any]) -> float:
    return space["last_used"] or 0.0
