"""Prefill under mlx_lm.server, with requests that are told apart and whole blocks that become what is stored.

`RequestBatches` are mlx-lm's batches, which know whose their sequences are. In them, and in `stream` for requests that mlx-lm
serves by themselves, an answer is made on what a hit will give: a prompt is computed in pieces that end where a block ends.
After each, the rows of its blocks are coded, stored, and put back decoded into the cache that the model goes on with; so are
those of an answer, when they fill a block. At its end the prompt is stored with its tail, for who asks that again. Decision
0028 says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.generate import generation_stream, stream_generate
from mlx_lm.models.cache import KVCache

from prefixcache.keys import BLOCK
from prefixcache.media import chunks
from prefixcache.servers.batch_rows import put_back
from prefixcache.servers.buffer_pool import empty_pool
from prefixcache.servers.errors import may_be_the_hits
from prefixcache.servers.mlx_lm.tenant_cache import TenantPromptCache, TokenizedRequest
from prefixcache.servers.mlx_lm.upstream import Batches, RequestTokens, request_of
from prefixcache.upstream import in_temporal_order, row_count

log = logging.getLogger("prefixcache")


class Begun(NamedTuple):
    """How a request was begun: the segments of its prompt, behind the tokens of its hit, and mlx-lm's other options."""

    segments: list[list[int]]
    hit: list[int]
    options: dict[str, Any]


@dataclass
class SequenceUnderWay:
    """A sequence in the batches. `request`: whose it is, None where nothing says so. `begun`: None once there is a token of
    its answer. `points`: where a snapshot or a tail is kept on the way. `ends`: after how many tokens a segment of the loop
    ends. `kept`: how many tokens are in blocks that are kept, or came from the cache.
    """

    request: TokenizedRequest | None
    begun: Begun | None
    points: list[int]
    ends: set[int]
    kept: int


class RequestBatches:
    """mlx-lm's batches (`upstream.Batches`), which know whose their sequences are, store the blocks that become whole in a
    step and put back what is stored of them, and go on when a step raises an exception. It stands where mlx-lm's loop has
    its `BatchGenerator`.

    An exception ends, with an error, the requests whose step it was: those whose prompts are computed, or those that
    generate. But where one of them began with a hit and has no token of its answer yet, the hit may be to blame: it is
    deleted, and all of them that have no token yet are computed from their first token on.
    """

    def __init__(self, prompts: TenantPromptCache, *args: Any, **options: Any):
        self._prompts = prompts
        self._sequences: dict[int, SequenceUnderWay] = {}  # by uid
        self._generated: list[Any] = []  # in the present step
        self._is_whole = True  # False while a call changes the batch that generates, or what came of it
        self._batches = Batches(self._watched, self._processed, *args, **options)
        self.extract_cache, self.close = self._batches.extract_cache, self._batches.close

    @property
    def prompt_cache_nbytes(self) -> int:
        return int(self._batches.prompt_cache_nbytes)

    def insert_segments(self, segments: Any, *, all_tokens: Any = None, **options: Any) -> Any:
        known = all_tokens or [[] for _ in segments]
        sequences = []
        for i, (parts, tokens) in enumerate(zip(segments, known, strict=True)):
            request = request_of(tokens)
            own_options = {name: values[i : i + 1] for name, values in options.items() if name != "caches"}
            begun = Begun([list(segment) for segment in parts], list(tokens), own_options)
            ends = [*accumulate(len(segment) for segment in parts if segment)]
            points = self._prompts.branch_points(request, len(tokens))
            sequences.append(SequenceUnderWay(request, begun, points, {*ends, ends[-1] - 1}, _whole(len(tokens))))
        pieces = segments if self._prompts.exact_prefill else [*map(self._pieces_of, sequences)]
        uids = self._batches.insert_segments(pieces, all_tokens=known, **options)
        self._sequences.update(zip(uids, sequences, strict=True))
        return uids

    def _pieces_of(self, sequence: SequenceUnderWay) -> list[list[int]]:
        """Return the segments of a sequence in pieces that end where a block does, and where state is kept."""
        assert sequence.begun is not None
        segments, step = [*filter(None, sequence.begun.segments)], self._batches.prefill_step_size
        return pieces_of(segments, len(sequence.begun.hit), step, sequence.points)

    def remove(self, uids: Any, *args: Any, **options: Any) -> Any:
        removed = self._batches.remove(uids, *args, **options)
        for uid in uids:
            self._forget(uid)
        return removed

    def next(self) -> Any:
        try:
            return self._batches.next()
        except Exception as error:
            return self._go_on_after(error)
        finally:
            self._generated = []  # else the last answer's prompt cache would stay while nobody asks

    def _processed(self, prompt_responses: Any, generated: Any) -> Any:
        for response in generated:
            if response.finish_reason is not None:
                self._forget(response.uid)
            elif response.uid in self._sequences:
                self._sequences[response.uid].begun = None
        if not self._prompts.exact_prefill:
            self._keep_all(prompt_responses, generated)
        return prompt_responses, generated

    def _forget(self, uid: int) -> None:
        self._sequences.pop(uid, None)

    # -- blocks that have become whole --------------------------------------------------------------------------------

    def _keep_all(self, prompt_responses: Any, generated: Any) -> None:
        """Keep what a step has made whole, and have the responses tell of ends of the loop's segments, not of pieces."""
        self._prompts.hear_of_chunks(all_of_them=False)  # others wait for them
        for response in prompt_responses:
            if not response.end_of_prompt:
                done, total = response.progress
                if (sequence := self._sequences.get(response.uid)) is not None:
                    response.end_of_segment = response.end_of_segment and done in sequence.ends
                self._keep(self._batches.prefilling, response.uid, total - done)
        for response in generated:
            if response.finish_reason is None:
                self._keep(self._batches.generating, response.uid, 0)

    def _keep(self, batch: Any, uid: int, to_come: int) -> None:
        """Keep the blocks of a sequence that have become whole."""
        sequence = self._sequences.get(uid)
        if uid not in batch.uids or sequence is None:
            return
        i, since = batch.uids.index(uid), sequence.kept
        ready = ready_of(batch.tokens[i], since, to_come, sequence.points)
        if ready is not None:
            layers, whole = [_single(layer, i) for layer in batch.prompt_cache], _whole(len(ready.tokens))
            self._prompts.keep_blocks(sequence.request, ready.tokens, layers, since, ready.state)
            for layer, single in zip(batch.prompt_cache, layers, strict=True):
                put_back(layer, i, single, since, whole)
            sequence.kept = whole

    # -- a step that failed -------------------------------------------------------------------------------------------

    def _watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any) -> Any:
            self._is_whole = False
            result = call(*args)
            self._is_whole = True
            if isinstance(result, list):
                self._generated = result
            return result

        return watched

    def _go_on_after(self, error: Exception) -> Any:
        """Begin again the requests that failed on what may be their hit, and end the others whose step failed by an error.
        Return what the step gave for all others, as `next` does. Ranks can't go on: the hits are deleted, and the error is
        raised.
        """
        untouched = self._batches.waiting()
        if self._is_whole:
            untouched |= {*self._batches.generating.uids, *(response.uid for response in self._generated)}
        failed = {uid: self._sequences[uid] for uid in sorted(self._sequences.keys() - untouched)}
        blamed = [each for each in failed.values() if each.begun and each.begun.hit] if may_be_the_hits(error) else []
        for sequence in blamed:
            if sequence.request is not None and sequence.begun is not None:
                self._prompts.drop_hit(sequence.request, len(sequence.begun.hit), error)
        again = {uid: sequence for uid, sequence in failed.items() if blamed and sequence.begun is not None}
        answers = {uid: of.request.answers if of.request is not None else None for uid, of in failed.items()}
        if self._prompts.cache.ranks is not None or not all(answers.values()):
            raise error
        was_whole = self._is_whole
        self._empty()
        for uid, sequence in again.items():
            self._begin_again(uid, sequence)
        ended = [uid for uid in failed if uid not in again]
        if ended:
            log.error("a step of the model failed, which ends %d requests: %s", len(ended), error, exc_info=error)
        for uid in ended:
            answers[uid].fail(error)  # type: ignore[union-attr]
        # mlx-lm's loop removes those that are to stop when it hears of their progress.
        heard = [self._batches.told_of(uid) for uid in ended]
        if was_whole:
            return self._processed(heard, self._generated)
        last = [response for response in self._generated if response.uid not in failed]  # their answers end here
        return heard, last

    def _empty(self) -> None:
        """Drop the prompts that are computed, and where a step has left it in the middle of a change, the batch that
        generates.
        """
        self._batches.drop_prefilling()
        if not self._is_whole:
            self._batches.drop_generating()
            self._is_whole = True
        empty_pool()

    def _begin_again(self, uid: int, sequence: SequenceUnderWay) -> None:
        """Compute a request's prompt from its first token on."""
        assert sequence.begun is not None
        (first, *others), hit, options = sequence.begun
        self._forget(uid)
        known = [RequestTokens([], sequence.request)]
        insert = partial(self.insert_segments, [[hit + first, *others]], all_tokens=known, **options)
        self._batches.insert_as(uid, insert)


def pieces_of(segments: Sequence[list[int]], at: int, step: int, points: Sequence[int]) -> list[list[int]]:
    """Cut segments, the first of which begins at token `at`, into pieces of at most `step` tokens that end where a block or a
    segment ends, and at each of `points`.
    """
    pieces = []
    for segment in segments:
        end = at + len(segment)
        bounds = [at, *(point for point in points if at < point < end), end]
        parts = [part for bound in pairwise(bounds) for part in chunks(*bound, step)]
        pieces += [segment[first - at : last - at] for first, last in parts]
        at = end
    return pieces


class Ready(NamedTuple):
    """The tokens that are stored after a step, and whether their recurrent `state` is kept."""

    tokens: list[int]
    state: bool


def ready_of(tokens: list[int], since: int, to_come: int, points: Sequence[int]) -> Ready | None:
    """Return what is stored of the tokens computed so far, while `to_come` of the prompt are still to be computed: all at
    `points` and before the prompt's last token, else whole blocks. None where that is no more than the first `since` tokens.
    """
    if to_come == 1 or len(tokens) in points:
        return Ready(tokens, state=True)
    whole = _whole(len(tokens))
    return Ready(tokens[:whole], state=to_come <= BLOCK) if whole > since else None


def _whole(tokens: int) -> int:
    return tokens - tokens % BLOCK


def _single(batched: Any, i: int) -> Any:
    """Return one sequence's layer cache; of a sequence that is alone, one that shares the batch's arrays."""
    in_temporal_order(batched)
    alone = type(batched).__name__ == "BatchKVCache" and batched.keys is not None and len(batched.keys) == 1
    if alone and not batched.left_padding.item():
        layer = KVCache()
        layer.keys, layer.values, layer.offset = batched.keys, batched.values, row_count(batched)
        return layer
    return batched.extract(i)


def stream(
    prompts: TenantPromptCache,
    request: TokenizedRequest,
    depth: int,
    model: Any,
    tokenizer: Any,
    prompt: Sequence[int],
    **options: Any,
) -> Iterator[Any]:
    """Generate as mlx-lm's `stream_generate` does, behind a request's hit of `depth` tokens, and keep blocks as they become
    whole.

    What is not the prefill of one model's tokens (a draft model, images, rows that are quantised meanwhile, processors that
    look at the prompt) is left to mlx-lm, on exact rows.
    """
    layers: Any = options.get("prompt_cache")
    given = [options.get(name) is not None for name in ("draft_model", "input_embeddings")]
    given += [bool(options.get(name)) for name in ("kv_bits", "logits_processors")]
    if prompts.exact_prefill or layers is None or any(given):
        yield from stream_generate(model=model, tokenizer=tokenizer, prompt=prompt, **options)
        return
    tokens, points, kept = request.prompt.given[:depth].tolist(), prompts.branch_points(request, depth), _whole(depth)

    def keep(to_come: int) -> None:
        nonlocal kept
        if (ready := ready_of(tokens, kept, to_come, points)) is not None:
            prompts.keep_blocks(request, ready.tokens, layers, kept, ready.state)
            kept = _whole(len(ready.tokens))

    progress = options.get("prompt_progress_callback") or (lambda done, total: None)
    done = 0
    with mx.stream(options.get("stream") or generation_stream):  # mlx-lm 0.31 passes none
        for piece in pieces_of([list(prompt[:-1])], depth, options.get("prefill_step_size", 2048), points):
            progress(done, len(prompt))
            model(mx.array([piece]), cache=layers)
            mx.eval([layer.state for layer in layers])
            mx.clear_cache()
            tokens += piece
            done += len(piece)
            keep(len(prompt) - done)
    options["prompt_progress_callback"] = lambda computed, total: progress(done + computed, len(prompt))
    tokens.append(prompt[-1])
    for response in stream_generate(model=model, tokenizer=tokenizer, prompt=list(prompt[-1:]), **options):
        keep(0)
        tokens.append(response.token)
        yield response
