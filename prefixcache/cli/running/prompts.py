"""Prompts as bodies of chat requests, read from files: JSON Lines, or one object over several lines. The server checks
them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from prefixcache.cli.text import Refused

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
    bodies = [body for file in files for body in _bodies(file)]
    if not bodies:
        raise Refused("no prompts: name a file that has a prompt as JSON on each line")
    return bodies


def _bodies(file: Path) -> list[tuple[str, dict[str, Any]]]:
    try:
        text = (sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"{file}: {getattr(error, 'strerror', None) or 'not UTF-8'}; give a file of prompts") from None
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError):
        whole = None
    if isinstance(whole, dict) or text.lstrip().partition("\n")[0].rstrip() == "{":  # one object over several lines
        return [(str(file), _body(file, 1, text))]
    return [
        (f"{file}:{number}", _body(file, number, line))
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip()
    ]


def _body(file: Path, number: int, text: str) -> dict[str, Any]:
    """Return the object that the JSON is which begins in line `number` of a file."""
    body, why = None, ""
    try:
        body = json.loads(text)
    except json.JSONDecodeError as error:
        number, why = number + error.lineno - 1, f" ({error.msg}, column {error.colno})"
    except (ValueError, RecursionError):
        pass
    if not isinstance(body, dict):
        raise Refused(f'{file}:{number}: no JSON object{why}; write {{"messages": [...]}} or {{"prompt": "..."}}')
    return body
