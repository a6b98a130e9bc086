"""Whether image files are what the index says, at the speed of the disk: for `reconcile --deep`. It reads into memory that is
used again, and takes a header's word for what an equal one has been checked for. It says yes or not sure: `read_image`
is the judge of the rest.
"""

from __future__ import annotations

import os
import re
import stat
import threading

import numpy as np

from prefixcache.image import FORMAT, OPENING, ImageError, is_whole, verify
from prefixcache.ssd.entries import Entry

_KEPT = 64 << 20  # bytes of a buffer that is worth keeping
_KNOWN = 4096  # headers, without what differs between the blocks of one layout


class Checker:
    """Thread-safe: every thread has a buffer of its own; `_known` grows only, by whole members."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._known: set[tuple[bytes, bytes, int]] = set()

    def is_whole(self, path: str, entry: Entry) -> bool:
        """Whether the file is the one that the index describes, to the last bit. False: ask `read_image`."""
        data = self._read(path, entry.nbytes)
        if data is None:
            return False
        end = 8 + int(data[:8].view("<u8")[0])
        if not 8 < end <= data.nbytes:
            return False
        head = f'{entry.checksum}","format":"{FORMAT}","kind":"{entry.kind}","key":"{entry.key.hex()}","parent":"'
        opening, header = OPENING + head.encode(), bytes(data[8:end])
        before, _, after = header[len(opening) + 32 :].partition(b'","start":"')
        start, _, after = after.partition(b'"')
        parent = header[len(opening) : len(opening) + 32]
        if not (
            header.startswith(opening)
            and before.startswith(b'","namespace":"%s"' % entry.namespace.hex().encode())
            and re.fullmatch(rb"[0-9a-f]{32}", parent)
            and re.fullmatch(rb"[0-9]{1,18}", start)
            and is_whole(data)
        ):
            return False
        same = before, after, data.nbytes - end
        if same not in self._known:
            try:
                verify(data, entry.checksum)
            except ImageError:
                return False
            if len(self._known) < _KNOWN:
                self._known.add(same)
        return True

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
