"""Where a prompt parts from what is stored, and why a hit is no deeper than it is. Nothing here reads a file or changes the
graph; a server asks for requests that were hit little.
"""

from __future__ import annotations

from typing import NamedTuple

from prefixcache.blocks.lookup import image_depth, rows_depth
from prefixcache.blocks.node import RAM, Walk
from prefixcache.keys import BLOCK
from prefixcache.tiers.prompt import Prompt
from prefixcache.tiers.state import Namespace
from prefixcache.tiers.storage import Storage

STATE_EVERY = 4096  # tokens: decision 0046
TAIL_STEP = 32  # tokens: a tail is kept at a multiple of these, decision 0056

PARTED = "parted"
NOTHING_STORED = "nothing_stored"
EVICTED = "evicted"
NOT_READ = "not_read"
DECLINED = "declined"
NO_STATE = "no_state"
NO_WINDOW = "no_window"
WHOLE_BLOCK = "whole_block"
WHOLE_MEDIUM = "whole_medium"
DAMAGED = "damaged"
OTHER_FORM = "other_form"

REASONS = {
    PARTED: "no stored prompt goes on like this one",
    NOTHING_STORED: "nothing is stored of this model and tenant",
    EVICTED: "more was stored, and has been evicted since",
    NOT_READ: "the SSD or the remote tier has more, and it was not read in time",
    DECLINED: "RAM has more, and computing it is quicker",
    NO_STATE: "the model goes on from stored states only, and none is kept there",
    NO_WINDOW: "the rows of a sliding window that it needs are not kept",
    WHOLE_BLOCK: "it parts within a coded block, which is hit as a whole",
    WHOLE_MEDIUM: "a medium, such as a picture, is hit as a whole, or the prompt ends with it",
    DAMAGED: "a block on its way was damaged, and is gone",
    OTHER_FORM: "more is stored, for layers of another form",
}


class Parting(NamedTuple):
    """Of a prompt's `tokens`, `hit` were given. Its first `position` are those of the stored prompt that shares most with it,
    in whichever tier; with EVICTED, of one that is stored no longer, to whole blocks. `reason`: why no more was given, one of
    `REASONS`.
    """

    tokens: int
    hit: int
    position: int
    reason: str

    @property
    def has_parted(self) -> bool:
        """Tell whether the prompt goes on otherwise than what is stored."""
        return self.tokens - self.position > 0 and self.reason != NOTHING_STORED


class BranchPoint(NamedTuple):
    """After how many tokens a prompt parts from those that are stored. What a hit there needs is kept at the last multiple of
    `step`: a snapshot or a tail; 0: such hits need neither.
    """

    depth: int
    step: int


def states_on_the_way(depth: int, tokens: int) -> range:
    """Return where recurrent state is kept while a prompt of so many tokens is computed from a hit of `depth` on, wherever it
    parts from others.
    """
    return range(depth - depth % STATE_EVERY + STATE_EVERY, tokens, STATE_EVERY)


def parting_of(storage: Storage, prompt: Prompt, hit: int) -> Parting:
    """Return where a prompt that was given `hit` tokens parts from what is stored. Called under the storage's lock."""
    walks = [(space, prompt.walk(space)) for space in prompt.namespaces()]
    if not walks:
        reason = OTHER_FORM if prompt.left_alone(hit) else NOTHING_STORED
        return Parting(len(prompt), hit, 0, reason)
    space, walk = max(walks, key=lambda pair: pair[1].depth)
    known = max(walk.depth, hit)  # a hot prompt may have more than the images that are left
    if (evicted := _evicted_to(storage, prompt, space, walk)) > known:
        return Parting(len(prompt), hit, evicted, EVICTED)
    reason = OTHER_FORM if prompt.left_alone(known) else _reason(storage, prompt, space, walk, hit)
    return Parting(len(prompt), hit, known, reason)


def branch_point_of(storage: Storage, prompt: Prompt) -> BranchPoint:
    """Return up to where a stored prompt is the same, below the last token, which is always computed. Called under the
    storage's lock.
    """
    spaces = prompt.namespaces()
    depth = max((rows_depth(prompt.walk(space), storage.graph.last) for space in spaces), default=0)
    step = BLOCK if any(space.plan.snapshots for space in spaces) else 0
    if not step and prompt.terms.whole_blocks and any(space.tree.keeps_tails for space in spaces):
        step = TAIL_STEP
    return BranchPoint(min(depth, max(len(prompt) - 1, 0)), step)


def _evicted_to(storage: Storage, prompt: Prompt, space: Namespace, walk: Walk) -> int:
    """Return the end of the last whole block behind the walk that was evicted lately; 0 where none was."""
    keys, first = prompt.keys(space), walk.depth // BLOCK
    evicted = (place for place in range(len(keys) - 1, first - 1, -1) if keys[place] in storage.evicted_keys)
    return (next(evicted, -1) + 1) * BLOCK


def _reason(storage: Storage, prompt: Prompt, space: Namespace, walk: Walk, hit: int) -> str:
    limit, last = max(len(prompt) - 1, 0), storage.graph.last
    if hit >= min(walk.depth, limit):
        return PARTED if space.tree.root.children or hit else NOTHING_STORED
    if prompt.deepest_in(space, RAM, limit).depth > hit:
        return DECLINED
    if prompt.deepest_in(space, last, limit).depth > hit:
        return NOT_READ
    if any(node.rows is None for node in walk.nodes):
        return DAMAGED
    if prompt.hit_depth(walk, last, limit) > hit:
        return WHOLE_BLOCK
    if image_depth(walk, last, limit) > hit:
        return WHOLE_MEDIUM
    return NO_STATE if walk.tree.snapshots else NO_WINDOW
