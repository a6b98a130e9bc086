"""Images leave a directory that no cache has open: all of them (`clear`), or those that were chosen (`prune`).

A kill at any moment leaves a directory that opens and has all that was to stay: rows leave before their files, in
transactions of a bounded size, and nothing leaves before what hangs on it.
"""

from __future__ import annotations

import heapq
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, NamedTuple

from prefixcache.ssd.choosing import Node, NoSuchNamespace, namespaces, nodes
from prefixcache.ssd.directory import Directory, Lock, disk_at, disk_of, holder, scan, sync_folder, tree_size
from prefixcache.ssd.entries import Namespace, Progress
from prefixcache.ssd.files import remove_file
from prefixcache.ssd.formats import refuse_newer
from prefixcache.ssd.index import Index, check_rows, connect, reading, suffixes
from prefixcache.ssd.quarantine import Item, quarantined
from prefixcache.ssd.store import Store

_NO_LIMIT = 1 << 60


# -- all of them -------------------------------------------------------------------------------------------------------


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
    """Delete every image, what was set aside and what interrupted writes left; the index is made anew.

    Raises DirectoryError when it is not a cache's, is held or newer; OSError for what can't be deleted.
    """
    there = Directory(directory)
    there.require()
    refuse_newer(there)
    if dry_run:
        return _clearing(there, dry_run, sum(disk_at(path) for path in suffixes(there.index)), None)
    lock = Lock(there)
    try:
        lock.sign()
        there.furnish()
        before = tree_size(there.root)
        for path in suffixes(there.index):  # without an index no row is older than its file
            remove_file(str(path))
        sync_folder(there.root)
        done = _clearing(there, dry_run, 0, progress)
        index = Index(there.index)
        try:
            index.mark(clean=True)
            index.checkpoint()
        finally:
            index.close()
        sync_folder(there.root)
        return Cleared(**{**vars(done), "freed": max(0, before - tree_size(there.root))})
    finally:
        lock.release()


def _clearing(there: Directory, dry_run: bool, freed: int, progress: Progress | None) -> Cleared:
    """What is there, deleted file by file unless `dry_run`."""
    images, left = [], []
    for address, item in there.files():
        if address is None:
            left.append(there.relative(item.path))
        else:
            images.append(item.path)
            freed += disk_of(item.stat(follow_symlinks=False))
    debris = [item.path for item in there.strays()]
    freed += sum(disk_at(path) for path in debris)
    aside = quarantined(there)
    freed += sum(item.disk for item in aside)
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
        _drop_folders(there, set(there.image_folders()))
        for folder in (there.tmp, there.quarantine):
            sync_folder(folder)
    return Cleared(str(there.root), dry_run, len(images), len(aside), len(debris), freed, tuple(sorted(left)))


# -- some of them ------------------------------------------------------------------------------------------------------


class Selection(NamedTuple):
    """Which images: of a model, of a namespace (the beginning of its root key, in hex), last used before a Unix time, the
    coldest until the directory takes `to_size` real bytes; what is None is not asked. `quarantine`: what was set aside, too.
    """

    model: str | None = None
    namespace: str | None = None
    used_before: float | None = None
    to_size: int | None = None
    quarantine: bool = False

    @property
    def of_images(self) -> bool:
        return any(part is not None for part in self[:4])


class Share(NamedTuple):
    """What left of one namespace: images and real bytes."""

    root: str
    model: str
    images: int
    disk: int


@dataclass(frozen=True)
class Pruned:
    """What `prune` deleted, or would. `disk` are the real bytes of the images; `held` images were chosen and stay, because
    others hang on them; `before` and `after` are the directory's real bytes, `reached`: small enough.
    """

    directory: str
    dry_run: bool
    images: int
    disk: int
    held: int
    shares: tuple[Share, ...]
    quarantine: int
    quarantine_disk: int
    before: int
    after: int
    reached: bool

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "shares": [share._asdict() for share in self.shares]}


def prune(
    directory: str | os.PathLike[str],
    selection: Selection,
    *,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Pruned:
    """Delete the images of a selection, but for those that others hang on which stay.

    Raises DirectoryError when it is not a cache's, is held or newer, NoSuchNamespace, IndexBroken (a dry run only: else the
    index is rebuilt first), OSError for what can't be deleted.
    """
    there = Directory(directory)
    there.require()
    refuse_newer(there)
    if dry_run:
        return _foresee(there, selection)
    store = Store(there.root, _NO_LIMIT)
    done = False
    try:
        found = _Pruning(store, selection, progress).run()
        done = True
    except NoSuchNamespace:
        done = True
        raise
    finally:
        store.close(clean=done)
    after = tree_size(there.root)
    reached = selection.to_size is None or after <= selection.to_size
    return Pruned(**{**vars(found), "after": after, "reached": reached})


class _Leaving:
    """The images of a selection in the order of leaving: the coldest first, nothing before what hangs on it."""

    def __init__(self, chosen: list[Node], used_before: float | None):
        self._chosen = chosen
        stays = [node for node in chosen if used_before is not None and node.used_at >= used_before]
        for node in stays:
            node.stays = True
        while stays:
            for above in stays.pop().holders:
                if not above.stays:
                    above.stays = True
                    stays.append(above)
        wanted = [node for node in chosen if used_before is None or node.used_at < used_before]
        self.held = sum(node.stays for node in wanted)
        self.count = len(wanted) - self.held

    def __iter__(self) -> Iterator[Node]:
        leaving = [node for node in self._chosen if not node.stays]
        for node in leaving:
            for above in node.holders:
                above.hanging += 1
        ready = [(node.used, -node.start, node.id, node) for node in leaving if not node.hanging]
        heapq.heapify(ready)
        while ready:
            node = heapq.heappop(ready)[-1]
            yield node
            for above in node.holders:
                above.hanging -= 1
                if not above.hanging and not above.stays:
                    heapq.heappush(ready, (above.used, -above.start, above.id, above))


class _Tally:
    """What has left so far, by namespace."""

    def __init__(self, spaces: dict[bytes, Namespace]):
        self._spaces = spaces
        self._sums: dict[bytes, list[int]] = {}

    def add(self, left: list[Node]) -> None:
        for node in left:
            sums = self._sums.setdefault(node.root, [0, 0])
            sums[0] += 1
            sums[1] += node.disk

    @property
    def shares(self) -> tuple[Share, ...]:
        return tuple(Share(root.hex(), self._spaces[root].model, *sums) for root, sums in self._sums.items())


def _until(order: Iterator[Node], excess: int, each: int) -> list[Node]:
    """The next to leave until `excess` bytes are free; `each` is what an image takes beside its file."""
    taken: list[Node] = []
    while excess > 0 and (node := next(order, None)) is not None:
        taken.append(node)
        excess -= node.disk + each
    return taken


def _aside(there: Directory, selection: Selection) -> list[Item]:
    """What was set aside and is to go: all of it, or what was set aside before the time that was given."""
    before = selection.used_before
    items = quarantined(there) if selection.quarantine else []
    return [item for item in items if before is None or item.when < before]


def _foresee(there: Directory, selection: Selection) -> Pruned:
    """What `prune` would do; the bytes of index and folders that become free are a guess."""
    before = tree_size(there.root)
    aside = _aside(there, selection)
    after = before - sum(item.disk for item in aside)
    left: list[Node] = []
    held = 0
    with reading(there.index, live=holder(there) is not None) as connection:
        check_rows(connection)
        spaces = namespaces(connection, selection.model, selection.namespace)
        tally = _Tally(spaces)
        if selection.of_images:
            leaving = _Leaving(nodes(connection, spaces), selection.used_before)
            held, each = leaving.held, _beside(connection, there)
            if selection.to_size is None:
                left = list(leaving)
            else:
                left = _until(iter(leaving), after - selection.to_size, each)
            after -= sum(node.disk + each for node in left)
            tally.add(left)
    after = max(after, 0)
    return Pruned(
        str(there.root), True, len(left), sum(node.disk for node in left), held, tally.shares, len(aside),
        sum(item.disk for item in aside), before, after, selection.to_size is None or after <= selection.to_size,
    )  # fmt: skip


def _beside(connection: Any, there: Directory) -> int:
    """Bytes of the index for one image."""
    count = connection.execute("SELECT count(*) FROM image").fetchone()[0]
    return disk_at(there.index) // max(count, 1)


class _Pruning:
    """One run over an opened directory."""

    def __init__(self, store: Store, selection: Selection, progress: Progress | None):
        self._store, self._selection, self._progress = store, selection, progress
        self._there = store.directory
        self._left: list[Node] = []

    def run(self) -> Pruned:
        there, selection = self._there, self._selection
        connection = connect(there.index)
        try:
            spaces = namespaces(connection, selection.model, selection.namespace)
            chosen = nodes(connection, spaces) if selection.of_images else []
            each = _beside(connection, there)
        finally:
            connection.close()
        before = self._du()
        aside = _aside(there, selection)
        self._store.quarantine.prune(sum(item.disk for item in aside))
        tally, leaving = _Tally(spaces), _Leaving(chosen, selection.used_before)
        order = iter(leaving)
        while True:
            if selection.to_size is None:
                part = list(order)
            else:
                part = _until(order, self._du() - selection.to_size, each)
            if not part:
                break
            self._remove(part, leaving.count)
            tally.add(part)
        return Pruned(
            str(there.root), False, len(self._left), sum(node.disk for node in self._left), leaving.held, tally.shares,
            len(aside), sum(item.disk for item in aside), before, 0, True,
        )  # fmt: skip

    def _remove(self, part: list[Node], count: int) -> None:
        """Rows, then files, then what is left empty."""
        store, folders = self._store, set()
        rest = iter(part)
        while chunk := list(islice(rest, store.ledger.rows)):
            with store.index.transaction():
                store.index.remove([node.address for node in chunk])
            for node in chunk:
                remove_file(self._there.file(node.address))
                folders.add(self._there.folder(node.address))
                self._left.append(node)
            store.maintain()
            if self._progress:
                self._progress(len(self._left), count)
        _drop_folders(self._there, folders)
        store.shrink_index()
        store.index.checkpoint()

    def _du(self) -> int:
        """Real bytes without those that the index has while it is open only."""
        return tree_size(self._there.root) - sum(disk_at(path) for path in suffixes(self._there.index)[1:])


def _drop_folders(there: Directory, folders: set[str]) -> None:
    """Two-digit folders that are empty go; those that stay, and the ones above, are made durable."""
    above = set()
    for folder in folders:
        with suppress(OSError):  # not empty
            os.rmdir(folder)
            above.add(os.path.dirname(folder))
            continue
        with suppress(FileNotFoundError):
            sync_folder(folder)
    for folder in above:
        sync_folder(folder)
