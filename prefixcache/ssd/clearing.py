"""`clear`: every image of a directory that no cache has open is deleted, whatever the index says of it.

A kill at any moment leaves a directory that opens: the index goes first, so no row is older than its file.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, dataclass
from typing import Any

from prefixcache.ssd.directory import Directory, disk_at, remove_empty_folders, scan
from prefixcache.ssd.entries import Progress
from prefixcache.ssd.files import remove_file
from prefixcache.ssd.index import Index, IndexFiles
from prefixcache.ssd.lock import Lock, refuse_newer
from prefixcache.ssd.quarantine import quarantined
from prefixcache.sync_folder import sync_folder


@dataclass(frozen=True)
class Cleared:
    """What `clear` deleted, or would. `freed` are real bytes; `left` are names in the image folders that no image has."""

    directory: str
    dry_run: bool
    images: int
    quarantine: int
    debris: int
    freed: int
    left: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "left": list(self.left)}


def clear(directory: str | os.PathLike[str], *, dry_run: bool = False, progress: Progress | None = None) -> Cleared:
    """Delete every image, what was quarantined and what interrupted writes left; the index is made anew.

    Raises DirectoryError when it is not a cache's, is held or newer; OSError for what can't be deleted.
    """
    there = Directory(directory)
    there.require()
    refuse_newer(there)
    if dry_run:
        return _clear_files(there, dry_run, sum(disk_at(path) for path in IndexFiles.of(there.index)), None)
    lock = Lock(there)
    try:
        lock.sign()
        there.furnish()
        before = there.size()
        for path in IndexFiles.of(there.index):
            remove_file(str(path))
        sync_folder(there.root)
        cleared = _clear_files(there, dry_run, 0, progress)
        index = Index(there.index)
        try:
            index.mark(clean=True)
            index.checkpoint()
        finally:
            index.close()
        sync_folder(there.root)
        return Cleared(**{**vars(cleared), "freed": max(0, before - there.size())})
    finally:
        lock.release()


def _clear_files(there: Directory, dry_run: bool, freed: int, progress: Progress | None) -> Cleared:
    """Delete what is there, file by file, or only count it."""
    images, left = [], []
    for address, item in there.files():
        if address is None:
            left.append(there.relative(item.path))
        else:
            images.append(item.path)
            freed += disk_at(item.path)  # of a live directory it may have gone
    debris = [item.path for item in there.strays()]
    freed += sum(disk_at(path) for path in debris)
    bad = quarantined(there)
    freed += sum(item.disk for item in bad)
    if not dry_run:
        for done, path in enumerate(images):
            remove_file(path)
            if progress:
                progress(done + 1, len(images))
        for path in debris:
            remove_file(path)
        for item in scan(there.quarantine):
            if item.is_dir(follow_symlinks=False):
                shutil.rmtree(item.path)
            else:
                remove_file(item.path)
        remove_empty_folders(there.image_folders())
        for folder in (there.tmp, there.quarantine):
            sync_folder(folder)
    return Cleared(str(there.root), dry_run, len(images), len(bad), len(debris), freed, tuple(sorted(left)))
