"""Images of a directory, live or dead, into an archive. Takes no lock and writes nothing into the directory: images never
change, and those that leave meanwhile are left out. Each is read and checked before it goes in.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO, NamedTuple

from prefixcache.ssd.archive import MANIFEST, Packer, manifest_bytes
from prefixcache.ssd.choosing import Node, namespaces, nodes
from prefixcache.ssd.directory import Directory, holder
from prefixcache.ssd.entries import FOLDERS, Entry, Namespace, Progress
from prefixcache.ssd.files import Damaged, read_image
from prefixcache.ssd.formats import refuse_newer
from prefixcache.ssd.index import check_rows, reading


class LeftOut(NamedTuple):
    """An image that did not go in. `gone`: it has left the live directory meanwhile."""

    name: str
    reason: str
    gone: bool = False


class Space(NamedTuple):
    """A namespace in the archive: its images and their bytes."""

    root: str
    model: str
    images: int
    nbytes: int


@dataclass(frozen=True)
class Exported:
    """What went in. `nbytes` are of the images, `archive_bytes` of the whole archive (0: a dry run)."""

    directory: str
    dry_run: bool
    live: bool
    spaces: tuple[Space, ...]
    images: int
    nbytes: int
    archive_bytes: int
    left_out: tuple[LeftOut, ...]

    @property
    def damaged(self) -> int:
        return sum(not one.gone for one in self.left_out)

    def as_dict(self) -> dict[str, Any]:
        return {
            **asdict(self), "spaces": [space._asdict() for space in self.spaces],
            "left_out": [one._asdict() for one in self.left_out],
        }  # fmt: skip


def export(
    directory: str | os.PathLike[str],
    stream: BinaryIO | None,
    *,
    model: str | None = None,
    namespace: str | None = None,
    release: str = "",
    progress: Progress | None = None,
) -> Exported:
    """Write the images of a model, of a namespace (the beginning of its root key, in hex) or all; without a stream say what
    would be.

    Raises DirectoryError when it is not a cache's or is newer, IndexBroken, NoSuchNamespace, OSError of the stream.
    """
    there = Directory(directory)
    there.require()
    refuse_newer(there)
    live = holder(there) is not None
    with reading(there.index, live=live) as connection:
        check_rows(connection)
        spaces = namespaces(connection, model, namespace)
        chosen = nodes(connection, spaces)
    run = _Run(there, spaces, chosen, live, progress)
    if stream is not None:
        packer = Packer(stream)
        packer.add(
            MANIFEST, manifest_bytes({"release": release, "created": time.time(), **run.manifest()}), time.time()
        )
        run.pack(packer)
        packer.end()
        written = packer.nbytes
    else:
        run.images, run.nbytes, written = len(chosen), sum(node.nbytes for node in chosen), 0
    return Exported(
        str(there.root), stream is None, live, run.spaces, run.images, run.nbytes, written,
        tuple(run.left_out),
    )  # fmt: skip


class _Run:
    def __init__(
        self,
        there: Directory,
        spaces: dict[bytes, Namespace],
        chosen: list[Node],
        live: bool,
        progress: Progress | None,
    ):
        self._there, self._chosen, self._live, self._progress = there, chosen, live, progress
        sums: dict[bytes, list[int]] = {root: [0, 0] for root in spaces}
        for node in chosen:
            sums[node.root][0] += 1
            sums[node.root][1] += node.nbytes
        self.spaces = tuple(Space(root.hex(), spaces[root].model, *both) for root, both in sums.items())
        self.images = self.nbytes = 0
        self.left_out: list[LeftOut] = []

    def manifest(self) -> dict[str, Any]:
        return {
            "images": len(self._chosen),
            "nbytes": sum(node.nbytes for node in self._chosen),
            "namespaces": [space._asdict() for space in self.spaces],
        }

    def pack(self, packer: Packer) -> None:
        lost: dict[bytes, bool] = {}  # blocks that are not in the archive: whether they have left meanwhile
        for done, node in enumerate(_parents_first(self._chosen), 1):
            name = f"{FOLDERS[node.kind]}/{node.key.hex()}.safetensors"
            problem = self._add(packer, node, name, lost)
            if problem is not None:
                self.left_out.append(problem._replace(name=name))
                if node.kind == "rows":
                    lost[node.key] = problem.gone
            if self._progress:
                self._progress(done, len(self._chosen))

    def _add(self, packer: Packer, node: Node, name: str, lost: dict[bytes, bool]) -> LeftOut | None:
        above = any(holder.key == node.parent for holder in node.holders)
        if node.parent in lost or not (above or node.parent == node.root):
            return LeftOut(name, "the block that it hangs on is not in the archive", lost.get(node.parent, False))
        entry = Entry(node.kind, node.key, node.root, node.parent, 0, b"", node.nbytes, node.checksum)
        try:
            image = read_image(self._there.file(node.address), entry)
        except Damaged as error:
            return LeftOut(name, str(error), self._live and error.identity is None)
        except OSError as error:
            return LeftOut(name, os.strerror(error.errno or 0))
        packer.add(name, image.data.data, node.used_at)
        self.images += 1
        self.nbytes += image.nbytes
        return None


def _parents_first(chosen: list[Node]) -> Iterator[Node]:
    """Those that were used last first, none before the block that it hangs on."""
    came: set[int] = set()
    for node in sorted(chosen, key=lambda node: (-node.used, node.start, node.kind != "rows", node.id)):
        above: list[Node] = []
        one: Node | None = node
        while one is not None and one.id not in came:
            came.add(one.id)
            above.append(one)
            one = next((holder for holder in one.holders if holder.key == one.parent), None)
        yield from reversed(above)
