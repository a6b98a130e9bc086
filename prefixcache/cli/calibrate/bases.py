"""What `prefixcache calibrate --list` says of the folder of bases: each file that is one, and of others why they are none."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from prefixcache.cli.evaluate.report import number
from prefixcache.cli.tables import Grid, table
from prefixcache.cli.text import age, foreign, size
from prefixcache.codecs.transform.bases import Bases
from prefixcache.codecs.transform.basis import BasisError, summary
from prefixcache.codecs.transform.codec import QUALITY

Facts = dict[str, Any]


def facts_of(folder: Path) -> Facts:
    """Return the files, newest first, as a server takes them: of each either its `basis` or the `error`, why it is none."""
    bases = Bases(folder)
    return {"folder": str(folder), "now": time.time(), "bases": [_facts(bases, path) for path in bases.files()]}


def _facts(bases: Bases, path: Path) -> Facts:
    file: Facts = {"file": path.name, "written": None, "error": None, "basis": None}
    try:
        file["written"] = path.stat().st_mtime
        basis = bases.read(path)
        ratio = basis.fp16_bytes / basis.coded_bytes(QUALITY)
        file["basis"] = {**summary(basis), "quality": QUALITY, "ratio": ratio}
    except BasisError as error:
        file["error"] = str(error)
    except OSError as error:
        file["error"] = f"can't be read ({error.strerror})"
    return file


def screen_of(facts: Facts) -> list[Table | Text]:
    """Return a table of the bases, and a line for each file that is none."""
    files = facts["bases"]
    if not files:
        return [foreign(f"{facts['folder']}: no basis; prefixcache calibrate MODEL makes one")]
    parts: list[Table | Text] = [foreign(facts["folder"])]
    rows = [_row(file, facts["now"]) for file in files if file["basis"]]
    if rows:
        note = (
            f"At quality {QUALITY:g}, on text that the basis had not seen. Smaller: a transformed token than in fp16."
        )
        parts += [table(Grid([*rows[0]], [[*row.values()] for row in rows])), foreign(note, "dim")]
    return parts + [foreign(f"{file['file']}: {file['error']}", "red") for file in files if file["error"]]


def _row(file: Facts, now: float) -> dict[str, str]:
    """Return the cells by their headings."""
    basis = file["basis"]
    measured = basis["measured"] or {}
    return {
        "model": basis["model"].partition("@")[0],
        "hash": basis["hash"][:8],
        "layers in\ngroups": f"{basis['layers']} in {basis['groups']}",
        "RAM": size(basis["bytes"]),
        "smaller": f"{basis['ratio']:.1f} x",
        "KL,\nnats": number(measured.get("kl")),
        "KL of\nturboquant:4": number(measured.get("reference_kl")),
        "metric": basis["metric"],
        "age": age(file["written"], now),
    }
