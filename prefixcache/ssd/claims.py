"""What a root key stands for, where files and the index may say different things of it, by error or by forgery.

A root key follows from model, codec, layout and salt (`keys.root_key`). Without a salt anybody can compute it, so such a
statement is proven or it isn't. With one only who knows the salt can: `PrefixCache` compares when it first computes a root.
Used where files are adopted that this process did not write.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from enum import Enum
from functools import lru_cache

from prefixcache import keys
from prefixcache.ssd.entries import NamespaceRow

FALSE = "the model, codec or layout is not that of the namespace which has this root key"


class Verdict(Enum):
    """What becomes of a statement. `OVERRULES`: it is proven, and what came in under the one believed so far is forged."""

    BELIEVED, OVERRULES, FALSE = range(3)


class Claims:
    """By root key, the statement that is believed: a proven one, else the first that was heard. Not thread-safe."""

    def __init__(self, known: Iterable[NamespaceRow] = ()):
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
    """ValueError unless model, codec and layout are in the one form that a cache writes: else one namespace had many."""
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
    """Whether the root key is that of the model, codec and layout without a salt."""
    return _is_root(space.root, *space.stated)


@lru_cache(1024)
def _is_root(root: bytes, model: str, codec: str, layout: str) -> bool:
    try:
        return keys.root_key(model, json.loads(codec), json.loads(layout), b"") == root
    except (ValueError, RecursionError):
        return False
