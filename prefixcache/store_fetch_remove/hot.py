"""Which hot prompt a request hits or begins with, and which become hot: see `tiers.hot`. The planner asks in the same way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from prefixcache.blocks.lookup import image_depth
from prefixcache.blocks.node import RAM
from prefixcache.keys import BLOCK, common_prefix
from prefixcache.layers.adapters import CacheError
from prefixcache.layers.hot_state import HotState, nbytes_of
from prefixcache.layers.reading import read
from prefixcache.layers.stored_rows import DecodedBeginning
from prefixcache.store_fetch_remove.namespaces import Namespaces
from prefixcache.tiers.hot import DecodedState, HotPrompt
from prefixcache.tiers.prompt import Prompt
from prefixcache.tiers.state import Namespace
from prefixcache.tiers.storage import Storage


class HotHit(NamedTuple):
    """The first `depth` tokens of a prompt are hot, in a namespace with this codec (JSON)."""

    state: Any
    depth: int
    codec: str


def keep_hot(storage: Storage, namespaces: Namespaces, prompt: Prompt, prompt_cache: list[Any]) -> int:
    """Keep a prompt cache's arrays for hits, as far as its tokens are stored. Return its bytes, 0 where it can't be kept."""
    reading = read(prompt_cache)
    namespace = namespaces.of_layout(prompt.model, reading.layout, prompt.salt)
    prompt.given_rows.turn_to(namespace.row.codec)
    end = len(prompt) if reading.positions is None else min(len(prompt), reading.positions)
    tokens = tokens_to_keep(storage, namespace, prompt, end, agreed=reading.agreed)
    try:
        nbytes = nbytes_of(prompt_cache, tokens) if tokens else 0
    except CacheError:
        return 0
    return add_hot(storage, namespace, prompt.first(tokens), nbytes, lambda: HotState.of(prompt_cache, tokens))


def tokens_to_keep(storage: Storage, namespace: Namespace, prompt: Prompt, end: int, *, agreed: bool = True) -> int:
    """Return how many tokens of a prompt can be kept hot, whose layers have seen `end`; 0 where none can. `agreed`: each has
    seen as many.
    """
    with storage.lock:
        stored = prompt.deepest_in(namespace, storage.graph.last, end).depth
    if not namespace.plan.lossless and prompt.given_rows.tokens // BLOCK < stored // BLOCK:
        stored = prompt.outside_media(prompt.given_rows.tokens // BLOCK * BLOCK)
    if namespace.plan.snapshots and not namespace.plan.lossless and prompt.given_rows.state != end:
        return 0
    is_sliceable = not (namespace.plan.windows or namespace.plan.snapshots)
    return stored if is_sliceable or (agreed and stored == end) else 0


def add_hot(
    storage: Storage, namespace: Namespace, prompt: Prompt, nbytes: int, make: Callable[[], DecodedState]
) -> int:
    """Keep the state of all tokens of a prompt, which `make` makes and which takes `nbytes`, where there is room. Return the
    bytes that are taken, 0 where there is none.
    """
    if not len(prompt):
        return 0
    nbytes += len(prompt.token_bytes)
    root, ids = namespace.row.root, np.frombuffer(prompt.token_bytes, "<i8")
    with storage.lock:
        reservation = storage.ram.reserve_hot(nbytes, root, ids)
    if reservation is None:
        return 0
    with reservation:
        hot = HotPrompt(root, ids, make())
        with storage.lock:
            if _stored(storage, namespace, hot) < len(ids):
                return 0  # deleted meanwhile
            is_kept = storage.hot.add(hot, reservation)
    return nbytes if is_kept else 0


def hot_hit(storage: Storage, prompt: Prompt, leave: int) -> HotHit | None:
    """Return the deepest hot prompt, where images in RAM don't reach deeper: at a boundary that images can be hit at."""
    with storage.lock:
        if not len(storage.hot):
            return None
        in_ram = prompt.deepest(RAM, leave)
        hot, depth = deepest_hot(storage, prompt, leave, in_ram.depth if in_ram is not None else 0)
        if hot is None:
            return None
        storage.hot.touch(hot)
        return HotHit(hot.state, depth, storage.namespaces[hot.root].row.codec)


def hot_blocks(storage: Storage, prompt: Prompt, namespace: Namespace, depth: int) -> HotHit | None:
    """Return the hot prompt that has most of the whole blocks of a hit of `depth` tokens in layers that keep every token."""
    with storage.lock:
        best, tokens, ids = None, 0, _ids(prompt, depth - depth % BLOCK)
        for hot in storage.hot.of(namespace.row.root):
            if hot.state.is_sliceable and (shared := _shared(hot, ids, tokens + BLOCK)):
                best, tokens = hot, shared - shared % BLOCK
        if best is None:
            return None
        storage.hot.touch(best)
        return HotHit(best.state, tokens, namespace.row.codec)


def hot_beginning(storage: Storage, prompt: Prompt, namespace: Namespace, depth: int) -> DecodedBeginning | None:
    """Return the rows of `hot_blocks`, from which a hit of `depth` tokens goes on with images, or None."""
    hot = hot_blocks(storage, prompt, namespace, depth)
    return hot.state.beginning(namespace.plan, hot.depth) if hot is not None else None


def deepest_hot(storage: Storage, prompt: Prompt, leave: int, least: int = 0) -> tuple[HotPrompt | None, int]:
    """Return the hot prompt that gives most of the tokens but the last `leave`, and how many; (None, 0) where none gives any,
    or as many as `least`. Called under the storage's lock.
    """
    best, deepest, wanted = None, 0, max(least, 1)
    ids = _ids(prompt, len(prompt) - leave)
    for namespace in prompt.namespaces() if len(storage.hot) else ():
        for hot in storage.hot.of(namespace.row.root):
            shared = _shared(hot, ids, wanted)
            if shared and (depth := _depth(storage, prompt, namespace, hot, shared)) >= wanted:
                best, deepest, wanted = hot, depth, depth + 1
    return best, deepest


def forget_deleted(storage: Storage) -> None:
    """Let go of hot prompts that no tier has any longer."""
    with storage.lock:
        for root, namespace in [(root, storage.namespaces.get(root)) for root in storage.hot.roots()]:
            for hot in list(storage.hot.of(root)):
                if namespace is None or _stored(storage, namespace, hot) < len(hot.ids):
                    storage.hot.drop(hot)


def _stored(storage: Storage, namespace: Namespace, hot: HotPrompt) -> int:
    walk = storage.graph.walk(namespace.tree, hot.ids.tobytes(), ())
    return image_depth(walk, storage.graph.last, len(hot.ids))


def _ids(prompt: Prompt, count: int) -> np.ndarray:
    return np.frombuffer(prompt.token_bytes, "<i8")[: max(count, 0)]


def _shared(hot: HotPrompt, ids: np.ndarray, wanted: int) -> int:
    """Return how many leading tokens a hot prompt shares with `ids`, 0 where they are fewer than `wanted`. Prompts that
    differ within these mostly differ in the last of them, too, which is therefore compared first.
    """
    if wanted > min(len(hot.ids), len(ids)) or hot.ids[wanted - 1] != ids[wanted - 1]:
        return 0
    shared = common_prefix(hot.ids, ids)
    return shared if shared >= wanted else 0


def _depth(storage: Storage, prompt: Prompt, namespace: Namespace, hot: HotPrompt, shared: int) -> int:
    """Return how much a hot prompt gives of one with which it shares so many tokens. Rows of its whole blocks are decoded: a
    hit doesn't end among them.
    """
    if shared < len(hot.ids) and not hot.state.is_sliceable:
        return 0
    if shared < len(hot.ids) // BLOCK * BLOCK and not namespace.plan.lossless:
        shared -= shared % BLOCK
    depth = prompt.deepest_in(namespace, storage.graph.last, shared).depth
    return depth if hot.state.is_sliceable or depth == len(hot.ids) else 0
