"""`prune`: the images of a selection are deleted from a directory that no cache has open.

The selected namespaces' entries become a graph of blocks (`blocks`), what is to stay is pinned there, and the images are
evicted as a cache evicts them: the least recent first, nothing before what depends on it. A dry run is the same without
deleting files. A kill at any moment leaves a directory that opens and has all that was to stay: rows of the index are
deleted before their files, in transactions of a bounded size.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from prefixcache.blocks.budget import Budget
from prefixcache.blocks.eviction import eviction_order
from prefixcache.blocks.graph import Graph
from prefixcache.blocks.node import Slot, covering_rows, dependencies
from prefixcache.image_format import SNAPSHOT
from prefixcache.memory import collector_at_rest
from prefixcache.ssd.directory import Directory, disk_at
from prefixcache.ssd.entries import Entry, NamespaceRow, Progress
from prefixcache.ssd.index import IndexFiles, reading
from prefixcache.ssd.lock import holder, refuse_newer
from prefixcache.ssd.open_directory import OpenDirectory
from prefixcache.ssd.quarantine import Item, quarantined
from prefixcache.ssd.tables import check_rows, read_namespaces, read_places
from prefixcache.store_fetch_remove.selection import NoSuchNamespace, Selection, selected_namespaces
from prefixcache.tiers.tier_in_graph import parent_of, place_entry

_NO_LIMIT = 1 << 60
_TIER = 1  # of the graph: what the directory has


class Share(NamedTuple):
    """What was deleted of one namespace: images and real bytes."""

    root: str
    model: str
    images: int
    disk: int


@dataclass(frozen=True)
class Pruned:
    """What `prune` deleted, or would. `disk` are the real bytes of the images; `held` images were selected and stay, because
    others depend on them; `before` and `after` are the directory's real bytes, `reached`: small enough.
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
    """Delete the images of a selection, but for those that others depend on which stay.

    Raises DirectoryError when it is not a cache's, is held or newer, NoSuchNamespace, IndexBroken (a dry run only: else the
    index is rebuilt first), OSError for what can't be deleted.
    """
    checked = Directory(directory)
    checked.require()
    refuse_newer(checked)
    with collector_at_rest():
        return _foresee(checked, selection) if dry_run else _prune(checked, selection, progress)


def _prune(directory: Directory, selection: Selection, progress: Progress | None) -> Pruned:
    opened = OpenDirectory(directory.root, _NO_LIMIT)
    clean = False
    try:
        tally = _delete(opened, selection, progress)
        clean = True
    except NoSuchNamespace:
        clean = True
        raise
    finally:
        opened.close(clean=clean)
    return tally.pruned(directory, selection, dry_run=False, after=directory.size())


# -- who is evicted ---------------------------------------------------------------------------------------------------


class _Images:
    """The images of the selected namespaces as a graph, with pins on those that were used since `used_before` and on all that
    these depend on.

    `held`: how many of them were not used since; `count`: how many can be evicted.
    """

    def __init__(self, entries: Iterable[Entry], used_before: float | None):
        self._graph = graph = Graph(Budget(_NO_LIMIT))
        self._namespaces: dict[bytes, bytes] = {}  # of trees whose root key is another one
        recent: set[Slot] = set()
        reservation = graph.budget.reserve(_NO_LIMIT, pooled=True)
        assert reservation is not None
        with reservation:
            for entry in entries:
                parent = parent_of(graph, entry)
                if parent is None:  # the index lacks it: the entries that depend on it are a tree of their own
                    parent = graph.tree(entry.parent).root
                    self._namespaces[entry.parent] = entry.namespace
                slot = place_entry(graph, entry, parent, _TIER, reservation)
                assert slot is not None
                if used_before is not None and entry.used_at >= used_before:
                    recent.add(slot)
            for slot in graph.slots.values():
                if slot.kind == SNAPSHOT and (rows := covering_rows(slot)) is not None:
                    rows.tick = max(rows.tick, slot.tick)  # as every block, not less recent than what depends on it
            graph.recency.sort_below_ram(graph.slots.values())
        required = _required(recent)
        graph.pin(recent | required)
        self.held = len(required - recent)
        self.count = len(graph.slots) - len(recent | required)

    def evict(self) -> Iterator[Slot]:
        """Yield one after the other, the least recent first, until all that is left is pinned."""
        return eviction_order(self._graph, _TIER, self._graph.orders[_TIER])

    def namespace(self, slot: Slot) -> bytes:
        assert slot.node.tree is not None
        root = slot.node.tree.root.key
        return self._namespaces.get(root, root)


def _required(slots: Iterable[Slot]) -> set[Slot]:
    required: set[Slot] = set()
    for slot in slots:
        for rows in dependencies(slot):
            if rows in required:
                break
            required.add(rows)
    return required


def _next(slots: Iterator[Slot], selection: Selection, disk: int, index_bytes: int) -> list[Slot]:
    """Return the next slots to delete, until a directory of `disk` real bytes is small enough: all where no size is wanted.
    `index_bytes` are what an image takes beside its file.
    """
    if selection.to_size is None:
        return list(slots)
    evicted: list[Slot] = []
    while disk > selection.to_size and (slot := next(slots, None)) is not None:
        evicted.append(slot)
        disk -= slot.disk + index_bytes
    return evicted


@dataclass
class _Tally:
    """What is deleted of a directory of `before` real bytes: images, by namespace, and what was quarantined (`bad`). `held`
    images were selected and stay.
    """

    namespaces: dict[bytes, NamespaceRow]
    bad: list[Item]
    before: int
    held: int
    _shares: dict[bytes, Share] = field(default_factory=dict)

    def add(self, namespace: bytes, disk: int) -> None:
        share = self._shares.get(namespace) or Share(namespace.hex(), self.namespaces[namespace].model, 0, 0)
        self._shares[namespace] = share._replace(images=share.images + 1, disk=share.disk + disk)

    @property
    def images(self) -> int:
        return sum(share.images for share in self._shares.values())

    @property
    def disk(self) -> int:
        return sum(share.disk for share in self._shares.values())

    @property
    def bad_disk(self) -> int:
        return sum(item.disk for item in self.bad)

    def pruned(self, directory: Directory, selection: Selection, *, dry_run: bool, after: int) -> Pruned:
        shares, reached = tuple(self._shares.values()), selection.to_size is None or after <= selection.to_size
        deleted = self.images, self.disk, self.held, shares, len(self.bad), self.bad_disk
        return Pruned(str(directory.root), dry_run, *deleted, self.before, after, reached)


# -- runs -------------------------------------------------------------------------------------------------------------


def _foresee(directory: Directory, selection: Selection) -> Pruned:
    """Return what `prune` would delete; the bytes of index and folders that become free are a guess."""
    with reading(directory.index, live=holder(directory) is not None) as connection:
        check_rows(connection)
        namespaces = selected_namespaces(read_namespaces(connection), selection)
        selected = namespaces if selection.of_images else {}
        images = _Images((e for root in selected for e in read_places(connection, root)), selection.used_before)
        (count,) = connection.execute("SELECT count(*) FROM image").fetchone()
    tally = _Tally(namespaces, _quarantined(directory, selection), directory.size(), images.held)
    index_bytes = _index_share(directory, count)
    for slot in _next(images.evict(), selection, tally.before - tally.bad_disk, index_bytes):
        tally.add(images.namespace(slot), slot.disk)
    after = tally.before - tally.bad_disk - tally.disk - tally.images * index_bytes
    return tally.pruned(directory, selection, dry_run=True, after=max(after, 0))


def _quarantined(directory: Directory, selection: Selection) -> list[Item]:
    """Return the quarantined files to delete: all, or those that were quarantined before the selection's time."""
    before = selection.used_before
    items = quarantined(directory) if selection.quarantine else []
    return [item for item in items if before is None or item.when < before]


def _index_share(directory: Directory, count: int) -> int:
    return disk_at(directory.index) // max(count, 1)


def _delete(opened: OpenDirectory, selection: Selection, progress: Progress | None) -> _Tally:
    """Delete the selection from an opened directory."""
    directory = opened.directory
    entries, opened.entries = opened.entries or [], None
    index_bytes = _index_share(directory, len(entries))
    namespaces = selected_namespaces(opened.index.namespaces(), selection)
    selected = namespaces if selection.of_images else {}
    images = _Images((entry for entry in entries if entry.namespace in selected), selection.used_before)
    del entries  # with all tokens
    tally = _Tally(namespaces, _quarantined(directory, selection), _disk(directory), images.held)
    opened.quarantine.prune(tally.bad_disk)

    def tell(deleted: int) -> None:
        if progress:
            progress(tally.images + deleted, images.count)

    slots = images.evict()
    while part := _next(slots, selection, _disk(directory), index_bytes):
        opened.delete([(slot.kind, slot.key) for slot in part], tell)
        for slot in part:
            tally.add(images.namespace(slot), slot.disk)
    return tally


def _disk(directory: Directory) -> int:
    """Return the directory's real bytes without those that the index has while it is open only."""
    return directory.size() - sum(disk_at(path) for path in IndexFiles.of(directory.index)[1:])
