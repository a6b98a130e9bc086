"""`Prompt`: one request's tokens, checked and resolved once, and how far each of its namespaces knows them.

A prompt remembers its walks and takes them up where they were when the graph has changed. Nothing here runs MLX or reads a
file: the planner asks in the same way.
"""

from __future__ import annotations

import copy
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from prefixcache.blocks.graph import Nearest
from prefixcache.blocks.lookup import image_depth, pin_leaves, required_images, tiers_to
from prefixcache.blocks.node import RAM, SHARED, TURN, Node, Slot, Walk, common_tokens
from prefixcache.keys import BLOCK, TOKEN_BYTES, as_tokens, chain
from prefixcache.media import Media, last_end, outside_media, rope_delta
from prefixcache.tiers.state import Namespace
from prefixcache.tiers.storage import Storage


class Deepest(NamedTuple):
    """How many leading tokens a namespace gives, and the way there. Valid until the graph changes."""

    depth: int
    namespace: Namespace
    walk: Walk


class Hit(NamedTuple):
    """A hit in RAM. The `pinned` slots keep all of its images there; the caller unpins them once it has the images."""

    depth: int
    namespace: Namespace
    walk: Walk
    pinned: list[Slot]


class PromptEnds(NamedTuple):
    """After how many tokens others may part from a prompt: where a beginning ends that they share, and where its turn does. 0
    where that is not known.
    """

    shared: int = 0
    turn: int = 0


NO_ENDS = PromptEnds()


@dataclass(frozen=True)
class PromptTerms:
    """What tokens are stored and looked up under: see `PrefixCache.prompt`. `form` is a `layers.form.CacheForm`, or None."""

    model: str = ""
    salt: bytes = b""
    form: Any = None
    whole_blocks: bool = False
    label: str = ""
    session: str = ""
    ends: PromptEnds = NO_ENDS


@dataclass
class GivenRows:
    """How many leading `tokens` have in the caller's layers the very rows that a fetch gives: those of a hit, and those that
    stores wrote back since. `state` is the number of tokens behind which the layers have the recurrent state that a fetch
    gives, `codec` (JSON) that of the namespace that gave the rows.
    """

    tokens: int = 0
    state: int = 0
    codec: str = ""

    def turn_to(self, codec: str) -> int:
        """Go on with a namespace of this codec. Return how many tokens have rows from a namespace of another codec. They
        count as given no longer, since this codec gives other rows.
        """
        others = self.tokens if self.codec not in ("", codec) else 0
        if others:
            self.tokens = self.state = 0
        self.codec = codec
        return others


class Prompt:
    """The tokens of one request, for one model and one tenant. `PrefixCache.prompt` makes it.

    `match`, `promote`, `fetch`, `store` and the others take it in the place of tokens, model and salt: these are then checked
    once, and the graph is walked once.
    """

    def __init__(
        self,
        storage: Storage,
        namespaces: Callable[[], Sequence[Namespace]],
        token_bytes: bytes,
        given: Any = None,
        terms: PromptTerms = PromptTerms(),
        media: Sequence[Media] = (),
    ):
        """`namespaces` gives those that may know the tokens: `token_bytes` (raw int64), with the pseudo-ids of `media` in
        place of their placeholders. `given` are the caller's own tokens.
        """
        self._storage = storage
        self._all_namespaces = namespaces
        self.token_bytes = token_bytes
        self.given = given
        self.terms = terms
        self.media = media  # the last one may go on beyond the prompt: see `first`
        self.given_rows = GivenRows()  # one for all prompts that were made of this one
        self.model, self.salt, self.form = terms.model, terms.salt, terms.form
        self._walks: dict[bytes, Walk] = {}  # by root key; the storage's lock guards them
        self._keys: dict[bytes, list[bytes]] = {}  # by root key, as far as they were asked for; guarded likewise

    def __len__(self) -> int:
        return len(self.token_bytes) // TOKEN_BYTES

    def namespaces(self) -> Sequence[Namespace]:
        """Return those that may know the tokens, as prompt caches of the caller's form."""
        known = self._all_namespaces()
        return known if self.form is None else [space for space in known if not self.form.difference(space.row.layout)]

    def left_alone(self, depth: int) -> str:
        """Return the layout (JSON) that knows more than the first `depth` tokens, as prompt caches that the caller doesn't
        make; "" where none does. Called under the storage's lock.
        """
        others = [] if self.form is None else self._all_namespaces()
        for namespace in others:
            if self.form.difference(namespace.row.layout):
                limit = max(len(self) - 1, 0)
                if self.hit_depth(self.walk(namespace), self._storage.graph.last, limit) > depth:
                    return namespace.row.layout
        return ""

    def continued(self, tokens: Any) -> Prompt:
        """Return the prompt with the text that comes after it, such as its answer; goes on from its walks. Errors as of
        `prompt`; ValueError where this one ends inside a medium.
        """
        if self.media and self.media[-1].end > len(self):
            raise ValueError(
                f"the prompt's {len(self)} tokens end inside a medium of tokens {self.media[-1].start} to "
                f"{self.media[-1].end}: give the prompt that has all of it"
            )
        more = as_tokens(tokens)
        given = np.concatenate([self._given_ids(), more]) if self.media else None
        return self._resumed(self.token_bytes + more.tobytes(), given)

    def first(self, count: int) -> Prompt:
        """Return a prompt of the first `count` tokens, for instance of those that are computed so far. It goes on from this
        prompt's walks. ValueError for a negative count.
        """
        if count < 0:
            raise ValueError(f"first({count}): give a number of tokens, 0 or more")
        given = self._given_ids()[:count] if self.media else None
        return self._resumed(self.token_bytes[: count * TOKEN_BYTES], given)

    def labelled(self, label: str) -> Prompt:
        """Return the same prompt. `stats().labels` counts under this word of yours what its stores add."""
        return self._under(label=label)

    def in_session(self, session: str) -> Prompt:
        """Return the same prompt, whose stores and fetches are those of a session: see `PrefixCache.end_session`."""
        return self._under(session=sys.intern(session))

    def with_ends(self, *, shared: int = 0, turn: int = 0) -> Prompt:
        """Return the same prompt, of which stores of so many tokens leave a tail that stays when its block becomes whole:
        others may part there, as the next turn where it leaves thoughts out. A turn's stays until the next one's is stored.
        """
        return self._under(ends=PromptEnds(shared, turn))

    def _under(self, **terms: Any) -> Prompt:
        """Return the same prompt, with the same walks, under other terms."""
        other = copy.copy(self)
        other.terms = replace(self.terms, **terms)
        return other

    @property
    def kept_ends(self) -> dict[int, str]:
        """Return the places where a tail stays when its block becomes whole, and what ends there: SHARED, also with a medium,
        which others ask about, too, or a TURN. What is shared stays where a turn ends, too.
        """
        named = {self.terms.ends.turn: TURN, self.terms.ends.shared: SHARED}
        return {end: what for end, what in named.items() if end} | {medium.end: SHARED for medium in self.media}

    def rope_delta(self, depth: int) -> int:
        """Return what the RoPE positions behind a hit of `depth` tokens are more than the tokens' places: the sum, over the
        media before, of positions minus length. Negative for most M-RoPE models.
        """
        return rope_delta(self.media, depth)

    def outside_media(self, place: int) -> int:
        """Return the last place at or before this one that is not inside a medium whose tokens attend to each other."""
        return outside_media(self.media, place)

    def last_multiple(self, step: int, place: int) -> int:
        """Return the last multiple of `step` or end of a medium at or before this place, outside of whole media."""
        end = place - place % step
        while (outside := self.outside_media(end)) < end:
            end = outside - outside % step
        return max(end, last_end(self.media, place))

    def _given_ids(self) -> np.ndarray:
        return as_tokens(self.given)[: len(self)]

    def _resumed(self, token_bytes: bytes, given: np.ndarray | None) -> Prompt:
        """Return a prompt whose tokens begin with these, or these with them. `given`: the caller's, if others."""
        media = tuple(medium for medium in self.media if medium.start * TOKEN_BYTES < len(token_bytes))
        given = np.frombuffer(token_bytes, "<i8") if given is None else given
        resumed = Prompt(self._storage, self._all_namespaces, token_bytes, given, self.terms, media)
        resumed.given_rows = self.given_rows
        for root, walk in list(self._walks.items()):
            path = [node for node in walk.path if node.end <= len(resumed)]
            resumed._walks[root] = walk._replace(path=path, version=-1)
        resumed._keys = {root: keys[: len(resumed) // BLOCK] for root, keys in list(self._keys.items())}
        return resumed

    def is_of(self, storage: Storage) -> bool:
        return self._storage is storage

    # What follows is called under the storage's lock.

    def walk(self, namespace: Namespace) -> Walk:
        """Find how far the namespace knows the tokens now."""
        graph, known = self._storage.graph, self._walks.get(namespace.row.root)
        prefix: Sequence[Node] = ()
        if known is not None and known.tree is namespace.tree:
            if known.version == graph.version:
                return known
            prefix = graph.valid_prefix(known.path)
        walk = self._walks[namespace.row.root] = graph.walk(namespace.tree, self.token_bytes, prefix)
        return walk

    def _hits_whole_blocks(self, namespace: Namespace) -> bool:
        return self.terms.whole_blocks and namespace.tree.keeps_tails

    def keys(self, namespace: Namespace) -> list[bytes]:
        """Return the keys of its whole blocks; those that the graph knows are not computed again."""
        root = namespace.row.root
        keys, step = self._keys.setdefault(root, []), BLOCK * TOKEN_BYTES
        if len(keys) < len(self) // BLOCK:
            keys += [node.key for node in self.walk(namespace).path[len(keys) :] if node.is_whole]
            for block in range(len(keys), len(self) // BLOCK):
                keys.append(chain(keys[-1] if keys else root, self.token_bytes[block * step : (block + 1) * step]))
        return keys

    def deepest(self, tier: int, leave: int = 0) -> Deepest | None:
        """Return the namespace that gives most of the tokens but the last `leave`; None where none is known."""
        limit = max(len(self) - leave, 0)
        hits = (self.deepest_in(namespace, tier, limit) for namespace in self.namespaces())
        return max(hits, key=lambda hit: hit.depth, default=None)

    def deepest_in(self, namespace: Namespace, tier: int, limit: int) -> Deepest:
        """Return the deepest boundary, at most `limit`, that can be hit; of a prompt with `whole_blocks` one at the end of a
        whole block, or in an incomplete one whose rows are kept as they are.
        """
        walk = self._hit_walk(namespace, tier, limit)
        depth = self.hit_depth(walk, tier, limit)
        while depth > 0 and self._hits_whole_blocks(namespace):
            node = next(node for node in walk.nodes if node.end >= depth)
            if node.end == depth if node.is_whole else not _is_coded(namespace, node):
                break
            depth = self.hit_depth(walk, tier, node.start)
        return Deepest(depth, namespace, walk)

    def _hit_walk(self, namespace: Namespace, tier: int, limit: int) -> Walk:
        """Return the walk that a hit of at most `limit` tokens takes. Where that can't end in the block that shares most with
        the prompt, it leads to the block beside it, such as a turn's tail, that shares most of those where it can.
        """
        walk = self.walk(namespace)
        tiers, only_tails = tiers_to(tier), self._hits_whole_blocks(namespace)
        path, last = walk.path, walk.partial
        if limit % BLOCK and limit // BLOCK < len(path):
            path, last = path[: limit // BLOCK], path[limit // BLOCK]
        if path and (path[-1].rows is None or not path[-1].rows.tiers & tiers):
            broken_at = next(i for i, node in enumerate(path) if node.rows is None or not node.rows.tiers & tiers)
            path, last = path[:broken_at], path[broken_at]
        elif last is None and path and not path[-1].is_whole:
            path, last = path[:-1], path[-1]
        if last is None or self._may_end_in(last, namespace, tier):
            return walk
        assert last.parent is not None
        tokens = self.token_bytes[last.start * TOKEN_BYTES : (last.start + BLOCK) * TOKEN_BYTES]
        candidates = [
            node
            for node in last.parent.children
            if not (only_tails and node.is_whole) and node.rows is not None and node.rows.tiers & tiers
        ]
        place, nearest = bisect_left(candidates, tokens, key=lambda node: node.tokens), Nearest(None, 0)
        for side in (reversed(candidates[:place]), candidates[place:]):
            node = next((node for node in side if self._may_end_in(node, namespace, tier)), None)
            shared = common_tokens(node.tokens, tokens) if node is not None else 0
            if shared > nearest.shared:
                nearest = Nearest(node, shared)
        if nearest.child is not None and nearest.shared == nearest.child.end - nearest.child.start:
            return walk._replace(path=[*path, nearest.child], partial=None, shared=0)
        return walk._replace(path=path, partial=nearest.child, shared=nearest.shared)

    def _may_end_in(self, node: Node, namespace: Namespace, tier: int) -> bool:
        """Tell whether a hit may end inside a block: its rows are in the tier or a faster one, and each can be had alone."""
        if node.rows is None or not node.rows.tiers & tiers_to(tier):
            return False
        return not self._hits_whole_blocks(namespace) or not (node.is_whole or _is_coded(namespace, node))

    def hit_depth(self, walk: Walk, tier: int, limit: int) -> int:
        """Return the deepest boundary, at most `limit`, that has all images that a hit needs, and is in no whole medium."""
        depth = image_depth(walk, tier, limit)
        while (outside := self.outside_media(depth)) < depth:
            depth = image_depth(walk, tier, outside)
        return depth


def take_hit(storage: Storage, prompt: Prompt, leave: int) -> Hit | None:
    """Pin the RAM images of the deepest hit and return it, or None. The caller unpins, and calls `count_hit`."""
    deepest = prompt.deepest(RAM, leave)
    if deepest is None or deepest.depth <= 0:
        return None
    return Hit(*deepest, storage.graph.pin(pin_leaves(required_images(deepest.walk, deepest.depth, RAM))))


def note_use(slots: Iterable[Slot], session: str) -> None:
    """Note that a request of a session ("" of none) used these slots: those of another session belong to none from now on."""
    for slot in slots:
        if slot.session != session:
            slot.session = ""


def count_hit(storage: Storage, prompt: Prompt, depth: int, hot: int) -> None:
    """Count a fetch that used the first `depth` tokens of a prompt, 0 on a miss, and make their images the most recent. The
    first `hot` of the tokens came from a hot prompt, so RAM need not have their images.
    """
    graph, counters = storage.graph, storage.counters
    counters.fetches += 1
    counters.asked_tokens += len(prompt)
    counters.hit_tokens += depth
    counters.hot_hit_tokens += hot
    if len(storage.long_prompts):
        for namespace in prompt.namespaces():
            storage.long_prompts.asked_for(prompt.keys(namespace))
    deepest = prompt.deepest(RAM, len(prompt) - depth) if depth else None
    counters.ram_hit_tokens += depth - max(deepest.depth if deepest is not None else 0, 0)
    if deepest is None or deepest.depth <= 0:  # or it was evicted since
        return
    required = required_images(deepest.walk, deepest.depth, RAM)
    graph.recency.touch(required, hit=True)
    whole = (slot for slot in required if slot.end <= deepest.depth)  # of others a store makes images of its own
    note_use(whole, prompt.terms.session)
    counters.count_tiers(required, deepest.depth)
    if storage.remote is not None:
        storage.remote.offer_used(deepest.walk, deepest.depth, required)


def _is_coded(namespace: Namespace, tail: Node) -> bool:
    """Tell whether a tail is coded, as live caches store it. False for one below RAM, which isn't read for that."""
    assert tail.rows is not None
    return tail.rows.image is not None and namespace.plan.is_coded(tail.rows.image.tensors())
