"""Index against files: adopt what is whole and has no row, drop rows without a file, quarantine what is broken. And the
index opened, or recreated where there is doubt about it.

It runs on a directory that its caller has locked: at an opening after a crash, and for `reconcile`. Shallow it reads headers
of files that have no row; deep it reads everything and checks every checksum.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from enum import Enum
from functools import lru_cache
from itertools import repeat
from typing import Any, NamedTuple, TypeVar

from prefixcache import keys
from prefixcache.ssd.directory import Directory, disk_at, disk_of
from prefixcache.ssd.entries import Address, Entry, NamespaceRow, Progress, batched
from prefixcache.ssd.errors import IndexBroken, NewerFormat
from prefixcache.ssd.files import Checker, DamagedFile, Described, from_header, read_header, read_image, remove_file
from prefixcache.ssd.index import Index, IndexFiles
from prefixcache.ssd.quarantine import Quarantine

_READERS = 4
_WITNESSES = 3  # files of a namespace that are opened to prove its row
_AT_ONCE = 16  # items that a reader takes at a time
_BATCH = 256
_IN_FLIGHT = 60.0  # seconds that a file of a live directory may be older than its row
_LOG = 4 << 20  # bytes of the index's log after which it is cut

FALSE = "the model, codec or layout is not that of the namespace which has this root key"

T = TypeVar("T")
R = TypeVar("R")


class Finding(NamedTuple):
    """One thing that was not as it should be. `path` is relative to the directory; `nbytes` are real bytes concerned.

    kind: "index", "debris", "lost file", "orphan", "broken", "stray", "unreadable".
    """

    kind: str
    path: str
    reason: str
    action: str
    nbytes: int = 0


@dataclass(frozen=True)
class Report:
    """What `reconcile` found and did; `error` says why it could not."""

    directory: str
    dry_run: bool = False
    deep: bool = False
    images: int = 0
    nbytes: int = 0
    findings: tuple[Finding, ...] = ()
    error: str = ""

    @property
    def counts(self) -> dict[str, int]:
        return dict(Counter(finding.kind for finding in self.findings))

    @property
    def freed(self) -> int:
        """Return the real bytes of what was deleted."""
        return self._sum("debris")

    @property
    def adopted(self) -> int:
        """Return the real bytes of whole files that had no row."""
        return self._sum("orphan")

    @property
    def quarantined(self) -> int:
        """Return the real bytes of what was quarantined."""
        return self._sum("broken") + self._sum("stray")

    @property
    def clean(self) -> bool:
        return not self.findings and not self.error

    @property
    def exit_code(self) -> int:
        """Return 0 where index and files agree, 1 where they did not, 2 where it could not be done."""
        if self.error or any(finding.kind == "unreadable" for finding in self.findings):
            return 2
        return 1 if self.findings else 0

    def as_dict(self) -> dict[str, Any]:
        sums = {
            name: getattr(self, name) for name in ("counts", "freed", "adopted", "quarantined", "clean", "exit_code")
        }
        return {**asdict(self), "findings": [finding._asdict() for finding in self.findings], **sums}

    def summary(self) -> str:
        if self.error:
            return self.error
        parts = [f"{n} x {kind}" for kind, n in sorted(self.counts.items())]
        return f"{self.images} images; " + (", ".join(parts) if parts else "nothing to repair")

    def _sum(self, kind: str) -> int:
        return sum(finding.nbytes for finding in self.findings if finding.kind == kind)


@dataclass(frozen=True)
class OpenedIndex:
    """An index, what it has, and why it is a new one: "" when it is not."""

    index: Index
    entries: list[Entry]
    broken: str


@dataclass(frozen=True)
class Mended:
    """The index that a directory has after its repair, and what the repair did."""

    index: Index
    report: Report


def open_index(directory: Directory, quarantine: Quarantine) -> OpenedIndex:
    """Open the index; quarantine one that is broken, and make a new one."""
    missing = not directory.index.exists()
    try:
        index = Index(directory.index)
        try:
            entries = index.entries()
            require_true(directory, index.namespaces(), entries)
        except BaseException:
            index.close()
            raise
        return OpenedIndex(index, entries, "missing" if missing else "")
    except IndexBroken as error:
        return OpenedIndex(_new_index(directory, quarantine, str(error)), [], str(error))


def require_true(directory: Directory, spaces: Iterable[NamespaceRow], entries: list[Entry]) -> None:
    """Raise IndexBroken when the file of an image says something else of its namespace than the namespace's row.

    One of the first files is asked, where nothing else proves the row: of a salted namespace the root key can't be computed
    again, and a layout with another number in it would be believed.
    """
    unproven = {space.root: space for space in spaces if not is_proven(space)}
    asked = Counter[bytes]()
    for entry in entries if unproven else ():
        space = unproven.get(entry.namespace)
        if space is None or asked[space.root] == _WITNESSES:
            continue
        try:
            said, stated = from_header(read_header(directory.file(entry.address)), 0)
        except (DamagedFile, ValueError, OSError, NewerFormat):
            said = None
        if said is None or said.address != entry.address:
            asked[space.root] += 1  # a read will tell
            continue
        if stated[:4] != space[:4]:
            raise IndexBroken("a namespace is not what its images say")
        asked[space.root] = _WITNESSES


def mend(
    directory: Directory,
    opened: OpenedIndex,
    quarantine: Quarantine,
    *,
    deep: bool = False,
    progress: Progress | None = None,
) -> Mended:
    """Repair a directory that the caller has locked. Its index is a new one where there is doubt about the one that was
    opened, which is then closed. After an error the index is closed.
    """
    index, entries, broken = opened.index, opened.entries, opened.broken
    try:
        try:
            if not broken:
                index.check()
            directory.sync()  # before a row says that a file is durable
            return Mended(index, compare(Pass(directory, entries, index, quarantine, deep, progress), broken))
        except (IndexBroken, sqlite3.IntegrityError) as error:
            index.close()
            index = _new_index(directory, quarantine, str(error))
            return Mended(index, compare(Pass(directory, [], index, quarantine, deep, progress), str(error)))
    except BaseException:
        index.close()
        raise


def _new_index(directory: Directory, quarantine: Quarantine, reason: str) -> Index:
    for path in IndexFiles.of(directory.index):
        if path.exists():
            quarantine.take(str(path), f"the index is broken: {reason}")
    return Index(directory.index)


class Verdict(Enum):
    """What becomes of a statement. `OVERRULES`: it is proven, and what came in under the one believed so far is forged."""

    BELIEVED, OVERRULES, FALSE = range(3)


class Claims:
    """By root key, the statement that is believed: a proven one, else the first that was heard. Not thread-safe."""

    def __init__(self, known: Iterable[NamespaceRow]):
        self._known = {space.root: space for space in known}

    def hear(self, space: NamespaceRow) -> Verdict:
        known = self._known.setdefault(space.root, space)
        if known.stated == space.stated:
            return Verdict.BELIEVED
        if is_proven(known) or not is_proven(space):
            return Verdict.FALSE
        self._known[space.root] = space
        return Verdict.OVERRULES


def check_stated(space: NamespaceRow) -> None:
    """Raise ValueError unless model, codec and layout are in the form that a cache writes: else one namespace had many."""
    keys.as_model(space.model)
    for name, text in (("codec", space.codec), ("layout", space.layout)):
        try:
            value = json.loads(text)
            sound = isinstance(value, dict) and keys.canonical(value) == text
        except (ValueError, RecursionError):
            sound = False
        if not sound:
            raise ValueError(f"the {name} is no JSON object as a cache writes it")


def is_proven(space: NamespaceRow) -> bool:
    """Tell whether the root key is that of the model, codec and layout without a salt."""
    return _is_root(space.root, *space.stated)


@lru_cache(1024)
def _is_root(root: bytes, model: str, codec: str, layout: str) -> bool:
    try:
        return keys.root_key(model, json.loads(codec), json.loads(layout), b"") == root
    except (ValueError, RecursionError):
        return False


class Pass:
    """One run over a directory: what it knows and what it has found. Without `index` nothing is changed."""

    def __init__(
        self,
        directory: Directory,
        entries: Iterable[Entry],
        index: Index | None,
        quarantine: Quarantine | None,
        deep: bool,
        progress: Progress | None,
    ):
        self.directory, self.index, self.quarantine = directory, index, quarantine
        self.rows = {entry.address: entry for entry in entries}
        self.deep, self.progress = deep, progress
        self.findings: list[Finding] = []
        self.images = self.nbytes = 0
        self.claims = Claims(index.namespaces() if index else ())
        self.adopted: dict[bytes, list[Address]] = {}  # by root key
        self.addresses_now: Callable[[], set[Address]] | None = None  # of a live directory: what its index has by now
        self.newest = max((entry.used for entry in self.rows.values()), default=0)

    def note(self, kind: str, path: str, reason: str, action: str, nbytes: int = 0) -> None:
        done = action if self.index else f"would be {action}"
        self.findings.append(Finding(kind, self.directory.relative(path), reason, done, nbytes))

    def move(self, kind: str, path: str, reason: str) -> None:
        size = disk_at(path)
        if self.quarantine:
            self.quarantine.take(path, reason)
        self.note(kind, path, reason, "quarantined", size)

    def delete(self, kind: str, path: str, reason: str) -> None:
        size = disk_at(path)
        if self.index:
            remove_file(path)
        self.note(kind, path, reason, "deleted", size)

    def forget(self, addresses: list[Address]) -> None:
        """Drop the rows of these images."""
        if self.index:
            with self.index.transaction():
                self.index.remove(addresses)
        for address in addresses:
            self.rows.pop(address, None)
        self.cut_log()

    def cut_log(self) -> None:
        """Cut the index's log where it has grown long."""
        if self.index and disk_at(IndexFiles.of(self.directory.index).log) > _LOG:
            self.index.checkpoint()

    def count(self, disk: int, images: int = 1) -> None:
        self.images += images
        self.nbytes += disk


def compare(run: Pass, broken: str) -> Report:
    directory = run.directory
    for item in directory.strays() if run.addresses_now is None else ():
        run.delete("debris", item.path, "left by a write that was interrupted")
    here = _scan(run)
    if broken and (here or broken != "missing"):  # no index and no files is a new directory
        run.note("index", str(directory.index), broken, "rebuilt from the files")
    if run.addresses_now:
        _forget_changes(run, here)
    total, done = len(here), 0
    _drop_lost(run, here)
    _distrust(run, here)
    known = [address for address in here if address in run.rows]
    orphans = [address for address in here if address not in run.rows]
    wrong: list[Address] = []  # whose row says other bytes on the disk
    for address, agrees in zip(known, _judge(run, known), strict=True):
        if not agrees:  # its row is dropped, and the file judged by its own word
            run.forget([address])
            orphans.append(address)
            continue
        disk = disk_of(here[address])
        if disk != run.rows[address].disk:
            wrong.append(address)
        run.count(disk)
        done += 1
        if run.progress:
            run.progress(done, total)
    _correct(run, wrong, here)
    for batch in batched(orphans, _BATCH):
        _adopt(run, batch)
        done += len(batch)
        if run.progress:
            run.progress(done, total)
    if run.index:
        run.index.checkpoint()
    return Report(str(directory.root), run.index is None, run.deep, run.images, run.nbytes, tuple(run.findings))


def _scan(run: Pass) -> dict[Address, os.stat_result]:
    """Return the image files; quarantine what can't be one."""
    here: dict[Address, os.stat_result] = {}
    for address, item in run.directory.files():
        if address is None:
            run.move("stray", item.path, "no image has such a name")
            continue
        try:
            here[address] = item.stat(follow_symlinks=False)
        except FileNotFoundError:  # a live directory
            continue
    return here


def _forget_changes(run: Pass, here: dict[Address, os.stat_result]) -> None:
    """Forget about what came or went while a live directory was read."""
    assert run.addresses_now
    rows = run.addresses_now()
    now = time.time()
    for address in here.keys() - run.rows.keys():
        if address in rows or now - here[address].st_mtime < _IN_FLIGHT:
            del here[address]
    for address in run.rows.keys() - here.keys():
        if address not in rows or os.path.lexists(run.directory.file(address)):
            del run.rows[address]


def _correct(run: Pass, wrong: list[Address], here: dict[Address, os.stat_result]) -> None:
    """Note how many bytes these files take on the disk: others than on the one that they were copied from."""
    if run.index is None:
        return
    for batch in batched(wrong, _BATCH):
        with run.index.transaction():
            for address in batch:
                run.index.correct(address, disk_of(here[address]))
        run.cut_log()


def _distrust(run: Pass, here: dict[Address, os.stat_result]) -> None:
    """Forget rows that say another size than the file has: the file says itself whether it is whole."""
    for batch in batched([a for a in here if a in run.rows and run.rows[a].nbytes != here[a].st_size], _BATCH):
        run.forget(batch)


def _drop_lost(run: Pass, here: dict[Address, os.stat_result]) -> None:
    for batch in batched([address for address in run.rows if address not in here], _BATCH):
        run.forget(batch)
        for address in batch:
            run.note("lost file", run.directory.file(address), "the index has it, the disk does not", "forgotten")


def _judge(run: Pass, known: list[Address]) -> Iterator[bool]:
    """Yield, for each image with a row and a file of the size that the row says, whether the file is what the row says."""
    checker = Checker()

    def look(address: Address) -> bool:
        entry, path = run.rows[address], run.directory.file(address)
        if checker.is_whole(path, entry):
            return True
        try:
            read_image(path, entry)
        except DamagedFile as damage:
            return run.addresses_now is not None and damage.identity is None  # it has just been deleted
        except OSError as error:
            run.note("unreadable", path, os.strerror(error.errno or 0), "left alone")
        return True

    yield from _parallel(look, known) if run.deep else repeat(True, len(known))


def _adopt(run: Pass, addresses: list[Address]) -> None:
    """Take whole files in that have no row; quarantine others."""
    wanted: list[Described] = []

    def look(address: Address) -> Described | Exception:
        path = run.directory.file(address)
        try:
            described = from_header(read_header(path), run.newest)
            if described.entry.address != address:
                return ValueError("the file is another image's")
            check_stated(described.namespace)
            if run.deep:
                read_image(path, described.entry)
            return described
        except (DamagedFile, ValueError, OSError) as error:
            return error

    for address, seen in zip(addresses, _parallel(look, addresses), strict=True):
        path = run.directory.file(address)
        if isinstance(seen, OSError):
            run.note("unreadable", path, os.strerror(seen.errno or 0), "left alone")
        elif isinstance(seen, Exception):
            run.move("broken", path, str(seen))
        elif (verdict := run.claims.hear(seen.namespace)) is Verdict.FALSE:
            run.move("broken", path, FALSE)
        else:
            if verdict is Verdict.OVERRULES:
                forged = [described for described in wanted if described.namespace.root == seen.namespace.root]
                for described in forged:
                    run.move("broken", run.directory.file(described.entry.address), FALSE)
                wanted = [described for described in wanted if described not in forged]
                _expel(run, seen.namespace)
            wanted.append(seen)
    if run.index and wanted:
        with run.index.transaction():
            for entry, namespace in wanted:
                run.index.insert(entry, namespace)
        run.cut_log()
    for entry, namespace in wanted:
        run.adopted.setdefault(namespace.root, []).append(entry.address)
        run.note("orphan", run.directory.file(entry.address), "whole, and not in the index", "adopted", entry.disk)
        run.count(entry.disk)


def _expel(run: Pass, truth: NamespaceRow) -> None:
    """Move images away that say what the index has believed of a root key, now that something else is proven."""
    known = [address for address, row in run.rows.items() if row.namespace == truth.root]
    for address in (*known, *run.adopted.pop(truth.root, ())):
        path = run.directory.file(address)
        try:
            stated = from_header(read_header(path), 0).namespace.stated
        except (DamagedFile, ValueError, OSError):
            continue  # whatever it is, a read will tell
        if stated == truth.stated:
            continue
        run.forget([address])
        run.count(-disk_at(path), images=-1)
        run.move("broken", path, FALSE)


def _parallel(work: Callable[[T], R], items: list[T]) -> Iterator[R]:
    """Yield results in order, with a bounded number ahead. A thread gets several items at once: small files are quicker read
    than handed over.
    """
    if len(items) < 2:
        yield from map(work, items)
        return
    ahead: deque[Future[list[R]]] = deque()
    with ThreadPoolExecutor(_READERS) as pool:
        try:
            for part in batched(items, max(1, min(_AT_ONCE, len(items) // (4 * _READERS)))):
                ahead.append(pool.submit(lambda part: list(map(work, part)), part))
                if len(ahead) > 2 * _READERS:
                    yield from ahead.popleft().result()
            while ahead:
                yield from ahead.popleft().result()
        finally:  # whoever reads the results may have given up
            for future in ahead:
                future.cancel()
