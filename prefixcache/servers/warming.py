"""Prompts prefilled and stored ahead of the first user: read from a file, rendered as mlx_lm.server renders requests,
computed as far as they are not stored yet. `prefixcache warm` calls this in a process of its own, a server on the thread
that owns its model. Where the model, the tokenizer and the cache come from is the caller's business.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import pairwise, takewhile
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from prefixcache.cache import PrefixCache
from prefixcache.keys import BLOCK, chunks
from prefixcache.layers.encode import evaluate
from prefixcache.layers.plan import read

CHAT, TEXT = ("messages", "tools", "chat_template_kwargs"), ("prompt",)
KEYS = (*CHAT, *TEXT, "cache_salt")
LABEL = "system"  # mlx_lm.server's word for what conversations open with, see `PrefixCache.store`

# After these roles it is the user's turn: what is stored must serve whatever the user says. Any other is answered.
USER_FOLLOWS = ("system", "developer", "assistant")
# What may come next begins like one of these. A tokenizer may join it with the end of what stands before it.
NEXT = ("a", "1", ".", " a", "  ", "\n", "\t\t", "\r")
THINKING = 11  # tokens at the end in which mlx_lm.server looks for the beginning of a thought
LEAST_SHARED = BLOCK  # tokens that prompts must share before the place where they part is worth a state of its own


class BadPrompt(ValueError):
    """A prompt that can't be read or rendered. The text names file, line, key and what to do; it quotes no prompt."""


@dataclass(frozen=True)
class Prompt:
    """One line of a file of prompts: either `messages`, as in a chat request, or `text`. `where` is "file:line"."""

    where: str
    messages: tuple[dict[str, Any], ...] = field(default=(), repr=False)
    tools: tuple[dict[str, Any], ...] = field(default=(), repr=False)
    text: str = field(default="", repr=False)
    salt: bytes = field(default=b"", repr=False)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Sequence:
    """The tokens to store of one prompt, and whose they are."""

    tokens: list[int] = field(repr=False)
    salt: bytes = field(default=b"", repr=False)


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


# -- reading ----------------------------------------------------------------------------------------------------------


def read_prompts(path: str | PathLike[str]) -> list[Prompt]:
    """The prompts of a JSON Lines file; blank lines don't count.

    A line is {"messages": [...], "tools": [...], "chat_template_kwargs": {...}} as in a chat request to mlx_lm.server, or
    {"prompt": "text"}; with "cache_salt": "..." its UTF-8 bytes are the salt. BadPrompt for anything else.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise BadPrompt(f"{path}: {error.strerror or error}; give a file with a prompt as JSON on each line") from None
    found = [_read(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise BadPrompt(f'{path}: no prompts in it; write one as JSON on each line, such as {{"messages": [...]}}')
    return found


def _read(where: str, line: bytes) -> Prompt:
    try:
        given = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else "nested too deep, or a number too long"
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg}, column {error.colno}"
        raise BadPrompt(f"{where}: not JSON ({reason}); write one object on each line") from None
    if not isinstance(given, dict):
        raise BadPrompt(f'{where}: no JSON object; write {{"messages": [...]}} or {{"prompt": "..."}}')
    given = {key: value for key, value in given.items() if value is not None}
    for key in given:
        if key not in KEYS:
            near = get_close_matches(key, KEYS, 1, 0.55) or [", ".join(KEYS)]
            raise BadPrompt(f"{where}: unknown key {key!r}; write {near[0]}, or leave it out")
    ways = [key for key in ("messages", "prompt") if key in given]
    if len(ways) != 1:
        raise BadPrompt(f'{where}: {" and ".join(ways) or "no prompt"}; give one of "messages" and "prompt"')
    if ways == ["prompt"]:
        for key in CHAT:
            _check(where, key, key not in given, 'goes with "messages" only; leave it out')
        _check(where, "prompt", isinstance(given["prompt"], str), "not a text; write a string")
        _check(where, "prompt", given["prompt"], "empty; write what is to be stored, or leave the line out")
        return Prompt(where, text=given["prompt"], salt=_salt(where, given))
    tools, options = given.get("tools", []), given.get("chat_template_kwargs", {})
    _check(where, "tools", _are_objects(tools), "not a list of objects; write tools as in a chat request")
    _check(where, "chat_template_kwargs", isinstance(options, dict), 'not an object; write {"name": value}')
    return Prompt(where, _messages(where, given["messages"]), tuple(tools), "", _salt(where, given), options)


def _messages(where: str, messages: Any) -> tuple[dict[str, Any], ...]:
    remedy = 'write [{"role": "system", "content": "..."}]'
    _check(where, "messages", _are_objects(messages) and messages, f"not a list of messages; {remedy}")
    for i, message in enumerate(messages):
        _check(where, f"messages[{i}].role", isinstance(message.get("role"), str), f"missing, or not a text; {remedy}")
        content = message.get("content")
        texts = _are_objects(content) and all(
            part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
        )
        wrong = "not a text, nor a list of text parts; images can't be warmed, so leave them out"
        _check(where, f"messages[{i}].content", content is None or isinstance(content, str) or texts, wrong)
    return tuple(messages)


def _salt(where: str, given: dict[str, Any]) -> bytes:
    salt = given.get("cache_salt", "")
    _check(where, "cache_salt", isinstance(salt, str), "not a text; write one, or leave it out")
    try:
        return bytes(salt.encode())
    except UnicodeEncodeError:
        raise BadPrompt(f"{where}: cache_salt: not Unicode text (half of a surrogate pair); write another") from None


def _check(where: str, key: str, good: Any, otherwise: str) -> None:
    if not good:
        raise BadPrompt(f"{where}: {key}: {otherwise}")


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


# -- tokens -----------------------------------------------------------------------------------------------------------


def sequences_of(
    tokenizer: Any, prompts: Iterable[Prompt], chat_template_args: dict[str, Any] | None = None
) -> list[Sequence]:
    """What to store of each prompt. BadPrompt for one that the tokenizer or its chat template refuses."""
    return [Sequence(tokens_of(tokenizer, prompt, chat_template_args), prompt.salt) for prompt in prompts]


def tokens_of(tokenizer: Any, prompt: Prompt, chat_template_args: dict[str, Any] | None = None) -> list[int]:
    """The tokens that every later request which begins with this prompt has, as mlx_lm.server makes them.

    `tokenizer` is mlx-lm's wrapper, `chat_template_args` what the server was started with.

    - Messages that the user goes on from (the last one is system, developer or assistant): what the chat template gives
      whatever the user says. It ends where mlx_lm.server ends its "system" segment, or some tokens before: the server sees
      one request, and a line feed in front of a text can be another token than one in front of a line feed.
    - Other messages are a request (the last one is user or tool), and it will come as it is: all its tokens up to the tail
      in which the template opens a thought, as the server's "user" segment; without such a tail all but the last one, as a
      request leaves one token to compute.
    - A text: its tokens but the last one, and but those that another text joined to it would change. A tokenizer of word
      pieces can change more of a last word that goes on, so a text should end where a word does. Attention is hit up
      to the first token that differs, whatever is stored; only recurrent layers need a boundary that is exactly there.

    What a template makes of the day or the hour is no one's to share.
    """
    try:
        if prompt.text:
            whole = list(tokenizer.encode(prompt.text))
            return _common([whole[:-1], *(list(tokenizer.encode(prompt.text + more)) for more in NEXT)])
        if prompt.messages[-1]["role"] not in USER_FOLLOWS:
            return _unanswered(tokenizer, _render(tokenizer, prompt, chat_template_args))
        turns = ({"role": "user", "content": more} for more in NEXT)
        return _common([_render(tokenizer, prompt, chat_template_args, turn) for turn in turns])
    except Exception as error:  # a template may raise anything
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise BadPrompt(f"{prompt.where}: the tokenizer or its chat template refuses it: {reason}") from error


def _render(
    tokenizer: Any, prompt: Prompt, chat_template_args: dict[str, Any] | None, *following: dict[str, Any]
) -> list[int]:
    from mlx_lm.server import convert_chat, process_message_content

    messages = copy.deepcopy([*prompt.messages, *following])
    if not tokenizer.has_chat_template:
        return list(tokenizer.encode(convert_chat(messages)))
    process_message_content(messages)
    options = {**(chat_template_args or {}), **prompt.chat_template_kwargs}
    tools = list(prompt.tools) or None
    return list(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, tools=tools, tokenize=True, **options)
    )


def _unanswered(tokenizer: Any, request: list[int]) -> list[int]:
    if tokenizer.has_thinking:
        thought = tokenizer.rfind_think_start(request, start=max(len(request) - THINKING, 0))
        if thought >= 0:
            return request[:thought]
    return request[:-1]


def _common(sequences: Iterable[list[int]]) -> list[int]:
    """The tokens with which all of them begin: those that the least and the greatest share."""
    ordered = sorted(sequences)
    pairs = zip(ordered[0], ordered[-1], strict=False)
    return [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]


# -- storing ----------------------------------------------------------------------------------------------------------


def warm(
    cache: PrefixCache,
    tokenizer: Any,
    load_model: Callable[[], Any],
    prompts: Iterable[Prompt],
    *,
    model: str,
    prefill_step_size: int = 2048,
    chat_template_args: dict[str, Any] | None = None,
    progress: Callable[[Step], None] | None = None,
) -> Warmed:
    """Store what `tokens_of` says of each prompt, as `warm_sequences` does it.

    Raises BadPrompt, before anything is computed, for one that the tokenizer or its chat template refuses.
    """
    sequences = sequences_of(tokenizer, prompts, chat_template_args)
    return warm_sequences(
        cache, load_model, sequences, model=model, prefill_step_size=prefill_step_size, progress=progress
    )


def warm_sequences(
    cache: PrefixCache,
    load_model: Callable[[], Any],
    sequences: list[Sequence],
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
    windows) is stored where they part, too, if they share 256 tokens or more.

    `progress` is told of every chunk and every sequence. What it raises ends the work; what was computed stays stored.
    """
    if prefill_step_size < 1:
        raise ValueError(f"prefill_step_size={prefill_step_size}: give a number of tokens, 1 or more")
    job = _Job(cache, load_model, model, prefill_step_size, progress or (lambda step: None), sequences)
    for number, (sequence, partings) in enumerate(zip(sequences, _partings(sequences), strict=True), 1):
        job.warm(number, sequence, partings)
    return Warmed(len(sequences), job.total, job.computed, job.skipped, unkept(cache, sequences, model=model))


def unkept(cache: PrefixCache, sequences: Iterable[Sequence], *, model: str) -> int:
    """How many of these sequences are not whole in the cache. No I/O, no MLX."""
    return sum(not _is_stored(cache, sequence, model) for sequence in sequences)


def _is_stored(cache: PrefixCache, sequence: Sequence, model: str) -> bool:
    tokens = sequence.tokens
    return not tokens or cache.match(tokens, model=model, salt=sequence.salt).ssd >= len(tokens)


class _Job:
    """The sequences at work. Used by one thread."""

    def __init__(
        self,
        cache: PrefixCache,
        load_model: Callable[[], Any],
        model: str,
        step: int,
        progress: Callable[[Step], None],
        sequences: list[Sequence],
    ):
        self._cache, self._load_model, self._model, self._step = cache, load_model, model, step
        self._progress, self._prompts = progress, len(sequences)
        self._nets: tuple[Any, ...] = ()
        self._layers: list[int] = []  # of the prompt cache, for each of them
        self.total = sum(len(sequence.tokens) for sequence in sequences)
        self.done = self.computed = self.skipped = 0

    def warm(self, number: int, sequence: Sequence, partings: list[int]) -> None:
        """Compute what is missing of a sequence, and store it at its end, and where it parts from others if need be."""
        tokens, before = sequence.tokens, self.done
        if _is_stored(self._cache, sequence, self._model):
            self.skipped += 1
            self._tell(number, before + len(tokens))
            return
        if not self._nets:
            self._load()
        prompt_cache, depth = self._begin(sequence)
        self._tell(number, before + depth)
        boundaries = [*partings, len(tokens)] if _needs_boundaries(prompt_cache) else [len(tokens)]
        for boundary in boundaries:
            for first, last in chunks(depth, boundary, self._step):
                self._compute(tokens[first:last], prompt_cache)
                if (
                    last // BLOCK * BLOCK > first // BLOCK * BLOCK
                ):  # as under serve: what is computed on is what is stored
                    self._store(sequence, last // BLOCK * BLOCK, prompt_cache, first // BLOCK * BLOCK)
                depth = last
                try:
                    self._tell(number, before + depth)
                except BaseException:  # the one who waits wants no more: what was computed is kept
                    self._store(sequence, depth, prompt_cache)
                    raise
            if depth == boundary:
                self._store(sequence, depth, prompt_cache)

    def _load(self) -> None:
        nets = self._load_model()
        self._nets = nets if isinstance(nets, tuple) else (nets,)
        self._layers = [len(make_prompt_cache(net)) for net in self._nets]

    def _begin(self, sequence: Sequence) -> tuple[list[Any], int]:
        """The deepest prompt cache that RAM or SSD has for a sequence, an empty one otherwise; and its tokens."""
        tokens, model, salt = sequence.tokens, self._model, sequence.salt
        match = self._cache.match(tokens, model=model, salt=salt)
        if match.ssd > match.ram:
            self._cache.promote(tokens, model=model, salt=salt, whole_blocks=True).result()
        prompt_cache, rest = self._cache.fetch(tokens, model=model, salt=salt, leave=0, whole_blocks=True)
        if prompt_cache is None:
            prompt_cache = [layer for net in self._nets for layer in make_prompt_cache(net)]
        return prompt_cache, len(tokens) - len(rest)

    def _compute(self, tokens: list[int], prompt_cache: list[Any]) -> None:
        """One chunk. Its logits are of no use, and as nothing asks for them they are never computed."""
        first = 0
        for net, layers in zip(self._nets, self._layers, strict=True):
            net(mx.array([tokens]), cache=prompt_cache[first : first + layers])
            first += layers
        evaluate(read(prompt_cache).leaves)
        mx.clear_cache()
        self.computed += len(tokens)

    def _store(self, sequence: Sequence, depth: int, prompt_cache: list[Any], since: int | None = None) -> None:
        """What was computed; of the blocks from token `since` on, which have just become whole, the rows are written back."""
        tokens, chunk = sequence.tokens[:depth], since is not None
        self._cache.store(
            tokens, prompt_cache, model=self._model, salt=sequence.salt, label=LABEL, write_back=chunk, since=since or 0,
            state=not chunk,
        )  # fmt: skip

    def _tell(self, number: int, done: int) -> None:
        self.done = done
        self._progress(Step(done, self.total, number, self._prompts))


def _needs_boundaries(prompt_cache: list[Any]) -> bool:
    """Whether a longer prompt's state can't serve every shorter one."""
    return any(leaf.layout["kind"] != "sliceable" for leaf in read(prompt_cache).leaves)


def _partings(sequences: list[Sequence]) -> list[list[int]]:
    """For each sequence, at how many tokens others of its salt part from it; ascending, none below LEAST_SHARED.

    In sorted order, what two sequences share is the least that neighbours between them share.
    """
    order = sorted(range(len(sequences)), key=lambda i: (sequences[i].salt, sequences[i].tokens))
    shared = [_shared(sequences[one], sequences[other]) for one, other in pairwise(order)]
    partings: list[set[int]] = [set() for _ in sequences]
    for places, depths in ((order[1:], shared), (order[-2::-1], shared[::-1])):
        passed: list[int] = []  # with those on one side, so far; ascending
        for place, depth in zip(places, depths, strict=True):
            passed = [*(one for one in passed if one < depth), depth]
            partings[place].update(passed)
    return [
        sorted(depth for depth in found if LEAST_SHARED <= depth < len(sequence.tokens))
        for found, sequence in zip(partings, sequences, strict=True)
    ]


def _shared(one: Sequence, other: Sequence) -> int:
    return len(_common([one.tokens, other.tokens])) if one.salt == other.salt else 0
