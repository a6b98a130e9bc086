"""Where the rows of a stored prompt stand in its images: of each stream the coded pieces that a buffer is filled from.

`stored` holds the images; `restore` and `read_ahead` fill buffers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from prefixcache.blocks.window_masks import mask_of, runs_of
from prefixcache.codecs.base import RowCodec
from prefixcache.codecs.interchange import on_cpu
from prefixcache.codecs.pieces import Piece
from prefixcache.image_format import Image
from prefixcache.keys import BLOCK
from prefixcache.layers.image_layout import Place, Plan, Section, Tensors
from prefixcache.layers.stacks import RowRun, Stacks
from prefixcache.layers.transformed import CodedBlocks, DecodedGroup, Stretch, codes_of, decode_joined


@dataclass(frozen=True, eq=False)
class WindowImage:
    """A window image. `mask`: for each window of the namespace, of which of its block's tokens it is to give the rows."""

    image: Image
    mask: tuple[int, ...]

    @cached_property
    def tensors(self) -> Tensors:
        return self.image.tensors()


@dataclass(frozen=True, eq=False)
class Block:
    """A block's images: its rows, and the window images that give rows of its tokens."""

    start: int
    rows: Image
    windows: tuple[WindowImage, ...] = ()

    @property
    def images(self) -> list[Image]:
        return [self.rows, *(window.image for window in self.windows)]

    @cached_property
    def tensors(self) -> Tensors:
        """Return the tensors of its rows image."""
        return self.rows.tensors()


class DecodedBeginning(NamedTuple):
    """The decoded rows of a prompt's first `tokens` tokens, which are whole blocks, in layers that keep every token: a piece
    of each leaf and stream. A hot prompt has them.
    """

    tokens: int
    pieces: dict[tuple[int, str], Piece]


class WindowRuns(NamedTuple):
    """The runs of rows of one window: `tails` in images of unfinished blocks, `whole` in images of whole blocks. The runs in
    `whole` are divided again: `sunk` have a copy as they are, whose place they give; `coded` have codes alone.
    """

    tails: list[RowRun]
    whole: list[RowRun]
    sunk: list[RowRun]
    coded: list[RowRun]


class StoredRows:
    """The rows of the first `tokens` tokens of a prompt: those of its `beginning`, and behind it those in the images of its
    blocks. For one call, on its thread.

    `layers` are those whose rows are asked for, in the model's order, all of them by default.
    """

    def __init__(
        self,
        plan: Plan,
        tokens: int,
        blocks: Sequence[Block],
        layers: Collection[int] | None = None,
        beginning: DecodedBeginning | None = None,
    ):
        self.plan, self.tokens, self._beginning = plan, tokens, beginning
        self.blocks = [block for block in blocks if beginning is None or block.start >= beginning.tokens]
        self._leading: dict[tuple[int, int], list[RowRun]] = {}
        self._layers = layers
        self._joined: dict[int | None, JoinedRows] = {}  # by window
        self._windows: dict[int, WindowRuns] = {}
        self._stacks = None if on_cpu() else Stacks(one_by_one=layers is not None and len(layers) < len(plan.layers))

    @cached_property
    def _coded(self) -> list[bool]:
        return [self.plan.is_coded(block.tensors) for block in self.blocks]

    def pieces(self, leaf: int, stream: str) -> list[Piece]:
        """Return all rows of one stream, still coded. Call `check` once all are decoded. DamagedBlock as `decode_joined`."""
        window = self.plan.window_of(leaf)
        if window is not None:
            return self._of_window(leaf, stream, window)
        beginning = [self._beginning.pieces[leaf, stream]] if self._beginning is not None else []
        return beginning + self._of_all_tokens(leaf, stream)

    def leading(self, first: int, last: int) -> list[RowRun]:
        """Return the runs of tokens `first` to `last` (not included), of tensors whose rows begin with their block's
        first token.
        """
        if (first, last) not in self._leading:  # each stream asks for the same few
            runs = self._leading[first, last] = []
            for block, coded in zip(self.blocks, self._coded, strict=True):
                low, high = max(first, block.start), min(last, block.start + BLOCK)
                if low < high:
                    runs.append(RowRun(block.tensors, low - block.start, high - low, low, coded=coded))
        return self._leading[first, last]

    def check(self) -> None:
        """Raise DamagedBlock if codes that `pieces` had decoded were written by no encoder. Waits for the GPU."""
        for joined in self._joined.values():
            joined.check()

    def _of_all_tokens(self, leaf: int, stream: str) -> list[Piece]:
        """Return the rows of a layer that keeps every token: sinks, then codes, then the tail as it is."""
        plan, sinks = self.plan, 0
        pieces: list[Piece] = []
        coded = self._coded_runs
        if (sink_place := plan.sink_places[leaf].get(stream)) is not None and coded and not coded[0].at:
            sinks = min(plan.sink_tokens, self.tokens)
            pieces = self._pieces(plan.sinks, sink_place, self.leading(0, sinks))
        if (leaf, stream) in plan.joined_places:
            pieces += [piece.since(sinks) for piece in self._of_joined(leaf, stream, None, coded)]
        elif coded:
            pieces += [piece.since(sinks) for piece in self._pieces(plan.rows, plan.places[leaf][stream], coded)]
        return pieces + self._pieces(plan.tails, plan.tail_places[leaf][stream], self._uncoded_runs)

    @cached_property
    def _coded_runs(self) -> list[RowRun]:
        return [run for run in self.leading(0, self.tokens) if run.coded]

    @cached_property
    def _uncoded_runs(self) -> list[RowRun]:
        return [run for run in self.leading(0, self.tokens) if not run.coded]

    def _pieces(self, section: Section, place: Place, runs: Sequence[RowRun]) -> list[Piece]:
        """Return one stream's rows of these runs. For the same runs pass the same list."""
        return pieces_of(section, place, runs) if self._stacks is None else self._stacks.pieces(section, place, runs)

    def _of_joined(self, leaf: int, stream: str, window: int | None, runs: Sequence[RowRun]) -> list[Piece]:
        """Return the rows in these coded runs of a stream that is transformed with others of its window."""
        plan = self.plan
        if window not in self._joined:
            section, shift = (plan.rows, 0) if window is None else (plan.windowed[window], self._shift(window))
            asked = [
                j
                for j, joined in enumerate(section.joined)
                if self._layers is None or any(plan.layer_of[leaf] in self._layers for leaf, _ in joined.streams)
            ]
            self._joined[window] = JoinedRows(section, runs, shift, asked)
        tails = plan.tails if window is None else plan.window_tails[window]
        codec = tails.groups[plan.tail_places[leaf][stream][0]].codec
        return self._joined[window].pieces(*plan.joined_places[leaf, stream], codec)

    def _of_window(self, leaf: int, stream: str, window: int) -> list[Piece]:
        plan, as_it_is = self.plan, self.plan.tail_places[leaf][stream]
        kept = self.leading(0, min(plan.windows[window].keep, self.tokens))
        runs = self._runs_of_window(window)
        pieces = self._pieces(plan.kept[window], as_it_is, kept)
        pieces += self._pieces(plan.window_tails[window], as_it_is, runs.tails)
        coded = runs.whole
        if (sink_place := plan.sink_places[leaf].get(stream)) is not None:
            pieces += self._pieces(plan.window_sinks[window], sink_place, runs.sunk)
            coded = runs.coded
        if (leaf, stream) in plan.joined_places:
            return pieces + self._of_joined(leaf, stream, window, coded)
        return pieces + self._pieces(plan.windowed[window], plan.places[leaf][stream], coded)

    def _runs_of_window(self, window: int) -> WindowRuns:
        """Return the same runs for all of the window's streams."""
        if window not in self._windows:
            coded_names = self.plan.windowed[window].names
            runs = WindowRuns([], [], [], [])
            for run in self._window_runs(window):
                if not all(name in run.tensors for name in coded_names):
                    runs.tails.append(run)
                    continue
                runs.whole.append(run)
                if run.sunk is not None:
                    runs.sunk.append(run._replace(first=run.sunk))
                else:
                    runs.coded.append(run)
            self._windows[window] = runs
        return self._windows[window]

    def _window_runs(self, window: int) -> Iterator[RowRun]:
        """Yield the runs of the window's tokens, block by block."""
        low, shift = self.plan.windows[window].first(self.tokens), self._shift(window)
        for block in self.blocks:
            missing = mask_of(low - block.start, self.tokens - block.start)
            sinks = self.plan.sunk(block.start)
            for image in block.windows:
                mask = image.mask[window]
                for asked in (mask & missing & sinks, mask & missing & ~sinks):
                    for first, last in runs_of(asked):
                        before = mask & mask_of(0, first)
                        sunk = (before & sinks).bit_count() if asked & sinks else None
                        yield RowRun(image.tensors, before.bit_count(), last - first, block.start + first - shift, sunk)
                missing &= ~mask

    def _shift(self, window: int) -> int:
        """Return by how much a token's number exceeds that of its row in the window's buffer. Kept rows are not shifted."""
        of = self.plan.windows[window]
        # In a full ring the row behind the kept ones is no token's: it is the next to be overwritten, and never read.
        return of.first(self.tokens) if of.chunked else max(self.tokens - of.size, 0)


class JoinedRows:
    """Rows of a section's joined streams in coded runs, for buffers where token t's row is t - `shift`. A group of joined
    streams is decoded at once, in the order `asked`, and kept until streams of another group are asked for.
    """

    def __init__(self, section: Section, runs: Sequence[RowRun], shift: int, asked: Sequence[int]):
        self._section, self._runs, self._shift = section, runs, shift
        self._number: int | None = None
        self._stretches: list[Stretch] = []
        self._next_groups = self._decoded(asked)
        self._unchecked: list[DecodedGroup] = []

    def pieces(self, j: int, number: int, codec: RowCodec) -> list[Piece]:
        """Return the rows of one stream of the section's `joined[j]`; `codec` keeps rows as they are."""
        if self._number != j:
            decoded = next(self._next_groups, None)
            if decoded is None or decoded[0] != j:
                decoded = next(self._decoded([j]))
            self._number, group = decoded
            self._stretches = group.stretches
            self._unchecked.append(group._replace(stretches=[]))
        pieces = [stretch.piece(number, codec) for stretch in self._stretches]
        return [piece._replace(at=piece.at - self._shift) for piece in pieces]

    def check(self) -> None:
        """Raise DamagedBlock if codes that were decoded were written by no encoder. Waits for the GPU."""
        for group in self._unchecked:
            group.check()

    def _decoded(self, numbers: Sequence[int]) -> Iterator[tuple[int, DecodedGroup]]:
        coded = []
        for joined in (self._section.joined[j] for j in numbers):
            blocks = [
                (run.at + self._shift, codes_of(joined, run.tensors, slice(run.first, run.first + run.rows)))
                for run in self._runs
            ]
            coded.append(CodedBlocks(joined, blocks))
        yield from zip(numbers, decode_joined(coded) if coded else (), strict=True)


def pieces_of(section: Section, place: Place, runs: Iterable[RowRun]) -> list[Piece]:
    """Return one stream's rows of these runs, still coded, from the tensors of a section where it has this place."""
    group, member = section.groups[place[0]], place[1]
    pieces = []
    for run in runs:
        planes = tuple(run.tensors[name][run.first : run.first + run.rows, member.in_group] for name in group.names)
        pieces.append(Piece(group.codec, planes, run.at, group.packed_levels(run.tensors, member.in_group)))
    return pieces
