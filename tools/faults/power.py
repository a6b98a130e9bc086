"""What a power cut leaves: worked out from the journal of a run, for any moment of it.

File data is durable once that file was fsynced, a name once its folder was; a rename is whole or has not happened, and is
durable with either of its folders. Of what is not durable yet a disk may keep any part: each of `VARIANTS` is one that
real disks leave. After an fsync that failed, the bytes that it should have written are lost, whatever a later one says.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import struct
from pathlib import Path
from typing import Any, NamedTuple

VARIANTS = {
    "dropped": "all of it",
    "names": "its data: names are there, files end where they ended when they were synced",
    "zeros": "its data: names and lengths are there, with zeros",
    "some": "a part of it, by chance; of some writes the second half",
}  # what of the unsynced is missing
EVERYTHING = "everything"  # no power cut: what the kernel would have shown
NEVER = 1 << 60

_HEAD = struct.Struct("<ciqqII")


class Effect(NamedTuple):
    """One change to a file's bytes or to a folder's names, made by call `at`, durable from call `durable` on."""

    at: int
    durable: int
    do: str  # "write", "cut", "link", "unlink", "rename"
    node: int  # whose bytes, or what is named
    folder: int = 0
    name: str = ""
    source: int = 0  # of a rename
    old: str = ""
    offset: int = 0
    data: bytes = b""


class Journal:
    """The calls of some runs, one after the other, as effects on a disk, and the words that were said between them."""

    def __init__(self, root: str | os.PathLike[str], *paths: str | os.PathLike[str]):
        self.effects: list[Effect] = []
        self.words: list[tuple[int, list[Any]]] = []
        self.failed: list[int] = []  # the calls that were an fsync and failed
        self.length = 0  # calls in all
        self._root = os.path.realpath(root)
        self._names: dict[int, dict[str, int]] = {0: {}}
        self._made = 0
        self._pending: dict[int, list[dict[str, Any]]] = {}
        self._draft: list[dict[str, Any]] = []
        for path in paths:
            self._read(Path(path).read_bytes())
        self.effects = [Effect(**one) for one in self._draft]

    def _read(self, raw: bytes) -> None:
        handles: dict[int, int] = {}
        draft, pending = self._draft, self._pending
        at, call = 0, self.length

        def effect(*owners: int, **more: Any) -> None:
            made = {"at": call, "durable": NEVER, **more}
            draft.append(made)
            for owner in owners:
                pending.setdefault(owner, []).append(made)

        while at < len(raw):
            op, handle, a, _, path_size, data_size = _HEAD.unpack_from(raw, at)
            at += _HEAD.size
            path, at = raw[at : at + path_size].decode(), at + path_size
            data, at = raw[at : at + data_size], at + data_size
            if op == b"Y":
                self.words += [(call, json.loads(line)) for line in data.decode().splitlines()]
                continue
            call += 1
            if op == b"O":
                folder, name = self._parent(path)
                node = self._find(path)
                if node is None:
                    node = self._new(folder, name)
                    effect(folder, do="link", node=node, folder=folder, name=name)
                elif a & os.O_TRUNC:
                    effect(node, do="cut", node=node, offset=0)
                handles[handle] = node
            elif op == b"W":
                effect(handles[handle], do="write", node=handles[handle], offset=a, data=data)
            elif op == b"T":
                effect(handles[handle], do="cut", node=handles[handle], offset=a)
            elif op == b"S":
                for one in pending.pop(handles[handle], ()):
                    if a == 0:
                        one["durable"] = min(one["durable"], call)
                    elif one["do"] not in ("write", "cut"):
                        pending.setdefault(handles[handle], []).append(one)
                if a != 0:
                    self.failed.append(call)
            elif op == b"M":
                folder, name = self._parent(path)
                node = self._new(folder, name)
                self._names[node] = {}
                effect(folder, do="link", node=node, folder=folder, name=name)
            elif op in (b"U", b"D"):
                folder, name = self._parent(path)
                effect(folder, do="unlink", node=self._names[folder].pop(name), folder=folder, name=name)
            elif op == b"R":
                (source, old), (folder, name) = self._parent(path), self._parent(data.decode())
                node = self._names[source].pop(old)
                self._names[folder][name] = node
                effect(folder, source, do="rename", node=node, folder=folder, name=name, source=source, old=old)
        self.length = call

    def _new(self, folder: int, name: str) -> int:
        self._made += 1
        self._names[folder][name] = self._made
        return self._made

    def _find(self, path: str) -> int | None:
        node: int | None = 0
        for name in path[len(self._root) :].split("/"):
            if name and node is not None:
                node = self._names[node].get(name)
        return node

    def _parent(self, path: str) -> tuple[int, str]:
        folder = self._find(os.path.dirname(path))
        if not path[len(self._root) :].strip("/"):
            return 0, ""
        assert folder is not None, path
        return folder, os.path.basename(path)

    def said(self, moment: int) -> list[list[Any]]:
        """The words that bind after call `moment`: what was let go of just then may still be asked for."""
        said = [(at, word) for at, word in self.words if at <= moment]
        while said and said[-1][0] == moment and said[-1][1][0] in ("leaving", "outgrown"):
            said.pop()
        return [word for _, word in said]

    def acknowledged(self, since: int) -> list[int]:
        """The moments from `since` on at which something was promised."""
        return [moment for moment, word in self.words if word[0] == "have" and moment >= since]

    def cut(self, moment: int, variant: str, seed: int = 0) -> Disk:
        """The disk when the power goes after call `moment`."""
        disk, chance = Disk(), random.Random(f"{moment} {seed}")
        for effect in self.effects:
            if effect.at > moment:
                break
            if effect.durable <= moment or variant == EVERYTHING:
                disk.apply(effect)
            elif variant == "some":
                if chance.random() < 0.5:
                    whole = effect.do != "write" or chance.random() < 0.7
                    disk.apply(effect if whole else effect._replace(data=effect.data[: len(effect.data) // 2]))
            elif variant in ("names", "zeros"):
                if effect.do != "write":
                    disk.apply(effect)
                elif variant == "zeros":
                    disk.apply(effect._replace(data=bytes(len(effect.data))))
        return disk


class Disk:
    """Folders and files by number; 0 is the root."""

    def __init__(self) -> None:
        self.folders: dict[int, dict[str, int]] = {0: {}}
        self.files: dict[int, bytearray] = {}

    def apply(self, effect: Effect) -> None:
        if effect.do == "write":
            data = self.files.setdefault(effect.node, bytearray())
            data.extend(bytes(max(0, effect.offset - len(data))))
            data[effect.offset : effect.offset + len(effect.data)] = effect.data
        elif effect.do == "cut":
            data = self.files.setdefault(effect.node, bytearray())
            data.extend(bytes(max(0, effect.offset - len(data))))
            del data[effect.offset :]
        else:
            names = self.folders.setdefault(effect.folder, {})
            if effect.do == "unlink":
                if names.get(effect.name) == effect.node:
                    del names[effect.name]
                return
            if effect.do == "rename":
                sources = self.folders.setdefault(effect.source, {})
                if sources.get(effect.old) == effect.node:
                    del sources[effect.old]
            names[effect.name] = effect.node

    def tree(self, folders: set[int]) -> dict[str, bytes | None]:
        """What can be reached: path -> bytes, None for a folder. `folders`: the numbers that are folders."""
        found: dict[str, bytes | None] = {}

        def walk(node: int, path: str) -> None:
            for name, child in self.folders.get(node, {}).items():
                where = f"{path}/{name}" if path else name
                if child in folders:
                    found[where] = None
                    walk(child, where)
                else:
                    found[where] = bytes(self.files.get(child, b""))

        walk(0, "")
        return found


def tree_after(journal: Journal, moment: int, variant: str, seed: int = 0) -> dict[str, bytes | None]:
    """What stands on the disk when the power goes after call `moment`: path -> bytes, None for a folder."""
    return journal.cut(moment, variant, seed).tree(set(journal._names))


def digest(tree: dict[str, bytes | None]) -> str:
    state = hashlib.blake2b(digest_size=16)
    for path in sorted(tree):
        data = tree[path]
        state.update(f"{path}\0{-1 if data is None else len(data)}\0".encode())
        state.update(data or b"")
    return state.hexdigest()


def lay_out(tree: dict[str, bytes | None], room: Path) -> None:
    """Make these files and folders, with the modes that the cache gives them."""
    for path in sorted(tree):
        data = tree[path]
        if data is None:
            (room / path).mkdir(mode=0o700)
        else:
            (room / path).write_bytes(data)
            (room / path).chmod(0o600)
