"""Which images an operator means: namespaces by model or root key, and what every image hangs on. Reads the index alone."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator

import numpy as np

from prefixcache.image import KINDS
from prefixcache.ssd.entries import Address, Namespace
from prefixcache.ssd.errors import SsdError

_FEW = 20  # names in an error


class NoSuchNamespace(SsdError):
    """Nothing in the index is of the model or namespace that was named, or more than one namespace is."""


class Node:
    """An image and what it can't be used without: `holders`, the block it stands on and, of a snapshot, the rows up to its
    boundary. `hanging` counts those that hang on it and have not left.
    """

    __slots__ = (
        "disk", "hanging", "holders", "id", "key", "kind", "parent", "root", "start", "stays", "used", "used_at",
    )  # fmt: skip

    def __init__(self, row: tuple[int, int, bytes, bytes, bytes, int, int, int, float]):
        self.id, kind, self.key, self.root, self.parent, self.start, self.disk, self.used, self.used_at = row
        self.kind = KINDS[kind]
        self.holders: list[Node] = []
        self.hanging = 0
        self.stays = False

    @property
    def address(self) -> Address:
        return self.kind, self.key


def namespaces(connection: sqlite3.Connection, model: str | None, root: str | None) -> dict[bytes, Namespace]:
    """Those that `model` means, and whose root key begins with these hex digits; all where neither is given."""
    rows = connection.execute("SELECT root, model, codec, layout, created FROM namespace ORDER BY id")
    found = [Namespace(*row) for row in rows]
    if model is not None:
        meant = model_meant(model, [space.model for space in found])
        found = [space for space in found if space.model == meant]
    if root is not None:
        found = [space for space in found if root and space.root.hex().startswith(root.lower())]
        if len(found) != 1:
            which = "no namespace" if not found else f"{len(found)} namespaces"
            raise NoSuchNamespace(
                f"--namespace {root!r}: {which} of that beginning; prefixcache inspect --json lists their root keys"
            )
    return {space.root: space for space in found}


def model_meant(name: str, models: Iterable[str]) -> str:
    """The one of `models` that `name` means: itself, or the one of `name@hash`, which is how `model_identity` calls it.
    NoSuchNamespace, which lists them, where there is none or there are several.
    """
    known = sorted(set(models))
    if name in known:
        return name
    found = [model for model in known if model.partition("@")[0] == name]
    if len(found) == 1:
        return found[0]
    if found:
        raise NoSuchNamespace(f"--model {name!r}: {len(found)} models have that name; give one whole: {_listed(found)}")
    there = f"there are {_listed(known)}" if known else "there is none of any"
    raise NoSuchNamespace(f"--model {name!r}: nothing is of that model; {there}")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _FEW} more, which prefixcache inspect lists" if len(names) > _FEW else ""
    return ", ".join(map(repr, names[:_FEW])) + more


def nodes(connection: sqlite3.Connection, roots: Iterable[bytes]) -> list[Node]:
    """Every image of these namespaces, with what it hangs on."""
    found: dict[Address, Node] = {}
    ids = dict(connection.execute("SELECT root, id FROM namespace"))
    for root in roots:
        for row in connection.execute(
            "SELECT id, kind, key, ?, parent, start, disk, used, used_at FROM image WHERE namespace = ?",
            [root, ids[root]],
        ):
            node = Node(row)
            found[node.address] = node
    for node in found.values():
        if (holder := found.get(("rows", node.parent))) is not None:
            node.holders.append(holder)
    for snapshot, rows in _covers(connection, found):
        snapshot.holders.append(rows)
    return list(found.values())


def _covers(connection: sqlite3.Connection, found: dict[Address, Node]) -> Iterator[tuple[Node, Node]]:
    """Of each snapshot the rows that go on from its block up to its boundary; of several the ones used last."""
    snapshots = [node for node in found.values() if node.kind == "snapshot"]
    parents = {node.parent for node in snapshots}
    kids: dict[bytes, list[tuple[Node, bytes]]] = {}
    for node in found.values():
        if node.kind == "rows" and node.parent in parents:
            kids.setdefault(node.parent, []).append((node, _tokens(connection, node)))
    for snapshot in snapshots:
        suffix = _tokens(connection, snapshot)
        covering = [node for node, tokens in kids.get(snapshot.parent, ()) if tokens.startswith(suffix)]
        if covering:
            yield snapshot, max(covering, key=lambda node: (node.used, node.used_at))


def _tokens(connection: sqlite3.Connection, node: Node) -> bytes:
    """As raw int64; the index keeps them as int32 where they fit."""
    row = connection.execute(
        "SELECT length, tokens FROM image JOIN tokens USING (id) WHERE id = ?", [node.id]
    ).fetchone()
    if row is None:
        return b""
    length, tokens = row
    return np.frombuffer(tokens, "<i4").astype("<i8").tobytes() if len(tokens) == 4 * length else bytes(tokens)
