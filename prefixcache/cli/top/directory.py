"""What `prefixcache top DIR` shows of a directory, live or dead: what `inspect` reads of it, by model, and how it grows.
Takes no lock and writes nothing.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from prefixcache.cli.directory.argument import refused
from prefixcache.cli.text import age, foreign, many, size
from prefixcache.cli.top.parts import Away, Facts, NotOurs, clock, meter, pairs, part_of
from prefixcache.ssd import DirectoryError, IndexBroken, Survey, survey

MODELS = 12  # lines of the table
KINDS = ("blocks", "windows", "snapshots")


class Watched:
    """A directory, looked at as `inspect` does. `limit`: bytes that it may take, as whoever asks says."""

    def __init__(self, directory: Path, limit: int | None = None):
        self.name = str(directory)
        self._directory = directory
        self._limit = limit
        self._before: Facts | None = None
        self._at = 0.0

    def look(self) -> Facts:
        try:
            found, now = survey(self._directory), time.monotonic()
        except (DirectoryError, IndexBroken, OSError) as error:
            gone = Away if self._before is not None else NotOurs  # what was there may come back
            raise gone(refused(self._directory, error)) from None
        seen = facts(self._directory, self._limit, found)
        growth = _growth(self._before, seen, now - self._at)
        self._before, self._at = seen, now
        return {**seen, **growth}

    def picture(self, facts: Facts) -> RenderableType:
        return picture(facts)


def facts(directory: Path, limit: int | None, found: Survey) -> Facts:
    """All that one look shows, as plain values; sizes in bytes, times in Unix seconds."""
    models: dict[str, Facts] = {}
    for space in found.namespaces:
        one = models.setdefault(space.model, {"model": space.model, "namespaces": 0, **dict.fromkeys(
            ("tokens", "images", "nbytes", "disk", "hits", "newest", "last_used_at"), 0)})  # fmt: skip
        one["namespaces"] += 1
        for name in ("tokens", "nbytes", "disk", "hits"):
            one[name] += getattr(space, name)
        one["images"] += sum(getattr(space, kind).images for kind in KINDS)
        for name in ("newest", "last_used_at"):
            one[name] = max(one[name], getattr(space, name))
    newest_first = sorted(models.values(), key=lambda one: (-one["last_used_at"], one["model"]))
    return {
        "source": str(directory), "up": True, "error": found.problem or None, "now": time.time(),
        "holder": found.holder or None, "clean": found.clean, "disk": found.disk, "limit": limit, "free": _free(directory),
        "index_bytes": found.index_bytes, "quarantine_files": len(found.quarantine),
        "quarantine_bytes": sum(item.disk for item in found.quarantine),
        "images": {kind: sum(getattr(space, kind).images for space in found.namespaces) for kind in KINDS},
        "tokens": sum(one["tokens"] for one in models.values()), "hits": sum(one["hits"] for one in models.values()),
        "models": [{**one, "newest": one["newest"] or None, "last_used_at": one["last_used_at"] or None}
                   for one in newest_first],
    }  # fmt: skip


def _growth(before: Facts | None, now: Facts, seconds: float) -> Facts:
    """What came a second since the look before; None with none before."""
    if before is None:
        return {"seconds": None, "growth": None}
    seconds = max(seconds, 1e-6)
    images = sum(now["images"].values()) - sum(before["images"].values())
    return {
        "seconds": seconds,
        "growth": {
            "disk": (now["disk"] - before["disk"]) / seconds,
            "tokens": (now["tokens"] - before["tokens"]) / seconds,
            "images": images / seconds,
            "hits": (now["hits"] - before["hits"]) / seconds,
        },
    }


def _free(directory: Path) -> int | None:
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return None


def picture(now: Facts) -> RenderableType:
    """Fits in 80 columns."""
    head = Text.assemble(("prefixcache ", "bold"), foreign(now["source"]), "  ", clock(now["now"]))
    table = pairs()
    state = foreign(f"open: {now['holder']}", "green") if now["holder"] else Text("nobody has it open")
    table.add_row("state", state if now["clean"] or now["holder"] else Text("not closed cleanly", "yellow"))
    free = f", {size(now['free'])} free on its disk" if now["free"] is not None else ""
    table.add_row("on disk", Text.assemble(meter(now["disk"], now["limit"]), free))
    if now["error"]:
        table.add_row("index", foreign(f"can't be read: {now['error']}", "red"))
    else:
        kinds = ", ".join(many(number, kind[:-1]) for kind, number in now["images"].items() if number)
        table.add_row("images", kinds or "none yet")
    table.add_row("growth", _in_words(now["growth"]))
    if now["quarantine_files"]:
        aside = f"{many(now['quarantine_files'], 'file')}, {size(now['quarantine_bytes'])}"
        table.add_row("set aside", Text(aside, "yellow"))
    return Group(head, table, _models(now)) if now["models"] else Group(head, table)


def _in_words(growth: dict[str, float] | None) -> str:
    if growth is None:
        return "-"
    disk = ("-" if growth["disk"] < 0 else "") + size(int(abs(growth["disk"])))
    return f"{disk}/s, {growth['images']:,.1f} images/s, {growth['tokens']:,.0f} tokens/s, {growth['hits']:,.1f} hits/s"


def _models(now: Facts) -> Any:
    """In the order of last use."""
    table = part_of("model", "tokens", "images", "on disk", "hits", "newest", "used")
    for one in now["models"][:MODELS]:
        table.add_row(
            foreign(one["model"]), f"{one['tokens']:,}", f"{one['images']:,}", size(one["disk"]), f"{one['hits']:,}",
            age(one["newest"], now["now"]), age(one["last_used_at"], now["now"]),
        )  # fmt: skip
    if len(now["models"]) > MODELS:
        table.add_row(foreign(f"... {many(len(now['models']) - MODELS, 'model')} more, used longer ago", "dim"))
    return table
