"""One image file: written so that it is whole or absent, read so that it is believed only when proved.

Blocking calls, each on one file; the writer, the readers and reconcile run them in their threads.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from prefixcache import image_memory, keys
from prefixcache.image_format import (
    FORMAT,
    HEADER_LIMIT,
    Headers,
    Image,
    ImageError,
    ImageKind,
    ParsedHeader,
    WrongFormat,
    examine,
    is_whole,
    parse_header,
)
from prefixcache.ssd.directory import disk_of, identity_of
from prefixcache.ssd.entries import BOUNDS, Entry, NamespaceRow
from prefixcache.ssd.errors import NewerFormat

_STEP = 1 << 30  # macOS refuses reads and writes of 2 GiB and more
_PIECE = 1 << 20
_KEPT = 64 << 20  # bytes of a buffer that a `Checker` keeps
_HOLE = 64  # a file this many times as large as what it takes on the disk is a hole, and not read


class DamagedFile(Exception):
    """The file is not what it should be; the text says why. `identity` is its device and inode, None when missing."""

    def __init__(self, reason: str, identity: tuple[int, int] | None):
        super().__init__(reason)
        self.identity = identity


class Misindexed(DamagedFile):
    """The file is the image, and whole by its own word: the size or the checksum in the index is wrong. `image`: what it
    has, None where its size is not the one that memory was reserved for.
    """

    def __init__(self, reason: str, identity: tuple[int, int] | None, image: Image | None = None):
        super().__init__(reason, identity)
        self.image = image


class Shallow(NamedTuple):
    """What a header says, its tensors unread but for the tokens."""

    header: ParsedHeader
    tokens: bytes
    nbytes: int
    disk: int
    modified: float


def write_file(path: str, data: np.ndarray) -> int:
    """Make `path` with these bytes, durable but for its name; returns its real bytes. Leaves nothing after an error."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            view, at = data.data.cast("B"), 0
            while at < len(view):
                at += os.write(fd, view[at : at + _STEP])
            os.fsync(fd)
            return disk_of(os.fstat(fd))  # after the fsync: file systems allocate late
        finally:
            os.close(fd)
    except BaseException:
        remove_file(path)
        raise


def remove_file(path: str) -> None:
    """Unlink, when it is there."""
    with suppress(FileNotFoundError):
        os.unlink(path)


def read_image(path: str, entry: Entry) -> Image:
    """Return the image of `entry`: Misindexed when the index is proved wrong, DamagedFile when the file is, OSError when that
    could not be found out.
    """
    fd, status = _open(path)
    identity = identity_of(status)
    try:
        if status.st_size != entry.nbytes:
            reason = f"{status.st_size} bytes, the index says {entry.nbytes}"
            raise (Misindexed if _is_whole_image_of(path, entry) else DamagedFile)(reason, identity)
        data = _read(fd, entry.nbytes, identity)
    finally:
        os.close(fd)
    try:
        header = examine(data)
    except ImageError as error:
        raise DamagedFile(str(error), identity) from None
    if not is_image_of(header, data, entry):
        raise DamagedFile("the file is another image's", identity)
    if header.checksum != entry.checksum:
        raise Misindexed("its checksum is not the one in the index", identity, Image(data))
    return Image(data)


def is_image_of(header: ParsedHeader, data: np.ndarray, entry: Entry) -> bool:
    """Tell whether a file of these bytes, `header` first, is the image that the index means: of the same tokens, too, for
    they are what prompts are compared with.
    """
    fields = header.fields
    said = fields.kind, fields.key, fields.parent, fields.namespace, fields.start
    if said != (entry.kind, entry.key.hex(), entry.parent.hex(), entry.namespace.hex(), entry.start):
        return False
    if entry.kind == "window":
        return True
    first, last = header.tokens or (0, 0)
    end = 8 + int(data[:8].view("<u8")[0])
    return bytes(data[end + first : end + last]) == entry.tokens


def _is_whole_image_of(path: str, entry: Entry) -> bool:
    """Tell whether the file is the image of `entry`, and whole by its own word. It is read in pieces: memory was reserved for
    the size that the index says.
    """
    try:
        said = from_header(read_header(path), 0).entry
        fd, status = _open(path)
        try:
            return said[:6] == entry[:6] and _is_whole(fd, status)
        finally:
            os.close(fd)
    except (DamagedFile, ValueError, OSError, NewerFormat):
        return False


def _open(path: str) -> tuple[int, os.stat_result]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise DamagedFile("the file is missing", None) from None
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise DamagedFile("not a regular file", None) from None
        raise
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise DamagedFile("not a regular file", identity_of(status))
    return fd, status


def _read(fd: int, nbytes: int, identity: tuple[int, int]) -> np.ndarray:
    return _fill(image_memory.take(nbytes), fd, identity)


def _fill(data: np.ndarray, fd: int, identity: tuple[int, int]) -> np.ndarray:
    """Read as many bytes of a file as there are places in `data`. Raises DamagedFile where there are fewer."""
    view, at = data.data, 0
    while at < data.nbytes:
        n = os.readv(fd, [view[at : at + _STEP]])
        if not n:
            raise DamagedFile(f"ends after {at} of {data.nbytes} bytes", identity)
        at += n
    return data


def read_header(path: str) -> Shallow:
    """Return what the file says of itself, checked as far as its header goes. Raises DamagedFile or OSError as `read_image`
    does, and NewerFormat for what a newer release wrote.
    """
    fd, status = _open(path)
    identity = identity_of(status)
    try:
        size = status.st_size
        if size < 8:
            raise DamagedFile(f"{size} bytes: too short for a header", identity)
        length = int.from_bytes(bytes(_read(fd, 8, identity)), "little")
        if not 0 < length <= min(size - 8, HEADER_LIMIT):
            raise DamagedFile(f"the header claims {length} bytes of {size}", identity)
        end = 8 + length
        try:
            header = parse_header(bytes(_read(fd, length, identity)), size - end)
        except ImageError as error:
            if isinstance(error, WrongFormat):
                _refuse_newer(fd, error.said, status)
            raise DamagedFile(str(error), identity) from None
        first, last = header.tokens or (0, 0)
        tokens = os.pread(fd, last - first, end + first)
        return Shallow(header, tokens, size, disk_of(status), status.st_mtime)
    finally:
        os.close(fd)


def _refuse_newer(fd: int, said: str, status: os.stat_result) -> None:
    """Raise NewerFormat for a whole file of a newer format; one that is not whole may say anything."""
    if re.fullmatch("[0-9]{1,9}", said) and int(said) > FORMAT and _is_whole(fd, status):
        raise NewerFormat("an image in it", int(said), FORMAT)


def _is_whole(fd: int, status: os.stat_result) -> bool:
    """Tell whether an open file's checksum is that of its bytes."""
    if disk_of(status) * _HOLE <= status.st_size:
        return False
    os.lseek(fd, 0, os.SEEK_SET)
    identity, sizes = identity_of(status), range(status.st_size, 0, -_PIECE)
    pieces = (_read(fd, min(left, _PIECE), identity) for left in sizes)
    return is_whole(next(pieces), pieces)


class Described(NamedTuple):
    """The entry and the namespace that a file's own header describes."""

    entry: Entry
    namespace: NamespaceRow


def from_header(said: Shallow, used: int) -> Described:
    """Return what a file says of itself. Raises ValueError for what no image of ours would say."""
    fields = said.header.fields
    key, parent, root = (bytes.fromhex(text) for text in (fields.key, fields.parent, fields.namespace))
    tokens = b"" if fields.kind == "window" else said.tokens
    if fields.kind != "window" and keys.chain(parent, tokens) != key:
        raise ValueError("the key is not the one of the tokens")
    if said.nbytes >= BOUNDS["nbytes"]:
        raise ValueError("the size is not valid")
    entry = Entry(
        ImageKind(fields.kind),
        key,
        root,
        parent,
        fields.start,
        tokens,
        said.nbytes,
        said.header.checksum,
        said.disk,
        used,
        said.modified,
        0,
        fields.extra,
        said.modified,
    )
    return Described(entry, NamespaceRow(root, fields.model, fields.codec, fields.layout, said.modified))


class Checker:
    """Thread-safe: every thread has a buffer of its own, and so is `Headers`."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._headers = Headers()

    def is_whole(self, path: str, entry: Entry) -> bool:
        """Tell whether the file is the one that the index describes, to the last bit. False: ask `read_image`."""
        data = self._read(path, entry.nbytes)
        if data is None:
            return False
        try:
            return is_image_of(examine(data, entry.checksum, self._headers.parse), data, entry)
        except ImageError:
            return False

    def _read(self, path: str, nbytes: int) -> np.ndarray | None:
        """Return the bytes of a plain file of this size, until the thread's next call."""
        try:
            fd, status = _open(path)
            try:
                if status.st_size != nbytes or nbytes < 8:
                    return None
                return _fill(self._room(nbytes), fd, identity_of(status))
            finally:
                os.close(fd)
        except (DamagedFile, OSError):
            return None

    def _room(self, nbytes: int) -> np.ndarray:
        if nbytes > _KEPT:
            return np.empty(nbytes, np.uint8)
        kept: np.ndarray | None = getattr(self._local, "buffer", None)
        if kept is None or kept.nbytes < nbytes:
            kept = self._local.buffer = np.empty(nbytes, np.uint8)
        return kept[:nbytes]
