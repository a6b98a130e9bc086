"""Prompts computed and stored ahead of the first user, as far as they are not stored yet. `prefixcache warm` calls this in a
process of its own, a server on the thread that owns its model. Where the model, the tokenizer and the cache come from is the
caller's business; what of a prompt is worth storing is said in `warm_prompts`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from prefixcache.cache import PrefixCache
from prefixcache.keys import BLOCK, common_prefix
from prefixcache.layers.encode import evaluate
from prefixcache.layers.form import CacheForm
from prefixcache.layers.reading import read
from prefixcache.media import chunks
from prefixcache.servers.warm_prompts import WarmSequence
from prefixcache.tiers.prompt import Prompt

MIN_SHARED = BLOCK  # tokens that prompts must share before the place where they branch is worth a state of its own


class Step(NamedTuple):
    """How far it is: `done` of the `total` tokens of all prompts are stored or computed; `prompt` of `prompts` is at work."""

    done: int
    total: int
    prompt: int
    prompts: int


class Warmed(NamedTuple):
    """What `warm` did: prompts and their tokens, tokens that the model computed, prompts that were stored already, and
    prompts that RAM and SSD have no room for: those are not whole in the cache now.
    """

    prompts: int
    tokens: int
    computed: int
    skipped: int
    unkept: int


def warm_sequences(
    cache: PrefixCache,
    load_model: Callable[[], Any],
    sequences: list[WarmSequence],
    *,
    model: str,
    prefill_step_size: int = 2048,
    progress: Callable[[Step], None] | None = None,
) -> Warmed:
    """Compute and store what the cache doesn't have of these sequences, in their order.

    `model` names the weights, as for `PrefixCache.store`. `load_model` gives an mlx-lm model, or a tuple of a model and its
    draft model, whose layers follow in one prompt cache as in mlx_lm.server; it is called once, when there is something to
    compute. MLX runs on this thread and its default stream, `prefill_step_size` tokens at a time. What
    sequences of one salt share is computed once: a model whose state can't be cut at any token (recurrent layers, sliding
    windows) is stored where they branch, too, if they share 256 tokens or more.

    `progress` is told of every chunk and every sequence. What it raises ends the work; what was computed stays stored.
    """
    if prefill_step_size < 1:
        raise ValueError(f"prefill_step_size={prefill_step_size}: give a number of tokens, 1 or more")
    job = _Warmer(cache, load_model, model, prefill_step_size, progress or (lambda step: None), sequences)
    for number, (sequence, points) in enumerate(zip(sequences, branch_points(sequences), strict=True), 1):
        job.warm(number, sequence, points)
    return Warmed(len(sequences), job.total, job.computed, job.skipped, unkept(cache, sequences, model=model))


def unkept(cache: PrefixCache, sequences: Iterable[WarmSequence], *, model: str) -> int:
    """Return how many of these sequences are not whole in the cache. No I/O, no MLX."""
    return sum(not _is_stored(cache, cache.prompt(s.tokens, model=model, salt=s.salt)) for s in sequences)


def _is_stored(cache: PrefixCache, prompt: Prompt) -> bool:
    return cache.match(prompt).ssd >= len(prompt)


class _Warmer:
    """The sequences at work. Used by one thread."""

    def __init__(
        self,
        cache: PrefixCache,
        load_model: Callable[[], Any],
        model: str,
        step: int,
        progress: Callable[[Step], None],
        sequences: list[WarmSequence],
    ):
        self._cache, self._load_model, self._model, self._step = cache, load_model, model, step
        self._progress, self._prompts = progress, len(sequences)
        self._nets: tuple[Any, ...] = ()
        self._form: CacheForm | None = None  # of their prompt cache, once they are loaded
        self._layers: list[int] = []  # of the prompt cache, for each of them
        self.total = sum(len(sequence.tokens) for sequence in sequences)
        self.done = self.computed = self.skipped = 0

    def warm(self, number: int, sequence: WarmSequence, points: list[int]) -> None:
        """Compute what is missing of a sequence, and store it at its end, and where others branch off if need be."""
        tokens, before = sequence.tokens, self.done
        prompt = self._cache.prompt(tokens, model=self._model, salt=sequence.salt, like=self._form)
        if _is_stored(self._cache, prompt):
            self.skipped += 1
            self._tell(number, before + len(tokens))
            return
        if not self._nets:
            self._load()
        prompt = self._cache.prompt(tokens, model=self._model, salt=sequence.salt, like=self._form, whole_blocks=True)
        prompt = prompt.labelled(sequence.label).in_session(sequence.session)
        prompt_cache, rest = self._cache.fetch(prompt, leave=0, promote=True)
        if prompt_cache is None:
            prompt_cache = [layer for net in self._nets for layer in make_prompt_cache(net)]
        depth = len(prompt) - len(rest)
        self._tell(number, before + depth)
        at_points = _needs_boundaries(prompt_cache)
        if self._cache.ranks is not None:  # the stages of a pipeline have different layers
            at_points = self._cache.ranks.any(at_points)
        boundaries = [*points, len(tokens)] if at_points else [len(tokens)]
        for boundary in boundaries:
            for first, last in chunks(depth, boundary, self._step):
                self._compute(tokens[first:last], prompt_cache)
                since, whole = (at // BLOCK * BLOCK for at in (first, last))
                if whole > since:  # as under serve: what is computed on is what is stored
                    self._store(prompt.first(whole), prompt_cache, since)
                depth = last
                try:
                    self._tell(number, before + depth)
                except BaseException:  # the one who waits wants no more: what was computed is kept
                    self._store(prompt.first(depth), prompt_cache)
                    raise
            if depth == boundary:
                self._store(prompt.first(depth), prompt_cache)

    def _load(self) -> None:
        nets = self._load_model()
        self._nets = nets if isinstance(nets, tuple) else (nets,)
        prompt_caches = [make_prompt_cache(net) for net in self._nets]
        self._form = CacheForm.of_kept([layer for layers in prompt_caches for layer in layers])
        self._layers = [len(layers) for layers in prompt_caches]

    def _compute(self, tokens: list[int], prompt_cache: list[Any]) -> None:
        """Compute one chunk. Its logits are of no use, and as nothing asks for them they are never computed."""
        first = 0
        for net, layers in zip(self._nets, self._layers, strict=True):
            net(mx.array([tokens]), cache=prompt_cache[first : first + layers])
            first += layers
        evaluate(read(prompt_cache).leaves)
        mx.clear_cache()
        self.computed += len(tokens)

    def _store(self, computed: Prompt, prompt_cache: list[Any], since: int | None = None) -> None:
        """Store what was computed. Of the blocks from token `since` on, just become whole, the rows are written back."""
        self._cache.store(computed, prompt_cache, write_back_from=since, snapshot=since is None)

    def _tell(self, number: int, done: int) -> None:
        self.done = done
        self._progress(Step(done, self.total, number, self._prompts))


def _needs_boundaries(prompt_cache: list[Any]) -> bool:
    """Return whether a longer prompt's state can't serve every shorter one."""
    return any(leaf.layout["kind"] != "sliceable" for leaf in read(prompt_cache).leaves)


def branch_points(sequences: list[WarmSequence]) -> list[list[int]]:
    """For each sequence, after how many tokens others of its salt go on otherwise; ascending, none below MIN_SHARED.

    In sorted order, what two sequences share is the least that neighbours between them share.
    """
    order = sorted(range(len(sequences)), key=lambda i: (sequences[i].salt, sequences[i].tokens))
    shared = [_shared(sequences[i], sequences[j]) for i, j in pairwise(order)]
    points: list[set[int]] = [set() for _ in sequences]
    for at, i in enumerate(order):
        for depth, j in zip(accumulate(shared[at:], min), order[at + 1 :], strict=True):
            if depth < MIN_SHARED:
                break
            points[i].add(depth)
            points[j].add(depth)
    return [
        sorted(depth for depth in depths if depth < len(sequence.tokens))
        for depths, sequence in zip(points, sequences, strict=True)
    ]


def _shared(a: WarmSequence, b: WarmSequence) -> int:
    return common_prefix(a.tokens, b.tokens) if a.salt == b.salt else 0
