"""The files that `prefixcache plan` writes: complete or not at all, and never in the place of something that is not its own.

A file is its own when it says so near its beginning: a page's generator, an SVG's creator, a PNG's software.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

MARK = "prefixcache plan"
_HEAD = 4096  # bytes in which the mark is looked for


class NotWritable(Exception):
    """A file can't be written as asked. The text names the option, the file and the remedy."""


def check(option: str, path: Path) -> None:
    """NotWritable unless `write` may put a file there: where the name is free, or that of an empty file or of one of ours."""
    if path.is_symlink():
        raise NotWritable(f"{option} {path}: is a link, and is left alone; name the file that it stands for")
    if not path.parent.is_dir():
        raise NotWritable(f"{option} {path}: no such folder; make {path.parent} first")
    if not os.access(path.parent, os.W_OK):
        raise NotWritable(f"{option} {path}: nothing can be written to {path.parent}; give another folder")
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise NotWritable(f"{option} {path}: is there and no file; give another name")
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except FileNotFoundError:
        return
    except OSError as error:
        raise NotWritable(f"{option} {path}: can't be looked at ({error.strerror}); give another name") from None
    if head and MARK.encode() not in head:
        raise NotWritable(f"{option} {path}: is there and not of prefixcache plan; give another name, or delete it")


def write(path: Path, fill: Callable[[Path], Any]) -> None:
    """`fill` a file of another name beside it, then give it this one: `path` never names half a file."""
    umask = os.umask(0)
    os.umask(umask)
    number, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=path.suffix, dir=path.parent)
    os.close(number)
    half = Path(name)
    try:
        fill(half)
        half.chmod(0o666 & ~umask)
        half.replace(path)
    except BaseException:
        with suppress(OSError):
            half.unlink()
        raise
