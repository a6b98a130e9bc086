"""Index against files: adopt what is whole and has no row, drop rows without a file, set aside what is broken.

`mend` runs on a directory that its caller has locked: at an opening after a crash, and for the admin command by way of
`reconcile`. Shallow it reads headers of files that have no row; deep it reads everything and checks every checksum.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from prefixcache.ssd.checking import Checker
from prefixcache.ssd.claims import FALSE, Claims, Verdict, check_stated
from prefixcache.ssd.directory import Directory, Lock, disk_at, holder, refusal
from prefixcache.ssd.entries import Address, Entry, Namespace, Progress
from prefixcache.ssd.errors import DirectoryError, IndexBroken
from prefixcache.ssd.files import Damaged, OlderFormat, from_header, read_header, read_image, remove_file
from prefixcache.ssd.formats import refuse_newer
from prefixcache.ssd.index import Index, Row, check, read_namespaces, read_rows, reading, suffixes
from prefixcache.ssd.quarantine import Quarantine

_READERS = 4
_AT_ONCE = 16  # items that a reader takes at a time
_CHUNK = 256
_IN_FLIGHT = 60.0  # seconds that a file of a live directory may be older than its row
_LOG = 4 << 20  # bytes of the index's log after which it is cut

T = TypeVar("T")
R = TypeVar("R")


class Finding(NamedTuple):
    """One thing that was not as it should be. `path` is relative to the directory; `nbytes` are real bytes concerned.

    kind: "index", "debris", "lost file", "orphan", "older format", "broken", "stray", "unreadable".
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
        """Real bytes of what was deleted."""
        return self._sum("debris") + self._sum("older format")

    @property
    def adopted(self) -> int:
        """Real bytes of whole files that had no row."""
        return self._sum("orphan")

    @property
    def set_aside(self) -> int:
        return self._sum("broken") + self._sum("stray")

    @property
    def clean(self) -> bool:
        return not self.findings and not self.error

    @property
    def exit_code(self) -> int:
        """0: index and files agree. 1: they did not. 2: it could not be done."""
        if self.error or any(finding.kind == "unreadable" for finding in self.findings):
            return 2
        return 1 if self.findings else 0

    def as_dict(self) -> dict[str, Any]:
        sums = {name: getattr(self, name) for name in ("counts", "freed", "adopted", "set_aside", "clean", "exit_code")}
        return {**asdict(self), "findings": [finding._asdict() for finding in self.findings], **sums}

    def summary(self) -> str:
        if self.error:
            return self.error
        parts = [f"{n} x {kind}" for kind, n in sorted(self.counts.items())]
        return f"{self.images} images; " + (", ".join(parts) if parts else "nothing to repair")

    def _sum(self, kind: str) -> int:
        return sum(finding.nbytes for finding in self.findings if finding.kind == kind)


def reconcile(
    directory: str | os.PathLike[str], *, dry_run: bool = False, deep: bool = False, progress: Progress | None = None
) -> Report:
    """Compare index and files of a directory and repair; with `dry_run` only say what would be done, also of a live
    one.

    Raises nothing for a directory that is held, missing, unreadable or newer: `Report.error` says so, `exit_code` is 2.
    """
    there = Directory(directory)
    try:
        there.require()
        if dry_run:
            return _look(there, deep, progress)
        lock = Lock(there)
        try:
            return _repair(there, lock, deep, progress)
        finally:
            lock.release()
    except DirectoryError as error:
        return Report(str(there.root), dry_run, deep, error=str(error))
    except (OSError, sqlite3.Error) as error:
        return Report(str(there.root), dry_run, deep, error=str(refusal(there.root, error)))


def _repair(directory: Directory, lock: Lock, deep: bool, progress: Progress | None) -> Report:
    from prefixcache.ssd.store import mended, open_index  # store opens with `mend`

    refuse_newer(directory)
    lock.sign()
    directory.furnish()
    quarantine = Quarantine(directory)
    index, broken = open_index(directory, quarantine)
    try:
        index, report = mended(directory, index, quarantine, broken=broken, deep=deep, progress=progress)
        index.mark(clean=True)
        index.checkpoint()
        return report
    finally:
        index.close()


def _look(directory: Directory, deep: bool, progress: Progress | None) -> Report:
    live = holder(directory) is not None
    try:
        with reading(directory.index, live=live) as connection:
            check(connection)
            run = _Pass(directory, read_rows(connection), None, None, deep, progress)
            run.claims = Claims(read_namespaces(connection))
            if live:
                run.again = lambda: read_rows(connection)
            return _compare(run, "")
    except IndexBroken as error:
        run = _Pass(directory, {}, None, None, deep, progress)
        if live:
            run.again = dict
        return _compare(run, str(error))


def mend(
    directory: Directory,
    index: Index,
    quarantine: Quarantine,
    *,
    broken: str = "",
    deep: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Repair a directory that the caller has locked. `broken`: why its index is a new one."""
    directory.sync()  # before a row says that a file is durable
    return _compare(_Pass(directory, index.rows(), index, quarantine, deep, progress), broken)


class _Pass:
    """One run over a directory: what it knows and what it has found. Without `index` nothing is changed."""

    def __init__(
        self,
        directory: Directory,
        rows: dict[Address, Row],
        index: Index | None,
        quarantine: Quarantine | None,
        deep: bool,
        progress: Progress | None,
    ):
        self.directory, self.rows, self.index, self.quarantine = directory, rows, index, quarantine
        self.deep, self.progress = deep, progress
        self.findings: list[Finding] = []
        self.images = self.nbytes = 0
        self.claims = Claims(index.namespaces() if index else ())
        self.adopted: dict[bytes, list[Address]] = {}  # by root key
        self.again: Callable[[], dict[Address, Row]] | None = None  # of a live directory: its rows by now
        self.newest = index.totals()[2] if index else 0

    def found(self, kind: str, path: str, reason: str, action: str, nbytes: int = 0) -> None:
        done = action if self.index else f"would be {action}"
        self.findings.append(Finding(kind, self.directory.relative(path), reason, done, nbytes))

    def set_aside(self, kind: str, path: str, reason: str) -> None:
        size = disk_at(path)
        if self.quarantine:
            self.quarantine.take(path, reason)
        self.found(kind, path, reason, "set aside", size)

    def delete(self, kind: str, path: str, reason: str) -> None:
        size = disk_at(path)
        if self.index:
            remove_file(path)
        self.found(kind, path, reason, "deleted", size)

    def counts(self, disk: int, images: int = 1) -> None:
        self.images += images
        self.nbytes += disk


def _compare(run: _Pass, broken: str) -> Report:
    directory = run.directory
    for item in directory.strays() if run.again is None else ():
        run.delete("debris", item.path, "left by a write that was interrupted, or by an older release")
    here = _scan(run)
    if broken and (here or broken != "missing"):  # no index and no files is a new directory
        run.found("index", str(directory.index), broken, "rebuilt from the files")
    if run.again:
        _settle(run, here)
    total, done = len(here), 0
    _drop_lost(run, here)
    _distrust(run, here)
    known = [address for address in here if address in run.rows]
    orphans = [address for address in here if address not in run.rows]
    for address, reason in _judge(run, known, here):
        if reason is not None:  # damaged, or another whole file that was copied over it: the file says itself
            if run.index:
                with run.index.transaction():
                    run.index.remove([address])
            del run.rows[address]
            orphans.append(address)
            continue
        done += 1
        disk = here[address].st_blocks * 512
        if run.index and disk != run.rows[address].disk:
            run.index.correct(address, disk)
        run.counts(disk)
        if run.progress:
            run.progress(done, total)
    for chunk in _chunks(orphans, _CHUNK):
        _adopt(run, chunk)
        done += len(chunk)
        if run.progress:
            run.progress(done, total)
    if run.index:
        run.index.checkpoint()
    return Report(str(directory.root), run.index is None, run.deep, run.images, run.nbytes, tuple(run.findings))


def _scan(run: _Pass) -> dict[Address, os.stat_result]:
    """The image files; what can't be one is set aside."""
    here: dict[Address, os.stat_result] = {}
    for address, item in run.directory.files():
        if address is None:
            run.set_aside("stray", item.path, "no image has such a name")
            continue
        try:
            here[address] = item.stat(follow_symlinks=False)
        except FileNotFoundError:  # a live directory
            continue
    return here


def _settle(run: _Pass, here: dict[Address, os.stat_result]) -> None:
    """Forget about what came or went while a live directory was read."""
    assert run.again
    rows = run.again()
    now = time.time()
    for address in here.keys() - run.rows.keys():
        if address in rows or now - here[address].st_mtime < _IN_FLIGHT:
            del here[address]
    for address in run.rows.keys() - here.keys():
        if address not in rows or os.path.lexists(run.directory.file(address)):
            del run.rows[address]


def _distrust(run: _Pass, here: dict[Address, os.stat_result]) -> None:
    """Forget rows that say another size than the file has: the file says itself whether it is whole."""
    for chunk in _chunks([a for a in here if a in run.rows and run.rows[a].nbytes != here[a].st_size], _CHUNK):
        if run.index:
            with run.index.transaction():
                run.index.remove(chunk)
        for address in chunk:
            del run.rows[address]


def _drop_lost(run: _Pass, here: dict[Address, os.stat_result]) -> None:
    for chunk in _chunks([address for address in run.rows if address not in here], _CHUNK):
        if run.index:
            with run.index.transaction():
                run.index.remove(chunk)
            _cut_log(run)
        for address in chunk:
            run.found("lost file", run.directory.file(address), "the index has it, the disk does not", "forgotten")


def _judge(
    run: _Pass, known: list[Address], here: dict[Address, os.stat_result]
) -> Iterator[tuple[Address, str | None]]:
    """Of each image that has a row and a file: None, or why the file is broken."""
    checker = Checker()

    def look(address: Address) -> tuple[Address, str | None]:
        row = run.rows[address]
        if here[address].st_size != row.nbytes:
            return address, f"{here[address].st_size} bytes, the index says {row.nbytes}"
        if not run.deep:
            return address, None
        kind, key = address
        entry = Entry(kind, key, row.namespace, b"", 0, b"", row.nbytes, row.checksum)
        if checker.is_whole(run.directory.file(address), entry):
            return address, None
        try:
            read_image(run.directory.file(address), entry)
        except Damaged as error:
            left = run.again is not None and error.identity is None  # it has just been deleted
            return address, None if left else str(error)
        except OSError as error:
            run.found("unreadable", run.directory.file(address), os.strerror(error.errno or 0), "left alone")
        return address, None

    if run.deep:
        yield from _parallel(look, known)
    else:
        yield from map(look, known)


def _adopt(run: _Pass, addresses: list[Address]) -> None:
    """Take whole files in that have no row; set others aside; delete what is of a format that isn't read any more."""
    wanted: list[tuple[Entry, Namespace]] = []

    def look(address: Address) -> tuple[Address, tuple[Entry, Namespace] | None, str, str]:
        path = run.directory.file(address)
        try:
            said = read_header(path)
            entry, namespace = from_header(said, run.newest)
            if entry.address != address:
                return address, None, "the file is another image's", "broken"
            check_stated(namespace)
            if run.deep:
                read_image(path, entry)
            return address, (entry, namespace), "", "orphan"
        except OlderFormat as error:
            return address, None, str(error), "older format"
        except (Damaged, ValueError) as error:
            return address, None, str(error), "broken"
        except OSError as error:
            return address, None, os.strerror(error.errno or 0), "unreadable"

    for address, pair, reason, kind in _parallel(look, addresses):
        path = run.directory.file(address)
        if pair and (verdict := run.claims.hear(pair[1])) is Verdict.FALSE:
            run.set_aside("broken", path, FALSE)
        elif pair:
            if verdict is Verdict.OVERRULES:
                for entry, namespace in wanted:
                    if namespace.root == pair[1].root:
                        run.set_aside("broken", run.directory.file(entry.address), FALSE)
                wanted = [one for one in wanted if one[1].root != pair[1].root]
                _expel(run, pair[1])
            wanted.append(pair)
        elif kind == "older format":
            run.delete(kind, path, reason)
        elif kind == "broken":
            run.set_aside(kind, path, reason)
        else:
            run.found(kind, path, reason, "left alone")
    if run.index and wanted:
        with run.index.transaction():
            for entry, namespace in wanted:
                run.index.insert(entry, namespace)
        _cut_log(run)
    for entry, namespace in wanted:
        run.adopted.setdefault(namespace.root, []).append(entry.address)
        run.found("orphan", run.directory.file(entry.address), "whole, and not in the index", "adopted", entry.disk)
        run.counts(entry.disk)


def _expel(run: _Pass, truth: Namespace) -> None:
    """What a root key stands for is proven now, and the index has believed something else: images that say that, too, go."""
    known = [address for address, row in run.rows.items() if row.namespace == truth.root]
    for address in (*known, *run.adopted.pop(truth.root, ())):
        path = run.directory.file(address)
        try:
            stated = from_header(read_header(path), 0)[1].stated
        except (Damaged, ValueError, OSError):
            continue  # whatever it is, a read will tell
        if stated == truth.stated:
            continue
        if run.index:
            with run.index.transaction():
                run.index.remove([address])
        run.rows.pop(address, None)
        run.counts(-disk_at(path), images=-1)
        run.set_aside("broken", path, FALSE)


def _cut_log(run: _Pass) -> None:
    if run.index and disk_at(suffixes(run.directory.index)[1]) > _LOG:
        run.index.checkpoint()


def _parallel(work: Callable[[T], R], items: list[T]) -> Iterator[R]:
    """In order, with a bounded number of results ahead. A thread gets several items at once: small files are quicker read
    than handed over.
    """
    if len(items) < 2:
        yield from map(work, items)
        return
    ahead: deque[Future[list[R]]] = deque()
    with ThreadPoolExecutor(_READERS) as pool:
        try:
            for part in _chunks(items, max(1, min(_AT_ONCE, len(items) // (4 * _READERS)))):
                ahead.append(pool.submit(lambda part: list(map(work, part)), part))
                if len(ahead) > 2 * _READERS:
                    yield from ahead.popleft().result()
            while ahead:
                yield from ahead.popleft().result()
        finally:  # whoever reads the results may have given up
            for future in ahead:
                future.cancel()


def _chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    while chunk := list(islice(rest, size)):
        yield chunk
