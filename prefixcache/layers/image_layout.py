"""Where each stream of a prompt cache stands in its images.

A `Plan`, made of a layout (`reading`) and a codec, says which tensors a rows image, a window image and a snapshot have.
Streams of equal codec, width and dtype share a tensor, token-major: (tokens, heads of all their layers, ...); layers that a
calibration joined have tensors of their own. `encode`, `transformed` and `stored_rows` follow it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial, reduce
from typing import NamedTuple

import numpy as np

from prefixcache.blocks.node import Window
from prefixcache.blocks.window_masks import extra_of, mask_of
from prefixcache.codecs import Codec, Raw, RawRows, RowCodec, Stream
from prefixcache.codecs.interchange import element
from prefixcache.codecs.levels import Levels, PackedLevels
from prefixcache.codecs.transform.codec import Calibrated
from prefixcache.codecs.transform.coding import GroupCoder
from prefixcache.image_format import DTYPES, Image, Spec
from prefixcache.keys import BLOCK
from prefixcache.layers import snapshots
from prefixcache.layers.adapters import PLAIN_CACHE, RECURRENT, ROTATING_CACHE, Layout, Leaf
from prefixcache.layers.allowed_classes import find_class

LEAST_ROWS = 32  # of a head's recurrent state; what has fewer is a convolution's last inputs


class Coding(NamedTuple):
    """A stream of a leaf, and the codec of its rows. `left_raw`: the user's codec codes rows, but not these."""

    stream: str
    heads: int
    rows: RowCodec
    left_raw: bool = False

    @property
    def is_coded(self) -> bool:
        return not isinstance(self.rows, RawRows)

    def as_it_is(self) -> Coding:
        return Coding(self.stream, self.heads, RawRows(self.rows.width, self.rows.dtype))


_Codings = list[list[Coding]]  # of each leaf
Tensors = dict[str, np.ndarray]  # an image's, by name
TokenRuns = tuple[tuple[int, int], ...]  # (first, last not included) of each
Words = Sequence[int]  # of each joined of a section


class Member(NamedTuple):
    """One stream within its group's tensors: leaf and stream name, and the heads that are its own."""

    leaf: int
    stream: str
    head: int
    heads: int

    @property
    def in_group(self) -> slice:
        """Return which of the group's heads are its own."""
        return slice(self.head, self.head + self.heads)

    def levels_of(self, group: Levels | None) -> Levels | None:
        """Return its own levels among those of all of the group's heads."""
        return group.of(self.head, self.heads) if group is not None else None


class Group(NamedTuple):
    """Streams that share a tensor per plane of their codec; `names[i]` is plane i's tensor. Where the codec levels rows,
    `mean` and `steps` name the tensors of their levels, one of each an image; `mean` is "" where rows aren't centred.
    """

    codec: RowCodec
    names: tuple[str, ...]
    members: tuple[Member, ...]
    heads: int
    mean: str
    steps: str

    @property
    def level_names(self) -> tuple[str, ...]:
        """Return the names of the tensors of its levels."""
        return tuple(name for name in (self.mean, self.steps) if name)

    def levels(self, tensors: Tensors, member: Member | None = None) -> Levels | None:
        """Return the levels of all heads, or of one member's, that an image has; None where the codec levels no rows."""
        packed = self.packed_levels(tensors, member.in_group if member is not None else slice(None))
        return Levels.unpacked(packed) if packed is not None else None

    def packed_levels(self, tensors: Tensors, heads: slice) -> PackedLevels | None:
        """Return the levels of some heads in the image's own numbers."""
        if not self.steps:
            return None
        return PackedLevels(tensors[self.mean][heads] if self.mean else None, tensors[self.steps][heads])

    def write_levels(self, tensors: Tensors, packed: PackedLevels) -> None:
        if self.mean:
            tensors[self.mean][...] = packed.mean
        tensors[self.steps][...] = packed.steps

    def specs(self, tokens: int) -> Iterator[Spec]:
        for name, plane in zip(self.names, self.codec.planes, strict=True):
            yield Spec(name, plane.dtype, (tokens, self.heads, *plane.shape))
        for name, dtype in ((self.mean, "BF16"), (self.steps, "U8")):
            if name and tokens:
                yield Spec(name, dtype, (self.heads, self.codec.width))


Place = tuple[int, Member]  # of a stream in a section: its group's number, and itself there


class Joined(NamedTuple):
    """Streams of several layers that are transformed together: (leaf, stream) in the order of the coder's, and their tensors,
    those of `codecs.transform.coding.Codes`. The second one's length is known once rows are coded.
    """

    coder: GroupCoder
    streams: tuple[tuple[int, str], ...]
    names: tuple[str, str, str, str]

    def specs(self, tokens: int, words: int | None = None) -> list[Spec]:
        """Return the specs of so many rows, which have so many `words` together; None: as many as are expected. Without rows
        there are no tensors.
        """
        coder = self.coder
        if not tokens:
            return []
        if words is None:
            words = round(tokens * coder.group.row_words(coder.quality))
        shapes = (tokens,), (words,), (-(-coder.group.channels // 2),), (coder.heads,)
        dtypes = "U16", "U16", "U8", "BF16"
        return [Spec(*spec) for spec in zip(self.names, dtypes, shapes, strict=True)]

    def words_in(self, tensors: Tensors, tokens: int) -> int:
        """Return the words that an image's heads claim; -1 where it has no such heads."""
        if not tokens:
            return 0
        heads = tensors.get(self.names[0])
        if heads is None or (heads.dtype, heads.shape) != (np.dtype("<u2"), (tokens,)):
            return -1
        return self.coder.words_of(heads)


class Section(NamedTuple):
    """Groups whose tensors have the same tokens, and streams that are joined, with theirs."""

    groups: tuple[Group, ...]
    joined: tuple[Joined, ...] = ()

    @property
    def names(self) -> list[str]:
        """Return the names of the tensors that its rows are in."""
        of_groups = [name for group in self.groups for name in group.names]
        return of_groups + [name for joined in self.joined for name in joined.names]

    def specs(self, tokens: int) -> list[Spec]:
        return [spec for group in self.groups for spec in group.specs(tokens)]

    def joined_specs(self, tokens: int, words: Words | None = None) -> list[Spec]:
        """Return the specs of joined streams. `words`: those of each; None: as many as are expected."""
        if words is None:
            return [spec for joined in self.joined for spec in joined.specs(tokens)]
        return [spec for of, count in zip(self.joined, words, strict=True) for spec in of.specs(tokens, count)]

    def words_in(self, tensors: Tensors, tokens: int) -> list[int]:
        """Return the words that an image's heads claim, of each joined; see there."""
        return [joined.words_in(tensors, tokens) for joined in self.joined]


class Plan:
    """Which tensors the images of one namespace have. Made of the layout and the codec alone; immutable.

    A rows image has `rows` of each token of a whole block, and `tails`, the same streams as they are, of each token of a
    block that is still to grow. A live cache that has only codes of a tail leaves them in `rows`. Beside them, as they are:
    `kept[i]` of the tokens before windows[i].keep (a ring's first tokens stay with the rows, or they would be the first to
    grow cold), and beside `rows` also `sinks`, of the codec's first `sink_tokens`.

    A window image has, of the tokens in its ranges, `windowed[i]`, or of an unfinished block `window_tails[i]`; and beside
    `windowed[i]`, as they are, `window_sinks[i]` of those tokens that are sinks. A snapshot has the leaves in `snapshots`,
    each by itself.
    """

    def __init__(self, layout: Layout, codec: Codec):
        self.layout = layout
        self.layers = [layout["kinds"][kind] for kind in layout["layers"]]
        self._codec = codec
        self.sink_tokens = codec.sink_tokens
        self._list_leaves()
        codings = [
            _codings(leaf, layer, len(self.layers), codec)
            for leaf, layer in zip(self.leaves, self.layer_of, strict=True)
        ]
        self.row_codecs = [
            {c.stream: c.rows for c in streams} for streams in codings
        ]  # by leaf; of joined ones, otherwise
        joined = self._joined(codec)
        self._list_joined(joined)
        left_raw = {
            self.layer_of[leaf]
            for leaf, streams in enumerate(codings)
            if any(c.left_raw and (leaf, c.stream) not in self.joined_places for c in streams)
        }
        self.raw = sorted(left_raw)
        # Where neither rows nor state are coded, a tail's rows are no other than a block's.
        exact_state = not self.snapshots or isinstance(codec, Raw)
        self.lossless = exact_state and not self.joined and not any(c.is_coded for streams in codings for c in streams)
        self._make_sections(codings, joined)
        self._find_places()

    def _list_leaves(self) -> None:
        """List the leaves of all layers, and the windows that they have."""
        self.leaves: list[Layout] = []
        self.layer_of: list[int] = []
        for index, layer in enumerate(self.layers):
            for leaf in _leaves_of(layer):
                self.leaves.append(leaf)
                self.layer_of.append(index)
        self.snapshots = [i for i, leaf in enumerate(self.leaves) if leaf["kind"] == "snapshot"]
        windowed = [leaf for leaf in self.leaves if leaf.get("streams") and "window" in leaf]
        self.windows = tuple(dict.fromkeys(Window(*leaf["window"]) for leaf in windowed))

    def _list_joined(self, of_sections: list[tuple[Joined, ...]]) -> None:
        self.joined = [joined for of_section in of_sections for joined in of_section]
        # Where a joined stream stands: (leaf, stream) -> its group in its section, and its number there.
        self.joined_places = {
            at: (j, n)
            for of_section in of_sections
            for j, joined in enumerate(of_section)
            for n, at in enumerate(joined.streams)
        }

    def _make_sections(self, codings: _Codings, joined: list[tuple[Joined, ...]]) -> None:
        """Make the sections of layers that keep every token, then those of layers with windows, by their window."""
        apart: _Codings = []
        sunk: _Codings = []
        for leaf, streams in enumerate(codings):
            apart.append([c for c in streams if (leaf, c.stream) not in self.joined_places])
            coded = [c for c in streams if c.is_coded or (leaf, c.stream) in self.joined_places]
            sunk.append([c.as_it_is() for c in coded] if self.sink_tokens else [])
        exact = [[c.as_it_is() for c in streams] for streams in codings]
        of_rows, *of_windows = joined

        leaves = [i for i, leaf in enumerate(self.leaves) if leaf["kind"] == "sliceable"]
        self.rows = _section("r", leaves, apart)._replace(joined=of_rows)
        self.tails = self.rows if self.lossless else _section("t", leaves, exact)
        self.sinks = _section("s.", leaves, sunk)

        def by_window(letter: str, codings: _Codings) -> list[Section]:
            numbers = [self.window_of(leaf) for leaf in range(len(self.leaves))]
            leaves_of = [[i for i, number in enumerate(numbers) if number == w] for w in range(len(self.windows))]
            return [_section(f"{letter}{w}.", leaves, codings) for w, leaves in enumerate(leaves_of)]

        self.kept = by_window("k", exact)
        self.windowed = [
            section._replace(joined=of) for section, of in zip(by_window("w", apart), of_windows, strict=True)
        ]
        self.window_tails = self.windowed if self.lossless else by_window("v", exact)
        self.window_sinks = by_window("x", sunk)
        several = (*self.kept, *self.windowed, *self.window_tails, *self.window_sinks)
        each_once = {id(section): section for section in (self.rows, self.tails, self.sinks, *several)}
        self.sections = list(each_once.values())

    def _find_places(self) -> None:
        """Note where each stream stands: leaf -> stream -> (group, member), in `rows` or `windowed`; in `tails`, `kept` or
        `window_tails`; in `sinks` or `window_sinks`.
        """
        self.places = self._places(self.rows, *self.windowed)
        self.tail_places = self._places(self.tails, *self.window_tails)
        self.sink_places = self._places(self.sinks, *self.window_sinks)

    def _joined(self, codec: Codec) -> list[tuple[Joined, ...]]:
        """Return the groups of a calibration whose layers are all here, as they were there: of layers that keep every token,
        then of each window.
        """
        of_sections: list[list[Joined]] = [[] for _ in range(1 + len(self.windows))]
        if not isinstance(codec, Calibrated):
            return [() for _ in of_sections]
        streams = _calibrated_streams(self.leaves, self.layer_of, codec)
        for g, group in enumerate(codec.basis.groups):
            members = [streams.get((g, number)) for number in range(2 * len(group.layers))]
            present = [member for member in members if member is not None]
            kinds = {(dtype, self.window_of(leaf)) for leaf, _, dtype in present}
            if len(present) == len(members) and len(kinds) == 1:
                ((dtype, window),) = kinds
                names = (f"z{g}.heads", f"z{g}.words", f"z{g}.offsets", f"z{g}.offset_steps")
                joined = Joined(codec.coder(g, dtype), tuple((leaf, name) for leaf, name, _ in present), names)
                of_sections[0 if window is None else 1 + window].append(joined)
        return [tuple(of_section) for of_section in of_sections]

    def _places(self, *sections: Section) -> list[dict[str, Place]]:
        places: list[dict[str, Place]] = [{} for _ in self.leaves]
        for section in sections:
            for g, group in enumerate(section.groups):
                for member in group.members:
                    places[member.leaf][member.stream] = (g, member)
        return places

    def check_classes(self) -> None:
        """Raise CacheError for a class that is not allowed here, or not in this release of its package."""
        for kind in self.layout["kinds"]:
            _check_class(kind)

    def window_of(self, leaf: int) -> int | None:
        """Return the number of a leaf's window; None for one that keeps every token, or no rows."""
        window = self.leaves[leaf].get("window")
        return self.windows.index(Window(*window)) if window is not None and self.leaves[leaf]["streams"] else None

    def held(self, leaves: Sequence[Leaf], window: int) -> TokenRuns:
        """Return the runs of tokens whose rows are there in every layer of this window."""
        of_window = [leaf.held for number, leaf in enumerate(leaves) if self.window_of(number) == window]
        return reduce(_intersection, of_window) if of_window else ()

    def describe_state(self, leaves: Sequence[Leaf]) -> snapshots.State:
        """Describe what a snapshot keeps of a live cache's leaves. CacheError for what can't be kept."""
        named = []
        for i in self.snapshots:
            name = f"layer {self.layer_of[i]} ({self.leaves[i]['class'].rsplit('.', 1)[-1]})"
            named.append((name, leaves[i].state, partial(self.state_codec, i)))
        return snapshots.describe_state(named)

    def stored_state(self, snapshot: Image) -> snapshots.StoredState:
        return snapshots.StoredState(snapshot, self._state_codecs())

    def _state_codecs(self) -> list[snapshots.CodecOf]:
        return [partial(self.state_codec, i) for i in self.snapshots]

    def state_codec(self, leaf: int, shape: Sequence[int], dtype: str) -> RowCodec | None:
        """Return the codec of the rows of a snapshot leaf's array, if it is recurrent state (1, heads, rows, width) that is
        coded.
        """
        if self.leaves[leaf]["class"] not in RECURRENT or len(shape) != 4:
            return None
        batch, heads, rows, width = shape
        if batch != 1 or heads < 1 or rows < LEAST_ROWS:
            return None
        stream = Stream(self.layer_of[leaf], len(self.layers), "state", heads, width, width, dtype)
        codec = self._codec.row_codec(stream)
        return None if isinstance(codec, RawRows) else codec

    def kept_tokens(self, window: int, start: int, tokens: int) -> int:
        """Count how many of a block's tokens have `kept` rows in its rows image."""
        return min(max(self.windows[window].keep - start, 0), tokens)

    def in_rows(self, start: int, tokens: int, coded: bool) -> list[tuple[Section, int]]:
        """Return the sections that the rows image of `tokens` tokens from `start` on has, and of how many of the tokens
        each.

        `coded`: as a whole block's are; else as a tail's.
        """
        sinks = min(max(self.sink_tokens - start, 0), tokens) if coded else 0
        kept = [(section, self.kept_tokens(w, start, tokens)) for w, section in enumerate(self.kept)]
        rows = self.rows if coded else self.tails
        return [(rows, tokens), *((s, n) for s, n in [*kept, (self.sinks, sinks)] if s.groups and n)]

    def rows_specs(self, start: int, tokens: int, coded: bool, words: Words | None = None) -> list[Spec]:
        """Return the specs of a rows image. `words` are of each joined; without, as many as are expected."""
        specs = [spec for section, count in self.in_rows(start, tokens, coded) for spec in section.specs(count)]
        specs += self.rows.joined_specs(tokens, words) if coded else []
        return [*specs, Spec("tokens", "I64", (tokens,))]

    def is_coded(self, tensors: Tensors) -> bool:
        """Tell whether a rows image has its rows as a whole block's has them."""
        return all(name in tensors for name in self.rows.names)

    def sunk(self, start: int) -> int:
        """Return as a mask the tokens of the block at `start` that are kept as they are beside their codes."""
        return mask_of(0, self.sink_tokens - start)

    def window_specs(
        self, mask: tuple[int, ...], start: int, coded: bool, words: Sequence[Words] | None = None
    ) -> list[Spec]:
        """Return the specs of a window image: with `coded` of a whole block, else of a tail. `words` are of each window's
        joined; without, as many as are expected.
        """
        specs = []
        for w, section in enumerate(self.windowed if coded else self.window_tails):
            specs += section.specs(mask[w].bit_count())
            specs += section.joined_specs(mask[w].bit_count(), words[w] if words and coded else None)
            if coded and (sunk := mask[w] & self.sunk(start)):
                specs += self.window_sinks[w].specs(sunk.bit_count())
        return specs

    def fits(self, image: Image, kind: str, start: int, tokens: int, mask: tuple[int, ...] = ()) -> bool:
        """Tell whether an image has the tensors that this namespace's have: of a block of so many tokens at `start`, of
        its window with the rows in `mask`, of a snapshot with so many tokens behind its block. Its checksum does not
        say that: it is no signature.
        """
        meta, tensors = image.header()
        if meta.kind != kind or meta.start != start:
            return False
        if kind == "snapshot":
            return snapshots.fits(meta.extra, tensors, self._state_codecs(), tokens)
        if kind == "window" and meta.extra != extra_of(mask):
            return False
        shapes = {name: (array.dtype, array.shape) for name, array in tensors.items()}
        for coded in (True,) if tokens == BLOCK else (False, True):
            if kind == "rows":
                specs = self.rows_specs(start, tokens, coded, self.rows.words_in(tensors, tokens))
            else:
                words = [section.words_in(tensors, mask[w].bit_count()) for w, section in enumerate(self.windowed)]
                specs = self.window_specs(mask, start, coded, words)
            if shapes == {spec.name: (DTYPES[spec.dtype], spec.shape) for spec in specs}:
                return True
        return False

    def fp16_bytes(self, tokens: int) -> int:
        """Return what the rows of `tokens` tokens of all sliceable and windowed layers would take as they are in a live
        cache.
        """
        total = 0
        for leaf in self.leaves:
            for _, _, heads, width, dtype, _ in leaf.get("streams") or ():
                total += tokens * heads * width * element(dtype).numpy.itemsize
        return total


def _intersection(a: TokenRuns, b: TokenRuns) -> TokenRuns:
    pairs = ((max(x[0], y[0]), min(x[1], y[1])) for x in a for y in b)
    return tuple((first, last) for first, last in pairs if first < last)


def _check_class(layer: Layout) -> None:
    find_class(layer["class"])
    for child in layer.get("children", ()):
        _check_class(child)


def _leaves_of(layer: Layout) -> Iterator[Layout]:
    """Return a layer's leaves, depth first."""
    if layer["kind"] == "list":
        for child in layer["children"]:
            yield from _leaves_of(child)
    else:
        yield layer


def _codings(leaf: Layout, layer: int, layers: int, codec: Codec) -> list[Coding]:
    """Say how this codec codes each stream of a leaf."""
    streams = leaf.get("streams") or []
    widths = {part: width for _, part, _, width, _, _ in streams}
    codings = []
    for name, part, heads, width, dtype, exact in streams:
        if exact:
            codings.append(Coding(name, heads, RawRows(width, dtype)))
            continue
        other = widths.get("values" if part == "keys" else "keys", width)
        rows = codec.row_codec(Stream(layer, layers, part, heads, width, other, dtype))
        codings.append(Coding(name, heads, rows, isinstance(rows, RawRows) and codec.spec()["name"] != "raw"))
    return codings


def _section(prefix: str, leaves: list[int], codings: _Codings) -> Section:
    """Make a section: streams of these leaves with equal row codecs form one group, in the order in which the codecs come."""
    by_codec: dict[RowCodec, list[Member]] = {}
    for leaf in leaves:
        for coding in codings[leaf]:
            members = by_codec.setdefault(coding.rows, [])
            head = members[-1].in_group.stop if members else 0
            members.append(Member(leaf, coding.stream, head, coding.heads))
    groups = []
    for g, (rows, members) in enumerate(by_codec.items()):
        names = tuple(f"{prefix}{g}.{plane.name}" for plane in rows.planes)
        mean = f"{prefix}{g}.mean" if rows.levelled and rows.centred else ""
        steps = f"{prefix}{g}.root" if rows.levelled else ""
        groups.append(Group(rows, names, tuple(members), members[-1].in_group.stop, mean, steps))
    return Section(tuple(groups))


def _calibrated_streams(
    leaves: Sequence[Layout], layer_of: Sequence[int], codec: Calibrated
) -> dict[tuple[int, int], tuple[int, str, str]]:
    """Return the streams that a calibration knows, of plain and rotating caches: (group, number) -> (leaf, stream, dtype)."""
    streams: dict[tuple[int, int], tuple[int, str, str]] = {}
    for leaf, (layout, layer) in enumerate(zip(leaves, layer_of, strict=True)):
        window = Window(*layout.get("window", (0,)))
        if layout["class"] not in (PLAIN_CACHE, ROTATING_CACHE) or window.keep or layer_of.count(layer) > 1:
            continue
        for name, part, heads, width, dtype, exact in layout["streams"] or ():
            place = codec.place_of(Stream(layer, max(layer_of) + 1, part, heads, width, width, dtype), window.size)
            if place is not None and not exact:
                streams[place] = leaf, name, dtype
    return streams
