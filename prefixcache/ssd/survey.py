"""What is in a directory, live or dead: for `prefixcache inspect`. Takes no lock and writes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from prefixcache.image_format import KINDS, ROWS, SNAPSHOT, WINDOW
from prefixcache.ssd.directory import Directory, disk_at
from prefixcache.ssd.errors import IndexBroken
from prefixcache.ssd.index import IndexFiles, read_clean, reading
from prefixcache.ssd.lock import holder
from prefixcache.ssd.quarantine import Item, quarantined
from prefixcache.ssd.tables import check_rows


class Count(NamedTuple):
    """Images of one kind: how many, their file bytes, the bytes that they really take."""

    images: int = 0
    nbytes: int = 0
    disk: int = 0


class Span(NamedTuple):
    """The tokens that an image is of; `extra` is JSON, of a window the ranges that it has."""

    kind: str
    start: int
    length: int
    extra: str


@dataclass(frozen=True)
class NamespaceSurvey:
    """One namespace. `codec` and `layout` are JSON text; `oldest` and `newest` are Unix times of writing (0.0: empty);
    `last_used` is the newest recency tick, `last_used_at` the Unix time of the last use (0.0: empty); `tokens` are those
    of its rows images."""

    root: str
    model: str
    codec: str
    layout: str
    created: float
    blocks: Count
    windows: Count
    snapshots: Count
    tokens: int
    oldest: float
    newest: float
    last_used: int
    last_used_at: float
    hits: int

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes + self.windows.nbytes + self.snapshots.nbytes

    @property
    def disk(self) -> int:
        return self.blocks.disk + self.windows.disk + self.snapshots.disk


@dataclass(frozen=True)
class Survey:
    """`holder` is who has it open ("pid 7 on host since ..."), "" when nobody; `problem` why the index can't be read;
    `disk` the real bytes of everything in the directory."""

    directory: str
    holder: str
    problem: str
    clean: bool
    namespaces: tuple[NamespaceSurvey, ...]
    quarantine: tuple[Item, ...]
    debris: tuple[str, ...]
    index_bytes: int
    disk: int

    def spans(self, root: str, kinds: Iterable[str] = KINDS) -> Iterator[Span]:
        """Yield the spans of the images of these kinds in the namespace whose root key is `root` (hex); they are read when
        asked for.
        """
        numbers = ", ".join(str(KINDS.index(kind)) for kind in kinds)
        directory = Directory(self.directory)
        with reading(directory.index, live=holder(directory) is not None) as connection:
            rows = connection.execute(
                "SELECT kind, start, length, extra FROM image "
                f"WHERE namespace = (SELECT id FROM namespace WHERE root = ?) AND kind IN ({numbers})",
                [bytes.fromhex(root)],
            )
            for kind, *rest in rows:
                yield Span(KINDS[kind], *rest)


def survey(directory: str | os.PathLike[str]) -> Survey:
    """Look what is in a directory. Raises DirectoryError when there is none or it is not a cache's, NewerFormat when a newer
    release wrote it.
    """
    there = Directory(directory)
    there.require()
    owner = holder(there) or ""
    namespaces: tuple[NamespaceSurvey, ...] = ()
    clean, problem = False, ""
    try:
        with reading(there.index, live=bool(owner)) as connection:
            check_rows(connection)
            namespaces = tuple(_namespaces(connection))
            clean = read_clean(connection)
    except IndexBroken as error:
        problem = str(error)
    return Survey(
        directory=str(there.root),
        holder=owner,
        problem=problem,
        clean=clean,
        namespaces=namespaces,
        quarantine=tuple(quarantined(there)),
        debris=tuple(sorted(item.name for item in there.strays())),
        index_bytes=sum(disk_at(path) for path in IndexFiles.of(there.index)),
        disk=there.size(),
    )


def _namespaces(connection: Any) -> Iterator[NamespaceSurvey]:
    spaces = connection.execute("SELECT id, root, model, codec, layout, created FROM namespace ORDER BY id").fetchall()
    sums: dict[int, dict[str, tuple[Any, ...]]] = {}
    for space, kind, *rest in connection.execute(
        "SELECT namespace, kind, count(*), sum(nbytes), sum(disk), sum(length), min(created), max(created), max(used), "
        "sum(hits), max(used_at) FROM image GROUP BY namespace, kind"
    ):
        sums.setdefault(space, {})[KINDS[kind]] = tuple(rest)
    for number, root, model, codec, layout, created in spaces:
        kinds = sums.get(number, {})
        counts = {kind: Count(*kinds[kind][:3]) if kind in kinds else Count() for kind in KINDS}
        rows = list(kinds.values())
        yield NamespaceSurvey(
            root.hex(),
            model,
            codec,
            layout,
            created,
            counts[ROWS],
            counts[WINDOW],
            counts[SNAPSHOT],
            tokens=kinds[ROWS][3] if ROWS in kinds else 0,
            oldest=min((row[4] for row in rows), default=0.0),
            newest=max((row[5] for row in rows), default=0.0),
            last_used=max((row[6] for row in rows), default=0),
            last_used_at=max((row[8] for row in rows), default=0.0),
            hits=sum(row[7] for row in rows),
        )
