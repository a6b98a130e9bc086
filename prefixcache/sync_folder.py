"""`sync_folder` makes names durable; `ssd.writer` says in which order files, folders and rows are."""

from __future__ import annotations

import os


def sync_folder(path: str | os.PathLike[str]) -> None:
    """Make what was made, renamed and deleted in a folder durable, by fsync."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
