"""Bytes of images that a model's state takes with a codec.

StateSizes are those of the store's own blueprints, to the byte; what the state is comes from `model`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from prefixcache.blocks.graph import NODE_BYTES, SLOT_BYTES
from prefixcache.blocks.node import Window
from prefixcache.blocks.window_masks import extra_of, held_mask
from prefixcache.codecs import Codec
from prefixcache.image_format import Blueprint, HeaderFields, Spec
from prefixcache.keys import BLOCK, KEY_BYTES, canonical
from prefixcache.layers.snapshots import State
from prefixcache.planning.model import PROMPT, ModelState, held_rows, row_bytes

GROWTH = 256  # rows that mlx-lm's caches grow by at once


class StateSizes:
    """Bytes of the images that `PrefixCache.store` makes of a model's state with a codec, headers included: exact."""

    def __init__(self, state: ModelState, codec: Codec):
        self.state, self.codec, self.plan = state, codec, state.plan(codec)
        # The name that they are stored under, which their headers have: as long as `model_identity` makes it.
        self.model = f"{state.name}@{'0' * 24}|code {'0' * 16}"
        self._codec, self._layout = canonical(codec.spec()), canonical(state.layout)
        self._nbytes: dict[Any, int] = {}

    def rows_bytes(self, start: int, tokens: int = BLOCK) -> int:
        """Return the bytes of the rows image of the block at token `start`: coded if it is whole, else as it is."""
        coded = tokens == BLOCK
        counts = tuple(count for _, count in self.plan.in_rows(start, tokens, coded))
        shape = (counts, coded)
        return self.image_bytes("rows", start, shape, lambda: (self.plan.rows_specs(start, tokens, coded), "{}"))

    def window_bytes(self, start: int, mask: tuple[int, ...], coded: bool = True) -> int:
        """Return the bytes of the window image with these tokens of the block, a bit each, for each of `plan.windows`."""
        sunk = tuple(tokens & self.plan.sunk(start) for tokens in mask)
        return self.image_bytes(
            "window", start, (mask, sunk, coded), lambda: (self.plan.window_specs(mask, start, coded), extra_of(mask))
        )

    def snapshot_bytes(self, start: int, suffix_tokens: int) -> int:
        """Return the bytes of the snapshot `suffix_tokens` (1 to 256) behind token `start`, where a block ends; 0 for a
        model without any.
        """
        if not self.state.has_snapshots:
            return 0
        end = start + suffix_tokens
        shape = (suffix_tokens, end if self.state.grows else None)
        return self.image_bytes("snapshot", start, shape, lambda: self._snapshot_specs(end, suffix_tokens))

    def _snapshot_specs(self, end: int, suffix_tokens: int) -> tuple[list[Spec], str]:
        state = self.snapshot(end)
        return [*state.specs(), Spec("tokens", "I64", (suffix_tokens,))], state.extra

    def snapshot(self, tokens: int) -> State:
        """Return what a snapshot after so many tokens keeps, as a store describes it; its arrays are not evaluated."""
        return self._fixed_snapshot or self.plan.describe_state(self.state.leaves(tokens))

    @cached_property
    def _fixed_snapshot(self) -> State | None:
        return None if self.state.grows else self.plan.describe_state(self.state.leaves(PROMPT))

    def image_bytes(self, kind: str, start: int, shape: Any, make: Callable[[], tuple[list[Spec], str]]) -> int:
        """Return an image's bytes, computed once for all images of a kind that have this shape and as many digits in
        `start`: a header has both.
        """
        image = kind, len(str(start)), shape
        if image not in self._nbytes:
            specs, extra = make()
            key = "0" * 2 * KEY_BYTES
            meta = HeaderFields(kind, key, key, key, self.model, self._codec, self._layout, start, extra=extra)
            self._nbytes[image] = Blueprint(meta, specs).nbytes
        return self._nbytes[image]

    @property
    def raw_bytes_per_token(self) -> int:
        """Of a token in a live cache of mlx-lm's, in the layers that keep every token."""
        return sum(row_bytes(leaf) for leaf in self.plan.leaves if leaf["kind"] == "sliceable")

    @property
    def bytes_per_token(self) -> float:
        """Of a token deep in a long prompt: its share of a whole block's rows image."""
        return self.rows_bytes(PROMPT) / BLOCK

    @property
    def ram_bytes_per_token(self) -> float:
        """The same with the block's place in the tree, which RAM has for it."""
        return (self.rows_bytes(PROMPT) + SLOT_BYTES + NODE_BYTES) / BLOCK + 8

    @property
    def ratio(self) -> float | None:
        """How many times smaller than in a live cache; None where no layer keeps every token."""
        return self.raw_bytes_per_token / self.bytes_per_token if self.raw_bytes_per_token else None

    def windows_bytes(self, tokens: int, first: int = 0) -> int:
        """Return the bytes of a prompt's window images from token `first` on, stored once after a generation."""
        windows = [(held_rows(window, tokens), window.keep) for window in self.plan.windows]
        total = 0
        for start in range(first, tokens, BLOCK) if windows else ():
            mask = tuple(held_mask(runs, start, keep, tokens) for runs, keep in windows)
            total += self.window_bytes(start, mask, tokens - start >= BLOCK) if any(mask) else 0
        return total

    @cached_property
    def most_windows_bytes(self) -> int:
        """Of the window images of one boundary deep in a prompt, at most: wherever in its block the boundary is."""
        if not self.plan.windows:
            return 0
        deep, total = PROMPT + 2 * -(-max(window.size for window in self.plan.windows) // BLOCK) * BLOCK, 0
        for tokens in range(deep + 1, deep + BLOCK + 1):
            first = min(held_rows(window, tokens)[-1][0] for window in self.plan.windows)
            total = max(total, self.windows_bytes(tokens, first=first // BLOCK * BLOCK))
        return total

    def prompt_bytes(self, tokens: int) -> int:
        """Return the bytes of all images of one prompt, stored once after a generation."""
        last_block = (tokens - 1) // BLOCK * BLOCK
        rows = sum(self.rows_bytes(start, min(BLOCK, tokens - start)) for start in range(0, tokens, BLOCK))
        return rows + self.windows_bytes(tokens) + self.snapshot_bytes(last_block, tokens - last_block)

    def live_bytes(self, tokens: int) -> int:
        """Return the bytes of the same prompt in mlx-lm's live cache after a generation, without the room to grow."""
        rows = 0
        for leaf in self.state.leaves(tokens):
            rows += sum(last - first for first, last in leaf.held) * row_bytes(leaf.layout)
        return rows + sum(array.nbytes for array in self.snapshot(tokens).arrays)

    def hot_bytes(self, tokens: int) -> int:
        """Return the bytes of the same prompt kept hot: a window that isn't full yet has the room that it grew by last."""
        room = 0
        for leaf in self.state.leaves(tokens):
            if "window" in leaf.layout and not (window := Window(*leaf.layout["window"])).chunked:
                room += min(GROWTH - 1, max(window.size - tokens, 0)) * row_bytes(leaf.layout)
        return self.live_bytes(tokens) + room
