"""What is stored of a prompt, as a caller may hold it: immutable bytes that become a live prompt cache on demand.

`StoredPrompt` is what `PrefixCache.lookup` gives, `StoredLayer` one layer of it. Both share images with the cache and
never change them; `copy()` is cheap. Decoding runs on the caller's thread and stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from prefixcache.blocks.window_masks import mask_of
from prefixcache.image_format import Image
from prefixcache.layers.adapters import Layout
from prefixcache.layers.image_layout import Plan
from prefixcache.layers.read_ahead import ReadAhead
from prefixcache.layers.reading import live_arrays
from prefixcache.layers.restore import Restorer
from prefixcache.layers.stored_rows import Block, DecodedBeginning, StoredRows


class StoredPrompt:
    """The stored state of `tokens` tokens of one prompt.

    Holds its images as long as it lives, whatever the cache evicts meanwhile; those bytes are then the holder's.
    """

    def __init__(self, plan: Plan, tokens: int, blocks: list[Block], snapshot: Image | None):
        self.plan = plan
        self.tokens = tokens
        self.blocks = blocks
        self.snapshot = snapshot

    @property
    def layers(self) -> list[StoredLayer]:
        """Return a wrapper of each layer, in the model's order."""
        return [StoredLayer(self, i) for i in range(len(self.plan.layers))]

    @property
    def nbytes(self) -> int:
        """Count the bytes of the images held, headers included."""
        images = [image for block in self.blocks for image in block.images]
        return sum(image.nbytes for image in (*images, self.snapshot) if image is not None)

    def copy(self) -> StoredPrompt:
        """Return another holder of the same bytes: trimming one does not show in the other."""
        return StoredPrompt(self.plan, self.tokens, self.blocks, self.snapshot)

    def is_trimmable(self) -> bool:
        """Tell whether the last token can be cut off. Recurrent state can't be cut, a window only while its rows are held."""
        return self.tokens > 0 and self._holds(self.tokens - 1)

    def trim(self, n: int) -> int:
        """Cut the last `n` tokens off, here only. Returns how many were cut. ValueError where rows for that are missing."""
        if n < 0:
            raise ValueError(f"trim({n}): give a number of tokens")
        n = min(n, self.tokens)
        if n and not self._holds(self.tokens - n):
            raise ValueError(f"trim({n}): {self.tokens - n} tokens is no boundary that this state can be cut to")
        self.tokens -= n
        return n

    def dequantize(
        self, room: int = 0, read_ahead: ReadAhead | None = None, beginning: DecodedBeginning | None = None
    ) -> list[Any]:
        """Make a live prompt cache of the classes that were stored, with room for `room` more tokens before it must grow.

        What is decoded already is taken from `read_ahead`, which is of these tokens and has its `beginning`, or copied from a
        `beginning`. DamagedBlock for a file that somebody forged: a `fetch` deletes it.
        """
        rows = StoredRows(self.plan, self.tokens, self.blocks, beginning=beginning)
        decoded = read_ahead.take(rows) if read_ahead is not None else None
        return _evaluated(Restorer(rows, self.snapshot, room, decoded=decoded).layers(range(len(self.plan.layers))))

    def live(self, room: int = 0) -> list[Any]:
        """Return the same, but layers of KVCache whose rows are TurboQuant's codes come as `TurboQuantKVCache`, which takes
        these codes as they are: nothing is decoded. All others are as `dequantize` makes them.

        Codes are taken where they have few levels, as those have that a live cache stored. Rows that a plain cache stored
        have levels of each block, which no kernel reads: they are coded anew with levels of the whole, and so is a tail.
        """
        return self._restored(range(len(self.plan.layers)), room, live=True)

    def _restored(self, layers: Sequence[int], room: int, *, live: bool) -> list[Any]:
        """Make these layers alone, as `live` or as `dequantize` makes them."""
        rows = StoredRows(self.plan, self.tokens, self.blocks, layers)
        return _evaluated(Restorer(rows, self.snapshot, room, live=live).layers(layers))

    def _holds(self, boundary: int) -> bool:
        if self.plan.snapshots:
            return boundary == self.tokens
        for w, window in enumerate(self.plan.windows):
            for block in self.blocks:
                needed = mask_of(window.first(boundary) - block.start, boundary - block.start)
                for image in block.windows:
                    needed &= ~image.mask[w]
                if needed:
                    return False
        return True


class StoredLayer:
    """One layer of a stored prompt, with the interface of the field: copy, trim, dequantize, nbytes, is_trimmable."""

    def __init__(self, prompt: StoredPrompt, index: int):
        self._prompt = prompt
        self._index = index

    @property
    def class_name(self) -> str:
        """Return the qualified name of the class that went in and will come out."""
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
        """Count the bytes that this layer's rows take in the images, without headers; nothing is evaluated."""
        plan, blocks, total = self._prompt.plan, self._prompt.blocks, 0
        leaves = [i for i, layer in enumerate(plan.layer_of) if layer == self._index]
        images = [block.tensors for block in blocks] + [image.tensors for block in blocks for image in block.windows]
        for group in (group for section in plan.sections for group in section.groups):
            heads = sum(member.heads for member in group.members if member.leaf in leaves)
            names = (*group.names, *group.level_names)
            stored = sum(tensors[name].nbytes for tensors in images for name in names if name in tensors)
            total += stored * heads // group.heads
        for joined in plan.joined:
            share = sum(leaf in leaves for leaf, _ in joined.streams)
            stored = sum(tensors[name].nbytes for tensors in images for name in joined.names if name in tensors)
            total += stored * share // len(joined.streams)
        if self._prompt.snapshot is not None:
            numbers = [number for number, leaf in enumerate(plan.snapshots) if leaf in leaves]
            state = plan.stored_state(self._prompt.snapshot)
            total += sum(state.leaf_nbytes(number) for number in numbers)
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
        """Make a live layer cache of the class that was stored."""
        return self._prompt._restored([self._index], room, live=False)[0]

    def live(self, room: int = 0) -> Any:
        """Return a live layer cache that takes TurboQuant's codes as they are, where it can: see `StoredPrompt.live`."""
        return self._prompt._restored([self._index], room, live=True)[0]


def _evaluated(layers: list[Any]) -> list[Any]:
    """Compute what is lazy, so that any thread can go on from these layers; return them."""
    mx.eval(live_arrays(layers))
    return layers
