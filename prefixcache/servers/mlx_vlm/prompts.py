"""One loaded model's prompts in a PrefixCache: what mlx-vlm's server stores and is given.

`ModelPrompts` is made when a model is loaded; `ServedPrompt` goes with each request, from its arrival to its last token.
Nothing here raises on the way of a request: what can't be kept is left out, what can't be read is a miss.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from prefixcache.cache import PrefixCache
from prefixcache.keys import BLOCK
from prefixcache.media import chunks
from prefixcache.servers.batch_rows import put_back
from prefixcache.servers.media_inputs import OF_TOKENS, MediaInputs, Placeholders, media_inputs
from prefixcache.servers.read_or_compute import ReadOrCompute, quietly
from prefixcache.tiers.prompt import Prompt

log = logging.getLogger("prefixcache")

ROOM = 1024  # tokens, beyond a hit, that its layers have room for


class ModelPrompts:
    """A loaded model's prompts in `cache`. `name`: of its weights and of what computes with them. `new_layers` makes an empty
    prompt cache of it. `placeholders`: its tokens for media, whose tokens attend to each other where `whole`. `thinks`: the
    next turn may leave thoughts out, and so part from a prompt at its end. Thread-safe.
    """

    def __init__(
        self,
        cache: PrefixCache,
        name: str,
        new_layers: Callable[[], list[Any]],
        placeholders: Placeholders,
        *,
        whole: bool,
        thinks: bool = False,
    ):
        self.cache, self.name, self.new_layers = cache, name, new_layers
        self.promotions = ReadOrCompute(cache)
        self.is_recurrent = not all(layer.is_trimmable() for layer in new_layers())
        self.placeholders, self._whole, self._thinks = placeholders, whole, thinks
        self._level = logging.WARNING  # of what is said about the next prompt whose media can't be told

    def served(self, inputs: dict[str, Any], salt: bytes) -> ServedPrompt:
        """Return a request's prompt, whose inputs a processor made, and wait for what its SSD has as long as that pays."""
        served = ServedPrompt(self, inputs)
        try:
            served.media = media_inputs(served.tokens, served.inputs, self.placeholders)
        except (TypeError, ValueError) as error:
            log.log(self._level, "a prompt whose media can't be told is neither kept nor hit: %s", error)
            self._level = logging.DEBUG  # once: a client that sends a placeholder as text does so in each turn
            return served
        with quietly("a lookup"):
            served.prompt = self._prompt(served, salt)
            self.promotions.wait(served.prompt)
        return served

    def _prompt(self, served: ServedPrompt, salt: bytes) -> Prompt:
        prompt = self.cache.prompt(
            served.tokens,
            model=self.name,
            salt=salt,
            like=self.new_layers(),
            whole_blocks=True,
            media=[replace(medium, whole=self._whole) for medium in served.media.media],
        ).labelled("mlx-vlm")
        return prompt.with_ends(turn=len(prompt) - 1) if self._thinks else prompt


class ServedPrompt:
    """A request's prompt and its answer: what a hit gives it, and what is kept of it. For the thread that generates.

    `inputs`: what a processor made of it. `prompt`: None where nothing is kept of it. `depth`: the tokens of its hit.
    """

    def __init__(self, prompts: ModelPrompts, inputs: dict[str, Any]):
        self.inputs = inputs
        self.tokens: list[int] = inputs["input_ids"][0].tolist()
        self.media = MediaInputs((), {}, None)
        self.prompt: Prompt | None = None
        self.depth = 0
        self._prompts = prompts
        self._answer: list[int] = []
        self._since = 0  # tokens whose whole blocks are kept, or came from the cache
        self._points: list[int] = []  # where a snapshot or a tail is kept on the way

    def behind(self, depth: int) -> dict[str, Any]:
        """Return the inputs of the prompt behind its first `depth` tokens, without media before that."""
        if not depth:
            return self.inputs
        of_tokens = {name: self.inputs[name][:, depth:] for name in OF_TOKENS if self.inputs.get(name) is not None}
        return of_tokens | self.media.between(depth, len(self.tokens))

    def _usable(self, depth: int) -> int:
        """Return the last place at or before `depth` behind which the prompt can be embedded by itself: outside of media, and
        before or behind all of them where their inputs can't be told apart.
        """
        media = self.media.media
        place = next((medium.start for medium in media if medium.start < depth < medium.end), depth)
        if self.media.parts is None and media and media[0].start < place < media[-1].end:
            return media[0].start
        return place

    # -- the prefill --------------------------------------------------------------------------------------------------

    def fetch(self) -> list[Any]:
        """Return the layers to go on from: those of the deepest hit, of `depth` tokens, or empty ones."""
        self.depth, layers = 0, None
        with quietly("a lookup"):
            layers = self._fetch()
        self._since = self.depth // BLOCK * BLOCK
        if layers is None:
            self.depth = self._since = 0
        return layers if layers is not None else self._prompts.new_layers()

    def _fetch(self) -> list[Any] | None:
        prompt, cache, leave = self.prompt, self._prompts.cache, 1
        if prompt is None:
            return None
        while True:
            layers, rest = cache.fetch(prompt, leave=leave, room=min(len(prompt), ROOM))
            self.depth = len(prompt) - len(rest) if layers is not None else 0
            usable = self._usable(self.depth)
            if usable == self.depth:
                break
            leave = len(prompt) - usable
        self._points = self._points_of(prompt)
        self._prompts.promotions.began(prompt, len(prompt) - self.depth)
        return layers

    def _points_of(self, prompt: Prompt) -> list[int]:
        """Return where a snapshot or a tail is kept: where other prompts parted; of recurrent models also before the first
        medium, and behind the last.
        """
        points = {self._prompts.cache.branch_point(prompt)}
        if self._prompts.is_recurrent and prompt.media:
            points |= {prompt.media[0].start, prompt.media[-1].end}
        return sorted(point for point in points if self.depth < point < len(prompt) - 1)

    def end_of_chunk(self, at: int, step: int) -> int:
        """Return where the chunk of at most `step` tokens ends that begins at token `at`: with a block, if it can, and not
        inside a medium whose tokens attend to each other. The last token is left for the answer's first.
        """
        last = len(self.tokens) - 1
        limit = next((point for point in self._points if point > at), last)
        _, end = next(
            chunks(at, min(limit, last), step, self.prompt.media if self.prompt is not None else ()), (at, last)
        )
        return end

    def keep(self, layers: list[Any], done: int) -> None:
        """Keep what has become whole of the prompt, of which `done` tokens are computed: the rows of blocks in `layers`
        become what a hit gives.
        """
        if self.prompt is None:
            return
        whole, is_last = done // BLOCK * BLOCK, done == len(self.tokens) - 1
        state = is_last or done in self._points
        is_end = state or any(medium.end == done for medium in self.prompt.media)
        if not is_end and whole <= self._since:
            return
        with quietly("a store"):
            seen = self.prompt.first(done if is_end else whole)
            if is_last:
                self._prompts.promotions.ended(seen)
            self._prompts.cache.store_behind(seen, layers, write_back_from=self._since, snapshot=state)
        self._since = max(whole, self._since)

    def drop_hit(self, error: Exception) -> list[Any]:
        """Delete the hit that the model could not go on from, and return empty layers to compute all of the prompt with."""
        log.warning(
            "a hit of %d tokens is deleted, since the model fails on it: %s: %s",
            self.depth,
            type(error).__name__,
            error,
        )
        with quietly("a removal"):
            if self.prompt is not None:
                self._prompts.cache.drop_hit(self.prompt, self.depth)
        self.depth = self._since = 0
        return self._prompts.new_layers()

    # -- the answer ---------------------------------------------------------------------------------------------------

    def generated(self, token: int) -> bool:
        """Hear of a token of the answer, which the layers have seen. Return whether a block has become whole with it."""
        self._answer.append(token)
        return self.prompt is not None and self._seen() // BLOCK * BLOCK > self._since

    @property
    def answered(self) -> int:
        """Return how many tokens of the answer `generated` was told of."""
        return len(self._answer)

    def _seen(self) -> int:
        return len(self.tokens) + len(self._answer)

    def keep_block(self, layers: list[Any], batched: Sequence[Any], row: int) -> None:
        """Keep the block that has become whole. `layers`: of the request alone; `batched`: those that go on, it is a `row`
        of.
        """
        since, whole = self._since, self._seen() // BLOCK * BLOCK
        if self.prompt is None:
            return
        with quietly("a store"):
            seen = self.prompt.continued(self._answer).first(whole)
            self._prompts.cache.store(seen, layers, write_back_from=since, snapshot=False)
            for layer, single in zip(batched, layers, strict=True):
                put_back(layer, row, single, since, whole)
        self._since = whole

    def end(self, layers: list[Any], last: int | None = None) -> None:
        """Keep the prompt and its answer, whose layers nobody appends to any more. `last`: a token that they have seen and
        `generated` was not told of.
        """
        if self.prompt is None:
            return
        cache, answer = self._prompts.cache, [*self._answer, *([] if last is None else [last])]
        with quietly("a store"):
            seen = self.prompt.continued(answer)
            is_hot = cache.settings.hot != 0
            cache.store(seen, layers, write_back_from=seen.given_rows.tokens if is_hot else None)
            cache.keep_hot(seen, layers)
        self.prompt = None
