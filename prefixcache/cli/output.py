"""Files that `evaluate` and `plan` write when they are asked to: pictures, which matplotlib draws, and pages.

A file is written whole or not at all, and replaces only an empty file or one that has MARK near its beginning. matplotlib
comes with the extra "plan", is imported when something is drawn, and draws without a display.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from prefixcache.cli.text import Refused

MARK = "Made by prefixcache"
INSTALL = "pip install 'prefixcache[plan]'"
KINDS = (".png", ".svg")

# Okabe and Ito's colours, which the colour-blind can tell apart, and markers.
LOOKS = (
    ("#E69F00", "s"),
    ("#0072B2", "o"),
    ("#56B4E9", "D"),
    ("#D55E00", "^"),
    ("#009E73", "v"),
    ("#CC79A7", "P"),
    ("#000000", "X"),
)


def can_draw() -> bool:
    return find_spec("matplotlib") is not None


def pictures(option: str, out: Path | None) -> list[Path]:
    """Return the files to draw: `out`, or one of each kind where it has no suffix. Refused when they can't be made."""
    if out is None:
        return []
    if not can_draw():
        raise Refused(f"{option} {out}: matplotlib is not installed; run {INSTALL}")
    if out.suffix and out.suffix not in KINDS:
        raise Refused(f"{option} {out}: can't draw {out.suffix}; give a name that ends in .png or .svg, or in neither")
    files = [out] if out.suffix else [out.with_name(out.name + kind) for kind in KINDS]
    for file in files:
        check(option, file)
    return files


def check(option: str, path: Path) -> None:
    """Raise Refused unless `write` may put a file there."""
    name = f"{option} {path}"
    if not path.parent.is_dir():
        raise Refused(f"{name}: no such folder; make {path.parent} first")
    if not os.access(path.parent, os.W_OK):
        raise Refused(f"{name}: nothing can be written to {path.parent}; give another folder")
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise Refused(f"{name}: is there and no plain file; give another name")
    try:
        head = path.open("rb").read(4096) if path.exists() else b""
    except OSError as error:
        raise Refused(f"{name}: can't be read ({error.strerror}); give another name") from None
    if head and MARK.encode() not in head:
        raise Refused(f"{name}: is there and not made by prefixcache; give another name, or delete it")


def write(option: str, path: Path, content: bytes) -> None:
    """Write a file in the place of what was there. Refused when the disk is full or takes no files."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_bytes(content)
        os.replace(unfinished, path)
    except OSError as error:
        raise Refused(f"{option} {path}: {error.strerror}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def draw(title: str, panels: Sequence[Callable[[Any], None]], kind: str, *, stacked: bool = False) -> bytes:
    """Draw panels side by side, or `stacked`, under a title unless it is empty; `kind` is a file's suffix. A panel is a
    function that draws on axes.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "prefixcache", "svg.fonttype": "none", "font.size": 9}):
        rows, columns = (len(panels), 1) if stacked else (1, len(panels))
        figure = Figure(figsize=(5.0 * columns, 4.2 * rows), layout="constrained")
        for axes, panel in zip(figure.subplots(rows, columns, squeeze=False).flat, panels, strict=True):
            panel(axes)
            axes.grid(True, which="major", alpha=0.3)
            if len(axes.get_legend_handles_labels()[0]) > 1:
                axes.legend(fontsize=7)
        if title:
            figure.suptitle(title, parse_math=False)
        image = io.BytesIO()
        metadata = {"Software": MARK} if kind == ".png" else {"Creator": MARK, "Date": None}  # the same each time
        figure.savefig(image, format=kind[1:], dpi=110, metadata=metadata)
    return image.getvalue()
