"""One image file: written so that it is whole or absent, read so that it is believed only when proved.

Blocking calls, each on one file; the writer, the readers and reconcile run them in their threads.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from prefixcache import keys
from prefixcache.image import DTYPES, FORMAT, KINDS, Image, ImageError, Meta, is_whole, verify
from prefixcache.ssd.directory import disk_of
from prefixcache.ssd.entries import BOUNDS, TOKENS, Entry, Namespace
from prefixcache.ssd.errors import NewerFormat

_STEP = 1 << 30  # macOS refuses reads and writes of 2 GiB and more
_HEADER_LIMIT = 4 << 20
_PIECE = 1 << 20
_DIMENSIONS = 32
_OLDER = frozenset(map(str, range(1, int(FORMAT))))  # formats that were, and aren't read


class Damaged(Exception):
    """The file is not what it should be; the text says why. `identity` is its device and inode, None when missing."""

    def __init__(self, reason: str, identity: tuple[int, int] | None):
        super().__init__(reason)
        self.identity = identity


class OlderFormat(Damaged):
    """The file is of a format that an earlier release wrote and this one doesn't read: of no use to anybody here."""


class Shallow(NamedTuple):
    """What a header says, its tensors unread but for the tokens."""

    meta: Meta
    tokens: bytes
    checksum: str
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
    """The image of `entry`: Damaged when the file is proved wrong, OSError when that could not be found out."""
    fd, found = _open(path)
    here = (found.st_dev, found.st_ino)
    try:
        if found.st_size != entry.nbytes:
            raise Damaged(f"{found.st_size} bytes, the index says {entry.nbytes}", here)
        data = _read(fd, entry.nbytes, here)
    finally:
        os.close(fd)
    try:
        image = verify(data, entry.checksum)
    except ImageError as error:
        raise Damaged(str(error), here) from None
    meta = image.header()[0]
    if (meta.kind, meta.key, meta.namespace) != (entry.kind, entry.key.hex(), entry.namespace.hex()):
        raise Damaged("the file is another image's", here)
    return image


def _open(path: str) -> tuple[int, os.stat_result]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise Damaged("the file is missing", None) from None
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise Damaged("not a regular file", None) from None
        raise
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        os.close(fd)
        raise Damaged("not a regular file", (found.st_dev, found.st_ino))
    return fd, found


def _read(fd: int, nbytes: int, here: tuple[int, int]) -> np.ndarray:
    data = np.empty(nbytes, np.uint8)
    view, at = data.data, 0
    while at < nbytes:
        n = os.readv(fd, [view[at : at + _STEP]])
        if not n:
            raise Damaged(f"ends after {at} of {nbytes} bytes", here)
        at += n
    return data


def read_header(path: str) -> Shallow:
    """What the file says of itself, checked as far as its header goes. Damaged or OSError, as in `read_image`; OlderFormat
    and NewerFormat for what another release wrote.
    """
    fd, found = _open(path)
    here = (found.st_dev, found.st_ino)
    try:
        size = found.st_size
        if size < 8:
            raise Damaged(f"{size} bytes: too short for a header", here)
        length = int.from_bytes(bytes(_read(fd, 8, here)), "little")
        if not 0 < length <= min(size - 8, _HEADER_LIMIT):
            raise Damaged(f"the header claims {length} bytes of {size}", here)
        header = bytes(_read(fd, length, here))
        try:
            return _parse(fd, header, size, found, here)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise Damaged("the header is not valid", here) from None
    finally:
        os.close(fd)


def _parse(fd: int, header: bytes, size: int, found: os.stat_result, here: tuple[int, int]) -> Shallow:
    table = json.loads(header)
    said = table.pop("__metadata__")
    if said["format"] != FORMAT:
        _refuse_newer(fd, said["format"], found)
        kind = OlderFormat if said["format"] in _OLDER else Damaged
        raise kind(f"format {said['format'][:20]!r}, this release reads {FORMAT!r}", here)
    checksum = said["checksum"]
    if said["kind"] not in KINDS or not re.fullmatch("[0-9a-f]{32}", checksum) or not said["start"].isdecimal():
        raise Damaged("the header's kind, start or checksum is not valid", here)
    end = 8 + len(header)
    at, tokens = 0, b""
    for name, tensor in table.items():
        first, last = tensor["data_offsets"]
        shape = tensor["shape"]
        if len(shape) > _DIMENSIONS or not all(type(n) is int and 0 <= n < BOUNDS["nbytes"] for n in shape):
            raise Damaged("a tensor's shape is not valid", here)  # the product of very many would take for ever
        nbytes = DTYPES[tensor["dtype"]].itemsize * math.prod(shape)
        if (first, last) != (at, at + nbytes):
            raise Damaged("a tensor's offsets are not valid", here)
        at = last
        if name == TOKENS and end + last <= size:
            if tensor["dtype"] != "I64" or nbytes > _HEADER_LIMIT:
                raise Damaged("the tokens are not valid", here)
            tokens = os.pread(fd, nbytes, end + first)
    if end + at != size:
        raise Damaged(f"{size} bytes, its header says {end + at}", here)
    fields = {name: said[name] for name in Meta._fields if name != "start"}
    if not all(isinstance(value, str) for value in fields.values()):
        raise Damaged("the header lacks a field", here)
    meta = Meta(**fields, start=int(said["start"]))
    return Shallow(meta, tokens, checksum, size, disk_of(found), found.st_mtime)


def _refuse_newer(fd: int, said: object, found: os.stat_result) -> None:
    """NewerFormat for a whole file of a newer format; one that is not whole may say anything."""
    if not (isinstance(said, str) and re.fullmatch("[0-9]{1,9}", said) and int(said) > int(FORMAT)):
        return
    os.lseek(fd, 0, os.SEEK_SET)
    here, sizes = (found.st_dev, found.st_ino), range(found.st_size, 0, -_PIECE)
    pieces = (_read(fd, min(left, _PIECE), here) for left in sizes)
    if found.st_blocks * 512 * 64 > found.st_size and is_whole(next(pieces), pieces):  # not of a giant that is a hole
        raise NewerFormat(
            f"an image in it is of format {said}, this release knows {FORMAT}: a newer release wrote it; upgrade "
            "prefixcache or name another directory"
        )


def from_header(said: Shallow, used: int) -> tuple[Entry, Namespace]:
    """The entry and namespace that a file's own header describes. ValueError for what no image of ours would say."""
    meta = said.meta
    key, parent, root = (bytes.fromhex(text) for text in (meta.key, meta.parent, meta.namespace))
    if not len(key) == len(parent) == len(root) == keys.KEY_BYTES:
        raise ValueError("a key in the header is not 32 hex digits")
    tokens = b"" if meta.kind == "window" else said.tokens
    if meta.kind != "window" and keys.chain(parent, tokens) != key:
        raise ValueError("the key is not the one of the tokens")
    if meta.start >= BOUNDS["start"] or said.nbytes >= BOUNDS["nbytes"]:
        raise ValueError("the start or the size is not valid")
    try:
        "".join((meta.model, meta.codec, meta.layout, meta.extra)).encode()
    except UnicodeEncodeError:
        raise ValueError("the header holds characters that UTF-8 can't") from None
    entry = Entry(
        meta.kind, key, root, parent, meta.start, tokens, said.nbytes, said.checksum, said.disk, used, said.modified,
        0, meta.extra, said.modified,
    )  # fmt: skip
    return entry, Namespace(root, meta.model, meta.codec, meta.layout, said.modified)
