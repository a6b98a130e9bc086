"""Has mlx-lm tokenize a request's prompt, on its client's thread or on the one that generates, and refuses it if the model
can't serve it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from prefixcache.keys import as_tokens
from prefixcache.servers.as_written import AsWritten, StoredSequences, as_written
from prefixcache.servers.canonical import ANSWERS, CanonicalText, TemplateChat, canonical
from prefixcache.servers.chat_messages import Message, TemplateRoles, for_template
from prefixcache.servers.mlx_lm.answer_reader import MarkReader
from prefixcache.servers.mlx_lm.client_template import ClientTemplate
from prefixcache.servers.mlx_lm.context import room_for, too_long
from prefixcache.servers.mlx_lm.leading_parts import LeadingParts, segments_at
from prefixcache.servers.mlx_lm.provider import LoadedModel, Provider
from prefixcache.servers.mlx_lm.upstream import MLX_LM_0_31, has_images, vision_of
from prefixcache.servers.prompt_parts import TEXT, UNKNOWN, ChatText, Part, place_of, render_by
from prefixcache.servers.request_schema import TEMPLATE, RequestRefused

log = logging.getLogger("prefixcache")

RENDERED = 1 << 26  # bytes that a request's own chat template may render


class EarlyTokens(NamedTuple):
    """What mlx-lm's `_tokenize` gave on the client's thread, with this tokenizer. `rewritten`: answers in it were."""

    tokenizer: Any
    tokenized: Any
    rewritten: bool


class PromptTokenizer:
    """Tokenizes prompts of one server by `tokenize`, which is mlx-lm's, in the text that `canonical` makes of them, and with
    answers as they are among what `stored` gives for a model and a request.
    """

    def __init__(
        self,
        provider: Provider,
        tokenize: Callable[[Any, Any, Any], Any],
        canonical: CanonicalText,
        stored: Callable[[LoadedModel, Any], StoredSequences],
    ):
        self._provider, self._by_mlx_lm, self._canonical, self._stored = provider, tokenize, canonical, stored
        self._leading = LeadingParts()

    def tokenize_early(self, request: Any, args: Any) -> None:
        """Tokenize a prompt on its client's thread, if its model is loaded; else check that the model can be loaded. A prompt
        with images is left to the loop, since it needs MLX.
        """
        loaded = self._provider.loaded_as(args.model)
        if _brings_template(args) and has_images(request):
            raise RequestRefused(f"{TEMPLATE}: not rendered for messages with images; leave one of them out")
        if loaded is not None:
            check_sampling(args, loaded.vocabulary)
            if not (self._provider.models.reads_images and has_images(request)):
                request.early_tokens = EarlyTokens(loaded.tokenizer, *self._tokenize(loaded, request, args))
            return
        if _brings_template(args):
            raise RequestRefused(f"{TEMPLATE}: its model is not loaded; ask it once without a template, then with it")
        self._provider.look_up(args.model)

    def count(self, request: Any, args: Any) -> int:
        """Return how many tokens a prompt has. RequestRefused where it can't be served, or only the loop could say."""
        loaded = self._provider.loaded_as(args.model)
        if loaded is None:
            self._provider.look_up(args.model)
            raise RequestRefused("model: it is not loaded, so nothing is counted; ask it once, then count", 503)
        if has_images(request):
            raise RequestRefused("messages: tokens of images are not counted; leave the images out")
        tokenized, _ = self._tokenize(loaded, request, args)
        return len(as_tokens(tokenized[0]))

    def part_of(self, request: Any, args: Any, tokens: Sequence[int], position: int) -> Part:
        """Return the part of a request's prompt in which the token at `position` is, UNKNOWN where that can't be told."""
        loaded = self._provider.loaded_as(args.model)
        if request.request_type != "chat":
            return Part(TEXT)
        if loaded is None or not by_own_template(loaded, request, args) or has_images(request):
            return Part(UNKNOWN)
        messages, tools = canonical(TemplateChat(request.messages, request.tools), self._canonical.rules)
        messages = for_template(messages, loaded.roles, images=False)
        arguments = {**self._provider.cli_args.chat_template_args, **(args.chat_template_kwargs or {})}
        render = render_by(loaded.tokenizer, arguments)
        text = ChatText(render, messages, tools)
        place = place_of(loaded.tokenizer, text.text, tokens, position)
        return text.part_at(place) if place is not None else Part(UNKNOWN)

    def tokenize(self, loaded: LoadedModel, request: Any, args: Any) -> Any:
        """Return what mlx-lm's `_tokenize` gives, which `tokenize_early` may have got; once, since the loop changes it.

        The answer before this request may have been stored since its client sent it, so answers are looked for once more.
        """
        check_sampling(args, loaded.vocabulary)
        early: EarlyTokens | None = getattr(request, "early_tokens", None)
        request.early_tokens = None
        if early is not None and early.tokenizer is loaded.tokenizer:
            tokenized, rewritten = self._as_written(loaded, request, args, early.tokenized)
            if rewritten or early.rewritten:
                self._canonical.count(ANSWERS)
            return tokenized
        if _brings_template(args):  # never on the thread that generates
            raise RequestRefused(f"{TEMPLATE}: another model was loaded in between; ask again", 503)
        tokenized, rewritten = self._tokenize(loaded, request, args)
        if rewritten:
            self._canonical.count(ANSWERS)
        return tokenized

    def _tokenize(self, loaded: LoadedModel, request: Any, args: Any) -> tuple[Any, bool]:
        """Return what mlx-lm's `_tokenize` gives, and whether answers in it were written anew."""
        tokenizer, rendered = loaded.tokenizer, RENDERED
        if loaded.context is not None and loaded.longest:
            rendered = min(rendered, 4 * loaded.context * loaded.longest)  # bytes of UTF-8
            if (least := _characters(request) // loaded.longest) >= loaded.context:
                raise RequestRefused(too_long(f"at least {least}", loaded.context))
        roles = loaded.roles
        if _brings_template(args):
            tokenizer, roles = ClientTemplate(tokenizer, rendered), TemplateRoles()
        try:
            messages, tools = self._canonical.of(TemplateChat(request.messages, request.tools))
            messages = for_template(messages, roles, images=self._provider.models.reads_images)
            tokenized = self._by_mlx_lm(tokenizer, replace(request, messages=messages, tools=tools), args)
        except RequestRefused:
            raise
        except Exception as error:  # of the template, or of what mlx-lm does with messages, tools and images
            missing = " is missing" if isinstance(error, KeyError) else ""
            raise RequestRefused(f"the prompt can't be read: {str(error)[:200]}{missing}") from error
        tokens = as_tokens(tokenized[0])
        if not len(tokens):  # the loop would die of it
            raise RequestRefused("the prompt has no tokens: give some text")
        if by_own_template(loaded, request, args) and not has_images(request):

            def tokenize(others: list[Message]) -> Any:
                return self._by_mlx_lm(tokenizer, replace(request, messages=others, tools=tools), args)[0]

            terms = (loaded.key, tools, args.chat_template_kwargs)
            ends = self._leading.ends(tokens, messages, terms, tokenize)
            tokenized = segments_at(tokenized, [ends.system] if self._provider.sliceable else ends)
        tokenized, rewritten = self._as_written(loaded, request, args, tokenized)
        room_for(len(tokenized[0]), loaded.context)
        return tokenized, rewritten

    def written(self, loaded: LoadedModel, request: Any, tokens: list[int]) -> AsWritten:
        """Return a chat's tokens with the answers in it as they are stored for a request's tenant, if that is to be."""
        if ANSWERS not in self._canonical.rules:
            return AsWritten(tokens, [])
        return as_written(tokens, self._stored(loaded, request), MarkReader(loaded.tokenizer, request.tools))

    def _as_written(self, loaded: LoadedModel, request: Any, args: Any, tokenized: Any) -> tuple[Any, bool]:
        """Return what mlx-lm's `_tokenize` gave with the answers in it as they are stored, and whether any is another."""
        if not by_own_template(loaded, request, args) or vision_of(tokenized) is not None:
            return tokenized, False
        try:
            written = self.written(loaded, request, tokenized[0])
        except Exception as error:
            log.warning("answers stay as the template writes them: %s: %s", type(error).__name__, error)
            return tokenized, False
        return _with_tokens(tokenized, written), bool(written.rewritings)


def _with_tokens(tokenized: Any, written: AsWritten) -> Any:
    """Return what `_tokenize` gave with other tokens, its segments cut where they were."""
    _, segments, *others = tokenized
    ends = list(accumulate(map(len, segments)))
    for rewriting in written.rewritings:
        ends = [rewriting.moved(end) for end in ends]
    return written.tokens, [written.tokens[start:end] for start, end in pairwise([0, *ends])], *others


def check_sampling(args: Any, size: int) -> None:
    """RequestRefused for what would end the thread that generates, or the process, once it samples from so many tokens."""
    if args.sampling.xtc_probability and MLX_LM_0_31:
        text = "xtc_probability, xtc_threshold: mlx-lm 0.31 fails of them; leave them out, or install mlx-lm 0.32"
        raise RequestRefused(text)
    for name, number in (("top_k", args.sampling.top_k), ("top_logprobs", args.top_logprobs)):
        if not number < size:
            raise RequestRefused(f"{name}={number}: the model has {size} tokens; give less")
    for token in args.logits.logit_bias or ():
        if not 0 <= token < size:
            raise RequestRefused(f"logit_bias of token {token}: the model has tokens 0 to {size - 1}")


def by_own_template(loaded: LoadedModel, request: Any, args: Any) -> bool:
    """Tell whether a request is a chat, and its model's own template renders it."""
    return request.request_type == "chat" and loaded.tokenizer.has_chat_template and not _brings_template(args)


def _brings_template(args: Any) -> bool:
    return TEMPLATE in (args.chat_template_kwargs or {})


def _characters(request: Any) -> int:
    """Return how long the texts of a prompt are."""
    contents = [request.prompt, *(message.get("content") for message in request.messages)]
    parts = [part for content in contents for part in (content if isinstance(content, list) else [content])]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return sum(len(text) for text in texts if isinstance(text, str))
