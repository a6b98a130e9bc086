"""`CacheForm`: what a caller's own prompt caches are like, so that a hit of another form is left alone.

A namespace has the layout that its caches were stored with. The same weights may have several: a program with `max_kv_size`
makes rings where another makes plain caches, and a release of mlx-lm may keep other rows for a layer. `PrefixCache.prompt`
asks a form which of them can stand in for what the caller makes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from typing import Any

from prefixcache.keys import canonical
from prefixcache.layers.adapters import CacheError, Layout
from prefixcache.layers.reading import read


class CacheForm:
    """The form of prompt caches that a caller makes: the classes of the layers, their attributes (`max_size`, `bits`), and of
    layers that have seen a token, the heads, widths and dtypes of their rows. Any thread may call anything.
    """

    def __init__(self, *prompt_caches: list[Any]):
        """Learn the form of `prompt_caches`, as the caller makes them, of each form that they may have. They are read,
        never evaluated or kept. Raises CacheError for one that a PrefixCache could not keep, ValueError for none.
        """
        if not prompt_caches:
            raise ValueError("CacheForm() of no prompt cache: give one as make_prompt_cache(model) makes it")
        self._alike = [_layers(read(prompt_cache).layout) for prompt_cache in prompt_caches]
        self.is_recurrent = any(map(_has_state, chain(*self._alike)))
        """Whether the caller's prompt caches have state that can't be cut by token."""
        self._differences: dict[str, str] = {}  # by layout

    @classmethod
    def of(cls, like: CacheForm | list[Any]) -> CacheForm:
        return like if isinstance(like, CacheForm) else cls(like)

    @classmethod
    def of_kept(cls, *prompt_caches: list[Any]) -> CacheForm | None:
        """Return the form; None, which is any, where a PrefixCache could not keep such prompt caches anyway."""
        try:
            return cls(*prompt_caches)
        except CacheError:
            return None

    def difference(self, layout: str) -> str:
        """Say where prompt caches of a layout (JSON) differ from the caller's; "" where they don't."""
        known = self._differences.get(layout)
        if known is None:
            stored = _layers(json.loads(layout))
            differences = [_difference(stored, given) for given in self._alike]
            known = self._differences[layout] = "" if "" in differences else differences[0]
        return known

    def learn(self, layout: Layout) -> None:
        """Take this layout for one that the caller makes, too: it has stored a prompt cache of it."""
        self._differences[canonical(layout)] = ""


def _layers(layout: Layout) -> list[Layout]:
    return [layout["kinds"][kind] for kind in layout["layers"]]


def _has_state(layer: Layout) -> bool:
    return layer["kind"] == "snapshot" or any(map(_has_state, layer.get("children", ())))


def _difference(stored: list[Layout], given: list[Layout]) -> str:
    if len(stored) != len(given):
        return f"{len(stored)} layers, not {len(given)}"
    differences = (
        text for at, pair in enumerate(zip(stored, given, strict=True)) for text in _differing(f"layer {at}", *pair)
    )
    return next(differences, "")


def _differing(at: str, stored: Layout, given: Layout) -> Iterator[str]:
    """Say in words where a stored layer is of another form than one that the caller makes."""
    if (stored["class"], stored["kind"]) != (given["class"], given["kind"]):
        yield f"{at} is a {_name(stored)}, not a {_name(given)}"
    elif stored["kind"] == "list":
        if len(stored["children"]) != len(given["children"]):
            yield f"{at} has {len(stored['children'])} caches, not {len(given['children'])}"
        for number, pair in enumerate(zip(stored["children"], given["children"], strict=False)):
            yield from _differing(f"{at}.{number}", *pair)
    elif stored.get("attrs") != given.get("attrs"):
        yield f"{at} ({_name(stored)}) has {_words(stored['attrs'])}, not {_words(given['attrs'])}"
    elif given.get("streams") and stored.get("streams") != given["streams"]:
        yield f"{at} ({_name(stored)}) has rows of {_rows(stored)}, not of {_rows(given)}"


def _name(layer: Layout) -> str:
    return str(layer["class"]).rpartition(".")[2]


def _words(attributes: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in attributes.items()) or "no attributes"


def _rows(layer: Layout) -> str:
    streams = layer.get("streams") or ()
    return ", ".join(f"{name} {heads} x {width} {dtype}" for name, _, heads, width, dtype, _ in streams) or "no tokens"
