"""Where each stream of a prompt cache stands in its images.

A prompt cache is read into a *layout* (JSON, the same for all caches of a model) and its live leaves. A `Plan`, made
of a layout and a codec, says which tensors a rows image, a window image and a snapshot have. Streams of equal codec,
width and dtype share a tensor, token-major: (tokens, heads of all their layers, ...). `encode` and `decode` follow
it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from prefixcache.blocks.masks import extra_of, mask_of
from prefixcache.blocks.node import Window
from prefixcache.codecs import Codec, RawRows, RowCodec, Stream
from prefixcache.codecs.interchange import element
from prefixcache.image import DTYPES, Image, Spec
from prefixcache.keys import BLOCK, canonical
from prefixcache.layers.adapters import CacheError, Layout, Leaf, check_kept, find_class, read_leaf

LIST = "mlx_lm.models.cache.CacheList"

# Of a leaf: each stream, the codec of its rows, and whether that is raw where the user's codec is not
_Coding = list[tuple[list[Any], RowCodec, bool]]


class Reading(NamedTuple):
    """A prompt cache, read: its layout, its leaves in depth-first order, and the tokens that all of them have seen.

    `positions` is None when no layer counts tokens. `agreed`: all layers that count say the same.
    """

    layout: Layout
    leaves: list[Leaf]
    positions: int | None
    agreed: bool


def read(prompt_cache: Any) -> Reading:
    """Read mlx-lm's list of layer caches. CacheError names the layer that can't be kept and what to do."""
    if not isinstance(prompt_cache, (list, tuple)) or not prompt_cache:
        raise CacheError(
            f"prompt cache of type {type(prompt_cache).__name__}: pass the list of layer caches, "
            "as make_prompt_cache gives"
        )
    leaves: list[Leaf] = []
    kinds: dict[str, int] = {}
    order = [
        kinds.setdefault(canonical(_read_layer(c, f"layer {i}", leaves)), len(kinds))
        for i, c in enumerate(prompt_cache)
    ]
    counted = [leaf.positions for leaf in leaves if leaf.positions is not None]
    layout = {"kinds": [json.loads(kind) for kind in kinds], "layers": order}
    return Reading(layout, leaves, min(counted, default=None), len(set(counted)) <= 1)


def _read_layer(cache: Any, at: str, leaves: list[Leaf]) -> Layout:
    if _is_list(type(cache)):
        children = [_read_layer(c, f"{at}.{i}", leaves) for i, c in enumerate(cache.caches)]
        path = f"{type(cache).__module__}.{type(cache).__qualname__}"
        check_kept(path, at)
        return {"class": path, "kind": "list", "tuple": isinstance(cache.caches, tuple), "children": children}
    leaf = read_leaf(cache, at)
    leaves.append(leaf)
    return leaf.layout


def _is_list(cls: type) -> bool:
    return any(f"{base.__module__}.{base.__qualname__}" == LIST for base in cls.__mro__)


class Member(NamedTuple):
    """One stream within its group's tensor: leaf and stream name, and the heads that are its own."""

    leaf: int
    stream: str
    head: int
    heads: int


class Group(NamedTuple):
    """Streams that share a tensor per plane of their codec; `names[i]` is plane i's tensor. Where the codec levels rows,
    `mean` and `root` name the tensors of their levels, one of each an image; `mean` is "" where rows aren't centred.
    """

    codec: RowCodec
    names: tuple[str, ...]
    members: tuple[Member, ...]
    heads: int
    mean: str
    root: str

    def specs(self, tokens: int) -> Iterator[Spec]:
        for name, plane in zip(self.names, self.codec.planes, strict=True):
            yield Spec(name, plane.dtype, (tokens, self.heads, *plane.shape))
        sides = (self.heads, self.codec.width)
        if self.mean and tokens:
            yield Spec(self.mean, "BF16", sides)
        if self.root and tokens:
            yield Spec(self.root, "U8", sides)


class Section(NamedTuple):
    """Groups whose tensors have the same tokens."""

    groups: tuple[Group, ...]

    def specs(self, tokens: int) -> list[Spec]:
        return [spec for group in self.groups for spec in group.specs(tokens)]


class Plan:
    """Which tensors the images of one namespace have. Made of the layout and the codec alone; immutable.

    rows image: `rows` for each token of a whole block, `tails` for each of one that is still to grow, which are the same
    streams as they are; `kept[i]`, raw, for the tokens before windows[i].keep (a ring's first tokens stay with the rows,
    or they would be the first to grow cold), and beside `rows` `sinks`, raw, for the codec's first `sink_tokens`. window
    image: `windowed[i]`, or for an unfinished block `window_tails[i]`, for the tokens in its ranges, and beside
    `windowed[i]` `window_sinks[i]`, raw, for those that are sinks. snapshot: the leaves in `snapshots`, each by itself. A
    live cache that has only codes of a tail leaves them in `rows`.
    """

    def __init__(self, layout: Layout, codec: Codec):
        self.layout = layout
        self.layers = [layout["kinds"][kind] for kind in layout["layers"]]
        self.leaves: list[Layout] = []
        self.layer_of: list[int] = []
        for index, layer in enumerate(self.layers):
            self._collect(layer, index)
        windowed = [leaf for leaf in self.leaves if leaf.get("streams") and "window" in leaf]
        self.windows = tuple(dict.fromkeys(Window(*leaf["window"]) for leaf in windowed))
        self.snapshots = [i for i, leaf in enumerate(self.leaves) if leaf["kind"] == "snapshot"]
        streams = [_streams(leaf, self.layer_of[i], len(self.layers), codec) for i, leaf in enumerate(self.leaves)]
        self.raw = sorted({self.layer_of[i] for i, own in enumerate(streams) for _, row, forced in own if forced})
        sliceable = [i for i, leaf in enumerate(self.leaves) if leaf["kind"] == "sliceable"]
        by_window = [
            [i for i, leaf in enumerate(self.leaves) if leaf.get("streams") and leaf.get("window") == list(window)]
            for window in self.windows
        ]
        as_they_are: list[_Coding] = [
            [(stream, RawRows(row.width, row.dtype), False) for stream, row, _ in own] for own in streams
        ]
        coded: list[_Coding] = [
            [(stream, RawRows(row.width, row.dtype), False) for stream, row, _ in own if not isinstance(row, RawRows)]
            for own in streams
        ]
        self.rows = _section("r", sliceable, streams)
        # Where no row is coded, a tail's are no other than a block's.
        self.lossless = all(isinstance(row, RawRows) for own in streams for _, row, _ in own)
        self.tails = self.rows if self.lossless else _section("t", sliceable, as_they_are)
        self.kept = [_section(f"k{w}.", leaves, as_they_are) for w, leaves in enumerate(by_window)]
        self.windowed = [_section(f"w{w}.", leaves, streams) for w, leaves in enumerate(by_window)]
        tails = [_section(f"v{w}.", leaves, as_they_are) for w, leaves in enumerate(by_window)]
        self.window_tails = self.windowed if self.lossless else tails
        self.sink_tokens = codec.sink_tokens
        self.sinks = _section("s.", sliceable if self.sink_tokens else [], coded)
        self.window_sinks = [
            _section(f"x{w}.", own if self.sink_tokens else [], coded) for w, own in enumerate(by_window)
        ]
        # Where each stream stands: leaf -> stream -> (group, member), in `rows` or `windowed`; in `tails`, `kept` or
        # `window_tails`; in `sinks` or `window_sinks`.
        self.places = self._placed(self.rows, *self.windowed)
        self.tail_places = self._placed(self.tails, *self.window_tails)
        self.sink_places = self._placed(self.sinks, *self.window_sinks)

    def _placed(self, *sections: Section) -> list[dict[str, tuple[int, Member]]]:
        places: list[dict[str, tuple[int, Member]]] = [{} for _ in self.leaves]
        for section in sections:
            for g, group in enumerate(section.groups):
                for member in group.members:
                    places[member.leaf][member.stream] = (g, member)
        return places

    def _collect(self, layer: Layout, index: int) -> None:
        if layer["kind"] == "list":
            for child in layer["children"]:
                self._collect(child, index)
        else:
            self.leaves.append(layer)
            self.layer_of.append(index)

    def check_classes(self) -> None:
        """CacheError for a class that is not allowed here, or not in this release of its package."""
        for kind in self.layout["kinds"]:
            _check_class(kind)

    def kept_tokens(self, window: int, start: int, tokens: int) -> int:
        """How many of a block's tokens have `kept` rows in its rows image."""
        return min(max(self.windows[window].keep - start, 0), tokens)

    def in_rows(self, start: int, tokens: int, coded: bool) -> list[tuple[Section, int]]:
        """The sections that the rows image of `tokens` tokens from `start` on has, and of how many of the tokens each.

        `coded`: as a whole block's are; else as a tail's.
        """
        sinks = min(max(self.sink_tokens - start, 0), tokens) if coded else 0
        own = [(section, self.kept_tokens(w, start, tokens)) for w, section in enumerate(self.kept)]
        rows = self.rows if coded else self.tails
        return [(rows, tokens), *((s, n) for s, n in [*own, (self.sinks, sinks)] if s.groups and n)]

    def rows_specs(self, start: int, tokens: int, coded: bool) -> list[Spec]:
        specs = [spec for section, count in self.in_rows(start, tokens, coded) for spec in section.specs(count)]
        return [*specs, Spec("tokens", "I64", (tokens,))]

    def is_coded(self, tensors: dict[str, np.ndarray]) -> bool:
        """Whether a rows image has its rows as a whole block's has them."""
        return all(name in tensors for group in self.rows.groups for name in group.names)

    def sunk(self, start: int) -> int:
        """Of the block that begins at `start` the tokens, as a mask, that are kept as they are beside their codes."""
        return mask_of(0, self.sink_tokens - start)

    def window_specs(self, mask: tuple[int, ...], start: int, coded: bool) -> list[Spec]:
        """`coded`: of a whole block, else of a tail."""
        specs = []
        for w, section in enumerate(self.windowed if coded else self.window_tails):
            specs += section.specs(mask[w].bit_count())
            if coded and (sunk := mask[w] & self.sunk(start)):
                specs += self.window_sinks[w].specs(sunk.bit_count())
        return specs

    def fits(self, image: Image, kind: str, start: int, tokens: int, mask: tuple[int, ...] = ()) -> bool:
        """Whether an image has the tensors that this namespace's have: of a block of so many tokens at `start`, of its window
        with the rows in `mask`, of a snapshot with so many tokens behind its block. Its checksum does not say that: it is no
        signature.
        """
        meta, tensors = image.header()
        if meta.kind != kind or meta.start != start:
            return False
        if kind == "snapshot":
            return self._is_state(meta.extra, tensors, tokens)
        if kind == "window" and meta.extra != extra_of(mask):
            return False
        shapes = {name: (array.dtype, array.shape) for name, array in tensors.items()}
        for coded in (True,) if tokens == BLOCK else (False, True):
            specs = self.rows_specs(start, tokens, coded) if kind == "rows" else self.window_specs(mask, start, coded)
            if shapes == {spec.name: (DTYPES[spec.dtype], spec.shape) for spec in specs}:
                return True
        return False

    def _is_state(self, extra: str, tensors: dict[str, np.ndarray], tokens: int) -> bool:
        """Whether a snapshot describes the state of each of this namespace's leaves, by arrays that are there."""
        arrays = {name: array for name, array in tensors.items() if name != "tokens"}
        if len(tensors) == len(arrays) or tensors["tokens"].shape != (tokens,):
            return False
        try:
            described = json.loads(extra)
            state, dtypes = described["state"], described["dtypes"]
            if not (len(state) == len(self.snapshots) and len(dtypes) == len(arrays)):
                return False
            sound = all(_is_described(value, len(dtypes)) for leaf in state for value in leaf.values())
            return sound and all(arrays[f"s{i}"].dtype == element(name).numpy for i, name in enumerate(dtypes))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return False

    def fp16_bytes(self, tokens: int) -> int:
        """What the rows of `tokens` tokens of all sliceable and windowed layers would take as they are in a live
        cache.
        """
        total = 0
        for leaf in self.leaves:
            for _, _, heads, width, dtype, _ in leaf.get("streams") or ():
                total += tokens * heads * width * element(dtype).numpy.itemsize
        return total


def _is_described(value: Any, arrays: int) -> bool:
    """Whether this is an attribute of a snapshot's state, as `encode` describes it, with so many arrays at hand."""
    if not isinstance(value, list):
        return value is None or isinstance(value, (bool, int, float, str))
    kind, content = value
    if kind == "array":
        return type(content) is int and 0 <= content < arrays
    if kind == "float":
        return content in ("inf", "-inf", "nan")
    items = content.values() if kind == "dict" else content
    return kind in ("dict", "list", "tuple") and all(_is_described(item, arrays) for item in items)


def _check_class(layer: Layout) -> None:
    find_class(layer["class"])
    for child in layer.get("children", ()):
        _check_class(child)


def _streams(leaf: Layout, layer: int, layers: int, codec: Codec) -> _Coding:
    """Each stream of a leaf, its row codec, and whether the codec left it raw."""
    streams = leaf.get("streams") or []
    widths = {part: width for _, part, _, width, _, _ in streams}
    found: _Coding = []
    for stream in streams:
        _, part, heads, width, dtype, exact = stream
        if exact:
            found.append((stream, RawRows(width, dtype), False))
            continue
        other = widths.get("values" if part == "keys" else "keys", width)
        row = codec.row_codec(Stream(layer, layers, part, heads, width, other, dtype))
        found.append((stream, row, isinstance(row, RawRows) and codec.spec()["name"] != "raw"))
    return found


def _section(prefix: str, leaves: list[int], streams: list[_Coding]) -> Section:
    members: dict[RowCodec, list[Member]] = {}
    for leaf in leaves:
        for (name, _, heads, _, _, _), row, _ in streams[leaf]:
            own = members.setdefault(row, [])
            head = own[-1].head + own[-1].heads if own else 0
            own.append(Member(leaf, name, head, heads))
    groups = []
    for g, (row, own) in enumerate(members.items()):
        names = tuple(f"{prefix}{g}.{plane.name}" for plane in row.planes)
        mean = f"{prefix}{g}.mean" if row.levelled and row.centred else ""
        root = f"{prefix}{g}.root" if row.levelled else ""
        groups.append(Group(row, names, tuple(own), own[-1].head + own[-1].heads, mean, root))
    return Section(tuple(groups))
