"""How the commands write: numbers, sizes, ages, and texts that came from outside.

Everything foreign (names of models and files, reasons) goes through `safe` and into a rich `Text`, never into markup.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from prefixcache.byte_sizes import size as size

_PASSWORD = re.compile(r"([a-z0-9+]+:/+)[^/\s]*@", re.IGNORECASE)  # of a URL, whose path has one slash
_LEFT_OUT = r"\1...@"
PIPE_WIDTH = 120  # columns where there is no terminal to ask and COLUMNS is not set


class Refused(ValueError):
    """The command can't do what was asked. The text names the option or the file, the value and the remedy."""


@contextmanager
def refusing(also: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn `Refused`, an OSError and `also` into one line on stderr and the exit code 2."""
    kinds: tuple[type[Exception], ...] = (Refused, OSError, *also)
    try:
        yield
    except kinds as error:
        complain(str(error))
        raise typer.Exit(2) from error


def expanded(path: str | Path, option: str = "") -> Path:
    """Return a path whose ~ is replaced by the home that it stands for. Refused names the option where there is none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise Refused(f"{option} {path}".lstrip() + ": no such home; write the whole path") from None


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Rich would exit with 1, which has another meaning here."""
        raise BrokenPipeError


def console(*, stderr: bool = False) -> Console:
    """Return a console of the stream as it is now. No markup, no emoji, no highlighting: texts are printed as they are."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or os.environ.get("COLUMNS") else PIPE_WIDTH
    return _Console(file=stream, width=width, markup=False, emoji=False, highlight=False)


def complain(message: str) -> None:
    """Write one line to stderr. It may quote what was given, and a URL's password is left out."""
    typer.echo(f"prefixcache: {safe(_PASSWORD.sub(_LEFT_OUT, message))}", err=True)


def one_line(error: BaseException) -> str:
    """Return an error's text without line ends; its class where it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def print_json(value: dict[str, Any]) -> None:
    """Print one object on stdout: ASCII, no colours, keys in the order that they were given."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=True, allow_nan=False))


def safe(text: str) -> str:
    """Return the text with escapes for control characters, line ends, and what is invisible or turns the direction."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def foreign(text: str, style: str = "") -> Text:
    return Text(safe(text), style=style)


def mute() -> None:
    """Discard what standard output still has to write; else the interpreter would complain at its end."""
    with open(os.devnull, "wb") as nowhere, suppress(OSError, ValueError):
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def age(when: float | None, now: float) -> str:
    """Return how long ago a Unix time was, in its largest unit; "-" for none."""
    if when is None:
        return "-"
    seconds = max(now - when, 0.0)
    for unit, length in (("y", 365.25 * 86400), ("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{int(seconds // length):,} {unit}"
    return f"{int(seconds)} s"


def duration(seconds: float | None) -> str:
    """Write a time to two or three digits, in the unit that suits it: "16 ms", "1.42 s", "2.5 min"; "-" for none."""
    if seconds is None:
        return "-"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    if seconds >= 1 or not seconds:
        return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.0f} ms" if seconds >= 1e-2 else f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} us"


def many(number: int, noun: str) -> str:
    """Write a number with its noun: "1 block", "1,234 blocks"; "1 branch", "2 branches"."""
    plural = f"{noun}es" if noun.endswith(("s", "x", "ch")) else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def exit_without_mlx(error: BaseException) -> None:
    """If mlx.core can't be loaded, as after a plain `pip install prefixcache` on Linux, say in a line which extra to install,
    and exit with 1. Of another error nothing is said.
    """
    if isinstance(error, ImportError) and (error.name in ("mlx", "mlx.core") or "libmlx" in str(error)):
        complain(
            'MLX has no back end here: on Linux run pip install "prefixcache[cpu]", or "prefixcache[cuda]" for an NVIDIA GPU '
            f"({error})"
        )
        raise typer.Exit(1) from None
