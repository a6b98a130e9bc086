"""Whether image files are what the index says, at the speed of the disk: for `reconcile --deep`. It reads into memory that is
used again, and parses no header twice. It says yes or not sure: `read_image` is the judge of the rest.
"""

from __future__ import annotations

import os
import stat
import threading

import numpy as np

from prefixcache.image_format import Headers, ImageError, examine
from prefixcache.ssd.entries import Entry
from prefixcache.ssd.files import is_image_of

_KEPT = 64 << 20  # bytes of a buffer that is worth keeping


class Checker:
    """Thread-safe: every thread has a buffer of its own, and so is `Headers`."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._headers = Headers()

    def is_whole(self, path: str, entry: Entry) -> bool:
        """Whether the file is the one that the index describes, to the last bit. False: ask `read_image`."""
        data = self._read(path, entry.nbytes)
        if data is None:
            return False
        try:
            return is_image_of(examine(data, entry.checksum, self._headers.parse), data, entry)
        except ImageError:
            return False

    def _read(self, path: str, nbytes: int) -> np.ndarray | None:
        """The bytes of a plain file of this size, until the thread's next call."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size != nbytes or nbytes < 8:
                return None
            data = self._room(nbytes)
            at = 0
            while at < nbytes:
                n = os.readv(fd, [data[at : at + (1 << 30)].data])
                if not n:
                    return None
                at += n
            return data
        except OSError:
            return None
        finally:
            os.close(fd)

    def _room(self, nbytes: int) -> np.ndarray:
        if nbytes > _KEPT:
            return np.empty(nbytes, np.uint8)
        kept: np.ndarray | None = getattr(self._local, "buffer", None)
        if kept is None or kept.nbytes < nbytes:
            kept = self._local.buffer = np.empty(nbytes, np.uint8)
        return kept[:nbytes]
