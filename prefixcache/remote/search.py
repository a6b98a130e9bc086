"""Which images of a prompt a remote tier is to be read for: what is missing here, asked for by name, the deepest boundary
that all of it together reaches.

An engine tells whether a name is there, and an engine's eviction leaves holes. Nothing here waits for anything but `Asking`,
and nothing here changes the graph. Decision 0033 says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from prefixcache.blocks.node import Window
from prefixcache.blocks.window_masks import held_mask, window_key
from prefixcache.image_format import ROWS, SNAPSHOT, WINDOW, ImageKind
from prefixcache.keys import BLOCK, TOKEN_BYTES, chain

SNAPSHOT_BLOCKS = 8  # the last blocks that are there, behind which snapshots are looked for


class SoughtImage(NamedTuple):
    """An image to read: as an index would describe it, and the bytes under its name, None where the engine didn't say."""

    kind: ImageKind
    key: bytes
    parent: bytes
    start: int
    tokens: bytes
    mask: tuple[int, ...] = ()
    size: int | None = None


class Gap(NamedTuple):
    """What this machine lacks of a prompt in one namespace.

    `token_bytes` are the prompt's, as far as a hit may go; `keys` those of its whole blocks, of which the rows of the first
    `known` are here. A hit here ends at `boundary`. `has_window` tells whether all rows of a block's windows are here.
    """

    root: bytes
    token_bytes: bytes
    keys: Sequence[bytes]
    known: int
    boundary: int
    windows: tuple[Window, ...]
    snapshots: bool
    has_window: Callable[[int], bool]

    @property
    def limit(self) -> int:
        return len(self.token_bytes) // TOKEN_BYTES

    @property
    def tokens(self) -> int:
        """Return the tokens that can be gained."""
        return self.limit - self.boundary

    def parent(self, block: int) -> bytes:
        """Return the key before a block."""
        return self.keys[block - 1] if block else self.root

    def rows(self, block: int) -> SoughtImage:
        tokens = self.token_bytes[block * BLOCK * TOKEN_BYTES : (block + 1) * BLOCK * TOKEN_BYTES]
        return SoughtImage(ROWS, self.keys[block], self.parent(block), block * BLOCK, tokens)

    def window(self, block: int) -> SoughtImage:
        mask = whole_mask(self.windows, block * BLOCK)
        key = self.keys[block]
        return SoughtImage(WINDOW, window_key(key, mask), key, block * BLOCK, b"", mask)


class Reach(NamedTuple):
    """The deepest boundary that can be had, and the images that are to be read for it, in the order to take them in."""

    boundary: int
    images: list[SoughtImage]


class Asking(Protocol):
    """The questions to an engine. Each raises EngineError, and may wait."""

    at_once: int
    """How many images one round trip may ask for."""

    def sizes(self, wanted: Sequence[SoughtImage]) -> list[int | None]:
        """Return the bytes of each that is there."""

    def snapshots(self, parents: Sequence[bytes]) -> list[set[str]]:
        """Return what `snapshot_id` gives of the snapshots behind each of the blocks with these keys."""

    def snapshot_id(self, key: bytes) -> str: ...


def whole_mask(windows: tuple[Window, ...], start: int) -> tuple[int, ...]:
    """Return the mask of a window image that has all rows of the block at `start`."""
    return tuple(held_mask(((0, start + BLOCK),), start, window.keep, start + BLOCK) for window in windows)


def search(gap: Gap, asking: Asking) -> Reach:
    """Return the deepest boundary that can be reached with images that are there, and these images. It is the boundary that
    this machine has, and there are none, where nothing deeper is.
    """
    rows = [gap.rows(block) for block in range(gap.known, len(gap.keys))]
    there = [image._replace(size=size) for image, size in zip(rows, leading(rows, asking), strict=False)]
    blocks = gap.known + len(there)
    if gap.snapshots:
        return _to_snapshot(gap, asking, there, blocks)
    return _to_block(gap, asking, there, blocks * BLOCK)


def leading(wanted: Sequence[SoughtImage], asking: Asking) -> list[int | None]:
    """Find how many of the first images are there, where they are of use in a row only: return their sizes, or None where it
    was not asked for. Where one round trip can't ask for all: the first alone, since most often nothing is there; then at
    places between what is there and what is not, until these meet.
    """
    sizes: list[int | None] = [None] * len(wanted)
    first, last = 0, len(wanted)  # those before `first` are there, as far as was asked; that at `last` is not
    places: Iterable[int] = range(last) if last <= asking.at_once else [0]
    while first < last:
        asked = list(places)
        for place, size in zip(asked, asking.sizes([wanted[place] for place in asked]), strict=True):
            if size is None:
                last = place
                break
            sizes[place], first = size, place + 1
        steps = min(asking.at_once, last - first)
        # The deepest is asked for, too: the prompt may have been here as it is.
        places = sorted({last - 1 - (last - 1 - first) * step // steps for step in range(steps)})
    return sizes[:last]


def _to_block(gap: Gap, asking: Asking, rows: list[SoughtImage], boundary: int) -> Reach:
    """Return the deepest boundary, no deeper than that which has rows, for which the windows are there, too."""
    asked: dict[int, int | None] = {}
    while boundary > gap.boundary:
        needed = sorted(_window_blocks(gap, boundary))
        unasked = [gap.window(block) for block in needed if block not in asked]
        asked.update(
            zip((window.start // BLOCK for window in unasked), asking.sizes(unasked) if unasked else (), strict=True)
        )
        missing = [block for block in needed if asked[block] is None]
        if not missing:
            windows = [gap.window(block)._replace(size=asked[block]) for block in needed]
            return Reach(boundary, [image for image in rows if image.start < boundary] + windows)
        boundary = max(missing) * BLOCK
    return Reach(gap.boundary, [])


def _window_blocks(gap: Gap, boundary: int) -> set[int]:
    """Return the blocks whose windows a hit at `boundary` reads, and that are not here."""
    return {
        block
        for window in gap.windows
        for block in range(window.first(boundary) // BLOCK, -(-boundary // BLOCK))
        if not gap.has_window(block) and any(whole_mask(gap.windows, block * BLOCK))
    }


def _to_snapshot(gap: Gap, asking: Asking, rows: list[SoughtImage], blocks: int) -> Reach:
    """Return, with the rows of so many blocks, the deepest boundary that a snapshot serves, and whose rows and windows are
    there.
    """
    parents = range(blocks, max(blocks - SNAPSHOT_BLOCKS, gap.boundary // BLOCK - 1, -1), -1)
    for block, ids in zip(parents, asking.snapshots([gap.parent(block) for block in parents]), strict=True):
        for snapshot in _snapshots_of(gap, asking, block, ids):
            boundary = block * BLOCK + len(snapshot.tokens) // TOKEN_BYTES
            if boundary <= gap.boundary:
                break
            wanted = [image for image in rows if image.start <= block * BLOCK]
            if block == blocks:  # rows that end where the snapshot does
                tail = snapshot._replace(kind=ROWS)
                size = asking.sizes([tail])[0]
                if size is None:
                    continue
                wanted.append(tail._replace(size=size))
            if gap.windows:
                reach = _to_block(gap, asking, [], boundary) if not boundary % BLOCK else Reach(0, [])
                if reach.boundary != boundary:
                    continue
                wanted += reach.images
            return Reach(boundary, [*wanted, snapshot])
    return Reach(gap.boundary, [])


def _snapshots_of(gap: Gap, asking: Asking, block: int, ids: set[str]) -> list[SoughtImage]:
    """Return those snapshots behind a block that the prompt goes through, the deepest first."""
    snapshots: list[SoughtImage] = []
    parent, first = gap.parent(block), block * BLOCK * TOKEN_BYTES
    for end in range(min(gap.limit - block * BLOCK, BLOCK) if ids else 0, 0, -1):
        suffix = gap.token_bytes[first : first + end * TOKEN_BYTES]
        key = chain(parent, suffix)
        if asking.snapshot_id(key) in ids:
            snapshots.append(SoughtImage(SNAPSHOT, key, parent, block * BLOCK, suffix))
    return snapshots
