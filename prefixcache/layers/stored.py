"""What is stored of a prompt, as a caller may hold it: immutable bytes that become a live prompt cache on demand.

`StoredPrompt` is what `PrefixCache.lookup` gives, `StoredLayer` one layer of it. Both share images with the cache and
never change them; `copy()` is cheap. Decoding runs on the caller's thread and stream.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import numpy as np

from prefixcache.blocks.masks import mask_of, runs_of
from prefixcache.codecs.pieces import Piece, decode
from prefixcache.codecs.turboquant.coding import Choice
from prefixcache.codecs.turboquant.levelling import Levels
from prefixcache.image_format import Image
from prefixcache.keys import BLOCK
from prefixcache.layers import levels, live_codes
from prefixcache.layers.adapters import PARTS, Layout, adapter_of, blank
from prefixcache.layers.classes import find_class
from prefixcache.layers.image_layout import Group, Member, Plan
from prefixcache.layers.joined import CodedBlocks, DecodedGroup, codes_of, decode_joined
from prefixcache.layers.snapshots import array_numbers, revived

if TYPE_CHECKING:
    from prefixcache.layers.read_ahead import ReadAhead


MOST_LEVELS = 4  # in a live cache: each takes an attention of its own


Streams = dict[tuple[int, str], mx.array]  # buffers by leaf and stream


class Held(NamedTuple):
    """A window image. `mask`: for each window of the namespace, of which of its block's tokens it is to give the rows."""

    image: Image
    mask: tuple[int, ...]


class Block(NamedTuple):
    """A block's images: its rows, and the window images that give rows of its tokens."""

    start: int
    rows: Image
    windows: tuple[Held, ...]

    @property
    def images(self) -> list[Image]:
        return [self.rows, *(window.image for window in self.windows)]


class Run(NamedTuple):
    """Rows `first` to `first + rows` of an image's tensors go to physical rows `at` and on of a buffer."""

    tensors: dict[str, np.ndarray]
    first: int
    rows: int
    at: int
    sunk: int | None = None
    """Where they also stand as they are beside their codes: the first of them."""
    coded: bool = False
    """As a whole block's rows are."""


class StoredPrompt:
    """The stored state of `tokens` tokens of one prompt.

    Holds its images as long as it lives, whatever the cache evicts meanwhile; those bytes are then the holder's.
    """

    def __init__(
        self,
        plan: Plan,
        tokens: int,
        blocks: list[Block],
        snapshot: Image | None,
    ):
        self.plan = plan
        self.tokens = tokens
        self._blocks = blocks
        self._snapshot = snapshot
        self._runs: dict[tuple[int, int], list[Run]] = {}
        # Rows of one group of transformed layers, and its number; and the groups that will be asked for next.
        self._decoded_group: tuple[int, DecodedGroup] | None = None
        self._next_groups: Iterator[tuple[int, DecodedGroup]] = iter(())
        self._unchecked: list[DecodedGroup] = []

    @cached_property
    def _rows(self) -> list[dict[str, np.ndarray]]:
        return [block.rows.tensors() for block in self._blocks]

    @cached_property
    def _coded(self) -> list[bool]:
        return [self.plan.is_coded(tensors) for tensors in self._rows]

    @cached_property
    def _windows(self) -> list[list[dict[str, np.ndarray]]]:
        return [[window.image.tensors() for window in block.windows] for block in self._blocks]

    @property
    def layers(self) -> list[StoredLayer]:
        """One wrapper a layer, in the model's order."""
        return [StoredLayer(self, i) for i in range(len(self.plan.layers))]

    @property
    def nbytes(self) -> int:
        """Bytes of the images held, headers included."""
        images = [image for block in self._blocks for image in block.images]
        return sum(image.nbytes for image in (*images, self._snapshot) if image is not None)

    def copy(self) -> StoredPrompt:
        """Another holder of the same bytes: trimming one does not show in the other."""
        made = object.__new__(StoredPrompt)
        made.__dict__.update(self.__dict__)
        made._decoded_group, made._next_groups, made._unchecked = None, iter(()), []
        return made

    def is_trimmable(self) -> bool:
        """Whether the last token can be cut off. Recurrent state can't be cut, a window only while its rows are held."""
        return self.tokens > 0 and self._holds(self.tokens - 1)

    def trim(self, n: int) -> int:
        """Cut the last `n` tokens off, here only. Returns how many were cut. ValueError where rows for that are
        missing.
        """
        if n < 0:
            raise ValueError(f"trim({n}): give a number of tokens")
        n = min(n, self.tokens)
        if n and not self._holds(self.tokens - n):
            raise ValueError(f"trim({n}): {self.tokens - n} tokens is no boundary that this state can be cut to")
        self.tokens -= n
        self._runs = {}
        return n

    def dequantize(self, room: int = 0, ahead: ReadAhead | None = None) -> list[Any]:
        """A live prompt cache of the classes that were stored, with room for `room` more tokens before it must grow.

        What is decoded already is taken from `ahead`. DamagedBlock for a file that somebody forged: a `fetch` deletes it.
        """
        if ahead is not None and (decoded := ahead.take(self)) is not None:
            return [self._make_layer(i, room, False, decoded) for i in range(len(self.plan.layers))]
        return self._made(range(len(self.plan.layers)), room, live=False)

    def live(self, room: int = 0) -> list[Any]:
        """The same, but layers of KVCache whose rows are TurboQuant's codes come as `TurboQuantKVCache`, which takes these
        codes as they are: nothing is decoded. All others are as `dequantize` makes them.

        Codes are taken where they have few levels, as those have that a live cache stored. Rows that a plain cache stored
        have levels of each block, which no kernel reads: they are coded anew with levels of the whole, and so is a tail.
        """
        return self._made(range(len(self.plan.layers)), room, live=True)

    def _made(self, layers: Sequence[int], room: int, *, live: bool) -> list[Any]:
        """These layers, once it is known that none of their blocks is damaged."""
        if len(layers) > 1:
            self._next_groups = self._groups(range(len(self.plan.joined)))
        try:
            made = [self._make_layer(i, room, live) for i in layers]
            for decoded in self._unchecked:
                decoded.check()
            return made
        finally:
            self._decoded_group, self._next_groups, self._unchecked = None, iter(()), []

    def _holds(self, boundary: int) -> bool:
        if self.plan.snapshots:
            return boundary == self.tokens
        for w, window in enumerate(self.plan.windows):
            for block in self._blocks:
                first, last = max(window.first(boundary) - block.start, 0), min(boundary - block.start, BLOCK)
                needed = mask_of(first, last)
                for image in block.windows:
                    needed &= ~image.mask[w]
                if needed:
                    return False
        return True

    # -- decoding -----------------------------------------------------------------------------------------------------

    def _make_layer(self, index: int, room: int, live: bool, decoded: Streams | None = None) -> Any:
        first = self.plan.layer_of.index(index)
        return self._make(self.plan.layers[index], iter(range(first, len(self.plan.leaves))), room, live, decoded)

    def _make(self, layer: Layout, leaves: Any, room: int, live: bool, decoded: Streams | None) -> Any:
        if layer["kind"] == "list":
            children = [self._make(child, leaves, room, live, decoded) for child in layer["children"]]
            return blank(find_class(layer["class"]), {"caches": tuple(children) if layer["tuple"] else children})
        leaf = next(leaves)
        if layer["kind"] == "snapshot":
            return self._make_snapshot(leaf)
        if decoded is not None:
            streams = {stream: decoded[leaf, stream] for stream in self.plan.tail_places[leaf]}
            cls = find_class(layer["class"])
            return adapter_of(cls).make(cls, self.plan.leaves[leaf], self.tokens, streams)
        choice = live_codes.choice_of(self.plan, leaf) if live else None
        return self._make_rows(leaf, room) if choice is None else self._make_live(leaf, choice, room)

    def _make_live(self, leaf: int, choice: Choice, room: int) -> Any:
        """Of a plain KVCache's codes, a live cache that has them; its rows coded anew where their levels are many, or where
        they are transformed.
        """
        if (leaf, PARTS[0]) in self.plan.joined_places:
            return live_codes.waiting(self._make_rows(leaf, room), choice)
        coded, runs = 0, self._leading_runs(0, self.tokens)
        for run in runs:
            if not run.coded:
                break
            coded = run.at + run.rows
        levelled = self._levelled_runs(leaf, runs) if coded else []
        if not coded or len(levelled) > MOST_LEVELS:
            return live_codes.waiting(self._make_rows(leaf, room), choice)
        layer = self.plan.leaves[leaf]
        capacity = adapter_of(find_class(layer["class"])).capacity(layer, self.tokens, room)
        leading = min(choice.sink_tokens, coded)
        pieces, sinks, tail = [], [], []
        for part in PARTS:
            g, member = self.plan.places[leaf][part]
            group = self.plan.rows.groups[g]
            pieces.append(_pieces(group, member, self._leading_runs(0, coded)))
            if choice.sink_tokens:
                s, member = self.plan.sink_places[leaf][part]
                exact = _pieces(self.plan.sinks.groups[s], member, self._leading_runs(0, leading))
                sinks.append(
                    decode(exact, member.heads, choice.sink_tokens, group.codec.width, group.codec.dtype)[None]
                )
            if coded < self.tokens:
                t, member = self.plan.tail_places[leaf][part]
                exact = _pieces(
                    self.plan.tails.groups[t], member, [run._replace(at=run.at - coded) for run in runs[-1:]]
                )
                tail.append(
                    decode(exact, member.heads, self.tokens - coded, group.codec.width, group.codec.dtype)[None]
                )
        mx.eval(sinks, tail)
        made = live_codes.live(self.plan, leaf, choice, live_codes.CodedLeaf(pieces, levelled, sinks), coded, capacity)
        if tail:
            made.update_and_fetch(*tail)
        return made

    def _levelled_runs(self, leaf: int, runs: list[Run]) -> list[tuple[int, Levels | None, Levels | None]]:
        """From which token on rows are coded with which levels of keys and values."""
        levelled: list[tuple[int, Levels | None, Levels | None]] = []
        for run in runs:
            if run.coded:
                both = []
                for part in PARTS:
                    g, member = self.plan.places[leaf][part]
                    both.append(levels.read(self.plan.rows.groups[g], run.tensors, member))
                if not levelled or not all(map(live_codes.same, levelled[-1][1:], both)):
                    levelled.append((run.at, both[0], both[1]))
        return levelled

    def _make_rows(self, leaf: int, room: int) -> Any:
        layer = self.plan.leaves[leaf]
        cls = find_class(layer["class"])
        adapter, streams = adapter_of(cls), {}
        if layer["streams"]:
            window = self.plan.windows.index(tuple(layer["window"])) if "window" in layer else None
            capacity = adapter.capacity(layer, self.tokens, room)
            tails = self.plan.tails if window is None else self.plan.window_tails[window]
            for stream, (t, member) in self.plan.tail_places[leaf].items():
                pieces = self.pieces_of(leaf, stream) if window is None else self._window_pieces(leaf, stream, window)
                capacity = max(capacity, max((piece.end for piece in pieces), default=0))
                as_they_are = tails.groups[t].codec
                streams[stream] = decode(pieces, member.heads, capacity, as_they_are.width, as_they_are.dtype)[None]
        return adapter.make(cls, layer, self.tokens, streams)

    @property
    def blocks(self) -> list[Block]:
        return self._blocks

    def pieces_of(self, leaf: int, stream: str) -> list[Piece]:
        """The rows of a layer that keeps every token: sinks, then codes, then those of the tail as they are."""
        plan, sinks = self.plan, 0
        pieces: list[Piece] = []
        runs = self._leading_runs(0, self.tokens)
        if (sunk := plan.sink_places[leaf].get(stream)) is not None and runs and runs[0].coded:
            sinks = min(plan.sink_tokens, self.tokens)
            pieces = _pieces(plan.sinks.groups[sunk[0]], sunk[1], self._leading_runs(0, sinks))
        if (leaf, stream) in plan.joined_places:
            pieces += self._joined_pieces(leaf, stream, sinks)
        for run in self._leading_runs(sinks, self.tokens):
            if run.coded:
                if (leaf, stream) not in plan.joined_places:
                    g, member = plan.places[leaf][stream]
                    pieces += _pieces(plan.rows.groups[g], member, [run])
            else:
                t, of_tail = plan.tail_places[leaf][stream]
                pieces += _pieces(plan.tails.groups[t], of_tail, [run])
        return pieces

    def _joined_pieces(self, leaf: int, stream: str, first: int) -> list[Piece]:
        """The rows, from token `first` on, of a stream that is transformed with others: all of those are decoded at once, and
        kept until another group is asked for, or the call ends.
        """
        j, number = self.plan.joined_places[leaf, stream]
        if self._decoded_group is None or self._decoded_group[0] != j:
            found = next(self._next_groups, None)
            if found is None or found[0] != j:
                found = next(self._groups(range(j, j + 1)))
            self._decoded_group = found
            self._unchecked.append(found[1]._replace(stretches=[]))
        codec = self.plan.tails.groups[self.plan.tail_places[leaf][stream][0]].codec
        return [stretch.since(first).piece(number, codec) for stretch in self._decoded_group[1].stretches]

    def _groups(self, numbers: range) -> Iterator[tuple[int, DecodedGroup]]:
        """These groups of transformed layers, by number."""
        runs = [run for run in self._leading_runs(0, self.tokens) if run.coded]
        groups = [self.plan.joined[j] for j in numbers]
        coded = [CodedBlocks(of, [(run.at, codes_of(of, run.tensors, run.rows)) for run in runs]) for of in groups]
        yield from zip(numbers, decode_joined(coded), strict=True)

    def _window_pieces(self, leaf: int, stream: str, window: int) -> list[Piece]:
        plan = self.plan
        g, member = plan.places[leaf][stream]
        t, as_it_is = plan.tail_places[leaf][stream]
        keep = min(plan.windows[window].keep, self.tokens)
        pieces = _pieces(plan.kept[window].groups[t], as_it_is, self._leading_runs(0, keep))
        coded, tail = plan.windowed[window].groups[g], plan.window_tails[window].groups[t]
        sinks = plan.sink_places[leaf].get(stream)
        for run in self._window_runs(window):
            if not all(name in run.tensors for name in coded.names):
                pieces += _pieces(tail, as_it_is, [run])
            elif sinks is not None and run.sunk is not None:
                pieces += _pieces(plan.window_sinks[window].groups[sinks[0]], sinks[1], [run._replace(first=run.sunk)])
            else:
                pieces += _pieces(coded, member, [run])
        return pieces

    def _leading_runs(self, first: int, last: int) -> list[Run]:
        """Tokens `first` to `last` (not included), of tensors whose rows begin with their block's first token."""
        if (first, last) not in self._runs:  # each stream asks for the same few
            runs = self._runs[first, last] = []
            for block, image, coded in zip(self._blocks, self._rows, self._coded, strict=True):
                low, high = max(first, block.start), min(last, block.start + BLOCK)
                if low < high:
                    runs.append(Run(image, low - block.start, high - low, low, coded=coded))
        return self._runs[first, last]

    def _window_runs(self, index: int) -> list[Run]:
        window, runs = self.plan.windows[index], []
        low = window.first(self.tokens)
        # A full ring: the row behind the kept ones is the next to be overwritten, and never read.
        full = not window.chunked and self.tokens > window.size
        shift = low - (window.keep + 1 if full else 0 if window.chunked else low)
        for block, images in zip(self._blocks, self._windows, strict=True):
            missing = mask_of(max(low - block.start, 0), min(self.tokens - block.start, BLOCK))
            for window_image, tensors in zip(block.windows, images, strict=True):
                mask, sunk = window_image.mask[index], self.plan.sunk(block.start)
                for wanted in (mask & missing & sunk, mask & missing & ~sunk):
                    for first, last in runs_of(wanted):
                        before = mask & mask_of(0, first)
                        also = (before & sunk).bit_count() if wanted & sunk else None
                        at = block.start + first - shift
                        runs.append(Run(tensors, before.bit_count(), last - first, at, also))
                missing &= ~window_image.mask[index]
        return runs

    def _make_snapshot(self, leaf: int) -> Any:
        assert self._snapshot is not None
        meta, tensors = self._snapshot.header()
        described = json.loads(meta.extra)
        number = self.plan.snapshots.index(leaf)
        state = {name: revived(v, tensors, described["dtypes"]) for name, v in described["state"][number].items()}
        return blank(find_class(self.plan.leaves[leaf]["class"]), state)


class StoredLayer:
    """One layer of a stored prompt, with the interface of the field: copy, trim, dequantize, nbytes, is_trimmable."""

    def __init__(self, prompt: StoredPrompt, index: int):
        self._prompt = prompt
        self._index = index

    @property
    def class_name(self) -> str:
        """Qualified name of the class that went in and will come out."""
        return str(self.layout["class"])

    @property
    def layout(self) -> Layout:
        layer: Layout = self._prompt.plan.layers[self._index]
        return layer

    @property
    def tokens(self) -> int:
        return self._prompt.tokens

    @property
    def nbytes(self) -> int:
        """Bytes that this layer's rows take in the images, without headers; nothing is evaluated."""
        prompt, plan, total = self._prompt, self._prompt.plan, 0
        leaves = [i for i, layer in enumerate(plan.layer_of) if layer == self._index]
        apart = plan.tails is not plan.rows
        rows = [plan.rows, *([plan.tails] if apart else []), *plan.kept, plan.sinks]
        windows = [*plan.windowed, *plan.window_sinks, *(plan.window_tails if apart else ())]
        window_images = [tensors for several in prompt._windows for tensors in several]
        for section, images in [*((s, prompt._rows) for s in rows), *((s, window_images) for s in windows)]:
            for group in section.groups:
                heads = sum(member.heads for member in group.members if member.leaf in leaves)
                names = (*group.names, *group.level_names)
                stored = sum(tensors[name].nbytes for tensors in images for name in names if name in tensors)
                total += stored * heads // group.heads
        for joined in plan.joined:
            share = sum(leaf in leaves for leaf, _ in joined.streams)
            stored = sum(tensors[name].nbytes for tensors in prompt._rows for name in joined.names if name in tensors)
            total += stored * share // len(joined.streams)
        if prompt._snapshot is not None:
            meta, tensors = prompt._snapshot.header()
            described = json.loads(meta.extra)["state"]
            for number, leaf in enumerate(plan.snapshots):
                for value in described[number].values() if leaf in leaves else ():
                    total += sum(tensors[f"s{n}"].nbytes for n in array_numbers(value))
        return total

    def copy(self) -> StoredLayer:
        return StoredLayer(self._prompt.copy(), self._index)

    def is_trimmable(self) -> bool:
        return self._prompt.is_trimmable()

    def trim(self, n: int) -> int:
        """Cut the last `n` tokens off this holder of the layer alone; see `StoredPrompt.trim`."""
        self._prompt = self._prompt.copy()
        return self._prompt.trim(n)

    def dequantize(self, room: int = 0) -> Any:
        """A live layer cache of the class that was stored."""
        return self._prompt._made([self._index], room, live=False)[0]

    def live(self, room: int = 0) -> Any:
        """A live layer cache that takes TurboQuant's codes as they are, where it can: see `StoredPrompt.live`."""
        return self._prompt._made([self._index], room, live=True)[0]


def _pieces(group: Group, member: Member, runs: list[Run]) -> list[Piece]:
    """One stream's rows of these runs, still coded."""
    pieces = []
    for run in runs:
        planes = tuple(run.tensors[name][run.first : run.first + run.rows, member.in_group] for name in group.names)
        pieces.append(Piece(group.codec, planes, run.at, levels.packed(group, run.tensors, member)))
    return pieces
