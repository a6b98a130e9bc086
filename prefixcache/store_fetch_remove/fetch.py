"""What a fetch does: pin what RAM has of a prompt, and decode blocks while the rest is still being read."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, NamedTuple

from prefixcache.blocks.lookup import rows_depth, windows_read
from prefixcache.blocks.node import RAM, Node, Slot
from prefixcache.blocks.window_masks import mask_of
from prefixcache.image_format import SNAPSHOT, Image
from prefixcache.keys import BLOCK
from prefixcache.layers.read_ahead import ReadAhead
from prefixcache.layers.stored import StoredPrompt
from prefixcache.layers.stored_rows import Block, WindowImage
from prefixcache.layers.transformed import DamagedBlock
from prefixcache.metrics.rates import MeasuredRates
from prefixcache.store_fetch_remove.hot import deepest_hot, hot_beginning, hot_blocks, hot_hit
from prefixcache.store_fetch_remove.namespaces import Namespaces
from prefixcache.tiers.prompt import Prompt, count_hit, take_hit
from prefixcache.tiers.state import Namespace
from prefixcache.tiers.storage import Storage
from prefixcache.trace.recording import Recorder

log = logging.getLogger("prefixcache")

RECENCY_FLUSH_INTERVAL = 60.0  # seconds after which a hit tells the index what was used
RECENCY_FLUSH_SLOTS = 8192  # or so many that it has not heard of


class PinnedPrompt(NamedTuple):
    """What RAM has of a prompt, still encoded, in which namespace, and the slots that are pinned for it."""

    stored: StoredPrompt
    namespace: Namespace
    slots: list[Slot]


class FetchedPrompt(NamedTuple):
    """A live prompt cache of so many tokens, which a fetch gives, of a namespace with this codec (JSON). The state of its
    first `hot` tokens was hot.
    """

    layers: list[Any]
    tokens: int
    hot: int
    codec: str


class Fetches:
    """What the fetches and lookups of a cache share. The storage's lock guards what was said, and when the index was told."""

    def __init__(self, storage: Storage, namespaces: Namespaces, rates: MeasuredRates, recorder: Recorder | None):
        self._storage, self._namespaces, self._rates, self._recorder = storage, namespaces, rates, recorder
        self._last_flush = time.monotonic()  # of what was used, to the index
        self._said: set[tuple[str, str]] = set()  # models and layouts of another form that a fetch has left alone

    def find(self, prompt: Prompt, leave: int) -> PinnedPrompt | None:
        """Pin what RAM has of a prompt and return it, or None on a miss. The caller unpins the slots."""
        storage = self._storage
        with storage.lock:
            unflushed = len(storage.graph.recency.unflushed)
            if unflushed > RECENCY_FLUSH_SLOTS or time.monotonic() > self._last_flush + RECENCY_FLUSH_INTERVAL:
                self._last_flush = time.monotonic()
                storage.spilling.flush_recency()
            hit = take_hit(storage, prompt, leave)
            if hit is None:
                return None
            depth, namespace, walk, pinned = hit
            blocks = [
                Block(
                    node.start,
                    node.rows.image,
                    tuple(
                        WindowImage(slot.image, tuple(mask & mask_of(0, shared) for mask in slot.mask))
                        for slot, shared in windows_read(node, depth, RAM).items()
                    ),
                )
                for node in walk.nodes
                if node.start < depth and node.rows is not None
            ]
            state: Image | None = next((slot.image for slot in pinned if slot.kind == SNAPSHOT), None)
        return PinnedPrompt(StoredPrompt(namespace.plan, depth, blocks, state), namespace, pinned)

    def decode(
        self, prompt: Prompt, leave: int, room: int | None, read_ahead: ReadAhead | None
    ) -> FetchedPrompt | None:
        """Return the deepest prompt cache that hot prompts and RAM have, or None on a miss. A block that can't be decoded is
        deleted, and the hit ends before it.
        """
        if (hot := hot_hit(self._storage, prompt, leave)) is not None:
            return FetchedPrompt(hot.state.layers(hot.depth), hot.depth, hot.depth, hot.codec)
        hit = self.find(prompt, leave)
        while hit is not None:
            try:
                return self._decoded(prompt, hit, room, read_ahead)
            except DamagedBlock as damage:
                discard_damaged(self._storage, prompt, hit.stored, damage)
                read_ahead = None
            finally:
                self._storage.unpin(hit.slots)
            hit = self.find(prompt, leave)
        return None

    def _decoded(
        self, prompt: Prompt, hit: PinnedPrompt, room: int | None, read_ahead: ReadAhead | None
    ) -> FetchedPrompt:
        stored, spare = hit.stored, len(prompt) - hit.stored.tokens if room is None else room
        if read_ahead is not None and read_ahead.is_of(stored.plan, stored.tokens):
            beginning = read_ahead.beginning
        else:
            read_ahead, beginning = None, hot_beginning(self._storage, prompt, hit.namespace, stored.tokens)
        began = time.monotonic()
        layers = stored.dequantize(spare, read_ahead, beginning)
        copied = beginning.tokens if beginning is not None else 0
        if read_ahead is None and not copied:  # a copy's time is not the decoding's
            self._rates.learn_fetch(prompt.model, stored.tokens, time.monotonic() - began)
        return FetchedPrompt(layers, stored.tokens, copied, hit.namespace.row.codec)

    def count(self, prompt: Prompt, depth: int, hot: int) -> None:
        """Count what a request was given, and how much of it was hot: once, however often RAM was asked for them."""
        storage = self._storage
        if self._recorder is not None:
            self._recorder.fetch(self._namespaces.recorded_root(prompt.model, prompt.salt), prompt.token_bytes)
        with storage.lock:
            count_hit(storage, prompt, depth, hot)
            other = prompt.left_alone(depth)
            storage.counters.of_other_form += bool(other)
            was_warned = (prompt.model, other) in self._said
            self._said.add((prompt.model, other))
        if other and not was_warned:
            log.warning(
                "model %r: prompts that were stored in another form are misses: %s",
                prompt.model,
                prompt.form.difference(other),
            )


def decline_slow(storage: Storage, rates: MeasuredRates, prompt: Prompt, leave: int) -> int:
    """Return how many tokens a fetch is to leave: `leave`, where the hit is quicker than computing by the rates that were
    measured here; else all but those that are hot, and what is declined is counted. Decision 0042 says why.
    """
    with storage.lock:
        deepest = prompt.deepest(RAM, leave)
        if deepest is None or not rates.fetching(prompt.model, deepest.depth):
            return leave
        depth = deepest.depth
        hot = deepest_hot(storage, prompt, leave)[1]
        if depth <= hot:
            return leave
        begins = hot_blocks(storage, prompt, deepest.namespace, depth)
        decoded = depth - (begins.depth if begins is not None else 0)
        if not rates.declines(prompt.model, decoded, depth - hot):
            return leave
        counters = storage.counters
        counters.declined_hits += 1
        counters.declined_hit_tokens += depth - hot
        is_first = counters.declined_hits == 1
    if is_first:
        log.info(
            "a hit of %d tokens is declined: fetching takes %.3f s, computing what is not hot of it %.3f s (setting "
            "decline_slow_hits). Said once; prefixcache_declined_hits_total counts",
            depth,
            rates.fetching(prompt.model, decoded),
            rates.computing(prompt.model, depth - hot),
        )
    return len(prompt) - hot


def fill_read_ahead(
    storage: Storage, coming: Future[int], prompt: Prompt, leave: int, room: int | None
) -> ReadAhead | None:
    """Decode the blocks that a promotion brings, one by one as they come, behind those that are decoded already, and return
    the buffers; None where that can't help. How deep the hit will be is a guess until the last block is there.
    """
    with storage.lock:
        deepest = prompt.deepest(storage.graph.last, leave)
    if deepest is None or deepest.depth <= 0 or not ReadAhead.serves(deepest.namespace.plan):
        return None
    depth, namespace, walk = deepest
    if (hot := hot_hit(storage, prompt, leave)) is not None and hot.depth >= depth:
        return None
    beginning = hot_beginning(storage, prompt, namespace, depth)
    read_ahead = ReadAhead(namespace.plan, depth, len(prompt) - depth if room is None else room, beginning)
    for node in walk.nodes[beginning.tokens // BLOCK if beginning is not None else 0 :]:
        if node.start >= depth or (image := _arrived(storage, node, coming)) is None:
            break
        try:
            read_ahead.add(node.start, image)
        except DamagedBlock:
            return None  # the fetch finds it again
    return read_ahead


def discard_damaged(storage: Storage, prompt: Prompt, stored: StoredPrompt, damage: DamagedBlock) -> None:
    """Delete a block's images from every tier, when its rows can't be decoded: what is left of the prompt ends before it."""
    damaged = next(block.images for block in stored.blocks if block.start == damage.start)
    with storage.lock:
        for namespace in prompt.namespaces():
            for node in prompt.deepest_in(namespace, RAM, stored.tokens).walk.nodes:  # the hit's way, not the prompt's
                slots = [slot for slot in node.slots if any(slot.image is image for image in damaged)]
                if slots:
                    log.warning("%s; it is deleted", damage)
                    storage.counters.corrupt += 1
                for slot in slots:
                    storage.reject(slot)


def discard_hit(storage: Storage, prompt: Prompt, depth: int) -> int:
    """Delete all images that a hit of the first `depth` tokens can have read, from every tier. Returns their bytes."""
    freed, beginning = 0, prompt.first(depth)
    with storage.lock:
        for namespace in beginning.namespaces():
            walk = beginning.walk(namespace)
            slots = [slot for node in walk.nodes if node.start < depth for slot in node.slots]
            freed += _discard(storage, [*slots, *walk.tree.root.snapshots.values()], depth)
            while rows_depth(walk := beginning.walk(namespace), storage.graph.last) == depth > 0:
                freed += _discard(storage, walk.nodes[-1].slots, depth)  # another block that has all of its tokens
        storage.counters.failed_hits += 1
    return freed


def _discard(storage: Storage, slots: Iterable[Slot], depth: int) -> int:
    """Delete images, but for snapshots behind the first `depth` tokens, from every tier. Returns their bytes."""
    freed = 0
    for slot in list(slots):
        if slot.kind != SNAPSHOT or slot.end <= depth:
            freed += storage.reject(slot)
    return freed


def _arrived(storage: Storage, node: Node, coming: Future[int]) -> Image | None:
    """Return a block's rows, once they are in RAM; None when they don't come. Every read that ends is notified."""
    with storage.changed:
        while node.rows is not None and node.rows.image is None and not coming.done():
            storage.changed.wait()
        return node.rows.image if node.rows is not None else None
