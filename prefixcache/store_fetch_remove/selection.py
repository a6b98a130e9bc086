"""Which images an operator means: by model, by namespace, by last use. No I/O here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from prefixcache.ssd.entries import NamespaceRow
from prefixcache.ssd.errors import SsdError

_FEW = 20  # names in an error


class NoSuchNamespace(SsdError):
    """Nothing in the index is of the model or namespace that was named, or the prefix fits several namespaces."""


class Selection(NamedTuple):
    """Which images: of a model, of a namespace (the beginning of its root key, in hex), last used before a Unix time, the
    least recently used until the directory takes `to_size` real bytes; None: not filtered by. `quarantine`: what was
    quarantined, too.
    """

    model: str | None = None
    namespace: str | None = None
    used_before: float | None = None
    to_size: int | None = None
    quarantine: bool = False

    @property
    def of_images(self) -> bool:
        return any(part is not None for part in self[:4])


def selected_namespaces(namespaces: list[NamespaceRow], selection: Selection) -> dict[bytes, NamespaceRow]:
    """Return the selected namespaces by root key: all if the selection names no model and no namespace. Raises
    NoSuchNamespace if a name fits none or several.
    """
    if selection.model is not None:
        model = model_meant(selection.model, [namespace.model for namespace in namespaces])
        namespaces = [namespace for namespace in namespaces if namespace.model == model]
    root = selection.namespace
    if root is not None:
        namespaces = [space for space in namespaces if root and space.root.hex().startswith(root.lower())]
        if len(namespaces) != 1:
            which = "no namespace" if not namespaces else f"{len(namespaces)} namespaces"
            raise NoSuchNamespace(
                f"namespace {root!r}: {which} whose root key begins so; prefixcache inspect --json lists their root keys"
            )
    return {namespace.root: namespace for namespace in namespaces}


def model_meant(name: str, models: Iterable[str]) -> str:
    """Return the one of `models` that `name` means: itself, the one of `name@hash`, as `model_identity` names models, or the
    one of `name|part`, as ranks do. Raises NoSuchNamespace, which lists them, if there is none or there are several.
    """
    known = sorted(set(models))
    if name in known:
        return name
    namesakes = [model for model in known if name in (model.partition("@")[0], model.partition("|")[0])]
    if len(namesakes) == 1:
        return namesakes[0]
    if namesakes:
        several = f"{len(namesakes)} models have that name; give one whole: {_listed(namesakes)}"
        raise NoSuchNamespace(f"model {name!r}: {several}")
    listed = f"there are {_listed(known)}" if known else "the index is empty"
    raise NoSuchNamespace(f"model {name!r}: nothing is of that model; {listed}")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _FEW} more, which prefixcache inspect lists" if len(names) > _FEW else ""
    return ", ".join(map(repr, names[:_FEW])) + more
