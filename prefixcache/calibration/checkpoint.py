"""What a calibration has gathered so far, in a file, so that an interrupted one goes on where it was.

One npz, whose zip has a CRC of every array; written whole beside its place and renamed.
"""

from __future__ import annotations

import logging
import os
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from prefixcache.codecs.interchange import Array

log = logging.getLogger("prefixcache")

INTERVAL = 30.0  # seconds between two files; and no more than a twentieth of the time goes into writing them
SHARE = 20
REQUEST = "request"


class Checkpoint:
    """The file at `path` (None: nothing is kept), for the request that `request` is the hash of. Made by one thread."""

    def __init__(self, path: Path | None, request: str):
        self._path, self._request = path, request
        self._due = time.monotonic() + INTERVAL

    def load(self) -> dict[str, Array] | None:
        """Return what was saved for this request; None, with a log line, where the file is another's or damaged."""
        if self._path is None or not self._path.exists():
            return None
        try:
            with np.load(self._path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            request = str(arrays.pop(REQUEST))
        except (OSError, ValueError, KeyError, EOFError, RuntimeError, zipfile.BadZipFile) as error:
            log.warning("%s: a damaged checkpoint (%s); calibration starts anew", self._path, error)
            return None
        if request != self._request:
            log.info("%s: a checkpoint of another model, text or grouping; calibration starts anew", self._path)
            return None
        return arrays

    @property
    def due(self) -> bool:
        return self._path is not None and time.monotonic() >= self._due

    def save(self, arrays: Mapping[str, Array]) -> None:
        """Save in place of what was there; durable when it returns. OSError where the disk refuses."""
        if self._path is None:
            return
        started = time.monotonic()
        unfinished = self._path.with_name(self._path.name + ".tmp")
        try:
            with open(unfinished, "wb", opener=_private) as file:
                np.savez(file, allow_pickle=False, **{**arrays, REQUEST: np.array(self._request)})
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, self._path)
        finally:
            unfinished.unlink(missing_ok=True)
        ended = time.monotonic()
        self._due = ended + max(INTERVAL, SHARE * (ended - started))


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)  # the rows of a text that may be somebody's own
