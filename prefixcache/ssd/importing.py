"""Images of an archive into a directory that no cache has open. The SSD tier writes them, so whatever the moment of a kill,
what stands in the index is whole. Everything that comes in is foreign: it is checked, and refused one by one.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
import threading
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from prefixcache import keys
from prefixcache.image import KINDS, Image, ImageError, verify
from prefixcache.ssd.archive import ArchiveError, Member, Unpacker, read_manifest
from prefixcache.ssd.claims import FALSE, Claims, Verdict, check_stated, is_proven
from prefixcache.ssd.directory import Directory, holder, tree_size
from prefixcache.ssd.entries import BOUNDS, FOLDERS, TOKENS, Address, Entry, Namespace, Progress
from prefixcache.ssd.errors import SsdError
from prefixcache.ssd.files import Shallow, from_header
from prefixcache.ssd.formats import refuse_newer
from prefixcache.ssd.index import check_rows, connect, read_namespaces, reading
from prefixcache.ssd.ledger import Ledger
from prefixcache.ssd.tier import Ssd

_QUEUE = 64 << 20  # bytes that may wait for the disk, or one image
_BLOCK, _INDEX = 4096, 256 << 10  # of a dry run: the disk's block, what an index takes besides its rows
_SHOWN = 1000  # refusals that are kept with their names
_FREE_SHARE = 0.9
_KINDS = {folder: kind for kind, folder in FOLDERS.items()}
_IMAGE = re.compile(rf"({'|'.join(_KINDS)})/([0-9a-f]{{32}})\.safetensors")


class ImportFailed(SsdError):
    """The disk could not take what came; what was written before stands."""


class Refusal(NamedTuple):
    """A member that did not go in. kind: "not a file", "unknown", "too large", "twice", "invalid", "misplaced",
    "namespace", "no room".
    """

    kind: str
    name: str
    reason: str


@dataclass
class Imported:
    """What went in, or would. `present` were there already; `unverified` are namespaces whose root key can't be computed
    again, because they have a salt; `counts` has all refusals by kind, `refused` the first of them; `torn`: why the archive
    could not be read to its end; `after` are the directory's real bytes.
    """

    directory: str
    dry_run: bool
    images: int = 0
    nbytes: int = 0
    present: int = 0
    models: list[str] = field(default_factory=list)
    unverified: list[str] = field(default_factory=list)
    refused: list[Refusal] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    torn: str = ""
    limit: int = 0
    after: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "refused": [refusal._asdict() for refusal in self.refused]}


def import_archive(
    directory: str | os.PathLike[str],
    stream: BinaryIO,
    *,
    most: int,
    limit: int | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Imported:
    """Take in what is whole. `most`: bytes of the largest image that is taken; `limit`: what the directory may take, by
    default what it takes now and 90 % of what is free.

    Raises DirectoryError when it is held, newer or somebody else's, ArchiveError when the stream is no archive of ours,
    ImportFailed when the disk fails.
    """
    archive = Unpacker(stream)
    members = iter(archive)
    manifest = read_manifest(archive, members)
    count = manifest.get("images")
    count = min(max(count, 0), 1 << 40) if type(count) is int else 0
    there = Directory(directory)
    with ExitStack() as stack:
        ssd: Ssd | None = None
        intake = _Intake(archive, there, count, most)
        limit = _room(there) if limit is None else limit
        if dry_run:
            intake.rehearse(limit)
            if not there.blank:
                there.require()
                refuse_newer(there)
                with reading(there.index, live=holder(there) is not None) as connection:
                    check_rows(connection)
                    intake.learn(connection)
        else:
            ssd = stack.enter_context(Ssd(there.root, limit=limit, queue_bytes=_QUEUE, written=intake.written))
            connection = connect(there.index)
            try:
                intake.learn(connection)
            finally:
                connection.close()
            intake.begin(ssd)
        torn = ""
        try:
            for member in members:
                intake.take(member)
                if progress:
                    progress(intake.seen, max(count, intake.seen))
        except ArchiveError as error:
            torn = str(error)
        if ssd is not None:
            intake.finish()
    found = intake.found
    found.directory, found.dry_run, found.torn, found.limit = str(there.root), dry_run, torn, limit or 0
    found.counts = dict(intake.counts)
    found.models, found.unverified = sorted(intake.models), sorted(intake.unverified)
    found.after = tree_size(there.root)
    return found


def _room(there: Directory) -> int:
    """What the directory takes, and most of what is free."""
    above = there.root
    while not above.is_dir() and above != above.parent:
        above = above.parent
    free = os.statvfs(above)
    return max(1, tree_size(there.root) + int(free.f_bavail * free.f_frsize * _FREE_SHARE))


class _Refused(Exception):
    def __init__(self, kind: str, reason: str):
        super().__init__(reason)
        self.kind = kind


class _Block(NamedTuple):
    """Of rows that are there: what must agree with what hangs on them."""

    root: bytes
    start: int
    length: int


class _Intake:
    """Takes members in. `_moved` guards what the writer's thread reports: `_written` and `_failed`."""

    def __init__(self, archive: Unpacker, there: Directory, count: int, most: int):
        self._archive, self._most = archive, most
        self._ssd: Ssd | None = None
        self._ledger: Ledger | None = None
        self._root = there.root
        self._blocks: dict[bytes, _Block] = {}
        self._there: dict[Address, bytes] = {}  # with its namespace's root key
        self._new: dict[Address, bytes] = {}
        self._claims = Claims()
        self._tick = count  # counts down: what comes first was used last
        self._base = 0
        self._moved = threading.Condition()
        self._failed = ""
        self.found = Imported("", False)
        self.counts: Counter[str] = Counter()
        self.models: set[str] = set()
        self.unverified: set[str] = set()
        self.seen = 0

    def learn(self, connection: sqlite3.Connection) -> None:
        """What the directory has."""
        self._claims = Claims(read_namespaces(connection))
        for kind, key, root, start, length in connection.execute(
            "SELECT kind, key, root, start, length FROM image JOIN namespace ON namespace.id = image.namespace"
        ):
            self._there[KINDS[kind], key] = root
            if KINDS[kind] == "rows":
                self._blocks[key] = _Block(root, start, length)

    def begin(self, ssd: Ssd) -> None:
        self._ssd, self._base = ssd, ssd.max_tick()

    def rehearse(self, limit: int) -> None:
        """Nothing is written; what has no room is told all the same, as far as it can be foreseen."""
        self._ledger = Ledger(limit, _BLOCK)
        self._ledger.measure(tree_size(self._root), self._ledger.log_room + _INDEX)

    def written(self, entry: Entry, error: Exception | None) -> None:
        """On the writer's thread."""
        with self._moved:
            if error is not None:
                self._failed = self._failed or str(error)
            self._moved.notify_all()

    def finish(self) -> None:
        assert self._ssd is not None
        whole = self._ssd.flush()
        self._check_disk()
        if not whole:
            raise ImportFailed(f"the disk did not take all: {self._ssd.stats().last_error}; mend that and run it again")

    def _check_disk(self) -> None:
        with self._moved:
            if self._failed:
                raise ImportFailed(
                    f"the disk failed: {self._failed}; mend that and run it again: it goes on from there"
                )

    def take(self, member: Member) -> None:
        try:
            self._take(member)
        except _Refused as refused:
            self.counts[refused.kind] += 1
            if len(self.found.refused) < _SHOWN:
                self.found.refused.append(Refusal(refused.kind, member.name, str(refused)))

    def _take(self, member: Member) -> None:
        if not member.plain:
            raise _Refused("not a file", "a link, a device, a folder or a record of tar's own")
        named = _IMAGE.fullmatch(member.name)
        if not named:
            raise _Refused("unknown", "no image has such a name")
        self.seen += 1
        self._tick -= 1
        address = _KINDS[named[1]], bytes.fromhex(named[2])
        root = self._new.get(address) or self._there.get(address)
        if root is not None and self._claims.is_settled(root):  # else this one may prove that the other is forged
            self._is_there(address)
            return
        if member.size > self._most:
            raise _Refused("too large", f"{member.size} bytes; at most {self._most} are taken here")
        self._take_image(address, self._archive.read())

    def _is_there(self, address: Address) -> bool:
        if address in self._new:
            raise _Refused("twice", "an image of this name came before")
        if address not in self._there:
            return False
        self.found.present += 1
        if self._ssd is not None:
            self._ssd.touch([(*address, self._recency(), 0)])
        return True

    def _take_image(self, address: Address, data: np.ndarray) -> None:
        try:
            image = verify(data)
            entry, space = _described(image)
        except (ImageError, ValueError) as error:
            raise _Refused("invalid", str(error)) from None
        if entry.address != address:
            raise _Refused("invalid", "the image is another one than its name says")
        self._check_space(space)
        if self._is_there(address):
            return
        self._check_place(entry)
        if self._ssd is not None:
            self._write(self._ssd, entry._replace(used=self._recency()), space, image)
        elif self._ledger is not None and not self._ledger.admit(image.nbytes):
            raise _no_room(self._ledger.limit)
        self._new[address] = space.root
        self.models.add(space.model)
        if not is_proven(space):
            self.unverified.add(space.root.hex())
        if entry.kind == "rows":
            self._blocks[entry.key] = _Block(space.root, entry.start, len(entry.tokens) // keys.TOKEN_BYTES)
        self.found.images += 1
        self.found.nbytes += image.nbytes

    def _recency(self) -> int:
        return min(self._base + 1 + max(self._tick, 0), BOUNDS["used"] - 1)

    def _check_space(self, space: Namespace) -> None:
        verdict = self._claims.hear(space)
        if verdict is Verdict.FALSE:
            raise _Refused("namespace", FALSE)
        if verdict is Verdict.OVERRULES:  # the writer deletes what came before, as soon as it gets this one
            if self._ssd is not None:
                self.finish()
            for known in (self._there, self._new):
                for address in [address for address, root in known.items() if root == space.root]:
                    del known[address]
                    self._blocks.pop(address[1], None)

    def _check_place(self, entry: Entry) -> None:
        """Where an image may hang: at the root, or on a block of its namespace that ends or, for a window, begins there."""
        length = len(entry.tokens) // keys.TOKEN_BYTES
        if entry.kind != "window" and not 0 < length <= keys.BLOCK:
            raise _Refused("invalid", f"{length} tokens: an image has 1 to {keys.BLOCK}")
        if entry.parent == entry.namespace and entry.kind != "window":
            start = 0
        else:
            block = self._blocks.get(entry.parent)
            if block is None:
                raise _Refused("misplaced", "the block that it hangs on is neither there nor before it in the archive")
            if block.root != entry.namespace or (entry.kind != "window" and block.length != keys.BLOCK):
                raise _Refused("misplaced", "nothing can hang on that block")
            start = block.start + (0 if entry.kind == "window" else block.length)
        if entry.start != start:
            raise _Refused("misplaced", "it begins elsewhere than where its block says")

    # Writing

    def _write(self, ssd: Ssd, entry: Entry, space: Namespace, image: Image) -> None:
        """Queue it, and wait while the queue is full."""
        while True:
            self._check_disk()
            idle = ssd.stats().queued_bytes == 0
            with self._moved:
                if ssd.write(entry, space, image):
                    return
                if not idle:
                    self._moved.wait(0.05)
                    continue
            if problem := ssd.stats().last_error:
                raise ImportFailed(f"the disk failed: {problem}; mend that and run it again: it goes on from there")
            raise _no_room(ssd.limit)


def _no_room(limit: int) -> _Refused:
    return _Refused("no room", f"the limit of {limit} bytes is reached; give more with --limit")


def _described(image: Image) -> tuple[Entry, Namespace]:
    """What a verified image says of itself. ValueError for what none of ours would say."""
    meta, tensors = image.header()
    tokens = b""
    if meta.kind != "window":
        held = tensors.get(TOKENS)
        if held is None or held.dtype != np.dtype("<i8") or held.ndim != 1:
            raise ValueError("the tokens are not valid")
        tokens = held.tobytes()
    entry, space = from_header(Shallow(meta, tokens, image.checksum, image.nbytes, 0, 0.0), 0)
    check_stated(space)
    try:
        extra = json.loads(meta.extra)
    except (ValueError, RecursionError):
        extra = None
    if not isinstance(extra, dict):
        raise ValueError("the extra is not a JSON object")
    return entry, space
