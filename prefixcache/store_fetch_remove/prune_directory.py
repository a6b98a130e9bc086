"""`prune`: the images of a selection are deleted from a directory that no cache has open.

The selected namespaces' entries become a graph of blocks (`blocks`), what is to stay is pinned there, and the images are
evicted as a cache evicts them: the least recent first, nothing before what depends on it. A dry run is the same without
deleting files. A kill at any moment leaves a directory that opens and has all that was to stay: rows of the index are
deleted before their files, in transactions of a bounded size.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

from prefixcache.blocks.budget import Budget
from prefixcache.blocks.eviction import eviction_order
from prefixcache.blocks.graph import Graph
from prefixcache.blocks.node import Slot, covering_rows, dependencies
from prefixcache.image_format import SNAPSHOT
from prefixcache.memory import collector_at_rest
from prefixcache.ssd.directory import Directory, disk_at
from prefixcache.ssd.entries import Entry, NamespaceRow, Progress
from prefixcache.ssd.index import reading, suffixes
from prefixcache.ssd.lock import holder, refuse_newer
from prefixcache.ssd.open_directory import OpenDirectory
from prefixcache.ssd.quarantine import Item, quarantined
from prefixcache.ssd.tables import check_rows, read_namespaces, read_places
from prefixcache.store_fetch_remove.selection import NoSuchNamespace, Selection, selected_namespaces
from prefixcache.tiers.loading import parent_of, place_entry

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
    there = Directory(directory)
    there.require()
    refuse_newer(there)
    with collector_at_rest():
        return _foresee(there, selection) if dry_run else _prune(there, selection, progress)


def _prune(there: Directory, selection: Selection, progress: Progress | None) -> Pruned:
    opened = OpenDirectory(there.root, _NO_LIMIT)
    clean = False
    try:
        pruned = _Pruning(opened, selection, progress).run()
        clean = True
    except NoSuchNamespace:
        clean = True
        raise
    finally:
        opened.close(clean=clean)
    after = there.size()
    reached = selection.to_size is None or after <= selection.to_size
    return Pruned(**{**vars(pruned), "after": after, "reached": reached})


# -- who is evicted ---------------------------------------------------------------------------------------------------


class _Images:
    """The images of the selected namespaces as a graph: pinned what was used since `used_before`, and what that depends on.

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
        """One after the other, the least recent first, until all that is left is pinned."""
        return eviction_order(self._graph, _TIER, self._graph.orders[_TIER])

    def namespace(self, slot: Slot) -> bytes:
        """The root key of a slot's namespace."""
        assert slot.node.tree is not None
        root = slot.node.tree.root.key
        return self._namespaces.get(root, root)


def _required(slots: Iterable[Slot]) -> set[Slot]:
    """What these depend on."""
    required: set[Slot] = set()
    for slot in slots:
        for rows in dependencies(slot):
            if rows in required:
                break
            required.add(rows)
    return required


def _until(slots: Iterator[Slot], excess: int, each: int) -> list[Slot]:
    """The next ones, until `excess` bytes are free; `each` is what an image takes beside its file."""
    evicted: list[Slot] = []
    while excess > 0 and (slot := next(slots, None)) is not None:
        evicted.append(slot)
        excess -= slot.disk + each
    return evicted


class _Tally:
    """What was deleted so far, by namespace."""

    def __init__(self, namespaces: dict[bytes, NamespaceRow]):
        self._namespaces = namespaces
        self._sums: dict[bytes, list[int]] = {}

    def add(self, namespace: bytes, disk: int) -> None:
        sums = self._sums.setdefault(namespace, [0, 0])
        sums[0] += 1
        sums[1] += disk

    @property
    def images(self) -> int:
        return sum(images for images, _ in self._sums.values())

    @property
    def disk(self) -> int:
        return sum(disk for _, disk in self._sums.values())

    @property
    def shares(self) -> tuple[Share, ...]:
        return tuple(Share(root.hex(), self._namespaces[root].model, *sums) for root, sums in self._sums.items())


# -- runs -------------------------------------------------------------------------------------------------------------


def _foresee(there: Directory, selection: Selection) -> Pruned:
    """What `prune` would do; the bytes of index and folders that become free are a guess."""
    before = there.size()
    bad = _quarantined(there, selection)
    after = before - sum(item.disk for item in bad)
    held = 0
    with reading(there.index, live=holder(there) is not None) as connection:
        check_rows(connection)
        namespaces = selected_namespaces(read_namespaces(connection), selection)
        tally = _Tally(namespaces)
        if selection.of_images:
            entries = (entry for root in namespaces for entry in read_places(connection, root))
            images = _Images(entries, selection.used_before)
            (count,) = connection.execute("SELECT count(*) FROM image").fetchone()
            held, each = images.held, _index_share(there, count)
            slots: Iterable[Slot] = images.evict()
            if selection.to_size is not None:
                slots = _until(images.evict(), after - selection.to_size, each)
            for slot in slots:
                tally.add(images.namespace(slot), slot.disk)
            after -= tally.disk + tally.images * each
    after = max(after, 0)
    return Pruned(
        str(there.root),
        True,
        tally.images,
        tally.disk,
        held,
        tally.shares,
        len(bad),
        sum(item.disk for item in bad),
        before,
        after,
        selection.to_size is None or after <= selection.to_size,
    )


def _quarantined(there: Directory, selection: Selection) -> list[Item]:
    """What is to go of what was quarantined: all of it, or what was quarantined before the time that was given."""
    before = selection.used_before
    items = quarantined(there) if selection.quarantine else []
    return [item for item in items if before is None or item.when < before]


def _index_share(there: Directory, count: int) -> int:
    """Bytes of the index for one of so many images."""
    return disk_at(there.index) // max(count, 1)


class _Pruning:
    """One run over an opened directory."""

    def __init__(self, opened: OpenDirectory, selection: Selection, progress: Progress | None):
        self._opened, self._selection, self._progress = opened, selection, progress
        self._there = opened.directory

    def run(self) -> Pruned:
        there, selection = self._there, self._selection
        entries, self._opened.entries = self._opened.entries or [], None
        each = _index_share(there, len(entries))
        namespaces = selected_namespaces(self._opened.index.namespaces(), selection)
        selected = namespaces if selection.of_images else {}
        images = _Images((entry for entry in entries if entry.namespace in selected), selection.used_before)
        del entries  # with all tokens
        before = self._disk()
        bad = _quarantined(there, selection)
        self._opened.quarantine.prune(sum(item.disk for item in bad))
        tally, slots = _Tally(namespaces), images.evict()
        while True:
            if selection.to_size is None:
                part = list(slots)
            else:
                part = _until(slots, self._disk() - selection.to_size, each)
            if not part:
                break
            self._opened.delete(
                [(slot.kind, slot.key) for slot in part], partial(self._tell, tally.images, images.count)
            )
            for slot in part:
                tally.add(images.namespace(slot), slot.disk)
        return Pruned(
            str(there.root),
            False,
            tally.images,
            tally.disk,
            images.held,
            tally.shares,
            len(bad),
            sum(item.disk for item in bad),
            before,
            0,
            True,
        )

    def _tell(self, before: int, count: int, deleted: int) -> None:
        if self._progress:
            self._progress(before + deleted, count)

    def _disk(self) -> int:
        """Real bytes without those that the index has while it is open only."""
        return self._there.size() - sum(disk_at(path) for path in suffixes(self._there.index)[1:])
