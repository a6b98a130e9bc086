"""Prompts as bodies of chat requests, read from files: JSON Lines, or one object over several lines. The server checks
them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from prefixcache.cli.text import Refused
from prefixcache.servers.warm_prompts import BadPrompt, read_objects

Files = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="PROMPTS.JSONL",
        help='A prompt on each line, the body of a chat request: {"messages": [...], "tools": [...]}, or {"prompt": "..."}; '
        "- for standard input.",
    ),
]


def read_bodies(files: list[Path]) -> list[tuple[str, dict[str, Any]]]:
    """Return where each prompt stands, and its body. Refused for a file that can't be read or has none."""
    if not files:
        raise Refused("no prompts: name a file that has a prompt as JSON on each line")
    try:
        return [body for file in files for body in read_objects(file)]
    except BadPrompt as error:
        raise Refused(str(error)) from None
