"""The archive that carries images between directories: a plain tar, without compression, read and written as a stream.

First `manifest.json`, then images as `rows/<key>.safetensors`, `windows/...`, `snapshots/...`, parents before children, those
used last first. Of what is read nothing is believed and no name becomes a path; how large a member may be is for the reader
to say before it takes one.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from prefixcache.ssd.errors import SsdError

FORMAT = 2  # with images of format 2
MANIFEST = "manifest.json"
MOST_MANIFEST = 16 << 20  # bytes
_BLOCK, _RECORD = 512, 10240
_STEP = 1 << 20
_WITH_DATA = {
    tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK,
}  # fmt: skip


class ArchiveError(SsdError):
    """The archive is not one of ours, is torn, or of a newer format; the text says which."""


class Member(NamedTuple):
    """What a member's header says. `plain`: a file, not a link, a device, a folder or a tar's own record."""

    name: str
    size: int
    plain: bool


class Packer:
    """Writes members in the order in which they come."""

    def __init__(self, stream: BinaryIO):
        self._stream = stream
        self.nbytes = 0

    def add(self, name: str, data: memoryview | bytes, modified: float = 0.0) -> None:
        header = tarfile.TarInfo(name)
        header.size, header.mode = len(data), 0o600
        header.mtime = int(min(max(modified, 0.0), 2.0**33 - 1))
        self._write(header.tobuf(tarfile.GNU_FORMAT))
        self._write(data)
        self._write(bytes(-len(data) % _BLOCK))

    def end(self) -> None:
        self._write(bytes(2 * _BLOCK))
        self._write(bytes(-self.nbytes % _RECORD))
        self._stream.flush()

    def _write(self, data: memoryview | bytes) -> None:
        view, at = memoryview(data), 0
        while at < len(view):
            at += self._stream.write(view[at : at + (1 << 30)])
        self.nbytes += len(view)


class Unpacker:
    """Reads members one after the other; what is not asked for is passed over. ArchiveError where it is torn."""

    def __init__(self, stream: BinaryIO):
        self._stream = stream
        self._left = self._padding = 0

    def __iter__(self) -> Iterator[Member]:
        while True:
            self._pass(self._left + self._padding)
            block = bytes(self._exactly(_BLOCK))
            if not any(block):
                return
            try:
                said = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            except tarfile.HeaderError:
                raise ArchiveError("a member's header is damaged: what follows it can't be read") from None
            if said.size < 0:
                raise ArchiveError("a member's header claims less than nothing: what follows it can't be read")
            plain = said.type in (tarfile.REGTYPE, tarfile.AREGTYPE)
            with_data = said.isreg() or said.type in _WITH_DATA or said.type not in tarfile.SUPPORTED_TYPES
            self._left = said.size if with_data else 0
            self._padding = -self._left % _BLOCK
            yield Member(said.name, said.size, plain)

    def read(self) -> np.ndarray:
        """The bytes of the member at hand; the caller has seen that its size is bearable."""
        data, self._left = self._exactly(self._left), 0
        return data

    def _exactly(self, nbytes: int) -> np.ndarray:
        data = np.empty(nbytes, np.uint8)
        view, at = data.data, 0
        while at < nbytes:
            n = self._stream.readinto(view[at : at + _STEP])  # type: ignore[attr-defined]
            if not n:
                raise ArchiveError("it ends in the middle: the rest is missing")
            at += n
        return data

    def _pass(self, nbytes: int) -> None:
        self._left = self._padding = 0
        while nbytes > 0:
            nbytes -= len(self._exactly(min(nbytes, _STEP)))


def manifest_bytes(manifest: dict[str, Any]) -> bytes:
    data = json.dumps({"prefixcache": "archive", "format": FORMAT, **manifest}, ensure_ascii=True).encode()
    if len(data) > MOST_MANIFEST:
        raise ArchiveError(f"a list of {len(manifest['namespaces'])} namespaces is too long: export them by --model")
    return data


def read_manifest(archive: Unpacker, members: Iterator[Member]) -> dict[str, Any]:
    """The first member. ArchiveError unless it is a manifest of ours that this release can read."""
    foreign = ArchiveError(f"not an archive of prefixcache export: it does not begin with a {MANIFEST}")
    first = next(members, None)
    if first is None or not first.plain or first.name != MANIFEST or first.size > MOST_MANIFEST:
        raise foreign
    try:
        said = json.loads(bytes(archive.read()))
    except (ValueError, RecursionError):
        raise ArchiveError(f"the {MANIFEST} of the archive is not JSON") from None
    if not isinstance(said, dict) or said.get("prefixcache") != "archive" or type(said.get("format")) is not int:
        raise foreign
    if said["format"] > FORMAT:
        raise ArchiveError(
            f"the archive is of format {said['format']}, this release knows {FORMAT}: a newer release wrote it; upgrade "
            "prefixcache"
        )
    if said["format"] < FORMAT:
        raise ArchiveError(
            f"the archive is of format {said['format']}, this release reads {FORMAT}: an earlier release wrote it, and "
            "its images are not read any more"
        )
    return said
