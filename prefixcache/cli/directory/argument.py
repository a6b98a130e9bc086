"""DIR, the argument that the commands of operators share, and the line that says that it can't be used."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prefixcache.ssd.directory import refusal

# readable=False: that it can't be read is ours to say, in the words of every other refusal.
Dir = Annotated[Path, typer.Argument(metavar="DIR", readable=False, help="The cache's directory (ssd_dir).")]


def refused(directory: Path, error: Exception) -> str:
    """What to say of an error about it: which part the system keeps from this user, or the error's own words."""
    if isinstance(error, PermissionError):
        return str(refusal(Path(error.filename or directory), error))
    return str(error)
